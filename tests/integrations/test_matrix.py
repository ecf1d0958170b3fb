"""Every way to distribute a model, with every host and method: each trains compressed, or is refused by name."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.integrations.test_fsdp_hosts import as_on_gpus
from tests.support.harness import run_ranks
from tests.support.launching import REPO_ROOT
from tests.support.logs import log_lines
from tests.support.trainer_runs import OLD_HOST, small_llama, tokens, trainer_arguments, use_accelerate

RANKS, STEPS = 4, 3
#: The rows of docs/choosing.md: replicas of a model that is cut into shards; 0 is DistributedDataParallel.
SETUPS = {
    "DDP": 0,
    "HSDP: FSDP2 with replicas": 2,
    "FSDP2 without replicas": 1,
    "`DistributedConfig` with replicas": 2,
    "`DistributedConfig` without replicas": 1,
}
HOSTS = ("Trainer", "Accelerate", "plain")
SHORT = [("`DistributedConfig` without replicas", "Trainer"), ("`DistributedConfig` with replicas", "Accelerate")]
#: What an error tells the user to do.
REMEDIES = r"[Uu]se (an ordinary|the) optimizer"


class Method(NamedTuple):
    """A column of the table, and how Trainer and the plug-in say it; bytes are at least so many times fewer."""

    column: str
    optim: str
    plugin: dict[str, Any]
    ratio: float

    @property
    def options(self) -> str:
        own = {name: value for name, value in self.plugin.items() if name not in ("optimizer", "zero_stage")}
        return ",".join(f"{name}={value}" for name, value in own.items())


BOTH_WAYS = {"grad_compression": "int4", "param_compression": "int4"}
METHODS = {
    "int4": Method("grad_compression", "adamw_torch", {"grad_compression": "int4"}, 7),
    "int8": Method("grad_compression", "adamw_torch", {"grad_compression": "int8"}, 3.8),
    "onebit_adam": Method("onebit_adam", "onebit_adam", {"optimizer": "onebit_adam", "freeze_step": 1}, 10),
    "zero2_adamw": Method("zero2_adamw", "zero2_adamw", {"zero_stage": 2, **BOTH_WAYS}, 5),
}
ADAMW = {"lr": 1e-3, "weight_decay": 0.0}


def cell(rank: int, world_size: int, setup: str, host: str, method: Method, folder: str) -> dict[str, Any]:
    """Train some steps: the ratio of bytes, the log, and this rank's parameters or shards; or the error."""
    use_accelerate(rank, world_size)
    import hf_compressopt

    hf_compressopt.register()
    try:
        with log_lines() as lines:
            train = {"Trainer": by_trainer, "Accelerate": by_accelerate, "plain": by_hand}[host]
            ratio, model = train(setup, method, folder)
    except (ValueError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    shards = [getattr(p.detach(), "to_local", p.detach)().reshape(-1) for _, p in sorted(model.named_parameters())]
    return {"error": "", "ratio": ratio, "told": lines, "bits": torch.cat(shards).numpy().tobytes()}


def model_of(setup: str, folder: str) -> Any:
    """The model, which from_pretrained has cut if the set-up says so."""
    if not setup.startswith("`DistributedConfig`"):
        return small_llama()
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if torch.distributed.get_rank() == 0:
        small_llama().save_pretrained(folder)
    torch.distributed.barrier()
    config = DistributedConfig(fsdp_size=RANKS // SETUPS[setup], dp_replicate_size=SETUPS[setup])
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def by_trainer(setup: str, method: Method, folder: str) -> tuple[float, Any]:
    from transformers import Trainer

    given = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 1e-3, "max_steps": STEPS}
    own = {"optim": method.optim, "optim_args": method.options, "train_sampling_strategy": "sequential"}
    args, model = trainer_arguments(output_dir=folder, **given, **own), model_of(setup, folder)
    if "FSDP2" in setup:
        from accelerate import Accelerator

        made = Accelerator.__init__

        def made_on_gpus(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            as_on_gpus(self, RANKS, SETUPS[setup])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Accelerator, "__init__", made_on_gpus)
            trainer = Trainer(model=model, args=args, train_dataset=tokens())
        trainer.is_fsdp_enabled = True
    else:
        trainer = Trainer(model=model, args=args, train_dataset=tokens())
    trainer.train()
    return float(trainer.state.log_history[-2]["compressopt/compression_ratio"]), model


def by_accelerate(setup: str, method: Method, folder: str) -> tuple[float, Any]:
    from accelerate import Accelerator
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from hf_compressopt import CompressOptPlugin, attach

    accelerator: Any = Accelerator(cpu=True)
    if "FSDP2" in setup:
        as_on_gpus(accelerator, RANKS, SETUPS[setup])
        plugin = accelerator.state.fsdp_plugin
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = ["LlamaDecoderLayer"]
    attach(accelerator, CompressOptPlugin(**method.plugin))
    model = model_of(setup, folder)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    for batch in batches():
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    states = accelerator.our_optimizers() or accelerator._compressopt.models.compressions()
    return float(states[0].metrics()["compression_ratio"]), model


def by_hand(setup: str, method: Method, folder: str) -> tuple[float, Any]:
    """With FSDP2, in the units that Accelerate and DistributedConfig make: the layers, the embedding, the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hf_compressopt import GradientCompression, OnebitAdam, ZeroOptimizer, attach_ddp, compress_fsdp, compress_hook

    model, replicas = model_of(setup, folder), SETUPS[setup]
    if "FSDP2" in setup:
        shape, names = ((RANKS,), ("shard",)) if replicas == 1 else ((replicas, RANKS // replicas), ("nodes", "shard"))
        mesh, inner = init_device_mesh("cpu", shape, mesh_dim_names=names), model.model
        for part in (*inner.layers, inner.embed_tokens, [inner.norm, model.lm_head], model):
            fully_shard(part, mesh=mesh)
    ddp = DistributedDataParallel(model) if setup == "DDP" and method.column != "zero2_adamw" else model
    state: Any
    optimizer: Any
    if method.column == "onebit_adam":
        optimizer = state = OnebitAdam(model.parameters(), lr=1e-3, freeze_step=1)
        attach_ddp(ddp, optimizer)
    elif method.column == "zero2_adamw":
        optimizer = state = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=2, **ADAMW, **BOTH_WAYS)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        bits = method.plugin["grad_compression"]
        if setup == "DDP":
            state = GradientCompression(model.named_parameters(), bits)
            ddp.register_comm_hook(state, compress_hook)
        else:
            back = {name: value for name, value in method.plugin.items() if name == "param_compression"}
            state = compress_fsdp(model, next(model.parameters()).device_mesh, bits, **back)
    for batch in batches():
        ddp(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(state.metrics()["compression_ratio"]), model


def batches() -> Any:
    rank, rows = torch.distributed.get_rank(), tokens()
    for step in range(STEPS):
        mine = rows[8 * step + 2 * rank :][:2]
        yield {key: torch.stack([row[key] for row in mine]) for key in mine[0]}


def documented() -> dict[str, list[str]]:
    """The table of docs/choosing.md: its cells by their rows' first one."""
    text = (REPO_ROOT / "docs" / "choosing.md").read_text().partition("## What works with what\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


ROWS = [
    pytest.param(setup, host, marks=() if (setup, host) in SHORT else pytest.mark.full)
    for setup in SETUPS
    for host in HOSTS
]


@pytest.mark.skipif(OLD_HOST, reason="this transformers has no DistributedConfig")
@pytest.mark.parametrize(("setup", "host"), ROWS)
def test_every_cell_trains_compressed_or_is_refused_by_name(setup: str, host: str, tmp_path: Path) -> None:
    titles, row = documented()[""], documented()[setup]
    for name, method in METHODS.items():
        (column,) = (number for number, title in enumerate(titles) if f"`{method.column}`" in title)
        ranks = run_ranks(RANKS, cell, setup, host, method, str(tmp_path / name), timeout=120)
        for found in ranks:
            if row[column].startswith("yes"):
                assert not found["error"] and found["ratio"] > method.ratio, (name, found)
            else:
                assert row[column] == "no" and re.search(REMEDIES, found["error"]), (name, found)
        if row[column].startswith("yes") and host != "plain":
            assert any(line.startswith("attached") for line in ranks[0]["told"]), (name, ranks[0])


@pytest.mark.skipif(OLD_HOST, reason="this transformers has no DistributedConfig")
@pytest.mark.parametrize("replicas", [2, 1])
def test_hosts_train_in_the_same_bits(replicas: int, tmp_path: Path) -> None:
    """FSDP2 by hand, by Accelerate, and by DistributedConfig in Trainer; without replicas compressed both ways."""
    method = METHODS["int4"] if replicas > 1 else Method("grad_compression", "adamw_torch", BOTH_WAYS, 5)
    setups = [setup for setup, count in SETUPS.items() if count == replicas]
    ways = [(setups[0], "plain"), (setups[0], "Accelerate"), (setups[1], "Trainer")]
    found = [run_ranks(RANKS, cell, *way, method, str(tmp_path / way[1]), timeout=120) for way in ways]
    assert not any(rank["error"] for ranks in found for rank in ranks), found
    bits = [[rank["bits"] for rank in ranks] for ranks in found]
    assert len(set(bits[0][:2])) == 2 and all(other == bits[0] for other in bits[1:])
