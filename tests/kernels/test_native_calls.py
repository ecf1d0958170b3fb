"""The CPU library: how it is chosen and loaded, what it refuses, and torch.compile."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ctypes import addressof, byref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_compressopt import kernels
from hf_compressopt.kernels import (
    SKETCH_NUMEL,
    AdamUpdate,
    Average,
    Combination,
    CompactErrors,
    Descent,
    IntegerFormat,
    LambMoments,
    LambOptions,
    LogVariance,
    ParameterSync,
    Segment,
    SignFormat,
    VarianceUpdate,
    library,
    native,
    reference,
)
from hf_compressopt.kernels.native import (
    AverageRecord,
    CombinationRecord,
    ErrorsRecord,
    IntegersRecord,
    Operands,
    VarianceRecord,
)
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
    library.loaded.cache_clear()
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
        library.loaded.cache_clear()
    with pytest.raises(RuntimeError, match="there is no library for meta"):
        library.available(torch.device("meta"))


def test_an_instruction_set_that_is_unknown_is_refused() -> None:
    with pytest.raises(RuntimeError, match='cannot run "sse9"; the best that it can is'):
        library.use_instruction_set("sse9")
    assert library.instruction_set("cpu") == BEST


def test_native_code_has_the_functions_of_the_reference() -> None:
    for name, function in inspect.getmembers(reference, inspect.isfunction):
        if name.endswith("_") and not name.startswith("_") and function.__module__ == reference.__name__:
            assert inspect.signature(getattr(native, name)) == inspect.signature(function), name


# -- what is refused, and what autograd is told -----------------------------------------------------------------------

SIGNS, INTS = SignFormat(8), IntegerFormat(4)


def test_wrong_tensors_are_refused() -> None:
    x, error, messages = torch.ones(80), torch.ones(80), torch.zeros(64, dtype=torch.uint8)
    z, ints = Combination.of(x), messages[:48]
    y, half = Average(80, INTS, ints, 1, 48), [Segment(x, 0, 40, 0), Segment(x, 40, 40, 0)]

    def signs(z: Combination, error: Tensor, messages: Tensor = messages) -> None:
        native.compress_(SIGNS, z, error, messages, 1, error)

    def integers(error: Tensor, messages: Tensor = ints, new: Tensor | None = None) -> None:
        native.compress_(INTS, z, error, messages, 1, new)

    negated, descent, param = x._neg_view(), Descent(0.1, 1.0, 1e-8, False), [Segment(x, 0, 80, 0)]
    sums, lamb = torch.zeros(3, dtype=torch.float64), LambOptions(0.9, 0.99, 1e-8, 0.0, False)
    sketch, squares = torch.zeros(SKETCH_NUMEL), torch.zeros((), dtype=torch.float64)

    def adam(exp_avg: Tensor, param: Tensor) -> None:
        native.apply_adam_(AdamUpdate(Average.of(x), exp_avg, x, [Segment(param, 0, 80, 0)], descent))

    def sync(anchor: Tensor) -> None:
        native.sync_parameters_(ParameterSync(Average.of(x), x, anchor, x, x, param, 1.0, descent))

    def moments(sums: Tensor) -> None:
        native.lamb_moments_(LambMoments(Average.of(x), x, x, x, param, x[:1], sums, lamb))

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: signs(z, error.double()), "error must be a contiguous torch.float32 tensor"),
        (lambda: signs(Combination.of(torch.ones(160)[::2]), error), "x must be .* not contiguous"),
        (lambda: signs(z, x._neg_view()), r"error must be .*negated lazily: call resolve_neg\(\) first"),
        (lambda: native.add_(y, [Segment(x._neg_view(), 0, 80, 0)]), "outputs must be .*negated lazily"),
        (lambda: adam(negated, x), "exp_avg must be .*negated lazily"),
        (lambda: adam(x, negated), "parameters must be .*negated lazily"),
        (lambda: sync(negated), "anchor must be .*negated lazily"),
        (lambda: moments(sums._neg_view()), "sums must be .*negated lazily"),
        (lambda: native.sketch_(param, 0, 0, sketch[:-1], squares), "y must have 4096 elements, got 4095"),
        (lambda: native.sketch_(param, 0, 0, sketch.double(), squares), "y must be .* torch.float32 tensor"),
        (lambda: native.sketch_(param, 0, 0, sketch, squares.float()), "squares must be .* torch.float64 tensor"),
        (lambda: signs(z, torch.ones(81)), "error must have 80 elements, got 81"),
        (lambda: signs(z, error, messages[:-1]), "messages must have 64 elements, got 63"),
        (lambda: signs(z, torch.ones(80, device="meta")), "error must be .* on meta"),
        (lambda: native.decompress_(Average(80, SIGNS, ints, 1, 64), x), "messages must have 64 bytes"),
        (lambda: native.decompress_(Average(80, SIGNS, messages, 2, 16), x), "stride must be at least 32.* got 16"),
        (lambda: native.sum_of_squares([x.double()], CPU), "float32, bfloat16 or float16"),
        (lambda: SignFormat(12), "scale_block must be a positive multiple of 8 or None, got 12"),
        (lambda: SignFormat(-8), "scale_block must be a positive multiple of 8 or None, got -8"),
        (lambda: kernels.all_finite(Average.of(x)), "an average in messages is needed, got values"),
        (lambda: integers(error.double()), "error must be a contiguous"),
        (lambda: integers(error, ints[:32]), "messages must have 48 elements, got 32"),
        (lambda: integers(error, new=torch.ones(81)), "new_error must have 80 elements, got 81"),
        (lambda: native.average_compress_(INTS, ints, error, torch.ones(81), ints, 1), "new_error must have 80"),
        (lambda: native.mean_(INTS, ints, x, 2, 0.5), "messages must have 96 elements, got 48"),
        (lambda: native.add_(y, half[:1], 1.0, 1.0), "outputs must cover 80 elements, got 40"),
        (lambda: native.add_(Average.of(x), half[:1]), "outputs must cover 80 elements, got 40"),
        (lambda: native.add_(Average.of(x.double()), half), "values must be a contiguous torch.float32 tensor"),
        (lambda: native.decompress_(Average(80, INTS, ints, 2, 16), x), "stride must be at least 32"),
        (lambda: native.decompress_(Average(80, INTS, ints[:32], 1, 48), x), "have 48 bytes or more"),
        (
            lambda: native.compress_(SignFormat(None), z, CompactErrors.zeros(80, 1), messages[:32], 2),
            "error must be of 80 elements in 2",
        ),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(error, torch.ones(80)) and torch.equal(x, torch.ones(80))


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


def test_the_c_interface_refuses_in_words() -> None:
    use, floats, messages = Operands(CPU, 8), torch.ones(8), torch.zeros(32).byte()
    zero, some, sent = use.combination(Combination(8, CPU)), floats.data_ptr(), messages.data_ptr()
    params, count, _ = use.segments("parameters", [Segment(floats, 0, 8, 0)])
    y, descent = use.average(Average.of(floats)), use.descent(Descent(0.1, 1.0, 1e-8, False))
    both, values, compact = ErrorsRecord(some, sent), ErrorsRecord(some, None), ErrorsRecord(None, sent)
    variance, last = VarianceRecord(None, some, None), AverageRecord(sent, None, 16, 0, 16, 1)
    z = CombinationRecord(None, addressof(last), None, 0, None, 1.0, 1.0)
    wide, none = AverageRecord(None, some, 16, 0, 0, 1), AverageRecord(None, None, 8, 0, 0, 1)
    apply = y, None, byref(variance), params, count, None, 1.0, descent
    for function, arguments, words in (
        ("co_compress", (zero, None, 1, 8, 0, 1), "co_compress: error is null"),
        ("co_compress", (zero, byref(values), sent, 8, 12, 1), "scale_block must be a multiple of 8, or 0, got 12"),
        ("co_compress", (zero, byref(both), sent, 8, 0, 1), "error must have values or messages, and not both"),
        ("co_average_integers", (sent, byref(values), byref(compact), sent, 8, 8, 1), "new_error have two forms"),
        ("co_sum_rows", (some, 3, 2, some, 4, 1.0), "co_sum_rows: the rows have dtype 3; known are 0 to 2"),
        ("co_sum_rows", (some, 0, 0, some, 8, 1.0), "co_sum_rows: count must be >= 1, got 0"),
        ("co_add_average", (byref(wide), params, count, 0.0, 1.0), "the segments have 8 elements, the bucket has 16"),
        ("co_add_average", (byref(none), params, count, 0.0, 1.0), "co_add_average: neither messages nor values"),
        ("co_combine", (byref(z), some, 8), "co_combine: last has 16 elements, the bucket has 8"),
        ("co_decode_integers", (byref(IntegersRecord(sent, 8, 48, 1, 5)), some), "bits must be 4 or 8, got 5"),
        ("co_sketch", (params, count, -1, 0, some, some), "co_sketch: offset must be >= 0, got -1"),
        ("co_apply_adam", apply, "codes of exp_avg_sq need tops, and values none"),
    ):
        with pytest.raises(RuntimeError, match=words):
            native.call(function, CPU, *arguments)


def test_fake_tensors_are_refused_where_real_ones_are_needed() -> None:
    with FakeTensorMode():
        fake = torch.ones(80)
        with pytest.raises(TypeError, match="FakeTensor without memory"):
            native.compress_(SIGNS, Combination.of(fake), fake, torch.zeros(64, dtype=torch.uint8), 1)


def test_operands_of_a_refresh_that_are_wrong_are_refused() -> None:
    x, floors = torch.ones(80), torch.ones(1)
    sums = torch.zeros(1, 3, dtype=torch.float64)
    codes = LogVariance(torch.zeros(80, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32))
    params, short = [Segment(None, 0, 80, 0)], [Segment(None, 0, 79, 0)]
    second = [Segment(None, 0, 80, 1)]
    signs = Average(80, SIGNS, torch.zeros(64, dtype=torch.uint8), 1, 64)

    def update(y: Average, v: Tensor | LogVariance = x, segments: Sequence[Segment] = params) -> VarianceUpdate:
        return VarianceUpdate(y, v, segments, 0.9)

    y = Average.of(x)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: native.variance_sums_(update(signs), sums), "must be an average in integers or in values"),
        (lambda: native.variance_sums_(update(y, x, short), sums), "cover 80 elements, got 79"),
        (lambda: native.variance_sums_(update(y, x, second), sums), "sums must have 6 entries"),
        (lambda: native.variance_sums_(update(y, x[:79]), sums), "exp_avg_sq must have 80 elements, got 79"),
        (lambda: native.variance_sums_(update(y), sums.float()), "sums must be .* torch.float64 tensor"),
        (lambda: native.refresh_variance_(update(y), floors[:0]), "floors must have 1 entries or more, got 0"),
        (lambda: native.refresh_variance_(update(y, codes), floors), "tops must be given for a variance in 8 bits"),
        (lambda: native.refresh_variance_(update(y, x._neg_view()), floors), "exp_avg_sq must be .*negated lazily"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="tops must be given for a variance in 8 bits"):
        reference.refresh_variance_(update(y, codes), floors)
    assert float(x.sum()) == 80 and not sums.any()


class Modes(TorchDispatchMode):
    """A mode in which tables are not kept: each call makes its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_refresh_under_a_dispatch_mode_has_its_own_bits() -> None:
    """The table of random factors is alive until the call returns."""
    random = torch.Generator().manual_seed(0)
    grads, start = torch.randn(4096, generator=random), torch.randint(0, 200, (4096,), generator=random).byte()
    found = []
    for mode in (nullcontext, Modes):
        codes, tops = start.clone(), torch.tensor([3], dtype=torch.int32)
        update = VarianceUpdate(Average.of(grads), LogVariance(codes, tops), [Segment(None, 0, 4096, 0)], 0.9)
        for key in range(5):
            with mode():
                native.refresh_variance_(update, torch.tensor([1e-3]), tops, key)
        found.append(codes)
    assert torch.equal(*found) and not torch.equal(found[0], start)


def test_what_is_written_gets_a_new_version() -> None:
    x, param = torch.ones(80), torch.nn.Parameter(torch.ones(80))
    m, v, error = torch.ones(80), torch.ones(80), torch.ones(80)
    messages = torch.zeros(64, dtype=torch.uint8)
    native.compress_(SIGNS, Combination.of(x), error, messages, 1, error)
    assert (x._version, error._version, messages._version) == (0, 1, 1)
    loss = (param * param).sum()
    params = [Segment(param.detach(), 0, 80, 0)]
    native.apply_adam_(AdamUpdate(Average.of(x), m, v, params, Descent(1e-2, 1.0, 1e-8, False), 1.0, None))
    assert (m._version, v._version) == (1, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    grad, error, messages = torch.ones(80), torch.ones(80), messages[:48].clone()
    z = Combination(80, CPU, grads=[Segment(grad, 0, 80, 0)])
    native.compress_(INTS, z, error, messages, 1)
    assert (grad._version, error._version, messages._version) == (0, 0, 1)
    native.add_(Average(80, INTS, messages, 1, 48), [Segment(grad, 0, 80, 0)])
    assert (grad._version, error._version, messages._version) == (1, 0, 1)
    native.add_(Average.of(x), [Segment(grad, 0, 40, 0), Segment(None, 0, 40, 1)])
    native.add_(Average.of(x), [Segment(None, 0, 80, 0)])
    native.add_(Average.of(x[:0]), [])
    assert (grad._version, x._version) == (2, 0)
    sums = torch.zeros(1, 3, dtype=torch.float64)
    update = VarianceUpdate(Average.of(x), v, [Segment(None, 0, 80, 0)], 0.9)
    native.variance_sums_(update, sums)
    assert (sums._version, v._version, x._version) == (1, 0, 0)
    native.refresh_variance_(update, torch.ones(1))
    assert (v._version, x._version) == (1, 0)


@pytest.mark.parametrize("form", [SIGNS, SignFormat(None), INTS, IntegerFormat(8)], ids=str)
def test_what_is_not_finite_shows_in_the_scales_of_every_chunk(form: cases.Form) -> None:
    for chunks in (1, 2, 3, 5):
        for numel in (8, 1_000, 1_001):
            sizes = form.chunk_nbytes(numel, chunks)
            messages = torch.zeros(chunks * sizes[0] + 16, dtype=torch.uint8)
            y = Average(numel, form, messages, chunks, sizes[0])
            for place in range(-1, numel, 97):
                u = torch.ones(numel)
                u[place if place >= 0 else 0] = torch.inf if place >= 0 else 1.0
                native.compress_(form, Combination.of(u), torch.zeros(numel), messages[: sum(sizes)], chunks)
                found = native.any_nan(y) if isinstance(form, IntegerFormat) else ~kernels.all_finite(y)
                assert bool(found) is (place >= 0)


# -- torch.compile, and fake tensors ----------------------------------------------------------------------------------

NUMEL, CHUNKS = 5_000, 2


def round_trip(form: cases.Form, x: Tensor, grad: Tensor, error: Tensor, server_error: Tensor) -> tuple[Tensor, Tensor]:
    sizes, use = form.chunk_nbytes(NUMEL, CHUNKS), kernels.on(x)
    messages = torch.zeros(sum(sizes), dtype=torch.uint8)
    z = Combination(NUMEL, CPU, x * 1.5, 0.9, [Segment(grad, 0, NUMEL, 0)], 0.1)
    use.compress_(form, z, error, messages, CHUNKS, error)
    out = torch.zeros(NUMEL)
    use.decompress_(Average(NUMEL, form, messages, CHUNKS, sizes[0]), out)
    server = torch.zeros(sizes[0], dtype=torch.uint8)
    use.average_compress_(form, messages, server_error, server_error, server, 2)
    return out + 1, server


@pytest.mark.parametrize("form", [SignFormat(512), INTS], ids=str)
def test_compiled_as_one_graph_and_with_fake_tensors(form: cases.Form, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(3)
    given = [torch.randn(n, generator=random) for n in (NUMEL, NUMEL, NUMEL, NUMEL // 2)]
    own = [tensor.clone() for tensor in given]
    expected = round_trip(form, *given)
    got = torch.compile(round_trip, backend="aot_eager", fullgraph=True)(form, *own)
    for one, other in zip([*got, *own], [*expected, *given], strict=True):
        if one.dtype == torch.uint8:
            assert one.shape == other.shape
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # scales of signs may differ in 2 ulp
    with FakeTensorMode():
        out, server = round_trip(form, *(torch.zeros(n) for n in (NUMEL, NUMEL, NUMEL, NUMEL // 2)))
    assert out.shape == (NUMEL,) and server.shape == expected[1].shape
    monkeypatch.setenv(library.VARIABLE, "reference")  # which has kept nothing that is fake
    again = round_trip(form, *(torch.zeros(n) for n in (NUMEL, NUMEL, NUMEL, NUMEL // 2)))
    assert torch.equal(again[0], torch.ones(NUMEL))
