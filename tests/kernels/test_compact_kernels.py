"""The native CPU kernels of compact operands against the reference, in all instruction sets, and on several threads."""

from collections.abc import Iterator
from ctypes import addressof, byref

import pytest
import torch

from hf_compressopt.kernels import library, native
from hf_compressopt.kernels.c_operands import (
    AverageRecord,
    CombinationRecord,
    ErrorsRecord,
    Operands,
    SegmentTable,
    VarianceRecord,
    descent_record,
)
from hf_compressopt.kernels.errors import CompactErrors
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.reference import values_of
from hf_compressopt.kernels.updates import Descent
from tests.support import compact_cases as cases
from tests.support.compact_suite import CompactSuite
from tests.support.instruction_sets import BEST, CPU, INSTRUCTION_SETS
from tests.support.kernel_cases import Arena, Pair

pytestmark = pytest.mark.usefixtures("native_library", "threads")


@pytest.fixture(params=INSTRUCTION_SETS)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU with each of its instruction sets."""
    library.use_instruction_set(request.param)
    yield CPU
    library.use_instruction_set(BEST)


class TestCompact(CompactSuite):
    """The suite, with each instruction set."""


@pytest.mark.parametrize("scale_block", (24, 136, 4096, 100_000, None))
def test_pieces_of_several_threads(device: torch.device, scale_block: int | None) -> None:
    torch.set_num_threads(3)
    cases.check_compress(device, 400_003, 2, scale_block, segments=7, last=2, with_factors=True)
    cases.check_average_compress(device, 300_001, 3, scale_block)
    cases.check_apply_adam(device, 700_001, 5, world_size=3, scale_block=scale_block)


@pytest.mark.parametrize("bits", (4, 8))
def test_pieces_of_integers(device: torch.device, bits: int) -> None:
    torch.set_num_threads(3)
    cases.check_compress_integers(device, 700_001, 3, bits, segments=7)
    cases.check_average_integers(device, 700_001, 5, bits)
    cases.check_commit_integers(device, 700_001, 3, bits, segments=7)


@pytest.mark.parametrize("scale_block", (24, 4096, 65_544, None))
def test_what_others_have_is_added(device: torch.device, scale_block: int | None) -> None:
    for numel in (33, 1000, 5003, 140_001):
        for segments in (0, 1, 7):
            for last in (0, 2):
                options = {"last": last, "still": segments == 7, "with_factors": numel % 2 > 0, "with_rest": True}
                cases.check_combine(device, numel, segments, **options)
                for compact in (False, True):
                    options |= {"segments": segments, "compact": compact}
                    cases.check_compress(device, numel, 2, scale_block, **options)
                    cases.check_commit(device, numel, 2, scale_block, **options)
                    options = {name: value for name, value in options.items() if name not in ("segments", "compact")}
    for bits in (4, 8):
        cases.check_compress_integers(device, 5003, 3, bits, segments=5, with_rest=True)
        cases.check_commit_integers(device, 5003, 3, bits, segments=5, with_rest=True)


def test_chunks_of_what_is_sent() -> None:
    for numel in (3, 1000, 5003):
        for segments in (0, 1, 7):
            for world_size in (1, 2, 5):
                for last in (0, world_size):
                    case = Pair(Arena(CPU), numel)
                    options = {"with_factors": True, "still": True, "with_rest": True, "scale_block": 24}
                    z, _ = cases.combination(case, numel, segments, last=last, **options)
                    chunks = [z.chunk(number, world_size) for number in range(world_size)]
                    assert torch.equal(torch.cat([values_of(chunk) for chunk in chunks]), values_of(z))


# -- what the C interface refuses -------------------------------------------------------------------------------------


def test_errors_have_one_form() -> None:
    zero, floats, messages = Operands(CPU, 8).combination(Combination(8, CPU)), torch.zeros(8), torch.zeros(32).byte()
    values = ErrorsRecord(floats.data_ptr(), None)
    for error in (ErrorsRecord(None, None), ErrorsRecord(floats.data_ptr(), messages.data_ptr())):
        with pytest.raises(RuntimeError, match="co_compress: error must have values or messages, and not both"):
            library.call("co_compress", CPU, zero, byref(error), messages.data_ptr(), 8, 0, 1)
    compact = ErrorsRecord(None, messages.data_ptr())
    with pytest.raises(RuntimeError, match="co_average_integers: error and new_error have two forms"):
        out = messages.data_ptr()
        library.call("co_average_integers", CPU, out, byref(values), byref(compact), out, 8, 8, 1)
    with pytest.raises(ValueError, match="error must be of 8 elements in 2"):
        native.compress_(Combination(8, CPU), CompactErrors.zeros(8, 1), messages[:16], 2, None)


def test_the_last_average_has_messages_of_the_bucket() -> None:
    messages, out = torch.zeros(32).byte(), torch.zeros(8)
    for last, words in (
        (AverageRecord(messages.data_ptr(), None, 16, 0, 16, 1), "last has 16 elements, the bucket has 8"),
        (AverageRecord(None, out.data_ptr(), 8, 0, 0, 1), "the messages of last are null"),
        (AverageRecord(messages.data_ptr(), None, 8, 4, 16, 1), "scale_block must be a multiple of 8"),
    ):
        z = CombinationRecord(None, addressof(last), None, 0, None, 1.0, 1.0)
        with pytest.raises(RuntimeError, match=f"co_combine: {words}"):
            library.call("co_combine", CPU, byref(z), out.data_ptr(), 8)


def test_a_variance_has_one_form_and_beta_is_1_without_momentum() -> None:
    values = torch.ones(8)
    y, descent = Operands(CPU, 8).average(Average.of(values)), descent_record(Descent(0.1, 1.0, 1e-8, False))
    table = SegmentTable("parameters", [Segment(torch.ones(8), 0, 8, 0)], CPU, 8)
    some = values.data_ptr()
    for variance, beta, words in (
        (VarianceRecord(None, None, None), 1.0, "exp_avg_sq must have values or codes, and not both"),
        (VarianceRecord(some, some, some), 1.0, "exp_avg_sq must have values or codes, and not both"),
        (VarianceRecord(None, some, None), 1.0, "codes of exp_avg_sq need tops, and values none"),
        (VarianceRecord(some, None, None), 0.5, "beta must be 1 without exp_avg, got 0.5"),
    ):
        arguments = y, None, byref(variance), table.address, table.count, None, beta, descent
        with pytest.raises(RuntimeError, match=f"co_apply_adam: {words}"):
            library.call("co_apply_adam", CPU, *arguments)
