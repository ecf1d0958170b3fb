"""The exchange in two levels inside the optimizers, on real ranks: M nodes of g ranks on one machine.

The oracle is the float64 simulation of M nodes, and the flat topology where both must agree.
"""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_compressopt
from hf_compressopt.collectives import topology
from tests.support.exchanging import errors_everywhere
from tests.support.family import SHAPES, assign, go_on, make
from tests.support.harness import on_ranks, run_ranks
from tests.support.logs import log_lines

Form = tuple[str, str]  # the optimizer, form of the state


NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)
FREEZE = 3
# the second half is that of the long tests
FORMS = [("OnebitAdam", "compact"), ("OnebitLamb", "float32"), ("ZeroOneAdam", "float32"), ("OnebitAdam", "float32")]
TWO = {"node_size": 2}
STOPS = (2, FREEZE + 2)  # one in each stage


def save_all(rank: int, world_size: int, forms: list[Form], folder: str, options: dict[str, Any]) -> dict[Any, Any]:
    """Runs of each form, and their saves in both stages; returns the errors then."""
    found = {}
    for name, form in forms:
        params, optimizer = build(name, form=form, **options)
        for start, stop in ((0, STOPS[0]), STOPS):
            go_on(rank, params, optimizer, range(start, stop))
            where = f"{folder}/{name}-{form}-{stop}"
            hf_compressopt.save_state(optimizer, where)
            if rank == 0:
                torch.save([p.detach() for p in params], f"{where}/params.pt")
            found[name, form, stop] = errors_everywhere(optimizer._states[0], optimizer.communicator)
        other = {} if options else TWO
        with pytest.raises(ValueError, match=r"node_size=(2, this one has 1|1, this one has 2)"):
            build(name, form=form, **other)[1].load_state_dict(optimizer.state_dict())
    dist.barrier()
    return found


def build(name: str = "OnebitAdam", **options: Any) -> tuple[list[nn.Parameter], Any]:
    schedule = {"var_freeze_step": FREEZE, "local_step_clipper": 1} if name == "ZeroOneAdam" else {}
    return make(0, 0, name, scale_block=64, **schedule, **options)


def load_all(rank: int, world_size: int, forms: list[Form], folder: str, options: dict[str, Any]) -> dict[Any, Any]:
    """Load the saves in another topology or on other ranks, take steps, and return what was loaded."""
    found = {}
    for (name, form), stop in product(forms, STOPS):
        params, optimizer = build(name, form=form, **options)
        where = f"{folder}/{name}-{form}-{stop}"
        assign(params, torch.load(f"{where}/params.pt"))
        hf_compressopt.load_state(optimizer, where)
        found[name, form, stop] = errors_everywhere(optimizer._states[0], optimizer.communicator)
        go_on(rank, params, optimizer, range(2))
        assert all(bool(p.isfinite().all()) for p in params)
    return found


def check_loaded(saved: dict[Any, Any], loaded: dict[Any, Any]) -> None:
    """Worker errors are the mean of all that there were for an element, server errors are found by place.

    Errors in 8 bits are rounded once more where their blocks are other ones.
    """
    assert loaded
    for key, (worker, server) in loaded.items():
        before, servers = saved[key]
        assert np.abs(before[~np.isnan(before)]).max() > 0
        exact = 1e-6 if "float32" in key else 0.02
        for row in worker:
            here = ~np.isnan(row)
            np.testing.assert_allclose(row[here], np.nanmean(before, axis=0)[here], atol=exact, err_msg=str(key))
        np.testing.assert_allclose(server, servers, atol=exact)


@pytest.mark.invariant(22)
@pytest.mark.parametrize("forms", [FORMS[:1], pytest.param(FORMS[1:], marks=pytest.mark.full)], ids=["some", "rest"])
def test_resumes_in_any_other_topology(forms: list[Form], tmp_path: Path) -> None:
    saved = {}
    for kind, options in (("flat", {}), ("nodes", TWO)):
        saved[kind] = run_ranks(4, save_all, forms, f"{tmp_path}/{kind}", options, timeout=240)[0]
    for kind, options, world_size in (
        *(("nodes", {}, ranks) for ranks in (4, 2, 1)),
        ("nodes", {"node_size": 4}, 4),
        ("flat", TWO, 4),
        ("flat", {"node_size": 3}, 3),
    ):
        results = run_ranks(world_size, load_all, forms, f"{tmp_path}/{kind}", options, timeout=240)
        if world_size > 1:
            check_loaded(saved[kind], results[0])


# -- topology="auto" ---------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_auto_is_what_the_launcher_says_and_a_resume_in_another_topology_is_told(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two ranks are hierarchical, whatever a stopwatch would say; nothing is sent to find out."""
    monkeypatch.setattr(topology, "gethostname", lambda: "ab"[dist.get_rank() // 2])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "all_to_all_single", None)  # nobody calls it before the first step
        params, optimizer = build()
    assert optimizer.communicator.levels is not None
    go_on(rank, params, optimizer, range(FREEZE + 2))
    hf_compressopt.save_state(optimizer, tmp_path)
    for options, told in (({}, False), ({"topology": "flat"}, True)):
        _, again = build(**options)
        with log_lines() as lines:
            hf_compressopt.load_state(again, tmp_path)
        assert (again.communicator.levels is None) == told
        assert any("For equal bits give topology='hierarchical'" in line for line in lines) == (told and rank == 0)
