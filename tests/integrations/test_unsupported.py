"""Set-ups in which a compressed or partitioned optimizer cannot work are refused, by a message that says what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.trainer_runs import Run, make_trainer, use_accelerate

INSTEAD = {
    "DEEPSPEED": "from-deepspeed",
    "MEGATRON_LM": "Megatron-LM",
    "FSDP": "zero2_adamw",
    "XLA": "ordinary optimizer",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def prepare(rank: int, world_size: int, what: str, kind: str) -> str:
    """Prepare under an accelerator whose state says that a launcher chose DeepSpeed or the like."""
    use_accelerate(rank, world_size)
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from accelerate.utils.deepspeed import DummyOptim

    from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam, ZeroOptimizer, register

    if what == "stock":
        register()
    model = network()
    plugin = CompressOptPlugin() if what in ("plugin", "dummy") else None
    accelerator: Any = (
        Accelerator(cpu=True) if what == "stock" else CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)
    )
    makers: dict[str, Any] = {
        "plugin": lambda: torch.optim.AdamW(model.parameters()),
        "dummy": lambda: DummyOptim(model.parameters()),
        "zero": lambda: ZeroOptimizer(model.parameters(), torch.optim.AdamW),
    }
    optimizer = makers.get(what, lambda: OnebitAdam(model.parameters(), freeze_step=2))()
    accelerator.state.distributed_type = DistributedType[kind]
    try:
        accelerator.prepare(model, optimizer)
    except ValueError as error:
        return str(error)
    finally:
        accelerator.state.distributed_type = DistributedType.MULTI_CPU
    return "no error"


@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize("what", ["optimizer", "plugin", "dummy", "zero", "stock"])
def test_accelerate_refuses_by_name(what: str, kind: str) -> None:
    if what == "dummy" and kind != "DEEPSPEED":
        pytest.skip("DummyOptim is DeepSpeed's")
    for text in run_ranks(2, prepare, what, kind):
        assert kind in text and INSTEAD[kind] in text, text


def make(rank: int, world_size: int, directory: str, arguments: dict[str, Any], kind: str, how: str) -> str:
    from accelerate.utils import DistributedType

    run = Run({**arguments, "output_dir": directory}, optimizer="instance" if how == "instance" else None)
    trainer = make_trainer(rank, world_size, run)
    trainer.accelerator.state.distributed_type = DistributedType[kind]
    try:
        if how == "construction":
            trainer.create_accelerator_and_postprocess()
        else:
            trainer.create_optimizer()
    except ValueError as error:
        return str(error)
    finally:
        trainer.accelerator.state.distributed_type = DistributedType.MULTI_CPU
    return "no error"


@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize("optim", ["onebit_adam", "zero2_adamw", "instance", "adamw_torch"])
def test_trainer_refuses_by_name(optim: str, kind: str, tmp_path: Path) -> None:
    arguments = {"optim": "adamw_torch" if optim == "instance" else optim}
    for text in run_ranks(2, make, str(tmp_path), arguments, kind, "instance" if optim == "instance" else "optimizer"):
        assert text == "no error" if optim == "adamw_torch" else kind in text and INSTEAD[kind] in text, text


def fully_sharded(rank: int, world_size: int, version: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from hf_compressopt import OnebitAdam

    model: nn.Module = network()
    if version == 2:
        from torch.distributed.device_mesh import init_device_mesh

        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    OnebitAdam(model.parameters(), freeze_step=2)


@pytest.mark.parametrize("version", [1, 2])
def test_plain_fsdp_is_refused_at_construction(version: int) -> None:
    errors = run_ranks_expecting_error(2, fully_sharded, version)
    assert all("shards of FSDP" in text and "ordinary optimizer with FSDP" in text for text in errors.values()), errors
