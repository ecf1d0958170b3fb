"""The kernels in pure PyTorch: the contract of each, the fallback on every device, and the oracle of native code.

:mod:`hf_compressopt.kernels.native` has the same functions, which leave the same bits. Every operation on an element is
rounded on its own, in the order of the formulas. Only sums over many elements (scales of signs, norms) may differ, by
at most 2 ulp.

Q(u) is what the messages of a code stand for. Errors may lie in 8 bits
(:class:`~hf_compressopt.kernels.compact.CompactErrors`), and so may a frozen variance
(:class:`~hf_compressopt.kernels.compact.LogVariance`). m, v, p, g and u stand for momentum, variance, parameter,
gradient and local update. A segment that stands still (:attr:`Segment.still`) counts as a direction of 0, and as a
momentum of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_numel
from hf_compressopt.kernels.compact import Errors, Variance, keep_errors_, values_of_errors, values_of_variance
from hf_compressopt.kernels.messages import AnyCode, IntegerCode
from hf_compressopt.kernels.operands import (
    AdamUpdate,
    Average,
    Combination,
    Descent,
    IntegerAverage,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
)

_LONG_RUN, _DEVICE_RUN = 1 << 16, 1 << 23  # elements that become float64 at once, on a CPU and elsewhere


# -- compression ------------------------------------------------------------------------------------------------------


def compress_(
    code: AnyCode, z: Combination, error: Errors, messages: Tensor, world_size: int, new_error: Errors | None = None
) -> None:
    """Compress z, n values: u = z + error; messages <- Q(u); new_error <- u - Q(u), if it is given.

    ``messages`` is uint8 of all ``world_size`` chunks; ``new_error`` has the form of ``error`` and may be ``error``.
    """
    u = values_of(z) + values_of_errors(error)
    scale = code.common_scale(u)
    for start, stop, message in code.chunks(messages, z.numel, world_size):
        u[start:stop] -= code.encode_(u[start:stop], message, scale)
    if new_error is not None:
        keep_errors_(new_error, u)


def average_compress_(
    code: AnyCode, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
) -> None:
    """Average a chunk on its server: a = mean of the messages' values + error; out <- Q(a); new_error <- a - Q(a).

    The sum is taken in float32: messages in groups of four, in rank order, and then the groups' sums, in order.
    ``messages`` is uint8 [world_size * code.nbytes(n)], one message of the chunk per rank; ``new_error`` may be
    ``error``.
    """
    if (numel := error.numel()) == 0:
        return
    mean = code.sum_of(messages.view(world_size, -1), numel).mul_(1.0 / world_size)
    mean += values_of_errors(error)
    keep_errors_(new_error, mean - code.encode_(mean, out, code.common_scale(mean)))


def mean_(code: IntegerCode, messages: Tensor, out: Tensor, world_size: int, factor: float) -> None:
    """Sum the messages of one chunk, in the order of :func:`average_compress_`: out <- sum * factor, [n] float32."""
    if out.numel():
        torch.mul(code.sum_of(messages.view(world_size, -1), out.numel()), factor, out=out)


def add_(y: IntegerAverage, outputs: Sequence[Segment], decay: float, scale: float) -> None:
    """Add an average to tensors: outputs <- outputs * decay + y * scale, each operation rounded to float32.

    Outputs are written in their own dtypes, and not read if decay is 0. Segments without a tensor are left alone.
    """
    values = values_of(y) * scale
    for segment, (change,) in _pieces(outputs, values):
        if segment.tensor is not None:
            segment.part.copy_(change if decay == 0 else segment.part.float() * decay + change)


def any_nan(*averages: IntegerAverage) -> Tensor:
    """Return whether a block of some averages is not finite, [] bool, from its scales."""
    return torch.stack([largest_scale(y) for y in averages]).isnan().any()


def largest_scale(y: Average | IntegerAverage) -> Tensor:
    """Return the largest scale, [], NaN if one is: in one reduction of all whole chunks, and one of the last."""
    if y.messages is None:
        raise ValueError("an average in messages is needed, got values")
    code, each = y.code, chunk_numel(y.numel, y.world_size)
    found = [torch.zeros((), dtype=code.scale_dtype, device=y.messages.device)] if y.numel == 0 else []
    whole = y.numel // each if each else 0
    if whole:
        (first, count), size = code.scales_at(each), code.scale_dtype.itemsize
        scales = y.messages[: y.messages.numel() // size * size].view(code.scale_dtype)
        place = scales.storage_offset() + first // size
        found.append(scales.as_strided((whole, count), (y.stride // size, 1), place).amax())
    if rest := y.numel - whole * each:
        found.append(code.scales(y.messages[whole * y.stride :], rest).amax())
    return found[0] if len(found) == 1 else torch.maximum(*found)


def decompress_(y: Average | IntegerAverage, out: Tensor) -> None:
    """Write the values of an average: out <- y. out: [n] float32, written."""
    if y.messages is None:
        assert isinstance(y, Average) and y.values is not None
        out.copy_(y.values)
        return
    for start, stop, message in y.code.chunks(y.messages, y.numel, y.world_size, y.stride):
        out[start:stop] = y.code.decode(message, stop - start)


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


def values_of(operand: Combination | Average | IntegerAverage) -> Tensor:
    """Return the values, [n] float32. Do not change them: they may be the operand's own."""
    if isinstance(operand, Combination):
        if operand.x is not None and operand.alpha == 1 and operand.grads is None and operand.factors is None:
            return operand.x
        out = torch.empty(operand.numel, dtype=torch.float32, device=operand.device)
        combine_(operand, out)
        return out
    if isinstance(operand, Average) and operand.values is not None:
        return operand.values
    assert operand.messages is not None
    out = torch.empty(operand.numel, dtype=torch.float32, device=operand.messages.device)
    decompress_(operand, out)
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
    lr_sum = sync.exp_avg.new_tensor(sync.lr_sum)  # for a number, CUDA multiplies by its inverse
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

    Each tensor has three sums: [0] grows by the sum of (m'/denominator(v))^2, [1] by the sum of
    (m'/denominator(v) + wd p)^2, and [2] becomes the largest denominator(v)/denominator(v_fresh) so far. A tensor that
    stands still counts as 1 in [2].
    """
    options = moments.options
    variance = _variance(moments.exp_avg_sq, moments.params)
    flats = values_of(moments.y), moments.exp_avg, moments.exp_avg_sq_fresh, variance
    for segment, (value, m, fresh, v) in _pieces(moments.params, *flats):
        new = torch.zeros_like(value) if segment.still else value / moments.factors[segment.index]
        gradient = (new - m * options.beta1).div_(m.new_tensor(1 - options.beta1))
        fresh.mul_(options.beta2).add_(gradient.square_().mul_(1 - options.beta2))
        m.copy_(new)
        frozen = _denominator(v, options)
        direction, ratio = _lamb_direction(segment, m, frozen), (frozen / _denominator(fresh, options)).max()
        update = _lamb_update(segment, direction, options)
        row = moments.sums[segment.index]
        row[0] += direction.double().square_().sum()
        row[1] += update.double().square_().sum()
        row[2] = torch.maximum(row[2], torch.ones_like(row[2]) if segment.still else ratio.double())


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Variance, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    """Take 1-bit LAMB's second pass: p <- p - rate (m / denominator(v) + wd p), a rate for each tensor."""
    for segment, (m, v) in _pieces(params, exp_avg, _variance(exp_avg_sq, params)):
        if segment.tensor is None:
            continue
        update = _lamb_update(segment, _lamb_direction(segment, m, _denominator(v, options)), options)
        wide = segment.part.float()
        segment.part.copy_(wide - update * rates[segment.index])


def _lamb_direction(segment: Segment, m: Tensor, denominator: Tensor) -> Tensor:
    return torch.zeros_like(m) if segment.still else m / denominator  # with eps = 0 the quotient is 0 / 0


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


def _bounded(direction: Tensor, descent: Descent) -> Tensor:
    return direction if math.isinf(descent.bound) else direction.clamp(-descent.bound, descent.bound)


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


# -- norms ------------------------------------------------------------------------------------------------------------


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum the squares of all elements, in float64; not finite if an element is not. Native code takes no float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for run in torch.split(tensor.detach().reshape(-1), _LONG_RUN if device.type == "cpu" else _DEVICE_RUN):
            wide = run.double()
            total += torch.dot(wide, wide)
    return total
