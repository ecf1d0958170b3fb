"""FusedAdam in Trainer and Accelerate, with two real processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import run_ranks
from tests.support.trainer_runs import Run, same_on_all_ranks, train, use_accelerate

# The gradient of an attention's key bias is nothing but rounding, which Adam would blow up to steps of full size.
EPSILON = {"adam_epsilon": 1e-5}

# Older Trainers have torch load every optimizer's tensors to "cpu:0" where CPU ranks are several, which it refuses.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation_and_clipping": ({"gradient_accumulation_steps": 3, "max_grad_norm": 0.3}, {}),
    "scaler": ({"max_grad_norm": 0.0}, {"scaler": True, "overflow": (1, 2)}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_trainer_has_the_numbers_of_adamw_torch(name: str, tmp_path: Path) -> None:
    arguments, extra = VARIANTS[name]
    here = {**arguments, **EPSILON, "output_dir": str(tmp_path), "max_steps": 6}
    plain = run_ranks(2, train, Run({**here, "optim": "adamw_torch"}, **extra), timeout=240)[0]
    fused = run_ranks(2, train, Run({**here, "optim": "fused_adam"}, **extra), timeout=240)[0]
    assert plain["optimizer"] == "AdamW" and fused["optimizer"] == "FusedAdam"
    assert all(fused["alike"]) and fused["model_class"] == "DistributedDataParallel"
    for parameter, value in plain["params"].items():
        torch.testing.assert_close(fused["params"][parameter], value, rtol=0, atol=1e-6)
    losses = [[row["loss"] for row in result["history"] if "loss" in row] for result in (plain, fused)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and len(losses[0]) == 6
    rates = [[row["lr"] for row in result["rows"]] for result in (plain, fused)]
    assert rates[0] == rates[1], "the scheduler waits at a skipped step, with either"
    if name == "scaler":
        assert [row["skipped"] for row in fused["rows"]] == [False, False, True, False, False, False]
        assert fused["rows"][2]["norm"] == fused["rows"][1]["norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fully_sharded_model(dtype: torch.dtype) -> None:
    """On DTensors, which torch's fused operator takes where they are float32."""
    plain, fused = (run_ranks(2, fsdp_loop, name, dtype) for name in ("AdamW", "FusedAdam"))
    for rank in range(2):
        for p, q in zip(plain[rank], fused[rank], strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6 if dtype == torch.float32 else 5e-3)


def fsdp_loop(rank: int, world_size: int, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hf_compressopt import FusedAdam

    cls: Any = {"AdamW": torch.optim.AdamW, "FusedAdam": FusedAdam}[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 7)).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        model(torch.randn(16, 10, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if cls is FusedAdam and os.environ.get("HF_COMPRESSOPT_KERNELS") != "reference":
        kinds = {part.kind.name for part in optimizer._plans[0]._parts}
        assert kinds == ({"SHARDED"} if dtype == torch.float32 else {"OTHER"})
    return [p.to_local().detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ours", [False, True], ids=["Accelerator", "CompressOptAccelerator"])
def test_accelerate(ours: bool, tmp_path: Path) -> None:
    """Clipping, a scheduler, a saved and loaded state: AdamW's numbers with either accelerator."""
    plain = run_ranks(2, accelerate_loop, "AdamW", ours, str(tmp_path / "plain"))[0]
    fused = run_ranks(2, accelerate_loop, "FusedAdam", ours, str(tmp_path / "fused"))[0]
    for parameter, value in plain.items():
        torch.testing.assert_close(fused[parameter], value, rtol=0, atol=1e-6)


def accelerate_loop(rank: int, world_size: int, name: str, ours: bool, directory: str) -> dict[str, torch.Tensor]:
    use_accelerate(rank, world_size)
    from accelerate import Accelerator

    from hf_compressopt import CompressOptAccelerator, FusedAdam

    cls: Any = {"AdamW": torch.optim.AdamW, "FusedAdam": FusedAdam}[name]
    accelerator = (CompressOptAccelerator if ours else Accelerator)(cpu=True, step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 7))
    optimizer: Any = cls(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def some_steps(first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            loss = model(torch.randn(16, 10, generator=generator)).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert same_on_all_ranks(model.parameters())

    some_steps(0, 3)
    accelerator.save_state(directory)
    some_steps(3, 6)
    expected = [p.detach().clone() for p in model.parameters()]
    accelerator.load_state(directory)
    some_steps(3, 6)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected, strict=True))
    return {key: p.detach().clone() for key, p in accelerator.unwrap_model(model).named_parameters()}
