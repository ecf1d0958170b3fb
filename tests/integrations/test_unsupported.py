"""Set-ups in which a compressed or partitioned optimizer cannot work are refused, by a message that says what to do."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam, ZeroOptimizer, register
from tests.support.harness import on_ranks
from tests.support.trainer_runs import Run, make_trainer, network, use_accelerate

INSTEAD = {
    "DEEPSPEED": "from-deepspeed",
    "MEGATRON_LM": "Megatron-LM",
    "FSDP": "zero2_adamw",
    "XLA": "ordinary optimizer",
}


@pytest.mark.parametrize("kind", INSTEAD)
@on_ranks(2)
def test_accelerate_refuses_by_name(rank: int, world_size: int, kind: str) -> None:
    """Prepare under an accelerator whose state says that a launcher chose DeepSpeed or the like."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from accelerate.utils.deepspeed import DummyOptim

    def ours(plugin: Any = None) -> Any:
        return CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)

    register()
    rows: dict[str, tuple[Any, Any]] = {
        "optimizer": (ours, lambda params: OnebitAdam(params, freeze_step=2)),
        "plugin": (lambda: ours(CompressOptPlugin()), torch.optim.AdamW),
        "zero": (ours, lambda params: ZeroOptimizer(params, torch.optim.AdamW)),
        "stock": (lambda: Accelerator(cpu=True), lambda params: OnebitAdam(params, freeze_step=2)),
    }
    if kind == "DEEPSPEED":
        rows["dummy"] = (lambda: ours(CompressOptPlugin()), DummyOptim)
    for accelerator_of, optimizer_of in rows.values():
        use_accelerate(rank, world_size)
        accelerator, model = accelerator_of(), network()
        optimizer = optimizer_of(model.parameters())
        accelerator.state.distributed_type = DistributedType[kind]
        try:
            with pytest.raises(ValueError, match=f"(?s)(?=.*{kind}).*{INSTEAD[kind]}"):
                accelerator.prepare(model, optimizer)
        finally:
            accelerator.state.distributed_type = DistributedType.MULTI_CPU


@pytest.mark.parametrize("kind", INSTEAD)
@on_ranks(2)
def test_trainer_refuses_by_name(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    for optim in ("onebit_adam", "zero2_adamw", "instance", "adamw_torch"):
        arguments = {"optim": "adamw_torch" if optim == "instance" else optim, "output_dir": str(tmp_path)}
        run = Run(arguments, optimizer="instance" if optim == "instance" else None)
        trainer = make_trainer(rank, world_size, run)
        trainer.accelerator.state.distributed_type = DistributedType[kind]
        refused = pytest.raises(ValueError, match=f"(?s)(?=.*{kind}).*{INSTEAD[kind]}")
        try:
            with nullcontext() if optim == "adamw_torch" else refused:
                trainer.create_optimizer()
        finally:
            trainer.accelerator.state.distributed_type = DistributedType.MULTI_CPU


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(2)
def test_plain_fsdp_is_refused_at_construction(rank: int, world_size: int, version: int) -> None:
    model: nn.Module = network()
    if version == 2:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(TypeError, match="(?s)shards of FSDP.*ordinary optimizer with FSDP"):
        OnebitAdam(model.parameters(), freeze_step=2)
