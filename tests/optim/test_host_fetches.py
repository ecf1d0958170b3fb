"""What a step fetches from the device: a GPU's queue runs dry while the host waits. Counted on CPU tensors."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_compressopt
from tests.support.harness import run_ranks
from tests.support.launching import REPO_ROOT, run

CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # the most fetches of a step that clips
    "OnebitAdam": ("OnebitAdam", {}, 1),
    "OnebitAdam, float32": ("OnebitAdam", {"state": "float32"}, 1),
    "OnebitLamb": ("OnebitLamb", {}, 1),
    "OnebitLamb, decay": ("OnebitLamb", {"weight_decay": 0.1}, 1),
    "OnebitLamb, warmup": ("OnebitLamb", {"freeze_step": 40}, 2),
    "ZeroOneAdam, sync": ("ZeroOneAdam", {"local_step_clipper": 1}, 3),
    "ZeroOneAdam, 1-bit gradients": ("ZeroOneAdam", {"freeze_step": 40, "var_update_scaler": 1}, 2),
}


class Fetches(TorchDispatchMode):
    """Counts item() and what calls it, and tolist(), but for step counts, which lie in host memory anyway."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.count = 0
        self.steps = {state.steps.untyped_storage().data_ptr() for state in optimizer._states}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fetches = func.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
        self.count += fetches and args[0].untyped_storage().data_ptr() not in self.steps
        return func(*args, **(kwargs or {}))


def fetches(rank: int, world_size: int, name: str, options: dict[str, Any], tensors: int) -> int:
    params = [torch.nn.Parameter(torch.ones(256)) for _ in range(tensors)]
    optimizer = getattr(hf_compressopt, name)(params, **{"freeze_step": 2, "bucket_cap_mb": 0.001, **options})
    found = 0
    for step in range(7):
        for number, param in enumerate(params):
            seed = 1000 * step + number + (0 if optimizer.plan.reduce_grads else 100 * rank)
            param.grad = torch.randn(256, generator=torch.Generator().manual_seed(seed))
        counter, tolist = Fetches(optimizer), torch.Tensor.tolist
        lists: list[int] = []

        def counted(tensor: torch.Tensor, lists: list[int] = lists, tolist: Any = tolist) -> Any:
            lists.append(1)
            return tolist(tensor)

        if optimizer.plan.reduce_grads:
            hf_compressopt.average_gradients(optimizer)
        with mock.patch.object(torch.Tensor, "tolist", counted), counter:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        found = counter.count + len(lists)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_step_fetches_no_value_per_bucket(case: str) -> None:
    name, options, most = CASES[case]
    few, many = (max(run_ranks(2, fetches, name, options, tensors)) for tensors in (3, 24))
    assert few == many <= most


#: 0/1 Adam clips a local step by this rank's norm, and a sync, as in this step, has a message. It reads the noise, too.
WAITS = {
    "OnebitAdam": 1,
    "ZeroOneAdam": 3,
    "OnebitLamb": 1,
    "int4 gradients": 1,
    "DDP, int4 gradients": 1,
    "ZeRO-2": 1,
}


def test_a_step_waits_once_for_the_device(tmp_path: Path) -> None:
    out = tmp_path / "syncs.json"
    run([sys.executable, str(REPO_ROOT / "scripts" / "benchmark_host.py"), "--syncs", "--json", str(out)])
    counted = json.loads(out.read_text())["found"]
    assert {name: sum(counted[name].values()) for name in WAITS} == WAITS
