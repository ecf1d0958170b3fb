"""Low-bit gradients on real gloo ranks: equal to a simulation in bits, through DDP's hook and in plain loops."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import GradientCompression, compress_hook, load_state, save_state
from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels.errors import values_of_errors
from tests.oracles.simulation_integers import Simulation
from tests.support.harness import RankError, run_ranks
from tests.support.recording import CAP, Recording, check_overlap, events_of_backward

SHAPES = [(7, 33), (129,), (0,), (1,), (64, 5), (3, 1, 2)]
BUCKET = 300  # elements, so that buckets cut tensors


def cap(numel: int = BUCKET) -> float:
    return numel * 4 / 2**20


def gradients(rank: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (i % 3 - 1) for i, shape in enumerate(shapes)]


def flat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Concatenated as the state lays them out: the last parameter first."""
    return torch.cat([t.reshape(-1).float() for t in reversed(list(tensors))]).numpy()


def in_a_plain_loop(
    rank: int, world_size: int, compression: str, form: str, steps: int
) -> tuple[list[np.ndarray], Any]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    state = GradientCompression(params, compression, bucket_cap_mb=cap(), state=form)
    results = []
    for step in range(steps):
        for p, grad in zip(params, gradients(rank, step), strict=True):
            p.grad = grad.clone()
        state.average_gradients()
        results.append(flat([p.grad for p in params]))
    return results, (state.worker_error.numpy(), state.server_error.numpy(), state.traffic.total_bytes)


@pytest.mark.parametrize("compression", ["int4", "int8"])
@pytest.mark.parametrize("form", ["compact", "float32"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_the_simulation_in_bits(world_size: int, compression: str, form: str) -> None:
    steps = 4
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    simulation = Simulation(numel, BUCKET, world_size, int(compression[3:]), compact=form == "compact")
    expected = []
    for step in range(steps):
        grads = np.stack([flat(gradients(rank, step)) for rank in range(world_size)])
        expected.append(simulation.average(grads) if world_size > 1 else grads[0])
    ranks = run_ranks(world_size, in_a_plain_loop, compression, form, steps)
    for rank, (results, (worker_error, _, _)) in enumerate(ranks):
        for mine, theirs in zip(results, expected, strict=True):
            assert mine.tobytes() == theirs.tobytes()
        if world_size > 1:
            assert worker_error.tobytes() == simulation.worker_error[rank].tobytes()
    if world_size > 1:
        held = np.sort(np.concatenate([server for _, (_, server, _) in ranks]))
        assert held.tobytes() == np.sort(simulation.server_error).tobytes()


@pytest.mark.parametrize(("compression", "bits"), [("int4", 4), ("int8", 8)])
def test_bytes_are_those_of_the_formula(compression: str, bits: int) -> None:
    numel, world_size = 100_000, 3
    (sent, _), *_ = run_ranks(world_size, one_tensor, numel, compression)
    formula = 2 * (world_size - 1) / world_size * numel * (bits + 16 / 128) / 8
    assert formula <= sent <= 1.01 * formula


def one_tensor(rank: int, world_size: int, numel: int, compression: str) -> tuple[int, float]:
    p = nn.Parameter(torch.zeros(numel))
    state = GradientCompression([p], compression)
    p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    state.average_gradients()
    before = state.traffic.total_bytes
    errors = []
    mean = sum(torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world_size)) / world_size
    received = torch.zeros(numel)
    for step in range(1, 9):
        p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        state.average_gradients()
        received += p.grad
        errors.append(float((received / step - mean).norm() / mean.norm()))
    assert errors[-1] < 0.3 * errors[0]  # what a message misses comes with a later one
    return (state.traffic.total_bytes - before) // 8, errors[-1]


def test_what_messages_miss_comes_later() -> None:
    (_, eight), *_ = run_ranks(2, one_tensor, 4096, "int8")
    (_, four), *_ = run_ranks(2, one_tensor, 4096, "int4")
    assert eight < 0.005 and four < 0.05


# -- DDP --------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of odd sizes, one of them tied, one frozen, one that is used in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(13, 37), nn.Linear(37, 37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.third = nn.Linear(37, 13)
        self.third.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.sometimes = nn.Linear(37, 37)

    def forward(self, x: torch.Tensor, also: bool = True) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.second(torch.tanh(self.first(x)))))
        return self.third(self.sometimes(h) if also else h)


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def data(rank: int, step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(8, 13, generator=torch.Generator().manual_seed(10_000 * part + 100 * rank + step))


def with_ddp(rank: int, world_size: int, ddp_options: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train by the hook, and beside it without DDP by average_gradients(); the weights of both, after each step."""
    dtype = getattr(torch, options.get("dtype", "float32"))
    accumulate, sometimes = options.get("accumulate", 1), options.get("sometimes", False)
    hooked, plain = make(dtype=dtype), make(dtype=dtype)
    ddp = DistributedDataParallel(hooked, bucket_cap_mb=0.005, **ddp_options)
    states = [GradientCompression(net.named_parameters(), "int4", bucket_cap_mb=cap(500)) for net in (hooked, plain)]
    ddp.register_comm_hook(states[0], compress_hook)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (hooked, plain)]
    same = []
    for step in range(5):
        also = not sometimes or step % 2 == 0
        for part in range(accumulate):
            x = data(rank, step, part).to(dtype)
            last = part == accumulate - 1
            if last:
                (ddp(x, also) ** 2).mean().backward()
            else:
                with ddp.no_sync():
                    (ddp(x, also) ** 2).mean().backward()
            (plain(x, also) ** 2).mean().backward()
        if sometimes:  # DDP hands over zeros for what nobody used
            for p in plain.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        states[1].average_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(hooked.parameters(), plain.parameters(), strict=True)
        same.append(all(torch.equal(one, other) for one, other in pairs))
    return {"same": same, "weights": [p.detach().float().numpy() for p in hooked.parameters()]}


@pytest.mark.parametrize(
    ("ddp_options", "options"),
    [
        ({}, {}),
        ({"gradient_as_bucket_view": True}, {}),
        ({"static_graph": True}, {}),
        ({"find_unused_parameters": True}, {"sometimes": True}),
        ({}, {"accumulate": 3}),
        ({}, {"dtype": "bfloat16"}),
    ],
    ids=["plain", "bucket views", "static graph", "unused parameters", "accumulation", "bfloat16"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_hook_has_the_bits_of_the_plain_loop(
    world_size: int, ddp_options: dict[str, Any], options: dict[str, Any]
) -> None:
    ranks = run_ranks(world_size, with_ddp, ddp_options, options)
    for result in ranks:
        if not options.get("sometimes"):
            assert result["same"] == [True] * 5
        for mine, theirs in zip(result["weights"], ranks[0]["weights"], strict=True):
            assert mine.tobytes() == theirs.tobytes()


def not_finite(rank: int, world_size: int, bad: float) -> dict[str, Any]:
    """A run with two steps whose gradients are not finite, beside one without these steps."""

    def run(steps: Sequence[int]) -> dict[str, Any]:
        params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        state = GradientCompression(params, bucket_cap_mb=cap())
        finite, unchanged = [], True
        for number in steps:
            before = state.worker_error.clone(), state.server_error.clone()
            for p, grad in zip(params, gradients(rank, number), strict=True):
                p.grad = grad.clone()
            if number in (1, 2) and rank == world_size - 1:
                params[4 * (number == 1)].grad.view(-1)[17] = bad  # of the first bucket, then of the last one
            state.average_gradients()
            finite.append(all(bool(p.grad.isfinite().all()) for p in params))
            if not finite[-1]:
                after = state.worker_error, state.server_error
                unchanged = unchanged and all(map(torch.equal, before, after))
        return {
            "finite": finite,
            "unchanged": unchanged,
            "skipped": state.skipped_steps,
            "grads": flat([p.grad for p in params]).tobytes(),
        }

    spoilt, well = run([0, 1, 2, 3, 4]), run([0, 3, 4])
    assert well["finite"] == [True] * 3
    return spoilt | {"as if never taken": spoilt["grads"] == well["grads"]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_reaches_all_and_changes_no_error(bad: float) -> None:
    ranks = run_ranks(3, not_finite, bad)
    for result in ranks:
        assert (result["finite"], result["unchanged"], result["skipped"]) == ([True, False, False, True, True], True, 2)
        assert result["as if never taken"]
        assert result["grads"] == ranks[0]["grads"]


def scaled(rank: int, world_size: int, scale: float) -> list[np.ndarray]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    state = GradientCompression(params, bucket_cap_mb=cap(), loss_scale=lambda: scale)
    for step in range(3):
        for p, grad in zip(params, gradients(rank, step), strict=True):
            p.grad = grad * scale
        state.average_gradients()
    return [flat([p.grad / scale for p in params]), state.worker_error.numpy()]


def test_errors_do_not_carry_the_loss_scale() -> None:
    once, other = run_ranks(2, scaled, 1.0), run_ranks(2, scaled, 1024.0)
    for mine, theirs in zip(once, other, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def record(rank: int, world_size: int) -> list[str]:
    def attach(ddp: DistributedDataParallel, communicator: Recording) -> Callable[[], None]:
        state = GradientCompression(ddp.parameters(), bucket_cap_mb=CAP, communicator=communicator)
        ddp.register_comm_hook(state, compress_hook)
        return lambda: None

    return events_of_backward(attach)


def test_the_first_message_leaves_before_the_last_gradient_is_there() -> None:
    for events in run_ranks(2, record):
        check_overlap(events)


# -- state and refusals -----------------------------------------------------------------------------------------------


def resumed(rank: int, world_size: int) -> bool:
    def run(state: GradientCompression, params: list[nn.Parameter], steps: range) -> np.ndarray:
        for step in steps:
            for p, grad in zip(params, gradients(rank, step), strict=True):
                p.grad = grad.clone()
            state.average_gradients()
        return flat([p.grad for p in params])

    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    whole = GradientCompression(params, bucket_cap_mb=cap())
    run(whole, params, range(3))
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in whole.state_dict().items()}
    expected = run(whole, params, range(3, 6))
    again = GradientCompression(params, bucket_cap_mb=cap())
    again.load_state_dict(saved)
    with pytest.raises(ValueError, match="bits=4, this rank 8"):
        GradientCompression(params, "int8", bucket_cap_mb=cap()).load_state_dict(saved)
    return run(again, params, range(3, 6)).tobytes() == expected.tobytes()


def test_a_resumed_state_gives_the_same_bits() -> None:
    assert run_ranks(3, resumed) == [True] * 3


def saved(rank: int, world_size: int, folder: str, form: str) -> tuple[np.ndarray, np.ndarray]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    state = GradientCompression(params, bucket_cap_mb=cap(), state=form)
    for step in range(3):
        for p, grad in zip(params, gradients(rank, step), strict=True):
            p.grad = grad.clone()
        state.average_gradients()
    save_state(state, folder)
    return state.worker_error.numpy(), whole_server_error(state)


def whole_server_error(state: GradientCompression) -> np.ndarray:
    """The server errors of all ranks, each at its place."""
    whole, ranks = torch.zeros(state.layout.numel), state.communicator
    for bucket, feedback in zip(state.layout.buckets, state.errors.feedback, strict=True):
        error = feedback.server
        start = bucket.start + chunk_range(bucket.numel, ranks.world_size, ranks.rank)[0]
        whole[start : start + error.numel()] = values_of_errors(error)
    ranks.all_reduce(whole).wait()
    return whole.numpy()


def loaded(rank: int, world_size: int, folder: str, form: str) -> tuple[np.ndarray, np.ndarray, int]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    state = GradientCompression(params, bucket_cap_mb=cap(170), state=form)  # other buckets than those of the save
    load_state(state, folder)
    return state.worker_error.numpy(), whole_server_error(state), state.steps


@pytest.mark.invariant(22)
@pytest.mark.parametrize(
    ("before", "after", "form"),
    [(2, 3, "float32"), (3, 2, "float32"), (4, 1, "float32"), (1, 2, "float32"), (2, 3, "compact"), (2, 1, "compact")],
)
def test_errors_go_over_to_another_number_of_ranks(before: int, after: int, form: str, tmp_path: Path) -> None:
    """A compact state that is saved has the values that it stands for; here float32 buffers load both."""
    old = run_ranks(before, saved, str(tmp_path), form)
    for worker, server, steps in run_ranks(after, loaded, str(tmp_path), "float32"):
        assert steps == 3 * (before > 1)
        if after == 1:
            assert worker.size == 0
        elif before == 1:
            assert not worker.any() and not server.any()
        else:
            mean = np.mean([error.astype(np.float64) for error, _ in old], axis=0)
            assert np.allclose(worker, mean, rtol=0, atol=1e-6)
            assert np.array_equal(server, old[0][1])


def resumed_from_files(rank: int, world_size: int, folder: str) -> list[bool]:
    """Save a run after three steps, and resume it from the files in each form of the state."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]

    def run(state: GradientCompression, steps: range) -> np.ndarray:
        for step in steps:
            for p, grad in zip(params, gradients(rank, step), strict=True):
                p.grad = grad.clone()
            state.average_gradients()
        return flat([p.grad for p in params])

    whole = GradientCompression(params, bucket_cap_mb=cap())
    run(whole, range(3))
    save_state(whole, folder)
    errors, expected = [whole.worker_error, whole.server_error], run(whole, range(3, 6))
    same = []
    for form in ("compact", "float32"):
        again = GradientCompression(params, bucket_cap_mb=cap(), state=form)
        load_state(again, folder)
        same += [torch.equal(again.worker_error, errors[0]), torch.equal(again.server_error, errors[1])]
        same += [form == "float32" or run(again, range(3, 6)).tobytes() == expected.tobytes()]
    per_element = sum(buffer.nbytes for buffer in (whole.errors.worker, whole.errors.server)) / whole.layout.numel
    return [*same, per_element < 1.2 * (1 + 1 / world_size)]  # 1.03 in large buckets


def test_a_resume_from_files_gives_the_same_bits_in_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    assert run_ranks(2, resumed_from_files, str(tmp_path)) == [[True] * 7] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "int8"}, "state must be one of"),
        ({"compression": "int2"}, "compression must be one of"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb must be > 0"),
        ({"dtype": torch.float64}, "must be float32, bfloat16 or float16"),
        ({"params": "int4"}, "come first, got 'int4'"),
        ({"params": nn.Linear(2, 2)}, "come first, got Linear"),
        ({"params": ["weight"]}, "come first, got .'weight'"),
        ({"params": torch.zeros(3)}, "come first, got tensor"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    given = dict(options)
    p = nn.Parameter(torch.zeros(3, dtype=given.pop("dtype", torch.float32)))
    with pytest.raises((ValueError, TypeError), match=message):
        GradientCompression(**{"params": [p], **given})


def pickled(rank: int, world_size: int) -> None:
    states = [GradientCompression([nn.Parameter(torch.zeros(40))], bucket_cap_mb=cap()) for _ in range(2)]
    for step in range(4):
        grad = torch.randn(40, generator=torch.Generator().manual_seed(10 * step + rank))
        for state in states:
            state.params[0].grad = grad.clone()
            state.average_gradients()
        assert torch.equal(*(state.params[0].grad for state in states))
        states[1] = pickle.loads(pickle.dumps(states[1]))


def test_a_pickle_goes_on_with_the_same_bits() -> None:
    run_ranks(2, pickled)


def unlike(rank: int, world_size: int) -> None:
    GradientCompression([nn.Parameter(torch.zeros(3 + rank))]).average_gradients()


def test_ranks_that_differ_fail_together() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, unlike)
    assert sorted(caught.value.errors) == [0, 1]
    assert all("differ from rank 0 in the options or parameters" in e.message for e in caught.value.errors.values())


def with_none(rank: int, world_size: int) -> list[bool]:
    params = [nn.Parameter(torch.zeros(40)) for _ in range(3)]
    state = GradientCompression(params)
    params[0].grad = torch.ones(40)
    if rank == 0:
        params[1].grad = torch.ones(40)
    state.average_gradients()
    assert torch.allclose(params[1].grad, torch.full((40,), 0.5), atol=0.08)
    return [p.grad is None for p in params]


def test_a_gradient_that_nobody_has_stays_none() -> None:
    assert run_ranks(2, with_none) == [[False, False, True]] * 2
