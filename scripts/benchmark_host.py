"""The host's time of a step: CPU time of the step's thread, per bucket, with buckets so small that nothing else weighs.

    python scripts/benchmark_host.py --json docs/host_time.json     # times
    python scripts/benchmark_host.py --modules                      # modules of the package that a step calls
    python scripts/benchmark_host.py --syncs                        # values that a step fetches from the device

Two processes train over gloo. Every variant takes a step on a model of its own, in an order by chance that is alike
on both ranks. A step is backward, average, clip and update. The time of a backward that sends nothing is subtracted.
Medians are over rounds, on rank 0. The baseline is an all-reduce per bucket, clip_grad_norm_ and fused AdamW.

--modules counts calls by sys.setprofile: modules of which a step enters any function, its generators included.
--syncs counts, on CPU tensors, what waits for a GPU: item() and what calls it (float, bool, is_nonzero), equal,
tolist, numpy and cpu; tensors that are made from Python numbers, which copy to the device; and copies between host
memory and the device: the package makes tensors in host memory with device="cpu", and all others are on the device.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _common import check_least, medians, on_ranks, parser_of, print_table, write_measurements
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_compressopt
from hf_compressopt import GradientCompression, ZeroOptimizer, average_gradients, compress_hook
from hf_compressopt.collectives.communicator import Communicator

WORLD_SIZE = 2
FREEZE = 3  # steps before the compressed stage
SETTLING = 8  # steps before anything is measured: the compressed stage, DDP's buckets and all caches are there
PACKAGE = str(Path(hf_compressopt.__file__).parent) + os.sep
BASELINE = "all_reduce, clip, AdamW"
BACKWARD = "backward alone"
#: Calls that wait for a device.
_WAITING = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal")
_FETCHING = ("tolist", "numpy", "cpu")
_COPYING = ("tensor", "as_tensor", "scalar_tensor")

Step = Callable[[], object]


class Matrices(nn.Module):
    """One parameter per bucket, and a loss whose gradient is a constant of the rank."""

    def __init__(self, buckets: int, numel: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.ones(numel, 1)) for _ in range(buckets))
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.gradients = [torch.randn(numel, generator=generator) for _ in range(buckets)]

    def forward(self) -> Tensor:
        return torch.stack([a.view(-1) @ b for a, b in zip(self.values, self.gradients, strict=True)]).sum()


@dataclass
class Given:
    """Parameters whose gradients are there, and who averages them; None are the ranks of torch.distributed."""

    params: list[nn.Parameter]
    bucket_mb: float
    communicator: Communicator | None = None

    def update(self) -> Step:
        """Return torch's clipping and fused AdamW."""
        optimizer = torch.optim.AdamW(self.params, lr=1e-3, fused=True)

        def clip_and_step() -> None:
            nn.utils.clip_grad_norm_(self.params, 1.0)
            optimizer.step()

        return clip_and_step


class Training(Given):
    """A variant: a model, and what follows its backward; it has done what only first steps do."""

    def __init__(self, name: str, buckets: int, numel: int) -> None:
        self.model: nn.Module = Matrices(buckets, numel)
        super().__init__(list(self.model.parameters()), 4 * numel / 2**20)
        self._after = METHODS[name](self)
        for _ in range(SETTLING):
            self.prepare()
            self.step()

    def prepare(self) -> None:
        """Run forward, which is not part of a step."""
        self.loss = self.model()

    def step(self) -> None:
        self.loss.backward()
        self._after()
        for param in self.params:
            param.grad = None


def all_reduced(training: Training) -> Step:
    """Average each bucket by itself, as a plain loop does."""
    update = training.update()

    def step() -> None:
        for param in training.params:
            dist.all_reduce(param.grad)
            param.grad.div_(WORLD_SIZE)
        update()

    return step


def compressed(name: str, training: Given, **options: Any) -> Step:
    """A compressed optimizer, soon in its compressed stage, which sends in every step."""
    options |= {"bucket_cap_mb": training.bucket_mb, "communicator": training.communicator}
    optimizer = getattr(hf_compressopt, name)(training.params, lr=1e-4, **options)
    return clipped(optimizer, partial(average_gradients, optimizer))


def clipped(optimizer: Any, average: Step = lambda: None) -> Step:
    """Average, clip and update by an optimizer of this package."""

    def step() -> None:
        average()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    return step


def int4(training: Given) -> Step:
    """Average gradients in 4 bits in a plain loop."""
    options: dict[str, Any] = {"bucket_cap_mb": training.bucket_mb, "communicator": training.communicator}
    state = GradientCompression(training.params, "int4", **options)
    update = training.update()

    def step() -> None:
        state.average_gradients()
        update()

    return step


def ddp(training: Training, compression: str | None) -> Step:
    """Average gradients by DistributedDataParallel, as they are or in 4 bits."""
    named, update = list(training.model.named_parameters()), training.update()
    training.model = wrapped = DistributedDataParallel(training.model, bucket_cap_mb=training.bucket_mb)
    if compression is not None:
        state = GradientCompression(named, compression, bucket_cap_mb=training.bucket_mb)
        wrapped.register_comm_hook(state, compress_hook)
    return update


def zero(training: Given) -> Step:
    """Partition gradients and state among the ranks."""
    options: dict[str, Any] = {"stage": 2, "bucket_cap_mb": training.bucket_mb, "lr": 1e-3, "fused": True}
    options |= {"communicator": training.communicator}
    return clipped(ZeroOptimizer(training.params, torch.optim.AdamW, **options))


METHODS: dict[str, Callable[[Training], Step]] = {
    BACKWARD: lambda _: lambda: None,
    BASELINE: all_reduced,
    "OnebitAdam": partial(compressed, "OnebitAdam", freeze_step=FREEZE),
    "ZeroOneAdam": partial(compressed, "ZeroOneAdam", var_freeze_step=FREEZE, local_step_clipper=1),
    "OnebitLamb": partial(compressed, "OnebitLamb", freeze_step=FREEZE),
    "int4 gradients": int4,
    "DDP": partial(ddp, compression=None),
    "DDP, int4 gradients": partial(ddp, compression="int4"),
    "ZeRO-2": zero,
}


def host_times(trainings: dict[str, Training], arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds of this thread per bucket and step of each variant, less backward, and ratios to the baseline."""

    def before(name: str) -> None:
        trainings[name].prepare()
        dist.barrier()

    steps = {name: training.step for name, training in trainings.items()}
    seconds = medians(steps, arguments.rounds, before, time.thread_time)
    net = {name: value - seconds[BACKWARD] for name, value in seconds.items() if name != BACKWARD}
    us = {name: 1e6 * value / arguments.buckets for name, value in net.items()}
    return {name: {"us_per_bucket": value, "ratio": value / us[BASELINE]} for name, value in us.items()}


def called_modules(step: Step) -> list[str]:
    """Modules of the package of which a step calls a function."""
    found: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return sorted(found)


class WaitingCalls(TorchDispatchMode):
    """Counts operators that wait for a device, but for those on tensors in host memory."""

    def __init__(self, counts: Counter[str], in_host_memory: Callable[[Any], bool] = lambda tensor: False) -> None:
        super().__init__()
        self.counts, self.in_host_memory = counts, in_host_memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in _WAITING and not self.in_host_memory(args[0]):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def copying_calls(counts: Counter[str]) -> Iterator[None]:
    """Counts calls that copy from a device or to it, of any thread, which no operator shows."""

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        count_and_call.uncounted = call  # type: ignore[attr-defined]
        return count_and_call

    with ExitStack() as stack:
        for home, name in [*((Tensor, name) for name in _FETCHING), *((torch, name) for name in _COPYING)]:
            stack.enter_context(mock.patch.object(home, name, counted(name, getattr(home, name))))
        yield


class HostCopies(TorchFunctionMode):
    """Counts copies between host memory and the device, which wait for one another, where both are the CPU's.

    Tensors are in host memory if they are made with device="cpu" inside, or from others that are.
    """

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts
        self._kept: dict[int, Tensor] = {}  # by the address of the memory, which nobody else can get

    def in_host_memory(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first, second = (*args, None, None)[:2]
        if hasattr(func, "uncounted"):  # copying_calls() has counted it
            func, name = func.uncounted, func.uncounted.__name__
            self.counts[name] -= self.in_host_memory(first)  # which waits for nothing
        waits = not kwargs.get("non_blocking")
        if name == "copy_" and waits and self.in_host_memory(first) != self.in_host_memory(second):
            self.counts["copy_"] += 1
        if name == "__setitem__" and isinstance(args[2], Tensor):
            self.counts["copy_"] += self.in_host_memory(first) != self.in_host_memory(args[2])
        if name in ("__getitem__", "__setitem__") and isinstance(second, list) and not self.in_host_memory(first):
            self.counts["index"] += 1
        stays = isinstance(second, torch.dtype) or self.in_host_memory(second)
        if name == "to" and self.in_host_memory(first) and not stays and second != "cpu":
            self.counts["to"] += waits
            return func(*args, **kwargs).clone()  # on the device from now on
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            tensors = [value for value in args if isinstance(value, Tensor)]
            made_here = kwargs.get("device") == "cpu" and isinstance(kwargs["device"], str)
            if made_here or (tensors and all(map(self.in_host_memory, tensors))):
                self._kept[result.untyped_storage().data_ptr()] = result
        return result


@contextmanager
def counted_waits(device: torch.device, counts: Counter[str]) -> Iterator[None]:
    """Count what waits for the device inside: on a GPU by torch's warnings, on a CPU what would wait for a GPU."""
    if device.type == "cpu":
        with WaitingCalls(counts), copying_calls(counts):
            yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counts["warnings"] += sum("synchroniz" in str(warning.message) for warning in caught)


def host_syncs(step: Step, counts: Counter[str]) -> dict[str, int]:
    """Number of each kind of call in a step that waits for a device, or copies to it."""
    with counted_waits(torch.device("cpu"), counts):
        step()
    return dict(sorted((+counts).items()))


def measure_rank(rank: int, _: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    logging.getLogger("hf_compressopt").setLevel(logging.ERROR)
    if not (arguments.modules or arguments.syncs):
        trainings = {name: Training(name, arguments.buckets, arguments.numel) for name in METHODS}
        return host_times(trainings, arguments)
    found: dict[str, Any] = {}
    for name in METHODS:
        copies = HostCopies(counts := Counter())
        with copies:
            training = Training(name, arguments.buckets, arguments.numel)
            training.prepare()
            counts.clear()  # what only first steps do
            found[name] = called_modules(training.step) if arguments.modules else host_syncs(training.step, counts)
    return found


def report(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print a table, and write JSON if asked."""
    if arguments.modules:
        rows = [["", "modules", "which"], *([name, str(len(row)), " ".join(row)] for name, row in found.items())]
    elif arguments.syncs:
        rows = [["", "syncs", "which"], *([name, str(sum(row.values())), repr(row)] for name, row in found.items())]
    else:
        times = ([name, f"{row['us_per_bucket']:.0f}", f"{row['ratio']:.2f}"] for name, row in found.items())
        rows = [["", "us per bucket", "ratio"], *times]
    print_table(f"{arguments.buckets} buckets of {arguments.numel} values, {WORLD_SIZE} ranks, gloo", rows)
    options = {name: getattr(arguments, name) for name in ("rounds", "buckets", "numel")}
    write_measurements(arguments.json, options, load=os.getloadavg()[0], found=found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a step of each variant (%(default)s)")
    parser.add_argument("--buckets", type=int, default=56, help="buckets of a step (%(default)s)")
    parser.add_argument("--numel", type=int, default=256, help="values of a bucket (%(default)s)")
    parser.add_argument("--json", type=Path, help="write what was found here, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--modules", action="store_true", help="count the modules that a step calls instead")
    what.add_argument("--syncs", action="store_true", help="count what waits for a device instead")
    arguments = parser.parse_args()
    check_least(parser, arguments, {"rounds": 1, "buckets": 1, "numel": 1})
    report(arguments, on_ranks(measure_rank, WORLD_SIZE, arguments)[0])


if __name__ == "__main__":
    main()
