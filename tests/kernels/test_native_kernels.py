"""The CPU library: the reference's bits, in all instruction sets, on several threads and in forked processes."""

import math
import sys
import threading
from dataclasses import replace

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
    ParameterSync,
    Segment,
    SignFormat,
    library,
    native,
    reference,
)
from hf_compressopt.kernels.messages import pack_signs
from tests.support import kernel_cases as cases
from tests.support.instruction_sets import BEST, CPU, INSTRUCTION_SETS
from tests.support.kernel_cases import Form
from tests.support.kernel_suite import CompactSuite, KernelSuite
from tests.support.launching import run

pytestmark = pytest.mark.usefixtures("native_library", "threads")
STILL = Descent(0.0, 1.0, 1e-8, False)
SEVERAL = [*map(SignFormat, (24, 136, 4096, 65_544, 100_000, None)), IntegerFormat(4), IntegerFormat(8)]


class TestKernels(KernelSuite):
    """The suite, with each instruction set."""


class TestCompact(CompactSuite):
    """The suite, with each instruction set."""


# -- sizes of a CPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SEVERAL, ids=str)
def test_pieces_of_several_threads(device: torch.device, form: Form) -> None:
    torch.set_num_threads(3)
    cases.check_compress(device, form, 700_001, 3, segments=7, last=2, with_factors=True, compact=True)
    cases.check_compress(device, form, 70_001, 1, segments=7)
    for compact in (True, False):
        cases.check_average_compress(device, form, 300_001, 5, shift=1, compact=compact)
    cases.check_decompress(device, form, 70_001, 2)
    cases.check_add(device, form, 700_001, 2, segments=7, decay=0.9, scale=2.0)
    if isinstance(form, IntegerFormat):
        cases.check_mean(device, form, 70_001, 5, shift=1)
    else:
        cases.check_apply_adam(device, 700_001, 5, chunks=3, scale_block=form.scale_block, with_m=False, log=True)


def test_adam_sketches_and_added_values_of_several_threads(device: torch.device) -> None:
    torch.set_num_threads(3)
    step = replace(cases.STEP, grad_scale=torch.tensor([3.0]), write_grads=True)
    cases.check_adam(CPU, (5, 700_001, 1000, 300_001), step, copies=True, shift=1)
    cases.check_sketch(device, 5_000_003, 9, offset=77)
    cases.check_add(device, SignFormat(None), 700_001, 0, segments=7, decay=0.9, scale=2.0)


def test_outputs_beyond_the_caches(device: torch.device) -> None:
    cases.check_decompress(CPU, SignFormat(4096), 4_300_003, 2, shift=3)
    cases.check_apply_adam(CPU, 4_300_003, 5, chunks=2, shift=1)
    for form in cases.INTEGERS:
        cases.check_average_compress(device, form, 4_300_003, 2)
        cases.check_decompress(device, form, 4_300_003, 1)
        cases.check_add(device, form, 4_300_003, 2, segments=7, decay=0.0, scale=2.0)
    for scale in (1.0, 2.0):
        cases.check_add(device, SignFormat(4096), 4_300_003, 0, segments=7, decay=0.0, scale=scale)


def test_averages_of_every_number_of_ranks(device: torch.device) -> None:
    for form in cases.FORMATS:
        for ranks in range(4, 18):
            cases.check_average_compress(CPU, form, 1511, ranks)


# -- numbers at the edges ---------------------------------------------------------------------------------------------


def test_sums_of_messages_keep_the_sign_of_zero(device: torch.device) -> None:
    numel, random, form = 5_000, torch.Generator().manual_seed(2), SignFormat(None)
    for ranks in range(1, 11):
        messages = torch.randint(256, (ranks, form.nbytes(numel)), dtype=torch.uint8, generator=random)
        messages[:, :4] = 0  # the scale: a sum of zeros is -0 only where all signs are negative
        expected, error = torch.full((numel,), -0.0), torch.full((numel,), -0.0)
        out = torch.empty_like(messages[0])
        reference.average_compress_(form, messages.view(-1), expected, expected, out, ranks)
        assert 0 < int(expected.signbit().sum()) < numel
        native.average_compress_(form, messages.view(-1), error, error, out, ranks)
        cases.assert_same_bits(error, expected)


def test_sums_of_squares_at_the_edges(device: torch.device) -> None:
    cases.check_square_sums(CPU, (1, 5, 0, 1000, 65_536, 65_537, 200_003), shift=1)
    assert not math.isfinite(native.sum_of_squares([torch.tensor([1.0, math.inf])], CPU))
    assert math.isnan(native.sum_of_squares([torch.ones(40), torch.tensor([math.nan])], CPU))
    assert float(native.sum_of_squares([torch.full((3,), 3e38)], CPU)) > 2.6e77  # beyond float32
    assert float(native.sum_of_squares([], CPU)) == 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_conversion_from_every_low_precision_number(device: torch.device, dtype: torch.dtype) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(values.numel())
    native.combine_(Combination(values.numel(), CPU, grads=[Segment(values, 0, values.numel(), 0)]), out)
    cases.assert_same_bits_but_nan(out, 0.0 + values.float())  # a term that is left out counts as 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_rounding_to_low_precision(device: torch.device, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = every.view(torch.int32)
    shift = 16 if dtype == torch.bfloat16 else 13
    near = [between + step for step in (0, 1, -1, (1 << shift - 1) - 1, 1 << shift - 1, (1 << shift - 1) + 1)]
    numbers = torch.cat([*near, torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int32)]).view(torch.float32)
    n = numbers.numel()
    param, anchor, zeros = torch.empty(n, dtype=dtype), numbers.clone(), torch.zeros(n)
    # A tensor that keeps still, and decay 1: the parameter is the anchor, rounded.
    params = [Segment(param, 0, n, 0, still=True)]
    native.sync_parameters_(
        ParameterSync(Average.of(zeros), zeros.clone(), anchor, zeros, zeros.clone(), params, 1.0, STILL)
    )
    cases.assert_same_bits_but_nan(param, numbers.to(dtype))


@pytest.mark.parametrize("scale_block", (None, 8, 512, 4096))
def test_values_that_are_not_ordinary(device: torch.device, scale_block: int | None) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e18, -1e18, math.inf, -math.inf, math.nan])
    form = SignFormat(scale_block)
    for kinds in (special[:2], special[2:5], special[:8], special):
        x = kinds[torch.randint(len(kinds), (9_001,), generator=torch.Generator().manual_seed(1))]
        message, error = cases.empty_messages(form, x.numel()), torch.zeros(x.numel())
        native.compress_(form, Combination.of(x), error, message, 1, error)
        rows = x.double().split(scale_block or x.numel())
        expected = torch.stack([row.square().mean().sqrt() for row in rows]).float()
        scales = form.scales(message, x.numel())
        torch.testing.assert_close(scales, expected, rtol=3e-7, atol=2e-45, equal_nan=True)
        u = x + 0.0
        assert torch.equal(message[scales.numel() * 4 :][: -(-x.numel() // 8)], pack_signs(u))
        cases.assert_same_bits_but_nan(error, u - form.decode(message, x.numel()))
        assert message.numel() == form.nbytes(x.numel())


# -- threads and forks ------------------------------------------------------------------------------------------------

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
        monkeypatch.setattr(native, "_host_threads", lambda: None)
    else:
        torch.set_num_threads(2)
        torch.ones(1_000_000).add_(1)  # torch's threads start with its first large operator
        native._host_threads.cache_clear()
        assert native._host_threads() is not None, "torch has no OpenMP"


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
