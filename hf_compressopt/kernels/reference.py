"""The kernels in pure PyTorch: the contract of each, the fallback on every device, and the oracle of native code.

:mod:`hf_compressopt.kernels.native` has the same functions, which leave the same bits. Every operation on an element is
rounded on its own, in the order of the formulas. Only sums over many elements (scales of signs, norms) may differ, by
at most 2 ulp.

Q(u) is what the messages of a format stand for. Errors may lie in 8 bits
(:class:`~hf_compressopt.kernels.compact.CompactErrors`), and so may a frozen variance
(:class:`~hf_compressopt.kernels.compact.LogVariance`). m, v, p, g and u stand for momentum, variance, parameter,
gradient and local update. A segment that stands still (:attr:`Segment.still`) counts as a direction of 0, and as a
momentum of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_numel
from hf_compressopt.kernels.compact import (
    Errors,
    Variance,
    decode_variance,
    dithered_codes,
    elements_at_once,
    keep_errors_,
    values_of_errors,
    values_of_variance,
)
from hf_compressopt.kernels.hashing import hashes, next_key
from hf_compressopt.kernels.messages import IntegerFormat, MessageFormat

#: Numbers of a sketch, and elements of a run of its own.
SKETCH_NUMEL = 4096

_LANES = 16
_ROWS = SKETCH_NUMEL // _LANES
_SIGNS = 64  # elements whose signs are one hash
_MOST_SPANS, _LEAST_RUNS = 64, 16
_PIECE = 1 << 15  # elements of rows that are summed at once per thread: a few pieces fit into a core's own cache
_LONG_RUN, _DEVICE_RUN = 1 << 16, 1 << 23  # elements that become float64 at once, on a CPU and elsewhere


# -- operands ----------------------------------------------------------------------------------------------------------
# The dataclasses are not frozen: a step makes hundreds, in half of the time.


@dataclass(slots=True)
class Segment:
    """Consecutive elements of one tensor. The segments of a bucket, in order, cover it without gaps."""

    #: The whole tensor, contiguous (float32, bfloat16 or float16). None: no gradient, or a parameter that stays.
    tensor: Tensor | None
    start: int  # within the flattened tensor
    numel: int
    index: int  # the tensor's entry in per-tensor arrays (factors, corrections, rates, sums)
    still: bool = False  # the tensor stands still because it has no variance: its average counts as 0

    @property
    def part(self) -> Tensor:
        """The elements, [numel]; they share memory with the tensor, which must not be None."""
        assert self.tensor is not None
        return self.tensor.detach().view(-1)[self.start : self.start + self.numel]


@dataclass(slots=True)
class Average:
    """The average of a bucket over the ranks: as messages of a format, or as ``values``, [numel] float32.

    The message of chunk j of ``world_size`` begins at byte ``j * stride`` of ``messages``, a multiple of 16.
    """

    numel: int
    form: MessageFormat | None = None
    messages: Tensor | None = None
    world_size: int = 1
    stride: int = 0
    values: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor) -> Average:
        """Return the average whose values are known, [n] float32."""
        return cls(values.numel(), values=values)


@dataclass(slots=True)
class Combination:
    """The values of a bucket that a rank sends: z = (alpha x + beta g) * factor, each operation in float32."""

    numel: int
    device: torch.device
    x: Tensor | None = None  # [numel] float32; None leaves the term out unless there is ``last``
    alpha: float = 1.0
    grads: Sequence[Segment] | None = None  # None leaves the term out, as does a segment without a tensor
    beta: float = 1.0
    factors: Tensor | None = None  # [tensors] float32
    #: If x is None: an average in messages, whose values are x; x counts as 0 where a segment stands still.
    last: Average | None = None

    @classmethod
    def of(cls, x: Tensor) -> Combination:
        """Return the combination whose values are x, [n] float32."""
        return cls(x.numel(), x.device, x)


@dataclass(slots=True)
class Descent:
    """The step along a direction d: p <- p * decay - lr * bounded(d), where ``decay`` is 1 - lr * weight_decay.

    With a decay of exactly 1.0 p is not multiplied. Elements of d are cut to +-``bound``; infinity changes nothing, and
    NaN stays. ``eps_inside_sqrt`` is sqrt(v + eps) instead of sqrt(v) + eps.
    """

    lr: float
    decay: float
    eps: float
    eps_inside_sqrt: bool
    bound: float = math.inf


@dataclass(slots=True)
class LambOptions:
    """The hyperparameters of one param group that 1-bit LAMB's kernels take; ``bound`` is that of :class:`Descent`."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    eps_inside_sqrt: bool
    bound: float = math.inf


@dataclass(slots=True)
class AdamUpdate:
    """Operands of :func:`apply_adam_`.

    y, n elements, may have ``exp_avg`` itself as its values. m, [n] float32, is written, or None if ``beta`` is 1 and
    nobody needs it beyond y; v is read. Segments without a tensor move no parameter. ``corrections``, [tensors, 2]
    float32, divide m and v: infinity as the first one stands for a direction of 0, None for m and v as they are.
    """

    y: Average
    exp_avg: Tensor | None
    exp_avg_sq: Variance
    params: Sequence[Segment]
    descent: Descent
    beta: float = 1.0
    corrections: Tensor | None = None


@dataclass(slots=True)
class LocalUpdate:
    """Operands of :func:`local_step_`.

    m and u, [n] float32, are updated in place, v is read. Without ``grads`` m stays as it is.
    """

    exp_avg: Tensor
    exp_avg_sq: Variance
    local_update: Tensor
    grads: Sequence[Segment] | None
    params: Sequence[Segment]
    beta1: float
    descent: Descent


@dataclass(slots=True)
class ParameterSync:
    """Operands of :func:`sync_parameters_`.

    y may have ``local_update`` itself as its values. m is written, the anchor (the parameters at the last sync) updated
    in place, and u set to 0; all [n] float32. Segments without a tensor change neither anchor nor parameter. ``lr_sum``
    is the sum of the learning rates of the interval, not 0; ``descent.decay`` the product over the interval, its
    ``bound`` that of y / denominator(v), and its ``lr`` is not used.
    """

    y: Average
    exp_avg: Tensor
    anchor: Tensor
    exp_avg_sq: Variance
    local_update: Tensor
    params: Sequence[Segment]
    lr_sum: float
    descent: Descent


@dataclass(slots=True)
class LambMoments:
    """Operands of :func:`lamb_moments_`.

    m and the fresh v, [n] float32, are updated in place, the frozen v is read. A segment without a tensor counts as
    p = 0. ``factors`` are [tensors] float32; ``sums``, [tensors, 3] float64, are 0 before a tensor's first segment.
    """

    y: Average
    exp_avg: Tensor
    exp_avg_sq_fresh: Tensor
    exp_avg_sq: Variance
    params: Sequence[Segment]
    factors: Tensor
    sums: Tensor
    options: LambOptions


@dataclass(slots=True)
class VarianceUpdate:
    """Operands of :func:`variance_sums_` and :func:`refresh_variance_`: v' = memory v + (1 - memory) g g.

    y is g, n elements, as messages of integers or as values. The tensors of ``params`` are not read.
    """

    y: Average
    exp_avg_sq: Variance
    params: Sequence[Segment]
    memory: float


# -- compression ------------------------------------------------------------------------------------------------------


def compress_(
    form: MessageFormat,
    z: Combination,
    error: Errors,
    messages: Tensor,
    world_size: int,
    new_error: Errors | None = None,
) -> None:
    """Compress z, n values: u = z + error; messages <- Q(u); new_error <- u - Q(u), if it is given.

    ``messages`` is uint8 of all ``world_size`` chunks; ``new_error`` has the form of ``error`` and may be ``error``.
    """
    u = torch.empty(z.numel, dtype=torch.float32, device=z.device)
    combine_(z, u)
    u += values_of_errors(error)
    scale = form.common_scale(u)
    for start, stop, message in form.chunks(messages, z.numel, world_size):
        u[start:stop] -= form.encode_(u[start:stop], message, scale)
    if new_error is not None:
        keep_errors_(new_error, u)


def average_compress_(
    form: MessageFormat, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
) -> None:
    """Average a chunk on its server: a = mean of the messages' values + error; out <- Q(a); new_error <- a - Q(a).

    The sum is taken in float32: messages in groups of four, in rank order, and then the groups' sums, in order.
    ``messages`` is uint8 [world_size * form.nbytes(n)], one message of the chunk per rank; ``new_error`` may be
    ``error``.
    """
    if (numel := error.numel()) == 0:
        return
    mean = form.sum_of(messages.view(world_size, -1), numel).mul_(1.0 / world_size)
    mean += values_of_errors(error)
    keep_errors_(new_error, mean - form.encode_(mean, out, form.common_scale(mean)))


def mean_(form: IntegerFormat, messages: Tensor, out: Tensor, world_size: int, factor: float) -> None:
    """Sum the messages of one chunk, in the order of :func:`average_compress_`: out <- sum * factor, [n] float32."""
    if out.numel():
        torch.mul(form.sum_of(messages.view(world_size, -1), out.numel()), factor, out=out)


def add_(y: Average, outputs: Sequence[Segment], decay: float = 0.0, scale: float = 1.0) -> None:
    """Add an average to tensors: outputs <- outputs * decay + y * scale, each operation rounded to float32.

    Outputs are written in their own dtypes, and not read if decay is 0. Segments without a tensor are left alone.
    """
    values = values_of(y) * scale
    for segment, (change,) in _pieces(outputs, values):
        if segment.tensor is not None:
            segment.part.copy_(change if decay == 0 else segment.part.float() * decay + change)


def any_nan(*averages: Average) -> Tensor:
    """Return whether a block of some averages of integers is NaN, [] bool, from its scales."""
    return torch.stack([largest_scale(y) for y in averages]).isnan().any()


def all_finite(y: Average) -> Tensor:
    """Return whether all scales of an average are finite, [] bool; a ValueError if it is not in messages."""
    return largest_scale(y).isfinite()


def largest_scale(y: Average) -> Tensor:
    """Return the largest scale, [], NaN if one is: in one reduction of all whole chunks, and one of the last."""
    if y.messages is None or y.form is None:
        raise ValueError("an average in messages is needed, got values")
    form, each = y.form, chunk_numel(y.numel, y.world_size)
    found = [torch.zeros((), dtype=form.scale_dtype, device=y.messages.device)] if y.numel == 0 else []
    whole = y.numel // each if each else 0
    if whole:
        size = form.scale_dtype.itemsize
        scales = y.messages[: y.messages.numel() // size * size].view(form.scale_dtype)
        place = scales.storage_offset() + form.scales_at(each) // size
        found.append(scales.as_strided((whole, form.blocks(each)), (y.stride // size, 1), place).amax())
    if rest := y.numel - whole * each:
        found.append(form.scales(y.messages[whole * y.stride :], rest).amax())
    return found[0] if len(found) == 1 else torch.maximum(*found)


def decompress_(y: Average, out: Tensor) -> None:
    """Write the values of an average: out <- y. out: [n] float32, written."""
    if y.values is not None:
        out.copy_(y.values)
        return
    if y.messages is None or y.form is None:
        raise ValueError("an average needs messages of a format, or values")
    for start, stop, message in y.form.chunks(y.messages, y.numel, y.world_size, y.stride):
        out[start:stop] = y.form.decode(message, stop - start)


def combine_(z: Combination, out: Tensor) -> None:
    """Write the values of a combination: out <- z. out: [n] float32, written."""
    if z.x is not None:
        torch.mul(z.x, z.alpha, out=out)
    elif z.last is not None:
        decompress_(z.last, out)
        for segment, (part,) in _pieces(z.grads or (), out):
            if segment.still:
                part.zero_()
        out.mul_(z.alpha)
    else:
        out.zero_()
    for segment, (part,) in _pieces(z.grads or (), out):
        if segment.tensor is not None:
            part.add_(segment.part.float() * z.beta)
        if z.factors is not None:
            part.mul_(z.factors[segment.index])


def sum_rows_(rows: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """Write the sum of rows, in their order, times a factor: out <- (((r0 + r1) + r2) + ...) * factor.

    rows: [count, n], contiguous. out: [n] float32, written; float64 where rows are.
    """
    piece = _PIECE * torch.get_num_threads() if out.device.type == "cpu" else max(1, out.numel())
    for total, part in zip(torch.split(out, piece), torch.split(rows, piece, dim=1), strict=True):
        head, *others = part.unbind()
        if others and head.dtype == total.dtype:
            torch.add(head, others.pop(0), out=total)
        else:
            total.copy_(head)
        for other in others:
            total += other
        if factor != 1:
            total *= factor


def values_of(y: Average) -> Tensor:
    """Return the values of an average, [n] float32. Do not change them: they may be its own."""
    if y.values is not None:
        return y.values
    assert y.messages is not None
    out = torch.empty(y.numel, dtype=torch.float32, device=y.messages.device)
    decompress_(y, out)
    return out


# -- the optimizers' steps --------------------------------------------------------------------------------------------


def apply_adam_(update: AdamUpdate) -> None:
    """Take the momentum from an average, and step: m <- y; p <- p decay - lr bounded(m^ / denominator(v^)).

    With another ``beta`` than 1 the momentum becomes m + beta (y - m).
    """
    momentum, variance = values_of(update.y), _variance(update.exp_avg_sq, update.params)
    if update.exp_avg is None:
        momentum = momentum.clone()
    elif update.beta == 1:
        momentum = update.exp_avg.copy_(momentum)
    else:
        momentum = update.exp_avg.add_((momentum - update.exp_avg).mul_(update.beta))
    for segment, (m, v) in _pieces(update.params, momentum, variance):
        if segment.still:
            m.zero_()
        if segment.tensor is None:
            continue
        if update.corrections is None:
            direction = m / _denominator(v, update.descent)
        else:
            first, second = update.corrections[segment.index].unbind()
            direction = (m / first).div_(_denominator(v / second, update.descent))
            direction = torch.where(torch.isinf(first), 0.0, direction)
        _descend_(segment, direction, update.descent)


def local_step_(update: LocalUpdate) -> None:
    """Take a local step: m <- b1 m + (1-b1) g; p <- p decay - lr bounded(m / denominator(v)); u <- u + lr m."""
    if update.grads is not None:
        m, beta1 = update.exp_avg, update.beta1
        combine_(Combination(m.numel(), m.device, m, beta1, update.grads, 1 - beta1), m)
    for segment, (m, v) in _pieces(update.params, update.exp_avg, _variance(update.exp_avg_sq, update.params)):
        if segment.tensor is not None:
            _descend_(segment, m / _denominator(v, update.descent), update.descent)
    update.local_update.add_(update.exp_avg * update.descent.lr)


def sync_parameters_(sync: ParameterSync) -> None:
    """Take a sync: m <- y / lr_sum; anchor <- anchor decay - bounded(y / denominator(v)); p <- anchor; u <- 0."""
    values = values_of(sync.y)
    lr_sum = sync.exp_avg.new_full((), sync.lr_sum)  # for a number, CUDA multiplies by its inverse
    torch.div(values, lr_sum, out=sync.exp_avg)
    variance = _variance(sync.exp_avg_sq, sync.params)
    for segment, (m, own, value, v) in _pieces(sync.params, sync.exp_avg, sync.anchor, values, variance):
        if segment.still:
            m.zero_()
        if segment.tensor is not None:
            direction = torch.zeros_like(value) if segment.still else value / _denominator(v, sync.descent)
            own.mul_(sync.descent.decay).sub_(_bounded(direction, sync.descent))
            segment.part.copy_(own)
    sync.local_update.zero_()


def lamb_moments_(moments: LambMoments) -> None:
    """Take 1-bit LAMB's first pass over a bucket: momentum, fresh variance, and the sums for each coefficient.

    m' = y / factor; g' = (m' - b1 m) / (1 - b1); v_fresh <- b2 v_fresh + (1-b2) g'^2; m <- m'.

    Each tensor has three sums: with d = bounded(m'/denominator(v)), [0] grows by the sum of d^2, [1] by the sum of
    (d + wd p)^2, and [2] becomes the largest denominator(v)/denominator(v_fresh) so far. A tensor that stands still
    counts as 1 in [2].
    """
    options = moments.options
    variance = _variance(moments.exp_avg_sq, moments.params)
    flats = values_of(moments.y), moments.exp_avg, moments.exp_avg_sq_fresh, variance
    for segment, (value, m, fresh, v) in _pieces(moments.params, *flats):
        new = torch.zeros_like(value) if segment.still else value / moments.factors[segment.index]
        gradient = (new - m * options.beta1).div_(m.new_full((), 1 - options.beta1))
        fresh.mul_(options.beta2).add_(gradient.square_().mul_(1 - options.beta2))
        m.copy_(new)
        frozen = _denominator(v, options)
        direction, ratio = _lamb_direction(segment, m, frozen, options), (frozen / _denominator(fresh, options)).max()
        update = _lamb_update(segment, direction, options)
        row = moments.sums[segment.index]
        row[0] += direction.double().square_().sum()
        row[1] += update.double().square_().sum()
        row[2] = torch.maximum(row[2], torch.ones_like(row[2]) if segment.still else ratio.double())


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Variance, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    """Take 1-bit LAMB's second pass: p <- p - rate (bounded(m / denominator(v)) + wd p), a rate for each tensor."""
    for segment, (m, v) in _pieces(params, exp_avg, _variance(exp_avg_sq, params)):
        if segment.tensor is None:
            continue
        direction = _lamb_direction(segment, m, _denominator(v, options), options)
        update = _lamb_update(segment, direction, options)
        wide = segment.part.float()
        segment.part.copy_(wide - update * rates[segment.index])


def variance_sums_(update: VarianceUpdate, sums: Tensor) -> None:
    """Take the first pass of a refresh over a bucket: the sums of each tensor, from which its floor is made.

    ``sums``, [tensors, 3] float64, are 0 before a tensor's first segment: [0] grows by the sum of v', [1] becomes the
    largest v' so far, and [2] the largest g g; NaN stays.
    """
    for segment, _, _, square, fresh in _learnt(update):
        row = sums[segment.index]
        row[0] += fresh.sum(dtype=torch.float64)
        row[1:] = torch.maximum(row[1:], torch.stack([fresh.amax(), square.amax()]).double())


def refresh_variance_(update: VarianceUpdate, floors: Tensor, tops: Tensor | None = None, key: int = 0) -> None:
    """Take the second pass of a refresh: v <- max(v', floor), a floor for each tensor; where it is NaN v stays.

    Args:
        update: The operands of the first pass.
        floors: [tensors] float32.
        tops: [tensors] int32, from which new codes count if v is in 8 bits (see ``tops_to_dither`` in
            :mod:`~hf_compressopt.kernels.compact`); those of v itself still tell what its codes were.
        key: A number >= 0, by which codes are rounded at random: others in other steps.
    """
    for segment, old, place, _, fresh in _learnt(update):
        floor = floors[segment.index]
        new = fresh.clamp_(min=floor)
        if old.dtype == torch.uint8:
            if tops is None:
                raise ValueError("tops must be given for a variance in 8 bits")
            new = dithered_codes(fresh, tops[segment.index], (key, segment.index), place)
        old.copy_(torch.where(floor.isnan(), old, new))


def _learnt(update: VarianceUpdate) -> Iterator[tuple[Segment, Tensor, int, Tensor, Tensor]]:
    """Yield segment, stored v, place in the tensor, g g and v' of runs of elements, which need little memory."""
    v = update.exp_avg_sq
    stored = v if isinstance(v, Tensor) else v.codes
    for segment, (grads, variances) in _pieces(update.params, values_of(update.y), stored):
        if segment.numel == 0:
            continue
        place, size = segment.start, elements_at_once(grads.device)
        for grad, old in zip(torch.split(grads, size), torch.split(variances, size), strict=True):
            before = old if isinstance(v, Tensor) else decode_variance(old, v.tops[segment.index])
            square = grad.square()
            # one rounding after another: instruction sets would fuse addcmul_ in different ways
            yield segment, old, place, square, before.mul(update.memory).add_(square.mul(1 - update.memory))
            place += grad.numel()


def _lamb_direction(segment: Segment, m: Tensor, denominator: Tensor, options: LambOptions) -> Tensor:
    if segment.still:
        return torch.zeros_like(m)  # with eps = 0 the quotient is 0 / 0
    return _bounded(m / denominator, options)


def _lamb_update(segment: Segment, direction: Tensor, options: LambOptions) -> Tensor:
    if segment.tensor is None or options.weight_decay == 0:
        return direction
    return direction + segment.part.float() * options.weight_decay


def _descend_(segment: Segment, direction: Tensor, descent: Descent) -> None:
    """Move p <- p decay - lr bounded(d), in float32 whatever its dtype; d counts as 0 if the tensor stands still."""
    wide = segment.part.float()
    if descent.decay != 1:
        wide = wide * descent.decay
    if not segment.still:
        wide = wide - _bounded(direction, descent) * descent.lr
    segment.part.copy_(wide)


def _bounded(direction: Tensor, options: Descent | LambOptions) -> Tensor:
    return direction if math.isinf(options.bound) else direction.clamp(-options.bound, options.bound)


def _denominator(variance: Tensor, options: Descent | LambOptions) -> Tensor:
    if options.eps_inside_sqrt:
        return square_root(variance + options.eps)
    return square_root(variance).add_(options.eps)


def square_root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root, as native kernels do: torch's may be off by 1 ulp. x: [...] float32."""
    return x.double().sqrt_().float()


def _variance(variance: Variance, segments: Sequence[Segment]) -> Tensor:
    return values_of_variance(variance, [(segment.numel, segment.index) for segment in segments])


def _pieces(segments: Sequence[Segment], *flats: Tensor) -> Iterator[tuple[Segment, list[Tensor]]]:
    """Yield each segment with its part of the flat buffers that the segments cover."""
    start = 0
    for segment in segments:
        stop = start + segment.numel
        yield segment, [flat[start:stop] for flat in flats]
        start = stop


# -- norms -------------------------------------------------------------------------------------------------------------


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum the squares of all elements, in float64; not finite if an element is not. Native code takes no float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for run in torch.split(tensor.detach().reshape(-1), _LONG_RUN if device.type == "cpu" else _DEVICE_RUN):
            wide = run.double()
            total += torch.dot(wide, wide)
    return total


def sketch_(segments: Sequence[Segment], offset: int, seed: int, y: Tensor, squares: Tensor) -> None:
    """Add the count sketch of consecutive elements of a group: y <- y + S(g); squares <- squares + sum of g^2.

    Args:
        segments: The elements from ``offset`` of the group on, in order. Segments without a tensor count as 0.
        offset: The first element's place in the group.
        seed: A number for each step, the same on all ranks; taken modulo 2^64.
        y: [4096] float32, updated in place; not finite if an element is not.
        squares: [] float64, updated in place, to the accuracy of float32.

    The sketch S(g) of a group's n elements has k = 4096 numbers. S is linear, so the mean of the ranks' sketches is the
    sketch of the mean gradient; and E ||S(g)||^2 = ||g||^2 over seeds. The norm's relative standard deviation is about
    1 / sqrt(2 k), 1.1 %.

    Element i of the group lies in run ``i // 4096``, row ``i // 16 % 256`` and lane ``i % 16``. It is added to, or
    subtracted from, one number of the sketch: a run is laid on the sketch with its rows rotated, and the lanes of each
    row rotated. Two elements of different runs meet with probability 1 / 4096, two elements of one run never.

    * hash(x) is the finalizer of SplitMix64, and G = 0x9E3779B97F4A7C15; sums and products are modulo 2^64.
    * key = hash(seed + G) for signs, and hash(key + G) for rotations.
    * Bit ``i % 64`` of hash(sign key + ``i // 64`` G) is set if element i is subtracted.
    * With h = hash(rotation key + run G), the row moves by ``h % 256`` and the lane by ``h // 256 % 16``.

    The sums are taken in float32 over the runs of a span, in order, from +0 on, and in float64 over the spans, in
    order. A span has max(16, ceil(runs / 64)) runs, and the first span begins with the first run of the call. So all
    instruction sets, devices and numbers of threads leave the same bits.

    Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (2002).
    """
    numel = sum(segment.numel for segment in segments)
    if numel == 0:
        return
    first_run = offset // SKETCH_NUMEL
    runs = -(-(offset + numel) // SKETCH_NUMEL) - first_run
    per_span = max(_LEAST_RUNS, -(-runs // _MOST_SPANS))
    spans = -(-runs // per_span)
    rows = torch.zeros(spans * per_span * SKETCH_NUMEL, dtype=torch.float32, device=y.device)
    start = offset - first_run * SKETCH_NUMEL
    for segment in segments:
        if segment.tensor is not None:
            rows[start : start + segment.numel] = segment.part
        start += segment.numel
    squares += sum_of_squares([rows], y.device)
    placed = _placed(rows, first_run, seed).view(spans, per_span, SKETCH_NUMEL)
    sums = torch.zeros(spans, SKETCH_NUMEL, dtype=torch.float32, device=y.device)
    for run in range(per_span):
        sums += placed[:, run]
    total = torch.zeros(SKETCH_NUMEL, dtype=torch.float64, device=y.device)
    for span in sums:
        total += span
    y.copy_(y.double() + total)


def _placed(rows: Tensor, first_run: int, seed: int) -> Tensor:
    """Return whole runs with their signs, each number at its place in the sketch. rows: [runs * 4096]; likewise."""
    runs = rows.numel() // SKETCH_NUMEL
    key = next_key(seed)
    words = hashes(key, first_run * (SKETCH_NUMEL // _SIGNS), rows.numel() // _SIGNS, rows.device)
    bits = words.unsqueeze(1) >> torch.arange(_SIGNS, device=rows.device) & 1
    signed = torch.where(bits.view(-1).bool(), -rows, rows).view(runs, _ROWS, _LANES)
    rotations = hashes(next_key(key), first_run, runs, rows.device).view(-1, 1)
    from_row = (torch.arange(_ROWS, device=rows.device) - (rotations & _ROWS - 1)) % _ROWS  # [runs, rows]
    from_lane = (torch.arange(_LANES, device=rows.device) - (rotations >> 8 & _LANES - 1)) % _LANES  # [runs, lanes]
    run = torch.arange(runs, device=rows.device).view(-1, 1, 1)
    return signed[run, from_row.unsqueeze(2), from_lane.unsqueeze(1)]
