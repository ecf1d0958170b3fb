"""The CPU library against the reference, in all its instruction sets, and how it is loaded and called."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_compressopt import kernels
from hf_compressopt.kernels import library, native, reference, signs
from hf_compressopt.kernels.c_operands import AverageRecord, Operands, SegmentTable
from hf_compressopt.kernels.messages import chunk_message_nbytes, message_nbytes
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import AdamUpdate, Descent, LambMoments, LambOptions, ParameterSync
from tests.support import kernel_cases as cases

CPU = torch.device("cpu")
BEST = "portable" if library.why_not(CPU) else library.instruction_set("cpu")
KNOWN = ("portable", "avx2", "avx512", "avx512_gfni")
INSTRUCTION_SETS = KNOWN[: KNOWN.index(BEST) + 1]
STILL = Descent(0.0, 1.0, 1e-8, False)
LARGE = 700_001  # enough for several threads


@pytest.fixture(autouse=True)
def native_library() -> None:
    missing = library.why_not(CPU)
    if missing and shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip(f"no library, and no compiler to build it with: {missing}")
    assert not missing, f"{missing}; `make kernels` builds it"


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(BEST)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


# -- the reference's bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_compress(instruction_set: str, scale_block: int | None) -> None:
    for numel in (*cases.NUMELS, 70_001):
        for world_size in (1, 2, 3):
            cases.check_compress(CPU, numel, world_size, scale_block, segments=numel % 5, with_factors=numel % 5 > 2)
    cases.check_compress(CPU, 5003, 4, scale_block, segments=40, with_x=False, shift=1)
    cases.check_compress(CPU, 3001, 4, scale_block, segments=900, with_factors=True)
    cases.check_compress(CPU, 100, 1, scale_block, with_x=False)


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_average_compress(instruction_set: str, scale_block: int | None) -> None:
    for numel in (*cases.NUMELS, 70_001):
        for world_size in (1, 2, 3, 8, 13):
            cases.check_average_compress(CPU, numel, world_size, scale_block, shift=numel % 3)
    for world_size in range(4, 18):
        cases.check_average_compress(CPU, 1511, world_size, scale_block)


def test_sums_of_messages_keep_the_sign_of_zero(instruction_set: str) -> None:
    numel, random = 5_000, torch.Generator().manual_seed(2)
    for world_size in range(1, 11):
        nbytes = message_nbytes(numel, None)
        messages = torch.randint(256, (world_size, nbytes), dtype=torch.uint8, generator=random)
        messages[:, :4] = 0  # the scale: a sum of zeros is -0 only where all signs are negative
        expected, error = torch.full((numel,), -0.0), torch.full((numel,), -0.0)
        reference.average_compress_(messages.view(-1), expected, torch.empty(nbytes).byte(), world_size, None)
        assert 0 < int(expected.signbit().sum()) < numel
        native.average_compress_(messages.view(-1), error, torch.empty(nbytes).byte(), world_size, None)
        cases.assert_same_bits(error, expected)


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_decompress(instruction_set: str, scale_block: int | None) -> None:
    for numel in (*cases.NUMELS, 70_001):
        for world_size in (0, 1, 2, 4):
            cases.check_decompress(CPU, numel, world_size, scale_block, shift=numel % 2)


def test_outputs_beyond_the_caches(instruction_set: str) -> None:
    cases.check_decompress(CPU, 4_300_003, 2, 4096, shift=3)
    cases.check_apply_adam(CPU, 4_300_003, 5, world_size=2, shift=1)


def test_combine(instruction_set: str) -> None:
    for numel in cases.NUMELS:
        for segments in (0, 1, 7):
            for with_x in (True, False):
                cases.check_combine(CPU, numel, segments, with_x=with_x, with_factors=segments > 1)


@pytest.mark.parametrize("descent", cases.DESCENTS)
def test_apply_adam(instruction_set: str, descent: Descent) -> None:
    for numel in cases.NUMELS:
        for world_size, block in ((0, None), (1, 4096), (3, 512), (2, None), (4, 8)):
            for beta, corrected in ((1.0, False), (0.1, True)):
                options = {"beta": beta, "corrected": corrected, "descent": descent, "shift": numel % 2}
                cases.check_apply_adam(CPU, numel, 7, world_size=world_size, scale_block=block, **options)


@pytest.mark.parametrize("descent", cases.DESCENTS)
def test_local_step(instruction_set: str, descent: Descent) -> None:
    for numel in cases.NUMELS:
        for with_grads in (True, False):
            cases.check_local_step(CPU, numel, 7, with_grads=with_grads, descent=descent)


def test_sync_parameters(instruction_set: str) -> None:
    for numel in cases.NUMELS:
        for world_size in (0, 1, 3):
            cases.check_sync_parameters(CPU, numel, 7, world_size=world_size)


@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
@pytest.mark.parametrize("eps_inside_sqrt", (False, True))
def test_lamb(instruction_set: str, weight_decay: float, eps_inside_sqrt: bool) -> None:
    options = LambOptions(0.9, 0.999, 1e-6, weight_decay, eps_inside_sqrt)
    for numel in cases.NUMELS:
        cases.check_lamb(CPU, numel, 6, world_size=numel % 3, options=options)


def test_adam(instruction_set: str) -> None:
    some = cases.STEP
    scale, clip = torch.tensor([1024.0]), torch.tensor([0.3])
    for step in (
        some,
        replace(some, weight_decay=0.0, bias_correction=False),
        replace(some, adam_w_mode=False, maximize=True, lr=torch.tensor(0.02)),
        replace(some, grad_scale=scale, clip_factor=clip, write_grads=True, found_inf=torch.zeros(1)),
        replace(some, grad_scale=torch.tensor([3.0]), adam_w_mode=False),
        replace(some, found_inf=torch.ones(1)),
    ):
        cases.check_adam(CPU, (1, 0, 5, 17, 1000, 4099), step, shift=1)
        for masters, moments in ((False, False), (True, False), (False, True)):

            def dtypes(k: int, own: bool = moments) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
                param, grad = cases.DTYPES[k % 3], cases.DTYPES[k // 3 % 3]
                return param, grad, param if own else torch.float32

            cases.check_adam(
                CPU, (1, 513, 100, 31, 40, 1025, 7, 600, 3), step, dtypes=dtypes, masters=masters, copies=True
            )


def test_adam_on_several_threads(instruction_set: str) -> None:
    torch.set_num_threads(3)
    step = replace(cases.STEP, grad_scale=torch.tensor([3.0]), write_grads=True)
    cases.check_adam(CPU, (5, LARGE, 1000, 300_001), step, copies=True, shift=1)


def test_sums_of_squares(instruction_set: str) -> None:
    cases.check_square_sums(CPU, (1, 5, 0, 1000, 65_536, 65_537, 200_003), shift=1)
    assert not math.isfinite(native.sum_of_squares([torch.tensor([1.0, math.inf])], CPU))
    assert math.isnan(native.sum_of_squares([torch.ones(40), torch.tensor([math.nan])], CPU))
    assert float(native.sum_of_squares([torch.full((3,), 3e38)], CPU)) > 2.6e77  # beyond float32
    assert float(native.sum_of_squares([], CPU)) == 0


# -- numbers at the edges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_conversion_from_every_low_precision_number(instruction_set: str, dtype: torch.dtype) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(values.numel())
    grads = [Segment(values, 0, values.numel(), 0)]
    native.combine_(Combination(values.numel(), CPU, grads=grads), out)
    assert_equal_with_nan(out, 0.0 + values.float())  # a term that is left out counts as 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_rounding_to_low_precision(instruction_set: str, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = every.view(torch.int32)
    shift = 16 if dtype == torch.bfloat16 else 13
    near = [between + step for step in (0, 1, -1, (1 << shift - 1) - 1, 1 << shift - 1, (1 << shift - 1) + 1)]
    numbers = torch.cat([*near, torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int32)]).view(torch.float32)
    n = numbers.numel()
    param = torch.empty(n, dtype=dtype)
    anchor, zeros = numbers.clone(), torch.zeros(n)
    # A tensor that keeps still, and decay 1: the parameter is the anchor, rounded.
    params = [Segment(param, 0, n, 0, still=True)]
    native.sync_parameters_(
        ParameterSync(Average.of(zeros), zeros.clone(), anchor, zeros, zeros.clone(), params, 1.0, STILL)
    )
    assert_equal_with_nan(param, numbers.to(dtype))


def assert_equal_with_nan(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isnan(), expected.isnan())
    kept = ~expected.isnan()
    cases.assert_same_bits(got[kept], expected[kept])


@pytest.mark.parametrize("scale_block", (None, 8, 512, 4096))
def test_values_that_are_not_ordinary(instruction_set: str, scale_block: int | None) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e18, -1e18, math.inf, -math.inf, math.nan])
    for kinds in (special[:2], special[2:5], special[:8], special):
        x = kinds[torch.randint(len(kinds), (9_001,), generator=torch.Generator().manual_seed(1))]
        message = torch.full((message_nbytes(x.numel(), scale_block),), 7, dtype=torch.uint8)
        error = torch.zeros(x.numel())
        native.compress_(Combination.of(x), error, message, 1, scale_block)
        scales = message[: 4 * kernels.num_blocks(x.numel(), scale_block)].view(torch.float32)
        rows = x.double().split(scale_block or x.numel())
        expected = torch.stack([row.square().mean().sqrt() for row in rows]).float()
        torch.testing.assert_close(scales, expected, rtol=3e-7, atol=2e-45, equal_nan=True)
        packed = message[scales.numel() * 4 :][: -(-x.numel() // 8)]
        u = x + 0.0
        assert torch.equal(packed, signs.pack_signs(u))
        assert_equal_with_nan(error, u - signs.decompress_message(message, x.numel(), scale_block))


# -- the same bits everywhere -----------------------------------------------------------------------------------------


def everything(numel: int) -> list[Tensor]:
    """What every kernel whose result depends on an order of summation leaves, and some of the others."""
    random = torch.Generator().manual_seed(5)

    def normal() -> Tensor:
        return torch.randn(numel, generator=random)

    x, grads, v = normal(), normal().bfloat16(), normal().square()
    cut = numel // 3 + 1
    segments = [Segment(grads, 0, cut, 0), Segment(grads, cut, numel - cut, 1)]
    z, written = Combination(numel, CPU, x, 0.9, segments, 0.1), [x]
    for block in (8, 512, 4096, 8192, 131_072, None):
        error, messages = normal(), torch.zeros(sum(chunk_message_nbytes(numel, 2, block)), dtype=torch.uint8)
        native.compress_(z, error, messages, 2, block)
        nbytes = message_nbytes(numel, block)
        several, server, out = torch.zeros(6, nbytes, dtype=torch.uint8), normal(), torch.zeros(nbytes).byte()
        for part in several:
            native.compress_(Combination.of(normal()), normal(), part, 1, block)
        native.average_compress_(several.view(-1), server, out, 6, block)
        written += [error, messages, several, server, out]
    y = Average(numel, None, out, 1, None, out.numel())
    param = normal()
    params = [Segment(param, 0, cut, 0), Segment(param, cut, numel - cut, 1)]
    m, fresh, sums = normal(), v.clone(), torch.zeros(2, 3, dtype=torch.float64)
    options = LambOptions(0.9, 0.999, 1e-6, 0.1, False)
    native.lamb_moments_(LambMoments(y, m, fresh, v, params, torch.ones(2), sums, options))
    native.apply_adam_(AdamUpdate(y, m, v, params, Descent(1e-2, 0.9, 1e-8, False), 0.1, None))
    return [*written, param, m, fresh, sums, native.sum_of_squares([x, grads], CPU)]


def assert_all_same_bits(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        cases.assert_same_bits(one, other)


@pytest.mark.parametrize("threads", [1, 3])
def test_copy_moves_bits_and_nothing_beside_them(instruction_set: str, threads: int) -> None:
    torch.set_num_threads(threads)
    random = torch.randint(-(2**31), 2**31 - 1, (3_000_100,), dtype=torch.int32)  # NaNs with payloads among them
    for numel in (0, 1, 15, 16, 17, 70_001, 3_000_001):
        for begin in (0, 1, 7):
            source, out = random[begin : begin + numel].view(torch.float32), torch.full((numel + 20,), 7.0)
            native.copy_(out[3 : 3 + numel], source)
            assert torch.equal(out[3 : 3 + numel].view(torch.int32), source.view(torch.int32))
            assert torch.equal(out[:3], torch.full((3,), 7.0)) and torch.equal(out[3 + numel :], torch.full((17,), 7.0))


def test_copies_of_every_kind_are_copies(instruction_set: str) -> None:
    large = torch.randn(400, 500)
    for source in (large, large.t(), large.bfloat16(), large.double(), large[0], torch.tensor(3.0), large[:0]):
        out = torch.empty_like(source)
        kernels.copy_(out, source)
        assert torch.equal(out, source)
    version = (out := torch.empty(400, 500))._version
    kernels.copy_(out, large)
    assert out._version > version


@pytest.fixture(params=["the host's", "our own"])
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
                assert_all_same_bits(everything(LARGE), expected)
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
        assert_all_same_bits(result, expected)


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


def run_python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=60)


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


@pytest.mark.parametrize("source", [FORK, FORKED_BEFORE_IMPORT], ids=["after a kernel", "before the import"])
def test_a_forked_child_has_threads_of_its_own(source: str) -> None:
    result = run_python(source)
    assert result.returncode == 0, result.stderr


# -- loading ----------------------------------------------------------------------------------------------------------


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, expected in (("", f"native {BEST}"), ("native", f"native {BEST}"), ("reference", "reference")):
        monkeypatch.setenv("HF_COMPRESSOPT_KERNELS", choice)
        assert kernels.implementation(CPU) == expected
    monkeypatch.setenv("HF_COMPRESSOPT_KERNELS", "fast")
    with pytest.raises(ValueError, match="must be 'native', 'reference' or not set, got 'fast'"):
        kernels.implementation(CPU)


def test_without_a_library_the_reference_works_and_native_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_COMPRESSOPT_KERNELS", raising=False)
    monkeypatch.setattr(library, "_DIRECTORY", tmp_path)
    library._library.cache_clear()
    library._why_not.cache_clear()
    try:
        assert kernels.implementation(CPU) == "reference"
        monkeypatch.setenv("HF_COMPRESSOPT_KERNELS", "native")
        with pytest.raises(RuntimeError, match=r"HF_COMPRESSOPT_KERNELS=native, .* for cpu: .*does not exist"):
            kernels.implementation(CPU)
        (tmp_path / "libcompressopt_cpu.so").write_text("not a library")
        library._why_not.cache_clear()
        with pytest.raises(RuntimeError, match="cannot be loaded"):
            kernels.implementation(CPU)
    finally:
        library._library.cache_clear()
        library._why_not.cache_clear()
    with pytest.raises(RuntimeError, match="there is no library for meta"):
        library.available(torch.device("meta"))


def test_an_instruction_set_that_is_unknown_is_refused() -> None:
    with pytest.raises(RuntimeError, match='cannot run "sse9"; the best that it can is'):
        library.use_instruction_set("sse9")
    assert library.instruction_set("cpu") == BEST


# -- what is refused, and what autograd is told -----------------------------------------------------------------------


def compress(x: Tensor, error: Tensor, messages: Tensor, scale_block: int | None = 8) -> None:
    native.compress_(Combination.of(x), error, messages, 1, scale_block)


def test_wrong_tensors_are_refused() -> None:
    x, error, messages = torch.ones(80), torch.ones(80), torch.zeros(message_nbytes(80, 8), dtype=torch.uint8)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: compress(x, error.double(), messages), "error must be a contiguous torch.float32 tensor"),
        (lambda: compress(torch.ones(160)[::2], error, messages), "x must be .* not contiguous"),
        (lambda: compress(x, torch.ones(81), messages), "error must have 80 elements, got 81"),
        (lambda: compress(x, error, messages[:-1]), "messages must have 64 elements, got 63"),
        (
            lambda: compress(x, error, torch.zeros(message_nbytes(80, None), dtype=torch.uint8), -8),
            "scale_block must be",
        ),
        (lambda: compress(x, torch.ones(80, device="meta"), messages), "messages must be"),
        (lambda: native.decompress_(Average(80, None, messages[:32], 1, 8, 64), x), "messages must have 64 bytes"),
        (lambda: native.decompress_(Average(80, None, messages, 2, 8, 16), x), "the stride is 16"),
        (lambda: native.sum_of_squares([x.double()], CPU), "float32, bfloat16 or float16"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="scale_block must be a positive multiple of 8 or None, got 12"):
        compress(x, error, torch.zeros(message_nbytes(80, 12), dtype=torch.uint8), 12)
    assert torch.equal(error, torch.ones(80))


def test_wrong_segments_are_refused() -> None:
    x, out = torch.ones(80), torch.zeros(80)
    for segments, message in (
        ([Segment(x, 0, 79, 0)], "must cover 80 elements, got 79"),
        ([Segment(x, 1, 80, 0)], "elements 1 to 81 of a tensor of 80"),
        ([Segment(x.double(), 0, 80, 0)], "float32, bfloat16 or float16"),
        ([Segment(torch.ones(160)[::2], 0, 80, 0)], "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            native.combine_(Combination(80, CPU, grads=segments), out)
    z = Combination(80, CPU, grads=[Segment(x, 0, 80, 3)], factors=torch.ones(3))
    with pytest.raises(ValueError, match="factors must have 4 entries or more, got 3"):
        native.combine_(z, out)


def test_null_pointers_are_refused() -> None:
    zero = Operands(CPU, 8).combination(Combination(8, CPU))
    with pytest.raises(RuntimeError, match="co_compress: scale_block must be a multiple of 8, or 0, got 12"):
        library.call("co_compress", CPU, zero, 1, 1, 8, 12, 1)
    with pytest.raises(RuntimeError, match="co_compress: error is null"):
        library.call("co_compress", CPU, zero, None, 1, 8, 0, 1)
    with pytest.raises(RuntimeError, match="the data of segment 0 is null"):
        table = SegmentTable("tensors", [Segment(None, 0, 5, 0)], CPU, 5)
        library.call("co_square_sums", CPU, table.address, 1, torch.zeros(1, dtype=torch.float64).data_ptr())
    with pytest.raises(RuntimeError, match="neither messages nor values"):
        library.call("co_decompress", CPU, ctypes.byref(AverageRecord(None, None, 8, 0, 0, 1)), None)


def test_fake_tensors_are_refused_where_real_ones_are_needed() -> None:
    with FakeTensorMode():
        fake = torch.ones(80)
        with pytest.raises(TypeError, match="FakeTensor without memory"):
            compress(fake, fake, torch.zeros(message_nbytes(80, 8), dtype=torch.uint8))


def test_what_is_written_gets_a_new_version() -> None:
    x, param = torch.ones(80), torch.nn.Parameter(torch.ones(80))
    m, v, error = torch.ones(80), torch.ones(80), torch.ones(80)
    messages = torch.zeros(message_nbytes(80, 8), dtype=torch.uint8)
    compress(x, error, messages)
    assert (x._version, error._version, messages._version) == (0, 1, 1)
    loss = (param * param).sum()
    params = [Segment(param.detach(), 0, 80, 0)]
    native.apply_adam_(AdamUpdate(Average.of(x), m, v, params, Descent(1e-2, 1.0, 1e-8, False), 1.0, None))
    assert (m._version, v._version) == (1, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- torch.compile, and fake tensors ----------------------------------------------------------------------------------

NUMEL, WORLD_SIZE, BLOCK = 5_000, 2, 512


def round_trip(x: Tensor, grad: Tensor, error: Tensor, server_error: Tensor) -> tuple[Tensor, Tensor]:
    form = kernels.SignFormat(BLOCK)
    sizes = form.chunk_nbytes(NUMEL, WORLD_SIZE)
    messages = torch.zeros(sum(sizes), dtype=torch.uint8)
    z = Combination(NUMEL, CPU, x * 1.5, 0.9, [Segment(grad, 0, NUMEL, 0)], 0.1)
    form.compress_(z, error, messages, WORLD_SIZE)
    out = torch.zeros(NUMEL)
    kernels.on(out).decompress_(form.average(NUMEL, messages, WORLD_SIZE, sizes[0]), out)
    server = torch.zeros(message_nbytes(NUMEL // 2, BLOCK), dtype=torch.uint8)
    received = messages[: 2 * server.numel()]
    form.average_compress_(received, server_error, server, WORLD_SIZE)
    return out + 1, server


def test_compiled_as_one_graph() -> None:
    random = torch.Generator().manual_seed(3)
    given = [torch.randn(n, generator=random) for n in (NUMEL, NUMEL, NUMEL, NUMEL // 2)]
    own = [tensor.clone() for tensor in given]
    expected = round_trip(*given)
    got = torch.compile(round_trip, backend="aot_eager", fullgraph=True)(*own)
    assert_all_same_bits([*got, *own], [*expected, *given])


def test_fake_tensors_have_shapes_but_no_data() -> None:
    with FakeTensorMode():
        out, server = round_trip(*(torch.zeros(n) for n in (NUMEL, NUMEL, NUMEL, NUMEL // 2)))
    assert out.shape == (NUMEL,) and server.shape == (message_nbytes(NUMEL // 2, BLOCK),)


def test_the_operators_keep_torchs_rules() -> None:
    x, error = torch.randn(80), torch.randn(80)
    messages = torch.zeros(message_nbytes(80, 8), dtype=torch.uint8)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compressopt.compress, (x, error, messages, 1, 8), test_utils=checks)
    torch.library.opcheck(
        torch.ops.compressopt.average_compress, (messages, error, messages.clone(), 1, 8), test_utils=checks
    )
    torch.library.opcheck(torch.ops.compressopt.decompress, (messages, error, 1, 8, 64), test_utils=checks)
