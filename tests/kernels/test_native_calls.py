"""The CPU library: how it is chosen and loaded, what it refuses, and torch.compile."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_compressopt import kernels
from hf_compressopt.kernels import library, native
from hf_compressopt.kernels.c_operands import AverageRecord, Operands, SegmentTable
from hf_compressopt.kernels.messages import message_nbytes
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import AdamUpdate, Descent
from tests.support import kernel_cases as cases
from tests.support.instruction_sets import BEST, CPU

pytestmark = pytest.mark.usefixtures("native_library", "threads")


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
    monkeypatch.setattr(library, "_found", {})
    library._library.cache_clear()
    try:
        assert kernels.implementation(CPU) == "reference"
        monkeypatch.setenv("HF_COMPRESSOPT_KERNELS", "native")
        with pytest.raises(RuntimeError, match=r"HF_COMPRESSOPT_KERNELS=native, .* for cpu: .*does not exist"):
            kernels.implementation(CPU)
        (tmp_path / "libcompressopt_cpu.so").write_text("not a library")
        library._found.clear()
        with pytest.raises(RuntimeError, match="cannot be loaded"):
            kernels.implementation(CPU)
    finally:
        library._library.cache_clear()
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
    form.compress_with_feedback_(z, error, messages, WORLD_SIZE)
    out = torch.zeros(NUMEL)
    kernels.on(out).decompress_(form.average(NUMEL, messages, WORLD_SIZE, sizes[0]), out)
    server = torch.zeros(message_nbytes(NUMEL // 2, BLOCK), dtype=torch.uint8)
    received = messages[: 2 * server.numel()]
    form.average_with_feedback_(received, server_error, server, WORLD_SIZE)
    return out + 1, server


def test_compiled_as_one_graph() -> None:
    random = torch.Generator().manual_seed(3)
    given = [torch.randn(n, generator=random) for n in (NUMEL, NUMEL, NUMEL, NUMEL // 2)]
    own = [tensor.clone() for tensor in given]
    expected = round_trip(*given)
    got = torch.compile(round_trip, backend="aot_eager", fullgraph=True)(*own)
    cases.assert_all_same_bits([*got, *own], [*expected, *given])


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
