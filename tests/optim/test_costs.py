"""What runs and steps cost: bytes sent, memory beside what is held, and values fetched from the device."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_compressopt
from hf_compressopt import GradientCompression, ZeroOptimizer, amp, average_gradients, grad_compression
from hf_compressopt.collectives import feedback, gradients
from hf_compressopt.kernels import native
from hf_compressopt.optim import math, overlap
from hf_compressopt.zero import config, parts, reducer
from tests.support.family import optimizer_of
from tests.support.harness import on_ranks, run_ranks
from tests.support.launching import REPO_ROOT
from tests.support.memory import MIB, peak_beyond

sys.path.append(str(REPO_ROOT / "scripts"))

from benchmark_host import HostCopies  # noqa: E402

# -- buckets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "cap"), [("cpu", 25), ("cuda", 100)])
def test_buckets_that_nobody_chose_are_larger_on_a_gpu(device: str, cap: int) -> None:
    """There the launches of a bucket are what it costs."""
    with FakeTensorMode():
        first, second = (nn.Parameter(torch.empty(8, 8, device=device)) for _ in range(2))
        numels = [optimizer_of("OnebitAdam", [first]).bucket_numel, GradientCompression([second]).layout.bucket_numel]
    zero = config.ZeroConfig(stage=1).on(torch.device(device))
    chosen = config.ZeroConfig(stage=1, reduce_bucket_size=1000).on(torch.device(device))
    assert {*numels, zero.reduce_numel, zero.gather_numel} == {cap * MIB // 4}
    assert (chosen.reduce_numel, chosen.gather_numel) == (1000, 1000)


# -- bytes of runs of 1,000 steps, with the defaults -------------------------------------------------------------------

STEPS, NUMEL = 1000, 4_000_000
RING = 2 * 4 * NUMEL  # bytes of an all-reduce in float32, times W / (W - 1)


def parameters(rank: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(NUMEL // 1000, 1000))]
    params[0].grad = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(rank))
    return params


@pytest.mark.parametrize(("name", "times"), [("OnebitAdam", 18), ("OnebitLamb", 16)])  # whose warmup is longer
@on_ranks(2)
def test_a_run_of_a_compressed_optimizer_sends_so_many_times_fewer_bytes(
    rank: int, world_size: int, name: str, times: int
) -> None:
    optimizer = getattr(hf_compressopt, name)(parameters(rank), lr=1e-3, warmup_bits=4)
    optimizer.scale_schedule(STEPS, given=[])
    last = optimizer.schedule.last_warmup_step  # no step of the warmup stage comes after it
    optimizer.freeze_step = 1
    sent = []
    for _ in range(2):  # a step of each stage
        average_gradients(optimizer)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        sent.append(optimizer.metrics()["bytes_sent_step"])
    assert STEPS * RING / 2 > times * (last * sent[0] + (STEPS - last) * sent[1])


@on_ranks(2)
def test_a_run_with_int4_gradients_sends_7_6_times_fewer_bytes(rank: int, world_size: int) -> None:
    state = GradientCompression(parameters(rank), "int4")
    state.average_gradients()
    assert RING / 2 > 7.6 * state.metrics()["bytes_sent_step"]


# -- memory: beside what a step holds between steps it needs buckets, as /proc counts ----------------------------------

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's /proc")
TENSORS = 20  # of 1 MiB: 20 MiB of float32 parameters
MOST = 6  # MiB: buckets under way
MOST_BY_TORCH = 12  # temporaries of a few tensors where PyTorch steps
MOST_OF_ONE_TENSOR = 16  # of 48: buckets, parts of which a wider copy is made, and what the allocator keeps
SHORT: dict[str, Any] = {"freeze_step": 1, "bucket_cap_mb": 1}
LONG: dict[str, Any] = {"freeze_step": 100, "bucket_cap_mb": 1}
# class, options, steps before the one that is measured, and the most that it may take
STEP: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "OnebitAdam, warmup": ("OnebitAdam", LONG, 2, MOST_BY_TORCH),
    "OnebitAdam, fused warmup": ("OnebitAdam", {**LONG, "fused_warmup": True}, 2, MOST),
    "OnebitAdam, compressed": ("OnebitAdam", SHORT, 3, MOST),
    "ZeroOneAdam, full-precision step": ("ZeroOneAdam", {**LONG, "var_update_scaler": 100}, 2, MOST),
    "ZeroOneAdam, 1-bit gradients": ("ZeroOneAdam", {**LONG, "var_update_scaler": 1}, 4, MOST),
    "ZeroOneAdam, local step": ("ZeroOneAdam", {**SHORT, "local_step_scaler": 1}, 8, MOST),
    "ZeroOneAdam, sync": ("ZeroOneAdam", {**SHORT, "local_step_scaler": 100}, 3, MOST),
    "OnebitLamb, compressed": ("OnebitLamb", SHORT, 3, MOST),
    "Lamb": ("Lamb", {}, 2, MOST_BY_TORCH),
    "FusedAdam": ("FusedAdam", {}, 2, MOST),
}


@pytest.mark.full
@needs_proc
@on_ranks(2, timeout=120)
def test_peak_of_a_step_is_buckets(rank: int, world_size: int) -> None:
    assert 19 <= peak_beyond(lambda: torch.ones(5 * MIB)) <= 32  # the measure itself
    for case, (name, options, steps, most) in STEP.items():
        params = [nn.Parameter(torch.ones(5 * MIB // TENSORS)) for _ in range(TENSORS)]
        for number, param in enumerate(params):
            param.grad = torch.full_like(param, 0.01 * (number + 1))
        optimizer = getattr(hf_compressopt, name)(params, lr=1e-4, **options)
        for _ in range(steps):
            optimizer.step()
        assert (found := peak_beyond(optimizer.step)) <= most, (case, found)


@needs_proc
@pytest.mark.usefixtures("fresh_ranks")
@pytest.mark.parametrize("name", ["OnebitAdam", pytest.param("ZeroOneAdam", marks=pytest.mark.full)])
@on_ranks(2, timeout=120)
def test_the_first_steps_and_the_switch_take_no_copy_of_a_large_tensor(rank: int, world_size: int, name: str) -> None:
    """Of the first step, the switch, and the first compressed step, on the kernels' own path in the warmup stage."""
    param = nn.Parameter(torch.ones(12 * MIB))
    param.grad = torch.full_like(param, 0.01)
    fused = {"fused_warmup": True} if name == "OnebitAdam" else {}
    optimizer = optimizer_of(name, [param], bucket_cap_mb=1, scale_block=4096, **fused)
    peaks = [peak_beyond(optimizer.step) for _ in range(3)]
    assert max(peaks) <= MOST_OF_ONE_TENSOR, peaks


# -- fetches: a GPU's queue runs dry while the host waits. Counted on CPU tensors --------------------------------------

SMALL_BUCKETS = {"freeze_step": 2, "bucket_cap_mb": 0.001}
WARMUP = {"freeze_step": 40}
FETCHES: dict[str, tuple[str, dict[str, Any], int]] = {  # the most of a step that clips
    "OnebitAdam": ("OnebitAdam", {}, 1),
    "OnebitLamb": ("OnebitLamb", {}, 1),
    "OnebitLamb, decay": ("OnebitLamb", {"weight_decay": 0.1}, 1),
    "OnebitLamb, warmup": ("OnebitLamb", WARMUP, 1),
    "OnebitAdam, zero_stage=2, late": ("OnebitAdam", {"zero_stage": 2, "clip": "late"}, 1),
    "OnebitAdam, first local gradients": ("OnebitAdam", {"compares": True}, 1),
    "OnebitAdam, zero_stage=2, warmup": ("OnebitAdam", {"zero_stage": 2, **WARMUP}, 1),
    "OnebitAdam, a group in full precision": ("OnebitAdam", {"non_freeze": 1}, 1),
    "ZeroOneAdam, sync": ("ZeroOneAdam", {"local_step_clipper": 1}, 1),
    "ZeroOneAdam, first sync": ("ZeroOneAdam", {"local_step_clipper": 1, "compares": True}, 1),
    # clipping agrees on the norm of the group, and parameters may be written until the step, whose sync tells of it
    "ZeroOneAdam, sync, a group in full precision": ("ZeroOneAdam", {"local_step_clipper": 1, "non_freeze": 1}, 2),
    "ZeroOneAdam, local step": ("ZeroOneAdam", {"local_step_clipper": 4, "local_step_scaler": 1}, 1),
    "ZeroOneAdam, 1-bit gradients": ("ZeroOneAdam", {"var_update_scaler": 1, **WARMUP}, 1),
    "ZeroOneAdam, variance step": ("ZeroOneAdam", {"var_update_scaler": 100, "warmup_bits": 32, **WARMUP}, 1),
    # the points of the largest variances, and which parameters have one
    "OnebitAdam, auto": ("OnebitAdam", {"freeze_step": "auto"}, 1),
    "OnebitLamb, auto": ("OnebitLamb", {"freeze_step": "auto"}, 1),
    "OnebitAdam, the switch": ("OnebitAdam", {"freeze_step": 7}, 3),
    "OnebitAdam, zero_stage=2, the switch": ("OnebitAdam", {"freeze_step": 7, "zero_stage": 2}, 4),
    # with the averages of backward
    "int4, hook": ("SGD", {"way": "hook"}, 0),
    "OnebitAdam, warmup, hook": ("OnebitAdam", {"way": "hook", **WARMUP}, 1),
    "OnebitAdam, late, hook": ("OnebitAdam", {"way": "hook", "clip": "late"}, 1),
    # that no gradient is sparse, and which parameters have one anywhere, is known when it returns
    "OnebitAdam, average_gradients": ("OnebitAdam", {"way": "counted loop", **WARMUP}, 2),
}


FETCHED: list[torch.Tensor] = []  # copies in host memory, which were asked for in a step before


def fetch_later(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    here = tensor.clone()
    FETCHED.append(here)
    return lambda: here


class Fetches(TorchDispatchMode):
    """Counts item() and what calls it, and tolist(), but for numbers that lie in host memory anyway."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.count = 0
        tensors = getattr(optimizer, "_tensors", {})
        host = [*(state.steps for state in getattr(optimizer, "_states", ())), *tensors.values()]
        self.host = {tensor.untyped_storage().data_ptr() for tensor in host}

    def note(self, tensor: torch.Tensor) -> None:
        self.count += tensor.untyped_storage().data_ptr() not in self.host and all(tensor is not t for t in FETCHED)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
            self.note(args[0])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        tolist = torch.Tensor.tolist

        def noted(tensor: torch.Tensor) -> Any:
            self.note(tensor)
            return tolist(tensor)

        noted.uncounted = tolist  # type: ignore[attr-defined]  # for HostCopies, which torch tells of both
        with (
            mock.patch.object(torch.Tensor, "tolist", noted),
            mock.patch.object(overlap, "reads_at_once", lambda device: False),
            mock.patch.object(gradients, "reads_at_once", lambda device: False),
            mock.patch.object(feedback, "reads_at_once", lambda device: False),
            mock.patch.object(grad_compression, "fetch_later", fetch_later),
            self,
        ):
            yield


class Products(nn.Module):
    """The sum of the products of all parameters with the input."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(16, 16) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(factor * x).sum() for factor in self.factors]).sum()


def fetches(rank: int, world_size: int, name: str, options: dict[str, Any], tensors: int) -> tuple[int, Counter[str]]:
    """Count the fetches of the last of seven backward passes and steps, as if the numbers lay on a device.

    And the copies between host memory and the device, which wait for one another.
    """
    with HostCopies(copies := Counter()):
        return count_fetches(rank, name, options, tensors, copies), +copies


def count_fetches(rank: int, name: str, options: dict[str, Any], tensors: int, copies: Counter[str]) -> int:
    net, options = Products(tensors), {**SMALL_BUCKETS, **options}
    model, params = net, list(net.parameters())
    whole, compares, way = options.pop("non_freeze", 0), options.pop("compares", False), options.pop("way", "loop")
    groups = [{"params": params[whole:]}, {"params": params[:whole], "non_freeze": True}]
    optimizer = torch.optim.SGD(params, lr=0.1) if name == "SGD" else getattr(hf_compressopt, name)(groups, **options)
    if way == "hook":
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    if name == "SGD":
        state = GradientCompression(net.named_parameters(), "int4", bucket_cap_mb=0.001)
        model.register_comm_hook(state, hf_compressopt.compress_hook)
    elif way == "hook":
        hf_compressopt.attach_ddp(model, optimizer)
    for step in range(7):
        counter = Fetches(optimizer)
        copies.clear()
        if compares:  # whether the ranks' gradients are their own, as in the first step of a process
            optimizer._agreement._gradients_compared = False
        with counter.counting():
            model(torch.randn(16, 16, generator=torch.Generator().manual_seed(2 * step + rank))).backward()
        if way == "hook" and options.get("clip") == "late" and step == 6:
            assert optimizer.overlap.signature, "no message has left early"
        if way != "hook":
            with counter.counting() if way == "counted loop" else nullcontext():
                average_gradients(optimizer)
        with counter.counting():
            if name != "SGD":
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        optimizer.zero_grad()
    return counter.count


@pytest.mark.parametrize("case", FETCHES)
def test_a_step_fetches_no_value_per_bucket(case: str) -> None:
    name, options, most = FETCHES[case]
    few, many = (run_ranks(2, fetches, name, options, tensors) for tensors in (3, 24))
    assert max(count for count, _ in few) == max(count for count, _ in many) <= most
    if "switch" not in case:  # its tables are copied to a device once, but not kept inside a mode of torch's dispatch
        assert [copies for _, copies in many] == [Counter()] * 2


def offloaded(rank: int, tensors: int, **options: Any) -> tuple[int, Counter[str], list[torch.Tensor]]:
    """Count the fetches of a step of ZeRO, and the copies that wait between host memory and the device."""
    with HostCopies(copies := Counter()):
        net = Products(tensors)
        optimizer = ZeroOptimizer(
            net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, reduce_bucket_size=300, **options
        )
        for step in range(4):
            counter = Fetches(None)
            copies.clear()
            with counter.counting():
                net(torch.randn(16, 16, generator=torch.Generator().manual_seed(2 * step + rank))).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
        return counter.count, +copies, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("options", [{}, {"grad_compression": "int4", "param_compression": "int4"}])
@on_ranks(2)
def test_an_offloaded_step_waits_as_seldom_as_one_on_the_device(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    """With all copies through page-locked memory, as if the CPU were a device with memory of its own."""

    def in_host_memory(tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu").copy_(tensor, non_blocking=non_blocking)

    def later(tensor: torch.Tensor, *, beside: bool = False) -> Callable[[], torch.Tensor]:
        here = in_host_memory(tensor, non_blocking=True)
        return lambda: here

    _, _, expected = offloaded(rank, 24, **options)
    with (
        mock.patch.object(config, "require_accelerator"),
        mock.patch.object(parts, "in_host_memory", in_host_memory),
        mock.patch.object(parts, "reads_at_once", return_value=False),
        mock.patch.object(reducer, "fetch_later", later),
    ):
        few, many = (offloaded(rank, tensors, offload_optimizer="cpu", **options) for tensors in (3, 24))
    assert few[:2] == many[:2] == (2, Counter())  # whether other code has written parameters, and the norm
    assert all(torch.equal(a, b) for a, b in zip(many[2], expected, strict=True))


def test_a_scale_is_fetched_where_it_changes_and_not_in_backward() -> None:
    """By hf_compressopt.GradScaler, whose scale lies on a device as if it were one."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = hf_compressopt.GradScaler("cpu", init_scale=1024.0)
    with (
        mock.patch.object(amp, "reads_at_once", lambda device: False),
        mock.patch.object(amp, "fetch_later", fetch_later),
    ):
        for factor, expected in ((torch.inf, 512.0), (1.0, 512.0)):
            scaler.scale(factor * weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with Fetches(optimizer) as counter:
                assert scaler.get_scale() == expected
            assert counter.count == 0
        state = scaler.state_dict()
        scaler.update(64.0)
        assert scaler.get_scale() == 64.0
        scaler.load_state_dict(state)
        assert scaler.get_scale() == 512.0


class Calls(TorchDispatchMode):
    """Counts operators, and copies among them."""

    count = copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_the_norm_of_a_large_variance_takes_few_launches_on_a_device() -> None:
    with Calls() as calls:
        math.sum_of(torch.empty(350_000_000, device="meta"))
    assert calls.count < 100


def moments_after(steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The moments of some tensors, of which a few are large, after steps with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (300, 41), (1,), (5, 3, 2), (1 << 19,)]
    rows = [(torch.zeros(shape), torch.zeros(shape), torch.zeros(())) for shape in shapes]
    for _ in range(steps):
        grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        math.advance_all_(grads, rows, {"betas": (0.9, 0.99)})
    return [value for row in rows for value in row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_many_tensors_have_the_bits_of_each(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = moments_after(3, dtype)
    monkeypatch.setattr(math, "reads_at_once", lambda device: False)
    monkeypatch.setattr(math, "_CHUNK_ON_DEVICE", 15_000)
    assert all(map(torch.equal, moments_after(3, dtype), expected))


def test_moments_of_many_tensors_take_few_launches_on_a_device() -> None:
    rows = [(*(torch.empty(100_000, device="meta") for _ in range(2)), torch.zeros(())) for _ in range(400)]
    grads = [torch.empty(100_000, device="meta") for _ in rows]
    with Calls() as calls:
        math.advance_all_(grads, rows, {"betas": (0.9, 0.99)})
    assert calls.count - len(rows) <= 3 * 3  # but for the counts of steps, on the host


@pytest.mark.parametrize(("name", "options"), [("OnebitLamb", {"freeze_step": 9, "max_grad_norm": 0.0}), ("Lamb", {})])
@on_ranks(1)
def test_a_full_step_of_lamb_takes_few_launches_per_tensor(
    rank: int, world_size: int, name: str, options: dict[str, Any]
) -> None:
    counts = []
    for tensors in (4, 24):
        params = [nn.Parameter(torch.ones(16)) for _ in range(tensors)]
        for param in params:
            param.grad = torch.full_like(param, 0.1)
        optimizer = getattr(hf_compressopt, name)(params, **options)
        optimizer.step()
        with mock.patch.object(math, "reads_at_once", lambda device: False), Calls() as calls:
            optimizer.step()
        counts.append(calls.count)
    assert counts[1] - counts[0] <= 18 * (24 - 4)


def copies_of_averages(rank: int, world_size: int, zero_stage: int | None, tensors: int) -> int:
    """Copies of a step with small tensors, which travel in full precision."""
    params = [nn.Parameter(torch.ones(16)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.full_like(param, 0.1)
    if zero_stage is None:
        step = GradientCompression(params, "int4").average_gradients
    else:
        step = hf_compressopt.OnebitAdam(params, freeze_step=9, zero_stage=zero_stage, max_grad_norm=0.0).step
    step()
    with Calls() as calls:
        step()
    return calls.copies


@pytest.mark.parametrize("zero_stage", [None, 1])
def test_averages_in_full_precision_take_as_few_copies_of_many_tensors_as_of_few(zero_stage: int | None) -> None:
    few, many = (run_ranks(2, copies_of_averages, zero_stage, tensors) for tensors in (4, 24))
    assert few == many


# -- kernels: each is one launch (tests/kernels/test_cuda_emulation.py) ------------------------------------------------


def kernels_of_a_step(rank: int, world_size: int, signs: bool, buckets: int) -> int:
    params = [nn.Parameter(torch.ones(256)) for _ in range(buckets)]
    for param in params:
        param.grad = torch.full_like(param, 0.1)
    if signs:
        optimizer = hf_compressopt.OnebitAdam(params, freeze_step=1, bucket_cap_mb=0.001)
        optimizer.step()
        work = optimizer.step
    else:
        work = GradientCompression(params, "int4", bucket_cap_mb=0.001).average_gradients
    with mock.patch.object(native, "call", wraps=native.call) as call:
        work()
    return call.call_count


@pytest.mark.parametrize(("signs", "most"), [(True, 3), (False, 4)])
def test_a_bucket_takes_so_many_kernels(signs: bool, most: int) -> None:
    few, many = (max(run_ranks(2, kernels_of_a_step, signs, buckets)) for buckets in (4, 12))
    assert 0 < many - few <= 8 * most
