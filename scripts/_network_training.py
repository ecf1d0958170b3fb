"""One rank of benchmark_network.py: trains with one method, and measures its steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from _network_methods import METHODS, MODELS, SWITCH, Method
from _slow_network import nothing_hook, sent_bytes

WARMUP = SWITCH + 5  # 0/1 Adam's intervals are at their longest then: a step at a multiple of it is a sync
LR = 1e-4


class Watch:
    """Times of steps, and the interface's counter around the measured ones, of which there are ``steps``."""

    def __init__(self, steps: int, interface: str) -> None:
        self._places, self._interface = (WARMUP, WARMUP + steps), interface
        self._ends: list[float] = []
        self._sent: list[int] = []

    def end_step(self, number: int) -> None:
        """Take note of the end of a step; the first is number 1. All ranks call."""
        import torch.distributed as dist

        if number in self._places:
            dist.barrier()
            self._sent.append(sent_bytes(self._interface))
        if number >= WARMUP:
            self._ends.append(time.perf_counter())

    def found(self, numel: int) -> dict[str, Any]:
        """Return seconds of each step, bytes that left in them, and the number of parameters."""
        seconds = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        return {"seconds": seconds, "sent": self._sent[1] - self._sent[0], "numel": numel}


def train(order: dict[str, Any], interface: str) -> dict[str, Any]:
    """Train with one method. Returns seconds of each step, and bytes that left, of the last steps."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    method, steps = METHODS[order["method"]], int(order["steps"])
    layers, width, vocabulary, tokens = MODELS[order["model"]]
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "vocab_size": vocabulary}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_positions=tokens, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
    model = GPT2LMHeadModel(config)
    numel, rows = sum(p.numel() for p in model.parameters()), torch.randint(0, vocabulary, (64, tokens))
    watch = Watch(steps, interface)
    if method.rival:
        train_rival(model, rows, method, WARMUP + steps, watch.end_step)
    elif method.between:
        train_sharded(model, rows, method, order["per_node"], WARMUP + steps, watch.end_step)
    else:
        train_by_trainer(model, rows, method, order["per_node"], WARMUP + steps, watch.end_step)
    return watch.found(numel)


def train_by_trainer(
    model: Any, rows: Any, method: Method, per_node: int, steps: int, end_step: Callable[[int], None]
) -> None:
    """Train with transformers' Trainer, which wraps the model in DistributedDataParallel unless ZeRO averages."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import hf_compressopt.auto  # noqa: F401

    class Callback(TrainerCallback):  # type: ignore[misc]
        """Registers DDP's hook, and watches."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            wrapped = trainer.model_wrapped
            if method.hook and isinstance(wrapped, DistributedDataParallel):
                register(wrapped)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            end_step(state.global_step)

    def register(wrapped: DistributedDataParallel) -> None:
        if method.hook == "none":
            wrapped.register_comm_hook(None, nothing_hook)
        elif method.hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    class Partitioned(ZeroRedundancyOptimizer):
        """Torch's, for Accelerate, which reads and loads a state dict when it wraps an optimizer."""

        def state_dict(self) -> dict[str, Any]:
            return torch.optim.Optimizer.state_dict(self)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """There is no state yet."""

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_bucket_cap_mb=method.ddp_bucket_cap_mb,
            ddp_find_unused_parameters=False,
            optim=method.optim,
            optim_args=method.optim_args.format(per_node=per_node) or None,
            per_device_train_batch_size=1,
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        optimizers: Any = (None, None)
        if method.partitioned:
            optimizers = (Partitioned(model.parameters(), torch.optim.AdamW, lr=LR, fused=True), None)
        examples = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(
            model=model, args=arguments, train_dataset=examples, callbacks=[Callback()], optimizers=optimizers
        )
        trainer.train()


def train_sharded(
    model: Any, rows: Any, method: Method, per_node: int, steps: int, end_step: Callable[[int], None]
) -> None:
    """Train in a plain loop, since Accelerate offers FSDP on accelerators only. FSDP2 shards the model in each node."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hf_compressopt import compress_fsdp

    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = (world_size // per_node, per_node)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    dtype = torch.bfloat16 if method.between == "bfloat16" else None
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype), "reshard_after_forward": False}
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if method.between != "bfloat16":
        compress_fsdp(model, mesh, method.between)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for number, loss in enumerate(losses(model, rows, rank, world_size, steps), start=1):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(number)


def train_rival(model: Any, rows: Any, method: Method, steps: int, end_step: Callable[[int], None]) -> None:
    """Train in a plain loop with a method of scripts/rivals, around AdamW or as the optimizer."""
    import torch
    from rivals import OPTIMIZERS, RIVALS

    from hf_compressopt.collectives.communicator import Traffic
    from hf_compressopt.collectives.torch_dist import TorchCommunicator

    communicator = TorchCommunicator(None, device=torch.device("cpu"), traffic=Traffic())
    options = dict(method.rival_options)
    if method.rival in OPTIMIZERS:
        rival = None
        optimizer = OPTIMIZERS[method.rival](model.parameters(), lr=LR, communicator=communicator, **options)
    else:
        rival = RIVALS[method.rival](model.parameters(), communicator, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ranks = communicator.rank, communicator.world_size
    for number, loss in enumerate(losses(model, rows, *ranks, steps), start=1):
        loss.backward()
        if rival is not None:
            rival.gradients()
        optimizer.step()
        if rival is not None:
            rival.parameters(last=False)
        optimizer.zero_grad()
        end_step(number)


def losses(model: Any, rows: Any, rank: int, world_size: int, steps: int) -> Iterator[Any]:
    """The loss of every step's example of a rank."""
    for step in range(steps):
        row = rows[(step * world_size + rank) % len(rows)].unsqueeze(0)
        yield model(input_ids=row, labels=row).loss
