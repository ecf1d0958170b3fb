"""Adapters that come to a base which is sharded already, through Trainer and Accelerate, on real gloo ranks."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_compressopt
from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, load_state, save_state
from tests.integrations.test_matrix import accelerator_of
from tests.support import trainer_runs as hosts
from tests.support.harness import run_ranks, same_on_all_ranks
from tests.support.logs import log_lines

STEPS = 4


class Lora(nn.Module):
    """A layer, and an adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(16, base.in_features) / 8)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def loaded(folder: str, replicas: int) -> Any:
    """A frozen model that from_pretrained has sharded."""
    from transformers import AutoModelForCausalLM

    distributed = pytest.importorskip("transformers.distributed", reason="this transformers shards no model it loads")
    if torch.distributed.get_rank() == 0:
        hosts.small_llama().save_pretrained(folder)
    torch.distributed.barrier()
    shards = torch.distributed.get_world_size() // replicas
    config = distributed.DistributedConfig(fsdp_size=shards, dp_replicate_size=replicas)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).requires_grad_(False)


def adapt(model: Any) -> Any:
    """Add an adapter to each layer, another one on each rank."""
    torch.manual_seed(torch.distributed.get_rank())
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    return model


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}


def trainer_of(folder: str, model: Any, optim_args: str | None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert same_on_all_ranks(adapters(model).values()), state.global_step

    given = {"learning_rate": 1e-2, "max_steps": STEPS, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    args = hosts.trainer_arguments(output_dir=folder, optim_args=optim_args, **given, **arguments)
    return Trainer(model=model, args=args, train_dataset=hosts.tokens(), callbacks=[Watch()])


def by_trainer(rank: int, world_size: int, folder: str, replicas: int) -> dict[str, Any]:
    hosts.use_accelerate(rank, world_size)
    hf_compressopt.register()
    found: dict[str, Any] = {}
    for optim_args in ("grad_compression=int4", "grad_compression=float32", None):
        trainer = trainer_of(folder, adapt(loaded(folder, replicas)), optim_args)
        if optim_args is None and not hasattr(trainer, "_sync_replicated_trainable_parameters"):
            continue  # an older Trainer averages no adapters by itself
        with log_lines() as lines:
            trainer.train()
        last = [row for row in trainer.state.log_history if "loss" in row][-1]
        told = [line for line in lines if "trainable parameters beside the shards are rank 0's" in line]
        assert len(told) == (rank == 0 and optim_args is not None)
        row = {name: value.numpy() for name, value in adapters(trainer.model).items()}
        found[str(optim_args)] = {"adapters": row, "last": last}
    return found


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_trainer_averages_adapters_of_a_model_that_was_loaded_in_shards(
    world_size: int, replicas: int, tmp_path: Path
) -> None:
    """In full precision as Trainer itself does where it does."""
    for found in run_ranks(world_size, by_trainer, str(tmp_path), replicas, timeout=240):
        int4, full, own = found["grad_compression=int4"], found["grad_compression=float32"], found.get("None")
        assert int4["last"]["compressopt/compression_ratio"] > 6.5
        for name, values in full["adapters"].items():
            assert own is None or abs(values - own["adapters"][name]).max() < 1e-5, name
            assert 0 < abs(values - int4["adapters"][name]).mean() < 5e-3, name
        assert own is None or own["last"]["grad_norm"] == pytest.approx(full["last"]["grad_norm"], rel=1e-3)


def with_accelerate(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Train 6 steps, and the last 3 of them again from what was saved: the bits are the same."""
    runs = []
    for resumed in (False, True):
        if kind == "loaded":
            hosts.use_accelerate(rank, world_size)
            plugin = CompressOptPlugin(grad_compression="int4")
            accelerator: Any = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)
            model = adapt(loaded(f"{folder}/model", 1))
            optimizer = torch.optim.AdamW(adapters_of(model), lr=1e-2)
            model, optimizer = accelerator.prepare(model, optimizer)
        else:  # Accelerate shards it, and the adapters come after that
            accelerator = accelerator_of(rank, world_size, 1, grad_compression="int4")
            model = hosts.small_llama().requires_grad_(False)
            model.lm_head.requires_grad_(True)
            optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2)
            model, optimizer = accelerator.prepare(model, optimizer)
            optimizer.optimizer.add_param_group({"params": adapters_of(adapt(model))})
        (state,) = accelerator._compressopt.models.compressions()
        if resumed and kind == "loaded":  # Accelerate cannot save shards that it has not made
            kept = torch.load(f"{folder}/{rank}.pt", weights_only=False)
            model.load_state_dict(kept["adapters"], strict=False)
            optimizer.load_state_dict(kept["optimizer"])
            load_state(state, folder)
        elif resumed:
            accelerator.load_state(folder)
        for step in range(3 if resumed else 0, 6):
            for part in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch(2 * step + part)).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            assert same_on_all_ranks(adapters(model).values())
            if step == 2 and not resumed and kind == "loaded":
                kept = {"adapters": adapters(model), "optimizer": optimizer.state_dict()}
                torch.save(kept, f"{folder}/{rank}.pt")
                save_state(state, folder)
            elif step == 2 and not resumed:
                accelerator.save_state(folder)
        averages = state.find_beside()
        errors = [averages.worker_error, averages.server_error]
        runs.append([getattr(p.detach(), "to_local", p.detach)().clone() for p in model.parameters()] + errors)
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def adapters_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if ".lora_" in name]


def batch(number: int) -> dict[str, Tensor]:
    rank, rows = torch.distributed.get_rank(), hosts.tokens()
    mine = rows[(4 * number + 2 * rank) % 88 :][:2]
    return {key: torch.stack([row[key] for row in mine]) for key in mine[0]}


@pytest.mark.parametrize("kind", ["loaded", "prepared"])
def test_accelerate_averages_adapters_and_resumes_in_the_same_bits(kind: str, tmp_path: Path) -> None:
    run_ranks(2, with_accelerate, str(tmp_path), kind, timeout=120)


def refused(rank: int, world_size: int, folder: str) -> None:
    hosts.use_accelerate(rank, world_size)
    hf_compressopt.register()
    model = adapt(loaded(folder, 1))
    for optim in ("onebit_adam", "zero_one_adam", "onebit_lamb", "zero2_adamw"):
        with pytest.raises(ValueError, match=f"{optim} works with DistributedDataParallel, not with from_pretrained"):
            trainer_of(folder, model, None, optim=optim).train()
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin(grad_compression="float32"))
    with pytest.raises(ValueError, match="grad_compression=float32 is for parameters beside those that FSDP2 shards"):
        accelerator.prepare(nn.Linear(2, 2), torch.optim.AdamW([nn.Parameter(torch.ones(2))]))


def test_what_cannot_work_beside_shards_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, refused, str(tmp_path))


# -- PEFT itself ------------------------------------------------------------------------------------------------------


def by_peft(rank: int, world_size: int, folder: str) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    hosts.use_accelerate(rank, world_size)
    hf_compressopt.register()
    base = loaded(f"{folder}/model", 1)
    torch.manual_seed(rank)
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = trainer_of(folder, model, "grad_compression=int4")
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
    torch.distributed.barrier()
    saved = load_file(f"{folder}/adapter/adapter_model.safetensors")
    mine = {name.replace(".default", ""): value for name, value in adapters(model).items()}
    assert saved.keys() == mine.keys() and all(torch.equal(saved[name], value) for name, value in mine.items())
    assert all(value.any() for value in mine.values())


def need_peft() -> None:
    try:
        import_module("peft")
    except ImportError:
        pytest.skip("peft is not installed: pip install --no-deps peft")


def test_peft_saves_the_adapter_that_every_rank_has(tmp_path: Path) -> None:
    need_peft()
    run_ranks(2, by_peft, str(tmp_path), timeout=120)


def adalora_of(rank: int) -> Any:
    from peft import AdaLoraConfig, get_peft_model

    hosts.use_accelerate(rank, torch.distributed.get_world_size())
    hf_compressopt.register()
    ranks = {"init_r": 8, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 6}
    return get_peft_model(hosts.small_llama(), AdaLoraConfig(target_modules=["q_proj", "v_proj"], **ranks))


def prune_in_trainer(rank: int, folder: str, **arguments: Any) -> set[int]:
    """Train as PEFT's documentation tells, and return how many ranks the adapters have left."""
    from transformers import Trainer, TrainerCallback

    class Prune(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model.base_model.update_and_allocate(state.global_step)
            assert same_on_all_ranks([p for p in model.parameters() if p.requires_grad]), state.global_step

    model = adalora_of(rank)
    args = hosts.trainer_arguments(output_dir=folder, learning_rate=1e-2, max_steps=6, **arguments)
    Trainer(model=model, args=args, train_dataset=hosts.tokens(), callbacks=[Prune()]).train()
    return {int(p.count_nonzero()) for name, p in model.named_parameters() if ".lora_E" in name}


def by_adalora(rank: int, world_size: int, folder: str) -> None:
    for averaged in ("grad_compression=int4", "grad_compression=int8"):
        assert min(prune_in_trainer(rank, folder, optim_args=averaged)) < 8
    refused = [
        {"optim": name} for name in ("onebit_adam", "zero_one_adam", "onebit_lamb", "zero1_adamw", "zero2_adamw")
    ]
    refused += [{"optim": "onebit_adam", "optim_args": f"zero_stage={stage}"} for stage in (1, 2)]
    refused += [{"optim_args": "zero_stage=2"}]
    for arguments in refused:
        with pytest.raises(ValueError, match="^AdaLoRA prunes by p.grad after each step.*int4"):
            prune_in_trainer(rank, folder, **arguments)
    model = adalora_of(rank)
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin(zero_stage=2))
    with pytest.raises(ValueError, match="^AdaLoRA prunes by p.grad after each step.*int4"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_adalora_prunes_alike_where_gradients_are_averaged_and_is_refused_elsewhere(tmp_path: Path) -> None:
    need_peft()
    run_ranks(2, by_adalora, str(tmp_path), timeout=120)
