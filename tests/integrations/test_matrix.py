"""Every way to distribute a model, with every host and method: each trains compressed, or is refused by name."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hf_compressopt import CompressOptPlugin, OnebitAdam, attach
from tests.support import trainer_runs as hosts
from tests.support.harness import on_ranks, run_ranks
from tests.support.launching import REPO_ROOT
from tests.support.logs import log_lines
from tests.support.spreading import short

pytestmark = pytest.mark.skipif(hosts.OLD_HOST, reason="these hosts have no ParallelismConfig and no DistributedConfig")

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
    hosts.use_accelerate(rank, world_size)
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
        return hosts.small_llama()
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if torch.distributed.get_rank() == 0:
        hosts.small_llama().save_pretrained(folder)
    torch.distributed.barrier()
    config = DistributedConfig(fsdp_size=RANKS // SETUPS[setup], dp_replicate_size=SETUPS[setup])
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def by_trainer(setup: str, method: Method, folder: str) -> tuple[float, Any]:
    from transformers import Trainer

    given = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 1e-3, "max_steps": STEPS}
    options = [f"{key}={value}" for key, value in method.plugin.items() if key not in ("optimizer", "zero_stage")]
    own = {"optim": method.optim, "optim_args": ",".join(options), "train_sampling_strategy": "sequential"}
    args, model = hosts.trainer_arguments(output_dir=folder, **given, **own), model_of(setup, folder)
    trainer = Trainer(model=model, args=args, train_dataset=hosts.tokens())
    if "FSDP2" in setup:
        as_on_gpus(trainer.accelerator, RANKS, SETUPS[setup])
        trainer.is_fsdp_enabled = True
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
            state = compress_fsdp(model, next(model.parameters()).device_mesh, bits)
    for batch in batches():
        ddp(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(state.metrics()["compression_ratio"]), model


def batches() -> Any:
    rank, rows = torch.distributed.get_rank(), hosts.tokens()
    for step in range(STEPS):
        mine = rows[8 * step + 2 * rank :][:2]
        yield {key: torch.stack([row[key] for row in mine]) for key in mine[0]}


def documented() -> dict[str, list[str]]:
    """The table of docs/choosing.md: its cells by their rows' first one."""
    text = (REPO_ROOT / "docs" / "choosing.md").read_text().partition("## What works with what\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


ROWS = [(setup, host) for setup in SETUPS for host in HOSTS]


@pytest.mark.parametrize(("setup", "host"), short(ROWS, SHORT))
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


@pytest.mark.parametrize("replicas", [2, 1])
def test_hosts_train_in_the_same_bits(replicas: int, tmp_path: Path) -> None:
    """FSDP2 by hand, by Accelerate, and by DistributedConfig in Trainer."""
    setups = [setup for setup, count in SETUPS.items() if count == replicas]
    ways = [(setups[0], "plain"), (setups[0], "Accelerate"), (setups[1], "Trainer")]
    found = [run_ranks(RANKS, cell, *way, METHODS["int4"], str(tmp_path / way[1]), timeout=120) for way in ways]
    assert not any(rank["error"] for ranks in found for rank in ranks), found
    bits = [[rank["bits"] for rank in ranks] for ranks in found]
    assert len(set(bits[0][:2])) == 2 and all(other == bits[0] for other in bits[1:])


# -- grad_compression with FSDP2 through Accelerate and Trainer: 2 replicas of 2 shards, or 4 shards ------------------


def as_on_gpus(accelerator: Any, world_size: int, replicas: int, version: int = 2) -> None:
    """Give an accelerator the state that it has on GPUs: Accelerate itself offers FSDP on accelerators only."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    state, config = accelerator.state, ParallelismConfig(replicas, world_size // replicas)
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False)
    state.parallelism_config, state.device_mesh = config, config.get_device_mesh("cpu")


def accelerator_of(rank: int, world_size: int, replicas: int, version: int = 2, **options: Any) -> Any:
    hosts.use_accelerate(rank, world_size)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    as_on_gpus(accelerator, world_size, replicas, version)
    return attach(accelerator, CompressOptPlugin(**options))


def train(rank: int, world_size: int, folder: str, resumed: bool, replicas: int) -> dict[str, Any]:
    accelerator = accelerator_of(rank, world_size, replicas, grad_compression="int4")
    model = hosts.small_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = hosts.tokens()
    if resumed:
        accelerator.load_state(folder)
    losses = []
    for step in range(6 if resumed else 0, 12):
        mine = rows[(8 * step + 2 * rank) % 88 :][:2]
        batch = {key: torch.stack([row[key] for row in mine]) for key in mine[0]}
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        if step == 5 and not resumed:
            accelerator.save_state(folder)
    (state,) = accelerator._compressopt.models.compressions()
    weights = torch.cat([p.detach().to_local().reshape(-1) for p in model.parameters()])
    return {"weights": weights.numpy(), "losses": losses, "steps": state.steps, **state.metrics()}


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.full), 1])
def test_accelerate_compresses_and_resumes(replicas: int, tmp_path: Path) -> None:
    ranks = run_ranks(4, train, str(tmp_path), False, replicas, timeout=240)
    for rank in (0, 1) if replicas > 1 else ():
        assert ranks[rank]["weights"].tobytes() == ranks[rank + 2]["weights"].tobytes()
    assert all(result["steps"] == 6 and result["compression_ratio"] > 5.5 for result in ranks)
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]
    for result, again in zip(ranks, run_ranks(4, train, str(tmp_path), True, replicas, timeout=240), strict=True):
        assert again["losses"] == result["losses"][6:]
        assert again["weights"].tobytes() == result["weights"].tobytes()
        assert again["steps"] == result["steps"]


@on_ranks(2, timeout=120)
def test_accelerate_gathers_changes_of_parameters_and_leaves_every_bit(rank: int, world_size: int) -> None:
    weights, metrics = [], []
    for how in ("none", "exact"):
        accelerator = accelerator_of(rank, world_size, 1, grad_compression="int4", param_compression=how)
        accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
        model = hosts.small_model(dropout=0.0)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        for step in range(4):
            mine = hosts.tokens()[4 * step + 2 * rank :][:2]
            accelerator.backward(model(**{key: torch.stack([row[key] for row in mine]) for key in mine[0]}).loss)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().to_local().reshape(-1) for p in model.parameters()]))
        (state,) = accelerator._compressopt.models.compressions()
        metrics.append(state.metrics())
    assert torch.equal(*weights) and "bits_per_parameter" not in metrics[0]
    assert 0 < metrics[1]["bits_per_parameter"] < 6


@on_ranks(4, timeout=120)
def test_accelerate_refuses_by_name(rank: int, world_size: int) -> None:
    int4 = {"grad_compression": "int4"}
    rows: list[tuple[str, dict[str, Any], bool]] = [
        ("fsdp_version=2", {"replicas": 1, "version": 1, **int4}, False),
        ("node_bits=16", {"replicas": 2, "node_bits": 16, **int4}, False),
        ("ZeroOptimizer works with DistributedDataParallel", {"replicas": 2, "zero_stage": 2, **int4}, False),
        ("OnebitAdam works with DistributedDataParallel", {"replicas": 2, "optimizer": "none"}, True),
    ]
    for text, options, ours in rows:
        accelerator, model = accelerator_of(rank, world_size, **options), hosts.small_model()
        params = model.parameters()
        optimizer = OnebitAdam(params, freeze_step=2) if ours else torch.optim.AdamW(params)
        with pytest.raises(ValueError, match=text):
            accelerator.prepare(model, optimizer)


def train_with_trainer(rank: int, world_size: int, folder: str, resume: str | None, replicas: int) -> dict[str, Any]:
    arguments = {"output_dir": folder, "optim_args": "grad_compression=int4", "bf16": replicas == 1}
    arguments |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    trainer = hosts.make_trainer(rank, world_size, hosts.Run(arguments, dropout=0.0))
    trainer.remove_callback(trainer.watch)
    as_on_gpus(trainer.accelerator, world_size, replicas)
    trainer.is_fsdp_enabled = True
    trainer.train(resume_from_checkpoint=resume)
    (state,) = trainer.accelerator._compressopt.models.compressions()
    weights = torch.cat([p.detach().to_local().reshape(-1) for p in trainer.model.parameters()])
    return {"weights": weights.numpy(), "history": trainer.state.log_history, "steps": state.steps}


@pytest.mark.full
@pytest.mark.parametrize("replicas", [2, 1])
def test_trainer_compresses_and_resumes(replicas: int, tmp_path: Path) -> None:
    ranks = run_ranks(4, train_with_trainer, str(tmp_path), None, replicas, timeout=240)
    saved = str(tmp_path / "checkpoint-4")
    again = run_ranks(4, train_with_trainer, str(tmp_path / "again"), saved, replicas, timeout=240)
    for rank, (result, other) in enumerate(zip(ranks, again, strict=True)):
        if replicas > 1:
            assert result["weights"].tobytes() == ranks[rank % 2]["weights"].tobytes()
        assert result["weights"].tobytes() == other["weights"].tobytes()
        assert result["steps"] == other["steps"] == 8
    last = [row for row in ranks[0]["history"] if "loss" in row][-1]
    assert (
        last["compressopt/compression_ratio"] > 5.8
    )  # more than a seventh of this model are vectors, which travel in full
