"""The native CPU kernels of integers against the reference, in all instruction sets, and what they refuse."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_compressopt.kernels import integer_native, library
from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.integer_messages import IntegerAverage, integer_message_nbytes
from hf_compressopt.kernels.integers import IntegerFormat
from hf_compressopt.kernels.operands import Combination, Segment
from tests.support import integer_cases as cases
from tests.support.integer_suite import IntegerSuite

CPU = torch.device("cpu")
BEST = "portable" if library.why_not(CPU) else library.instruction_set("cpu")
KNOWN = ("portable", "avx2", "avx512", "avx512_gfni")
BITS = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture(params=KNOWN[: KNOWN.index(BEST) + 1])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU with each of its instruction sets."""
    library.use_instruction_set(request.param)
    yield CPU
    library.use_instruction_set(BEST)


class TestIntegers(IntegerSuite):
    """The suite, with each instruction set."""


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@BITS
def test_pieces_of_several_threads(device: torch.device, bits: int) -> None:
    cases.check_compress(device, 70_001, 1, bits, segments=7)
    cases.check_average_compress(device, 70_001, 5, bits, shift=1)
    cases.check_decompress(device, 70_001, 2, bits)
    cases.check_mean(device, 70_001, 5, bits, shift=1)
    cases.check_add(device, 70_001, 2, bits, segments=7, decay=0.9, scale=2.0)
    cases.check_commit(device, 70_001, 2, bits, segments=7)


@BITS
def test_outputs_beyond_the_caches(device: torch.device, bits: int) -> None:
    cases.check_average_compress(device, 4_300_003, 2, bits)
    cases.check_decompress(device, 4_300_003, 1, bits)
    cases.check_add(device, 4_300_003, 1, bits, segments=7, decay=0.0, scale=1.0)
    cases.check_add(device, 4_300_003, 2, bits, segments=7, decay=0.0, scale=2.0)


@BITS
def test_threads_change_no_bit(bits: int) -> None:
    number, numel = torch.get_num_threads(), 900_001
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            message = torch.empty(integer_message_nbytes(numel, bits), dtype=torch.uint8)
            IntegerFormat(bits).compress_(Combination.of(normal(numel)), torch.zeros(numel), message, 1)
            new_error, out = torch.empty(numel), torch.empty_like(message)
            IntegerFormat(bits).average_compress_(message, normal(numel, 1), new_error, out, 1)
            results.append((message, new_error, out))
        for result in results[1:]:
            assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))
    finally:
        torch.set_num_threads(number)


def test_wrong_tensors_are_refused() -> None:
    x, error = torch.ones(80), torch.ones(80)
    message = torch.zeros(integer_message_nbytes(80, 4), dtype=torch.uint8)
    z, y = Combination.of(x), IntegerAverage(80, message, 1, 4, 48)
    half = [Segment(x, 0, 40, 0), Segment(x, 40, 40, 0)]
    for call, words in (
        (lambda: integer_native.compress_(z, error.double(), message, 1, 4), "error must be a contiguous"),
        (lambda: integer_native.compress_(z, error, message[:32], 1, 4), "messages must have 48 elements, got 32"),
        (
            lambda: integer_native.average_compress_(message, error, torch.ones(81), message, 1, 4),
            "new_error must have 80",
        ),
        (
            lambda: integer_native.compress_(z, error, message, 1, 4, torch.ones(81)),
            "new_error must have 80 elements, got 81",
        ),
        (lambda: integer_native.mean_(message, x, 2, 4, 0.5), "messages must have 96 elements, got 48"),
        (lambda: integer_native.add_(y, half[:1], 1.0, 1.0), "outputs must cover 80 elements, got 40"),
        (lambda: integer_native.decompress_(IntegerAverage(80, message, 2, 4, 16), x), "stride must be at least 32"),
        (
            lambda: integer_native.decompress_(IntegerAverage(80, message[:32], 1, 4, 48), x),
            "have 48 bytes or more",
        ),
        (lambda: integer_native.commit_(Commit(z, error, message, y, half[:1], 1.0)), "must cover 80 elements, got 40"),
        (
            lambda: integer_native.commit_(
                Commit(Combination(80, CPU, grads=[Segment(x, 0, 80, 0)]), error, message, y, half, 1.0)
            ),
            "outputs must have segments of the same lengths and indices",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(RuntimeError, match="co_decode_integers: bits must be 4 or 8, got 5"):
        structure = integer_native.IntegersRecord(message.data_ptr(), 80, 48, 1, 5)
        library.call("co_decode_integers", CPU, integer_native.ctypes.byref(structure), x.data_ptr())


def test_what_is_written_gets_a_new_version() -> None:
    grad, error = torch.ones(80), torch.ones(80)
    z = Combination(80, CPU, grads=[Segment(grad, 0, 80, 0)])
    message = torch.zeros(integer_message_nbytes(80, 4), dtype=torch.uint8)
    IntegerFormat(4).compress_(z, error, message, 1)
    assert (grad._version, error._version, message._version) == (0, 0, 1)
    IntegerFormat(4).commit_(
        Commit(z, error, message, IntegerAverage(80, message, 1, 4, 48), [Segment(grad, 0, 80, 0)])
    )
    assert (grad._version, error._version, message._version) == (1, 1, 1)


# -- torch.compile, and fake tensors ----------------------------------------------------------------------------------


def round_trip(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    message = torch.zeros(integer_message_nbytes(x.numel(), 4), dtype=torch.uint8)
    IntegerFormat(4).compress_(Combination.of(x * 1.5), error, message, 1)
    out, new_error, y = torch.empty_like(message), torch.empty_like(x), torch.empty_like(x)
    IntegerFormat(4).average_compress_(message, error, new_error, out, 1)
    IntegerFormat(4).decompress_(IntegerAverage(x.numel(), out, 1, 4, out.numel()), y)
    return y + 1, new_error


def test_compiled_as_one_graph() -> None:
    expected = round_trip(normal(1_000), normal(1_000, 1))
    got = torch.compile(round_trip, backend="aot_eager", fullgraph=True)(normal(1_000), normal(1_000, 1))
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    with FakeTensorMode():
        assert round_trip(torch.zeros(1_000), torch.zeros(1_000))[0].shape == (1_000,)


def test_the_operators_keep_torchs_rules() -> None:
    x, error = normal(80), normal(80, 1)
    message = torch.zeros(integer_message_nbytes(80, 4), dtype=torch.uint8)
    checks = ("test_schema", "test_faketensor")
    operators = torch.ops.compressopt
    torch.library.opcheck(operators.compress_integers, (x, error, message, 1, 4), test_utils=checks)
    received = message.clone()
    torch.library.opcheck(operators.average_integers, (received, error, x, message, 1, 4), test_utils=checks)
    torch.library.opcheck(operators.decode_integers, (message, x, 1, 4, 48), test_utils=checks)
