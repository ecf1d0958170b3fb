"""Cases that native kernels must pass on any device: the reference's bits, and nothing written beside the buffers.

Each check makes its data on the CPU from a seed, runs the reference there and the native kernel on copies that lie
between guards on the device, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import (
    SKETCH_NUMEL,
    AdamUpdate,
    Average,
    Combination,
    CompactErrors,
    Descent,
    Errors,
    IntegerFormat,
    LambMoments,
    LambOptions,
    LocalUpdate,
    LogVariance,
    MessageFormat,
    ParameterSync,
    Segment,
    SignFormat,
    Variance,
    VarianceUpdate,
    changes,
    native,
    reference,
    tensor_of,
    values_of_errors,
)
from hf_compressopt.kernels.adam import AdamStep, AdamTable, AdamTensors, reference_
from hf_compressopt.kernels.compact import ZERO_CODE, keep_errors_

_GUARD = 64  # bytes on either side of every buffer
_PATTERN = 0xA5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
# Tiles of kernels hold 4096 elements, blocks of threads 1024 at a time, a warp takes 512 integers or 128 of all else.
NUMELS = (1, 7, 8, 33, 127, 129, 513, 1000, 4097, 9_001)
SIGNS = tuple(map(SignFormat, (None, 8, 24, 128, 136, 512, 1000, 4096, 8192, 20_000)))
INTEGERS = (IntegerFormat(4), IntegerFormat(8))
FORMATS = (*SIGNS, *INTEGERS)
#: Values of which every kind must come through: zeros, denormals, the largest numbers, and what is not finite.
SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-38, 1e-36, 2.0**-117, 3e-30, -1.0, 2.0**127, -(2.0**127), 3.4e38]
    + [math.inf, -math.inf, math.nan]
)
_LOWEST_TOP, _HIGHEST_TOP = -754, 1023  # with every code a normal float32 number
Form = MessageFormat


class Pair:
    """The same tensors for the reference and for the kernel, whose copies lie between guards on the device."""

    place: Callable[[Tensor, int], Tensor] | None = None  # makes the copies instead, if a fixture has set it

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.random = device, torch.Generator().manual_seed(seed)
        self._blocks: list[tuple[Tensor, int, int]] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def copy(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """A copy for the kernel, off the 16-byte alignment by so many elements; the case does not compare it."""
        if self.place is not None:
            return self.place(tensor, shift)
        begin = _GUARD + shift * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        block = torch.full((end + _GUARD,), _PATTERN, dtype=torch.uint8, device=self.device)
        self._blocks.append((block, begin, end))
        return block[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def put(self, tensor: Tensor, shift: int = 0) -> tuple[Tensor, Tensor]:
        self._pairs.append((tensor, self.copy(tensor, shift)))
        return self._pairs[-1]

    def normal(self, *shape: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        return self.put(torch.randn(shape, generator=self.random), shift)

    def positive(self, *shape: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        return self.put(torch.rand(shape, generator=self.random) + 0.1, shift)

    def segments(
        self, numel: int, count: int, *, missing: bool = False, still: bool = False, cuts: Sequence[int] | None = None
    ) -> tuple[list[Segment], list[Segment], list[int]]:
        """Random runs, some of them empty, of tensors of all dtypes; without tensors, or still, every third."""
        if cuts is None:
            cuts = sorted(self.integer(0, numel) for _ in range(count - 1))
        indices = torch.randperm(count, generator=self.random).tolist()
        sides: tuple[list[Segment], list[Segment]] = ([], [])
        for k, (start, stop) in enumerate(zip([0, *cuts], [*cuts, numel], strict=True)):
            before = self.integer(0, 5)
            values = torch.randn(before + stop - start + 2, generator=self.random).to(DTYPES[self.integer(0, 2)])
            tensors = (None, None) if missing and k % 3 == 1 else self.put(values, self.integer(0, 3))
            for side, tensor in zip(sides, tensors, strict=True):
                side.append(Segment(tensor, before, stop - start, indices[k], still and k % 3 == 2))
        return *sides, list(cuts)

    def sides(self, *pairs: tuple[Any, Any]) -> Iterator[tuple[Any, ...]]:
        """The reference and its operands, then the native kernels and theirs; then all pairs must be the same."""
        for module, operands in zip((reference, native), zip(*pairs, strict=True), strict=True):
            yield module, *operands
        self.check()

    def check_guards(self) -> None:
        for block, begin, end in self._blocks:
            beside = torch.cat([block[:begin], block[end:]])
            assert bool((beside == _PATTERN).all()), "written beside a buffer"

    def check(self) -> None:
        self.check_guards()
        for expected, got in self._pairs:
            assert_same_bits(got, expected)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    different = got.cpu().reshape(-1).view(integers) != expected.reshape(-1).view(integers)
    if bool(different.any()):
        k = int(different.nonzero()[0])
        values = f"{got.reshape(-1)[k]} instead of {expected.reshape(-1)[k]}"
        raise AssertionError(f"{int(different.sum())} of {different.numel()} differ, the first at {k}: {values}")


def assert_same_bits_but_nan(got: Tensor, expected: Tensor) -> None:
    """The same bits, but for the payload of what is not a number."""
    assert torch.equal(got.cpu().isnan(), expected.isnan())
    assert_same_bits(got.cpu().nan_to_num(7.0, math.inf, -math.inf), expected.nan_to_num(7.0, math.inf, -math.inf))


def assert_scales_close(got: Tensor, expected: Tensor) -> None:
    """Within 2 units in the last place. got: [n] float32; expected: [n] float64."""
    step = torch.nextafter(expected.float(), torch.tensor(math.inf)).double() - expected.float().double()
    assert bool(((got.double() - expected).abs() <= 2 * step).all()), (got - expected).abs().max()


# -- operands ---------------------------------------------------------------------------------------------------------


def empty_messages(form: Form, numel: int, chunks: int = 1) -> Tensor:
    return torch.full((sum(form.chunk_nbytes(numel, chunks)),), 7, dtype=torch.uint8)


def combination(
    case: Pair,
    numel: int,
    segments: int,
    *,
    with_x: bool = True,
    last: int = 0,
    scale_block: int | None = 4096,
    with_factors: bool = False,
    still: bool = False,
    alpha: float = 0.9,
    shift: int = 0,
) -> tuple[Combination, Combination]:
    """Values to send: for the reference, and for the kernel. last: chunks of the average that x is, or 0."""
    x, own_x = case.normal(numel, shift=shift) if with_x and not last else (None, None)
    y, own_y = average(case, SignFormat(scale_block), numel, last) if last else (None, None)
    factors, own_factors = case.positive(segments) if with_factors and segments else (None, None)
    grads, own_grads, _ = case.segments(numel, segments, missing=True, still=still) if segments else (None, None, None)
    return (
        Combination(numel, CPU, x, alpha, grads, 0.1, factors, y),
        Combination(numel, case.device, own_x, alpha, own_grads, 0.1, own_factors, own_y),
    )


def errors(case: Pair, numel: int, chunks: int, *, compact: bool, shift: int = 0) -> tuple[Errors, Errors]:
    """Errors of random sizes, for the reference and for the kernel; they are not compared by the case."""
    values = torch.randn(numel, generator=case.random) * 0.5
    if not compact:
        return values, case.copy(values, shift)
    made = CompactErrors.zeros(numel, chunks)
    keep_errors_(made, values)
    return made, replace(made, messages=case.copy(made.messages))


def assert_errors(got: Errors, expected: Errors) -> None:
    if isinstance(got, Tensor):
        return assert_same_bits_but_nan(got, tensor_of(expected))
    assert_same_bits(got.messages, tensor_of(expected))


def messages_of(case: Pair, form: Form, numel: int, count: int, values: Tensor | None = None) -> Tensor:
    """Messages of `count` ranks, each of the same chunk, of normal numbers or drawn from the values."""
    messages = torch.zeros(count * form.nbytes(numel), dtype=torch.uint8)
    for part in messages.view(count, -1) if numel else ():
        u = torch.randn(numel, generator=case.random)
        if values is not None:
            u = values[torch.randint(len(values), (numel,), generator=case.random)]
        reference.compress_(form, Combination.of(u), torch.zeros(numel), part, 1)
    return messages


def average(case: Pair, form: Form, numel: int, chunks: int) -> tuple[Any, Any]:
    """An averaged bucket, as it is gathered: messages of its chunks, a stride apart; for 0 chunks the values."""
    if chunks == 0:
        values, own_values = case.normal(numel)
        return Average.of(values), Average.of(own_values)
    stride = max(form.chunk_nbytes(numel, chunks)) + 16
    messages = torch.zeros(chunks * stride, dtype=torch.uint8)
    for start, stop, part in form.chunks(messages, numel, chunks, stride):
        part.copy_(messages_of(case, form, stop - start, 1))
    messages, own = case.put(messages)
    return Average(numel, form, messages, chunks, stride), Average(numel, form, own, chunks, stride)


def variance(case: Pair, numel: int, tensors: int, *, log: bool, shift: int = 0) -> tuple[Variance, Variance]:
    """A frozen variance. In 8 bits: tensors of ordinary sizes, of the least and the largest; every code, many zeros."""
    if not log:
        return case.positive(numel, shift=shift)
    codes = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=case.random)
    codes[torch.rand(numel, generator=case.random) < 0.1] = ZERO_CODE
    tops = torch.randint(-100, 60, (tensors,), dtype=torch.int32, generator=case.random)
    tops[3::4], tops[4::5] = _LOWEST_TOP, _HIGHEST_TOP
    (codes, own_codes), (tops, own_tops) = case.put(codes, shift), case.put(tops)
    return LogVariance(codes, tops), LogVariance(own_codes, own_tops)


# -- compression ------------------------------------------------------------------------------------------------------


def mean_squares(values: Tensor, block: int | None) -> Tensor:
    """The mean square of each block, the last of which may be shorter: float64."""
    squares = values.double().square()
    whole = squares.numel() - squares.numel() % (block or max(squares.numel(), 1))
    head, tail = squares[:whole], squares[whole:]
    means = [head.view(-1, block or whole).mean(1)] * bool(whole) + [tail.mean()[None]] * bool(tail.numel())
    return torch.cat(means)


def check_messages(u: Tensor, messages: Tensor, form: Form, chunks: int) -> Tensor:
    """The messages of u: the reference's, but that scales of signs are within 2 ulp of float64's.

    Returns the errors that they leave.
    """
    left = u.clone()
    for start, stop, message in form.chunks(messages, u.numel(), chunks):
        part, expected = u[start:stop], torch.empty_like(message)
        form.encode_(part, expected)
        if isinstance(form, SignFormat):
            scales = form.scales(message, stop - start)
            assert_scales_close(scales, mean_squares(u if form.scale_block is None else part, form.scale_block).sqrt())
            form.scales(expected, stop - start).copy_(scales)
        assert_same_bits(message, expected)
        left[start:stop] -= form.decode(message, stop - start)
    return left


def rounded(error: Errors, values: Tensor) -> Errors:
    """These values as errors of the same form."""
    kept = deepcopy(error)
    keep_errors_(kept, values)
    return kept


def check_compress(
    device: torch.device,
    form: Form,
    numel: int,
    chunks: int,
    *,
    segments: int = 0,
    compact: bool = False,
    values: Tensor | None = None,
    shift: int = 0,
    **options: Any,
) -> None:
    """Messages alone, and messages with new errors, in place or elsewhere."""
    case = Pair(device, numel + 31 * chunks + segments)
    if values is None:
        z, own = combination(case, numel, segments, shift=shift, **options)
    else:
        z, own = map(Combination.of, case.put(values))
    error, own_error = errors(case, numel, chunks, compact=compact, shift=shift)
    start, u = deepcopy(own_error), torch.empty(numel)
    reference.combine_(z, u)
    u += values_of_errors(error)
    first, second = (case.copy(empty_messages(form, numel, chunks)) for _ in range(2))
    native.compress_(form, own, own_error, first, chunks)
    assert_same_bits(tensor_of(own_error), tensor_of(start).cpu())
    new = own_error if numel % 2 else errors(case, numel, chunks, compact=compact, shift=shift)[1]
    native.compress_(form, own, own_error, second, chunks, new)
    case.check()
    assert_same_bits(second, first.cpu())
    assert_errors(new, rounded(error, check_messages(u, first.cpu(), form, chunks)))


def check_average_compress(
    device: torch.device,
    form: Form,
    numel: int,
    ranks: int,
    *,
    compact: bool = False,
    shift: int = 0,
    values: Tensor | None = None,
) -> None:
    case = Pair(device, numel + 17 * ranks)
    messages, own_messages = case.put(messages_of(case, form, numel, ranks, values))
    error, own_error = errors(case, numel, 1, compact=compact, shift=shift)
    start = deepcopy(own_error)
    new = own_error if numel % 2 else errors(case, numel, 1, compact=compact, shift=shift)[1]
    out = case.copy(empty_messages(form, numel))
    native.average_compress_(form, own_messages, own_error, new, out, ranks)
    case.check()
    u = form.sum_of(messages.view(ranks, -1), numel) * (1.0 / ranks) + values_of_errors(error)
    assert_errors(new, rounded(error, check_messages(u, out.cpu(), form, 1)))
    if new is not own_error:
        assert_same_bits(tensor_of(own_error), tensor_of(start).cpu())


def check_not_finite(device: torch.device, numel: int, scale_block: int | None) -> None:
    """What is not finite makes the scale of its block NaN or infinite, and the errors of the block NaN."""
    case, form = Pair(device, numel), SignFormat(scale_block)
    x = torch.randn(numel, generator=case.random)
    x[numel // 3], x[2 * numel // 3] = math.inf, math.nan
    x, own_x = case.put(x)
    error, own_error = errors(case, numel, 1, compact=True)
    message = case.copy(empty_messages(form, numel))
    for _ in range(2):
        u = x + values_of_errors(error)
        native.compress_(form, Combination.of(own_x), own_error, message, 1, own_error)
        case.check()
        got = message.cpu()
        assert torch.equal(form.scales(got, numel).isfinite(), mean_squares(u, scale_block).isfinite())
        error = rounded(error, u - form.decode(got, numel))
        assert_errors(own_error, error)
        left = values_of_errors(error)
        assert 2 <= int(left.isnan().sum()) and bool(left.isnan()[numel // 3])


def check_combine(device: torch.device, numel: int, segments: int, **options: Any) -> None:
    case = Pair(device, numel + segments)
    for k, z, out in case.sides(combination(case, numel, segments, **options), case.normal(numel, shift=3)):
        k.combine_(z, out)


def check_sum_rows(device: torch.device, numel: int, count: int, dtype: torch.dtype, factor: float, shift: int) -> None:
    case = Pair(device, numel + count)
    rows = torch.randn(count, numel, generator=case.random).to(dtype)
    finite = SPECIAL[:-3]  # a sum of infinities is NaN, whose bits are the device's own
    rows.view(-1)[: len(finite)] = finite[: rows.numel()]
    for k, values, out in case.sides(case.put(rows, shift), case.normal(numel, shift=3)):
        k.sum_rows_(values, out, factor)


def check_decompress(device: torch.device, form: Form, numel: int, chunks: int, shift: int = 0) -> None:
    case = Pair(device, numel)
    for k, y, out in case.sides(average(case, form, numel, chunks), case.normal(numel, shift=shift)):
        k.decompress_(y, out)


def check_any_nan(device: torch.device, form: IntegerFormat, numel: int, chunks: int) -> None:
    """NaN is found in the scales of any chunk, and in no other bytes, which are all ones."""
    case = Pair(device, numel + chunks)
    stride = max(form.chunk_nbytes(numel, chunks)) + 16
    _, messages = case.put(torch.full((stride * chunks,), 0xFF, dtype=torch.uint8))
    y, places = Average(numel, form, messages, chunks, stride), []
    for start, stop, message in form.chunks(messages, numel, chunks, stride):
        scales = form.scales(message, stop - start)
        scales.fill_(math.inf)  # no NaN: an average's scale is either
        places += [(scales, place) for place in {0, len(scales) // 2, len(scales) - 1}]
    assert not native.any_nan(y)
    for scales, place in places:
        scales[place] = math.nan
        assert native.any_nan(y), place
        scales[place] = -1.0
    case.check_guards()


def check_mean(
    device: torch.device, form: IntegerFormat, numel: int, ranks: int, *, shift: int = 0, values: Tensor | None = None
) -> None:
    case = Pair(device, numel + 17 * ranks)
    outs = torch.empty(numel), case.copy(torch.zeros(numel), shift)
    for k, messages, out in case.sides(case.put(messages_of(case, form, numel, ranks, values)), outs):
        k.mean_(form, messages, out, ranks, 3.0 / ranks)
    assert_same_bits_but_nan(outs[1], outs[0])


def check_add(
    device: torch.device, form: Form, numel: int, chunks: int, *, segments: int, decay: float, scale: float
) -> None:
    case = Pair(device, numel + 31 * chunks + segments)
    averages = average(case, form, numel, chunks)
    for k, y, outputs in case.sides(averages, case.segments(numel, segments, missing=True)[:2]):
        k.add_(y, outputs, decay, scale)


def check_add_all_kinds_of_values(device: torch.device, dtype: torch.dtype) -> None:
    """Every pair of special values: zeros keep their signs, and what is not read leaves no trace."""
    values, outputs = SPECIAL.repeat(len(SPECIAL)), SPECIAL.repeat_interleave(len(SPECIAL)).to(dtype)
    for decay, scale in ((0.0, 1.0), (0.0, 0.3), (1.0, 1.0), (0.9, -2.0)):
        case, expected = Pair(device, 0), outputs.clone()
        own, got = case.copy(values), case.copy(outputs)
        for k, y, out in ((reference, values, expected), (native, own, got)):
            k.add_(Average.of(y), [Segment(out, 0, len(values), 0)], decay, scale)
        case.check()
        assert_same_bits(own, values)
        assert_same_bits_but_nan(got, expected)


# -- what the optimizers do with the average --------------------------------------------------------------------------

DESCENTS = (
    Descent(1e-2, 0.99, 1e-8, False),
    Descent(1e-2, 1.0, 1e-6, True),
    Descent(1e-2, 0.99, 1e-8, False, 0.7),
    Descent(1e-2, 1.0, 1e-6, True, 0.3),
)


def check_apply_adam(
    device: torch.device,
    numel: int,
    segments: int,
    *,
    chunks: int,
    scale_block: int | None = 4096,
    beta: float = 1.0,
    with_m: bool = True,
    log: bool = False,
    corrected: bool = False,
    whole: bool = False,
    descent: Descent = DESCENTS[0],
    shift: int = 0,
) -> None:
    """whole: every tensor is there, and none stands still."""
    case = Pair(device, numel + segments)
    average_ = average(case, SignFormat(scale_block), numel, chunks)
    momentum = case.normal(numel, shift=shift) if with_m else (None, None)
    square = variance(case, numel, segments, log=log, shift=shift)
    tensors = case.segments(numel, segments, missing=not whole, still=not whole)[:2]
    corrections: tuple[Any, Any] = (None, None)
    if corrected:
        values = torch.rand(segments, 2, generator=case.random) + 0.1
        values[::4, 0] = math.inf
        corrections = case.put(values)
    for k, y, m, v, params, given in case.sides(average_, momentum, square, tensors, corrections):
        k.apply_adam_(AdamUpdate(y, m, v, params, descent, beta, given))


def check_scales_that_are_not_ordinary(device: torch.device, numel: int, scale_block: int) -> None:
    """NaN stays NaN, zeros keep their signs, and infinity is bounded."""
    form = SignFormat(scale_block)
    for bound in (math.inf, 0.5):
        case = Pair(device, numel)
        messages = messages_of(case, form, numel, 1)
        scales = form.scales(messages, numel)
        for place, scale in enumerate((math.nan, 0.0, math.inf, 1e-40, 3e38)):
            scales[place::7] = scale
        v, own_v = variance(case, numel, 1, log=True)
        start = torch.randn(numel, generator=case.random)
        start[torch.rand(numel, generator=case.random) < 0.1] = -0.0
        own_param, param = case.copy(start), start.clone()
        descent = Descent(1e-2, 1.0, 1e-8, False, bound)
        for how, sent, moment, tensor in (
            (reference, messages, v, param),
            (native, case.copy(messages), own_v, own_param),
        ):
            y = Average(numel, form, sent, 1, sent.numel())
            how.apply_adam_(AdamUpdate(y, None, moment, [Segment(tensor, 0, numel, 0)], descent))
        case.check()
        assert_same_bits_but_nan(own_param, param)
        assert bool(param.isnan().any()) and not bool(param.isnan().all())


def check_local_step(
    device: torch.device, numel: int, segments: int, *, with_grads: bool, descent: Descent, log: bool = False
) -> None:
    case = Pair(device, numel + segments)
    operands = case.normal(numel), variance(case, numel, segments, log=log), case.normal(numel)
    *tensors, cuts = case.segments(numel, segments, missing=True, still=True)
    gradients = case.segments(numel, segments, missing=True, cuts=cuts)[:2]
    for k, m, v, u, params, grads in case.sides(*operands, tuple(tensors), gradients):
        k.local_step_(LocalUpdate(m, v, u, grads if with_grads else None, params, 0.9, descent))


def check_sync_parameters(
    device: torch.device, numel: int, segments: int, *, chunks: int, descent: Descent, log: bool = False
) -> None:
    case = Pair(device, numel + segments)
    operands = average(case, SignFormat(512), numel, chunks), case.normal(numel), case.normal(numel)
    more = variance(case, numel, segments, log=log), case.normal(numel)
    tensors = case.segments(numel, segments, missing=True, still=True)[:2]
    for k, y, m, anchor, v, u, params in case.sides(*operands, *more, tensors):
        y = y if chunks else Average.of(u)  # as in a run of one rank
        k.sync_parameters_(ParameterSync(y, m, anchor, v, u, params, 0.03, descent))


def check_bound(device: torch.device) -> None:
    """Check a bound: values beyond it become the bound, NaN stays NaN, and an infinite bound changes nothing."""
    directions = torch.tensor([0.5, 2.0, 2.5, -2.0, -3e38, math.inf, -math.inf, math.nan, -0.0, 1e-45] * 5)
    ones, expected = torch.ones_like(directions), directions.clamp(-2.0, 2.0)
    for bound in (2.0, math.inf):
        for how in (reference, native):
            on = torch.device("cpu") if how is reference else device
            params = [torch.zeros(len(directions), device=on) for _ in range(3)]
            runs = [[Segment(p, 0, len(directions), 0)] for p in params]
            m, u, anchor = (values.to(on, copy=True) for values in (directions, 0 * ones, 0 * ones))
            y, v, descent = Average.of(directions.to(on)), ones.to(on), Descent(1.0, 1.0, 0.0, False, bound)
            how.apply_adam_(AdamUpdate(y, m, v, runs[0], descent))
            how.local_step_(LocalUpdate(m, v, u, None, runs[1], 0.9, descent))
            how.sync_parameters_(ParameterSync(y, m, anchor, v, u, runs[2], 1.0, descent))
            for param in params:
                wanted = -expected if bound == 2.0 else -directions
                torch.testing.assert_close(param.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def check_lamb(
    device: torch.device, numel: int, segments: int, *, chunks: int, options: LambOptions, log: bool = False
) -> None:
    case = Pair(device, numel + segments)
    operands = average(case, SignFormat(4096), numel, chunks), case.normal(numel), case.positive(numel)
    square = variance(case, numel, segments, log=log)
    params, own_params, _ = case.segments(numel, segments, missing=True, still=True)
    nonempty = [segment for segment in params if segment.numel]
    more = case.positive(segments), case.positive(segments)
    start = torch.rand(segments, 3, generator=case.random, dtype=torch.float64)
    sums = start.clone(), case.copy(start)
    for k, y, m, fresh, v, tensors, factors, found in case.sides(
        *operands, square, (nonempty, own_params), more[0], sums
    ):
        k.lamb_moments_(LambMoments(y, m, fresh, v, tensors, factors, found, options))
    torch.testing.assert_close(sums[1].cpu(), sums[0], rtol=1e-12, atol=0)
    for k, m, v, tensors, rates in case.sides(operands[1], square, (params, own_params), more[1]):
        k.lamb_apply_(m, v, tensors, rates, options)


def check_refresh(
    device: torch.device, numel: int, segments: int, form: Form | None, *, chunks: int, log: bool
) -> None:
    """Check both passes of a refresh. In the second every third tensor keeps its variance."""
    case = Pair(device, numel + segments + chunks)
    mean = average(case, form or SignFormat(8), numel, chunks if form else 0)
    square = variance(case, numel, segments, log=log)
    params, own_params, _ = case.segments(numel, segments)
    floors, own_floors = case.positive(segments)
    floors[::3] = own_floors[::3] = math.nan
    old_tops = square[0].tops if isinstance(square[0], LogVariance) else torch.zeros(segments, dtype=torch.int32)
    moved = torch.randint(-20, 60, (segments,), dtype=torch.int32, generator=case.random)
    tops = case.put((old_tops + moved).clamp_(_LOWEST_TOP, _HIGHEST_TOP))
    start = torch.rand(segments, 3, generator=case.random, dtype=torch.float64)
    sums = start.clone(), case.copy(start)
    for k, y, v, tensors, found in case.sides(mean, square, (params, own_params), sums):
        k.variance_sums_(VarianceUpdate(y, v, tensors, 0.9), found)
    torch.testing.assert_close(sums[1].cpu(), sums[0], rtol=1e-12, atol=0)
    for k, y, v, tensors, floor, top in case.sides(mean, square, (params, own_params), (floors, own_floors), tops):
        k.refresh_variance_(VarianceUpdate(y, v, tensors, 0.9), floor, top if log else None, key=3)


# -- FusedAdam, norms and sketches -------------------------------------------------------------------------------------

STEP = AdamStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def check_adam(
    device: torch.device,
    numels: Sequence[int],
    step: AdamStep = STEP,
    *,
    dtypes: Callable[[int], tuple[torch.dtype, torch.dtype, torch.dtype]] = lambda k: (torch.float32,) * 3,
    masters: bool = False,
    copies: bool = False,
    shift: int = 0,
    steps: int = 3,
) -> None:
    """dtypes: of parameter, gradient and moments of the k-th tensor."""
    case = Pair(device, len(numels))
    sides: list[list[list[Tensor | None]]] = [[], []]
    for k, numel in enumerate(numels):
        param, grad, moment = dtypes(k)
        weights = torch.randn(numel, generator=case.random)
        row = [
            case.put(torch.randn(numel, generator=case.random).to(grad), shift),
            case.put(weights.to(param), shift),
            case.put(torch.randn(numel, generator=case.random).to(moment), shift),
            case.put(torch.rand(numel, generator=case.random).to(moment), shift),
            case.put(torch.tensor(float(k % 3))),
            case.put(weights.clone(), shift) if masters else (None, None),
            case.put(torch.zeros(numel, dtype=torch.bfloat16), shift) if copies else (None, None),
        ]
        for side, tensors in zip(sides, zip(*row, strict=True), strict=True):
            side.append(list(tensors))
    expected, own = (AdamTensors(*map(list, zip(*side, strict=True))) for side in sides)
    table = AdamTable(own)
    for _ in range(steps):
        reference_(expected, step)
        table.run(own.grads, _on(step, device), device)
    case.check()


def _on(step: AdamStep, device: torch.device) -> AdamStep:
    names = ("lr", "grad_scale", "found_inf", "clip_factor")
    moved = {n: getattr(step, n).to(device) for n in names if isinstance(getattr(step, n), Tensor)}
    return replace(step, **moved)


def check_square_sums(device: torch.device, numels: Sequence[int], shift: int = 0) -> None:
    case = Pair(device, len(numels))
    pairs = [
        case.put((torch.randn(numel, generator=case.random) * 3).to(DTYPES[k % 3]), shift)
        for k, numel in enumerate(numels)
    ]
    expected = torch.stack([cpu.double().square().sum() for cpu, _ in pairs])
    got = native.sum_of_squares([own for _, own in pairs], device)
    case.check()
    torch.testing.assert_close(got.cpu(), expected.sum(), rtol=1e-13, atol=0)


def check_sketch(device: torch.device, numel: int, segments: int, *, offset: int = 0, seed: int = 1) -> None:
    case = Pair(device, numel + offset + segments)
    grads, own_grads, _ = case.segments(numel, segments, missing=True)
    y, own_y = case.normal(SKETCH_NUMEL)
    squares = torch.rand((), dtype=torch.float64, generator=case.random)
    own_squares = case.copy(squares)
    reference.sketch_(grads, offset, seed, y, squares)
    native.sketch_(own_grads, offset, seed, own_y, own_squares)
    case.check()
    torch.testing.assert_close(own_squares.cpu(), squares, rtol=1e-6, atol=0)


def check_changes(device: torch.device, old: Tensor, by: Tensor, *, shift: int = 0) -> None:
    """Keys that change by integers, as far as there are such keys. old: [n] int16; by: likewise."""
    case = Pair(device, old.numel())
    new = changes.keys((changes.keys(old).int() + by).clamp(-0x8000, 0x7FFF).short())
    olds, news = case.put(old.clone(), shift), case.put(new, shift)
    sizes = case.put(torch.zeros(changes.blocks_of(old.numel()), dtype=torch.int16))
    for use, before, now, found in zip((changes.Reference, changes.Native), olds, news, sizes, strict=True):
        use.change_sizes_(before, now, found)
    case.check()
    assert sizes[0].max() <= 512
    offsets = case.put(sizes[0].long().cumsum(0) - sizes[0])
    payloads = case.put(torch.zeros(int(sizes[0].sum()), dtype=torch.uint8))
    sides = zip((changes.Reference, changes.Native), olds, news, sizes, offsets, payloads, strict=True)
    for use, before, now, found, places, payload in sides:
        use.write_changes_(before, now, found, places, payload)
        use.apply_changes_(payload, found, places, before)
    case.check()
    assert_same_bits(olds[1], new)
