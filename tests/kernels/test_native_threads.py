"""The CPU library on several threads, and in forked processes: the same bits everywhere."""

import sys
import threading

import pytest
import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.kernels import (
    SKETCH_NUMEL,
    AdamUpdate,
    Average,
    Combination,
    Descent,
    IntegerFormat,
    LambMoments,
    LambOptions,
    Segment,
    SignFormat,
    library,
    native,
)
from tests.support import kernel_cases as cases
from tests.support.instruction_sets import BEST, CPU, INSTRUCTION_SETS
from tests.support.launching import run

pytestmark = pytest.mark.usefixtures("native_library", "threads")
LARGE = 700_001  # enough for several threads


def everything(numel: int) -> list[Tensor]:
    """Results of every kernel that depends on an order of summation, and of some others."""
    random = torch.Generator().manual_seed(5)

    def normal() -> Tensor:
        return torch.randn(numel, generator=random)

    x, grads, v = normal(), normal().bfloat16(), normal().square()
    cut = numel // 3 + 1
    segments = [Segment(grads, 0, cut, 0), Segment(grads, cut, numel - cut, 1)]
    z, written = Combination(numel, CPU, x, 0.9, segments, 0.1), [x]
    forms = [*map(SignFormat, (8, 512, 4096, 8192, 131_072)), IntegerFormat(4), IntegerFormat(8), SignFormat(None)]
    for form in forms:
        error, messages = normal(), torch.zeros(sum(form.chunk_nbytes(numel, 2)), dtype=torch.uint8)
        native.compress_(form, z, error, messages, 2, error)
        several, server = torch.zeros(6, form.nbytes(numel), dtype=torch.uint8), normal()
        for part in several:
            native.compress_(form, Combination.of(normal()), normal(), part, 1)
        out = torch.zeros_like(several[0])
        native.average_compress_(form, several.view(-1), server, server, out, 6)
        written += [error, messages, several, server, out]
    y = Average(numel, forms[-1], out, 1, out.numel())
    param = normal()
    params = [Segment(param, 0, cut, 0), Segment(param, cut, numel - cut, 1)]
    m, fresh, sums = normal(), v.clone(), torch.zeros(2, 3, dtype=torch.float64)
    options = LambOptions(0.9, 0.999, 1e-6, 0.1, False)
    native.lamb_moments_(LambMoments(y, m, fresh, v, params, torch.ones(2), sums, options))
    native.apply_adam_(AdamUpdate(y, m, v, params, Descent(1e-2, 0.9, 1e-8, False), 0.1, None))
    sketch, square = torch.zeros(SKETCH_NUMEL), torch.zeros((), dtype=torch.float64)
    native.sketch_(segments, 33, 5, sketch, square)
    return [*written, param, m, fresh, sums, sketch, square, native.sum_of_squares([x, grads], CPU)]


@pytest.mark.parametrize("threads", [1, 3])
def test_copy_moves_bits_and_nothing_beside_them(device: torch.device, threads: int) -> None:
    torch.set_num_threads(threads)
    random = torch.randint(-(2**31), 2**31 - 1, (3_000_100,), dtype=torch.int32)  # NaNs with payloads among them
    for numel in (0, 1, 15, 16, 17, 70_001, 3_000_001):
        for begin in (0, 1, 7):
            source, out = random[begin : begin + numel].view(torch.float32), torch.full((numel + 20,), 7.0)
            native.copy_(out[3 : 3 + numel], source)
            assert torch.equal(out[3 : 3 + numel].view(torch.int32), source.view(torch.int32))
            assert torch.equal(out[:3], torch.full((3,), 7.0)) and torch.equal(out[3 + numel :], torch.full((17,), 7.0))


def test_copies_of_every_kind_are_copies(device: torch.device) -> None:
    large = torch.randn(400, 500)
    for source in (large, large.t(), large.bfloat16(), large.double(), large[0], torch.tensor(3.0), large[:0]):
        out = torch.empty_like(source)
        kernels.copy_(out, source)
        assert torch.equal(out, source)
    version = (out := torch.empty(400, 500))._version
    kernels.copy_(out, large)
    assert out._version > version


@pytest.fixture(params=["the host's", pytest.param("our own", marks=pytest.mark.full)])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose threads the kernels work on."""
    if request.param == "our own":
        monkeypatch.setattr(library, "_host_threads", lambda: None)
    else:
        torch.set_num_threads(2)
        torch.ones(1_000_000).add_(1)  # torch's threads start with its first large operator
        library._host_threads.cache_clear()
        assert library._host_threads() is not None, "torch has no OpenMP"


@pytest.mark.usefixtures("pool")
def test_all_instruction_sets_and_numbers_of_threads_leave_the_same_bits() -> None:
    torch.set_num_threads(1)
    expected = everything(LARGE)
    for name in INSTRUCTION_SETS:
        for threads in (1, 2, 5):
            library.use_instruction_set(name)
            torch.set_num_threads(threads)
            try:
                for one, other in zip(everything(LARGE), expected, strict=True):
                    cases.assert_same_bits(one, other)
            finally:
                library.use_instruction_set(BEST)


@pytest.mark.usefixtures("pool")
def test_denormals_are_flushed_by_all_threads_or_by_none() -> None:
    torch.set_num_threads(4)
    tiny, out = torch.full((4_000_000,), 1e-39), torch.empty(4_000_000)
    try:
        for flushed in (True, False):
            assert torch.set_flush_denormal(flushed)
            for _ in range(3):
                native.combine_(Combination(tiny.numel(), CPU, tiny, 0.5, None, 0.0), out)
                assert torch.equal(out, torch.zeros_like(out) if flushed else tiny / 2)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.usefixtures("pool")
def test_several_threads_of_python_at_once() -> None:
    torch.set_num_threads(3)
    expected = everything(200_003)
    results: list[list[Tensor]] = []
    callers = [threading.Thread(target=lambda: results.append(everything(200_003))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    for result in results:
        for one, other in zip(result, expected, strict=True):
            cases.assert_same_bits(one, other)


FORK = """
import os, sys, torch
from hf_compressopt.kernels import native
torch.set_num_threads(4)
x = torch.ones(3_000_000).mul_(1)
assert float(native.sum_of_squares([x], x.device)) == 3_000_000  # on torch's threads; in the child on the library's own
for _ in range(3):
    child = os.fork()
    if child == 0:
        code = 1
        for _ in range(2):
            code = 0 if float(native.sum_of_squares([x], x.device)) == 3_000_000 else 1
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if float(native.sum_of_squares([x], x.device)) == 3_000_000 else 1)
        os._exit(code or os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert float(native.sum_of_squares([x], x.device)) == 3_000_000
"""


FORKED_BEFORE_IMPORT = """
import os, torch
torch.set_num_threads(2)
x = torch.ones(3_000_000).add_(1)  # torch's threads run, and the child will not have them
child = os.fork()
if child == 0:
    from hf_compressopt.kernels import native
    for _ in range(3):
        code = 0 if float(native.sum_of_squares([x], x.device)) == 12_000_000 else 1
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(FORK, id="after a kernel"),
        pytest.param(FORKED_BEFORE_IMPORT, id="before the import", marks=pytest.mark.full),
    ],
)
def test_a_forked_child_has_threads_of_its_own(source: str) -> None:
    run([sys.executable, "-c", source])
