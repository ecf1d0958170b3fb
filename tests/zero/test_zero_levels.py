"""ZeRO in two levels, on real ranks: M nodes of g ranks on one machine.

The oracle is one process: gradients are summed inside each node by place, then node by node, and torch's AdamW updates
the whole parameters. Gradients that are small integers have sums without rounding: then flat and two levels agree too.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_compressopt import ZeroOptimizer, load_state, save_state
from hf_compressopt.kernels.compact import values_of_errors
from tests.support.harness import on_ranks, run_ranks
from tests.support.zero_runs import INT4

SHAPES = [(20, 17), (64,), (0, 3), (130,), (1,), (31, 9)]
STEPS = 3
NODES = [(2, 2), *(pytest.param(*row, marks=pytest.mark.full) for row in [(2, 3), (3, 2)])]  # nodes, and ranks on each
# what may change no bit
FORMS: list[dict[str, Any]] = [
    {"stage": 2},
    {"stage": 1, "reduce_bucket_size": 128, "allgather_bucket_size": 200},
    {"stage": 2, "reduce_bucket_size": 600, "overlap_comm": False, "round_robin_gradients": True},
]


def gradients(rank: int, step: int, whole: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    if whole:
        return [torch.randint(-64, 65, shape, generator=generator).float() for shape in SHAPES]
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def go_on(params: list[nn.Parameter], optimizer: ZeroOptimizer, rank: int, steps: range, whole: bool = False) -> None:
    for step in steps:
        grads = gradients(rank, step, whole)
        sum((p * g.to(p.dtype)).sum() for p, g in zip(params, grads, strict=True)).backward()  # their gradients are g
        optimizer.step()


def flat(params: list[Any]) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1).float() for p in params]).numpy()


def simulated(nodes: int, size: int) -> np.ndarray:
    params, world_size = make(), nodes * size
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for step in range(STEPS):
        scaled = [[g * (1.0 / world_size) for g in gradients(rank, step)] for rank in range(world_size)]
        for number, p in enumerate(params):
            total = torch.zeros(())
            for node in range(nodes):
                inside = scaled[node * size][number].clone()
                for place in range(1, size):
                    inside += scaled[node * size + place][number]
                total = inside if node == 0 else total + inside
            p.grad = total
        optimizer.step()
    return flat(params)


def solve(rank: int, world_size: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for form in FORMS:
            params = make(dtype)
            optimizer = ZeroOptimizer(params, torch.optim.AdamW, lr=1e-2, node_size=size, **form)
            go_on(params, optimizer, rank, range(STEPS))
            found.setdefault(str(dtype.itemsize), []).append(flat(params))
    assert f"hierarchical on {world_size // size} nodes" in optimizer.describe()
    return found


@pytest.mark.parametrize(("nodes", "size"), NODES)
def test_equals_the_simulation_in_bits_in_any_form(nodes: int, size: int) -> None:
    """Stages, sizes of buckets, overlap and the order of owners change no bit."""
    expected = simulated(nodes, size)
    ranks = run_ranks(nodes * size, solve, size)
    for found in ranks:
        assert all(params.tobytes() == expected.tobytes() for params in found["4"])
        assert all(params.tobytes() == ranks[0]["2"][0].tobytes() for params in found["2"])


@on_ranks(4)
def test_accumulation_clipping_skips_and_copies_have_the_bits_of_the_flat_exchange(rank: int, world_size: int) -> None:
    found = []
    for topology in ({"node_size": 2}, {"topology": "flat"}):
        params = make()
        optimizer = ZeroOptimizer(params, torch.optim.AdamW, lr=1e-2, clip_grad=1.0, **topology)
        for part in (0, 1):
            grads = gradients(rank, part, whole=True)
            sum((p * g).sum() for p, g in zip(params, grads, strict=True)).backward()
        optimizer.step()
        (params[0] * (float("inf") if rank == 3 else 1.0)).sum().backward()
        optimizer.step()
        assert optimizer.step_was_skipped
        params, other = copy.deepcopy([params, optimizer])
        go_on(params, other, rank, range(2, 4), whole=True)
        assert other.communicator.topology.node_size == topology.get("node_size", 1)
        found.append(flat(params))
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize(("options", "nbytes", "of_errors"), [({}, 4, 0.0), (INT4, 33 / 64, (1 + 2 / 128) / 2)])
@on_ranks(4)
def test_bytes_are_those_of_the_formulas(
    rank: int, world_size: int, options: dict[str, Any], nbytes: float, of_errors: float
) -> None:
    """Between nodes a ring of ``nbytes`` an element each way; inside float32 gradients and such parameters."""
    p = nn.Parameter(torch.zeros(400, 500))
    optimizer = ZeroOptimizer([p], torch.optim.AdamW, lr=1e-2, node_size=2, **options)
    for _ in range(2):
        inside = optimizer.metrics().get("bytes_sent_in_node", 0.0)
        (p * rank).sum().backward()
        optimizer.step()
    metrics, errors = optimizer.metrics(), [g.errors for g in optimizer.partition.reducer.slices if g.errors]
    ring, within = 2 / 2 * nbytes * p.numel(), (4 + nbytes) / 2 * p.numel()  # of M = 2 nodes, of g = 2 ranks
    assert 1 <= 2 * metrics["bytes_sent_step"] / ring < 1.05
    assert 1 <= (metrics["bytes_sent_in_node"] - inside) / within < 1.05
    assert sum(error.nbytes for error in errors) / p.numel() == pytest.approx(of_errors, rel=0.02)


def moments_of(optimizer: ZeroOptimizer) -> np.ndarray:
    return flat([optimizer.get_full_state(p, "exp_avg_sq") for p in optimizer.partition.tensors if p.numel()])


def errors_by_parameter(optimizer: ZeroOptimizer) -> list[np.ndarray]:
    """The errors of all elements, in the order of the parameters; nan where this rank has none."""
    found = [np.full(p.numel(), np.nan, np.float32) for p in optimizer.partition.tensors]
    for gradients in optimizer.partition.reducer.slices:
        if gradients.errors is not None:
            values = values_of_errors(gradients.errors.kept)
            for number, rows in gradients.error_places.items():
                for begin, span in rows:
                    found[number][span.start : span.stop] = values[begin : begin + span.numel]
    return found


def saved_errors(rank: int, world_size: int, folder: str) -> tuple[list[np.ndarray], np.ndarray]:
    options: dict[str, Any] = {"grad_compression": "int4", "param_compression": "int8", "node_size": 2}
    params = make()
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, lr=1e-2, reduce_bucket_size=600, **options)
    go_on(params, optimizer, rank, range(STEPS))
    save_state(optimizer, folder)
    return errors_by_parameter(optimizer), moments_of(optimizer)


def loaded_errors(rank: int, world_size: int, folder: str) -> tuple[list[np.ndarray], np.ndarray]:
    optimizer = ZeroOptimizer(make(), torch.optim.AdamW, lr=1e-2, grad_compression="int4")
    load_state(optimizer, folder)
    return errors_by_parameter(optimizer), moments_of(optimizer)


def test_errors_of_nodes_go_on_in_any_topology(tmp_path: Path) -> None:
    saved = run_ranks(4, saved_errors, str(tmp_path))
    loaded = [found for ranks in (4, 2) for found in run_ranks(ranks, loaded_errors, str(tmp_path))]
    assert all(moments.tobytes() == saved[0][1].tobytes() for _, moments in loaded)
    for number in (number for number, shape in enumerate(SHAPES) if len(shape) == 2 and np.prod(shape)):
        rows = np.stack([errors[number] for errors, _ in saved])
        nodes = [np.where(np.isnan(rows[2 * node]), rows[2 * node + 1], rows[2 * node]) for node in range(2)]
        assert np.isfinite(nodes).all() and np.isnan(rows).sum() == rows.size / 2  # the ranks of a node share them
        mean = np.mean(nodes, axis=0)
        for errors, _ in loaded:
            assert errors[number] == pytest.approx(mean, abs=float(np.abs(mean).max()) / 127)


@on_ranks(3)
def test_nodes_that_cannot_be_are_refused(rank: int, world_size: int) -> None:
    refused = [({"node_size": 2}, "divide the number of ranks, 3, got 2"), ({"topology": "two-level"}, "two nodes")]
    for topology, text in refused:
        with pytest.raises(ValueError, match=text):
            ZeroOptimizer(make(), torch.optim.AdamW, **topology)
