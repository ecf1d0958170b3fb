"""The kernels in pure PyTorch: the specification, the fallback on every device, and the oracle of the native kernels.

The functions implement :class:`hf_compressopt.kernels.protocol.Kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels.errors import Errors, keep_errors_, values_of_errors
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.signs import chunks_of, compress_chunks_, decompress_message, mean_of_messages, rms
from hf_compressopt.kernels.updates import AdamUpdate, Descent, LambMoments, LambOptions, LocalUpdate, ParameterSync
from hf_compressopt.kernels.variance import Variance, values_of_variance

_LONG_RUN, _DEVICE_RUN = 1 << 16, 1 << 23  # elements that become float64 at once, on a CPU and elsewhere


# -- compression ------------------------------------------------------------------------------------------------------


def compress_(z: Combination, error: Errors, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.compress_`."""
    u = values_of(z) + values_of_errors(error)
    scale = None if scale_block is not None or z.numel == 0 else rms(u)
    compress_chunks_(u, messages, chunks_of(z.numel, world_size, scale_block), scale_block, scale)
    keep_errors_(error, u)


def compress_only_(z: Combination, error: Errors, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.compress_only_`."""
    u = values_of(z) + values_of_errors(error)
    scale = None if scale_block is not None or z.numel == 0 else rms(u)
    compress_chunks_(u, messages, chunks_of(z.numel, world_size, scale_block), scale_block, scale)


def commit_(z: Combination, error: Errors, own: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.commit_`."""
    u = values_of(z) + values_of_errors(error)
    for chunk in chunks_of(z.numel, world_size, scale_block):
        u[chunk.start : chunk.stop] -= decompress_message(own[chunk.byte :], chunk.stop - chunk.start, scale_block)
    keep_errors_(error, u)


def average_compress_(messages: Tensor, error: Errors, out: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.average_compress_`."""
    numel = error.numel()
    if numel == 0:
        return
    u = values_of_errors(error) + mean_of_messages(messages.view(world_size, -1), numel, scale_block)
    scale = None if scale_block is not None else rms(u)
    compress_chunks_(u, out, chunks_of(numel, 1, scale_block), scale_block, scale)
    keep_errors_(error, u)


def decompress_(y: Average, out: Tensor) -> None:
    """See :meth:`Kernels.decompress_`."""
    if y.messages is None:
        assert y.values is not None
        out.copy_(y.values)
        return
    for rank in range(y.world_size):
        start, stop = chunk_range(y.numel, y.world_size, rank)
        if start < stop:
            out[start:stop] = decompress_message(y.messages[rank * y.stride :], stop - start, y.scale_block)


def combine_(z: Combination, out: Tensor) -> None:
    """See :meth:`Kernels.combine_`."""
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
    if z.rest is not None:
        out.add_(z.rest)


def values_of(operand: Combination | Average) -> Tensor:
    """Return the values, [n] float32. Do not change them: they may be the operand's own."""
    if isinstance(operand, Combination):
        others = operand.grads, operand.factors, operand.rest
        if operand.x is not None and operand.alpha == 1 and all(other is None for other in others):
            return operand.x
        out = torch.empty(operand.numel, dtype=torch.float32, device=operand.device)
        combine_(operand, out)
        return out
    if operand.values is not None:
        return operand.values
    assert operand.messages is not None
    out = torch.empty(operand.numel, dtype=torch.float32, device=operand.messages.device)
    decompress_(operand, out)
    return out


# -- the optimizers' steps --------------------------------------------------------------------------------------------


def apply_adam_(update: AdamUpdate) -> None:
    """See :meth:`Kernels.apply_adam_`."""
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
    """See :meth:`Kernels.local_step_`."""
    if update.grads is not None:
        m, beta1 = update.exp_avg, update.beta1
        combine_(Combination(m.numel(), m.device, m, beta1, update.grads, 1 - beta1), m)
    for segment, (m, v) in _pieces(update.params, update.exp_avg, _variance(update.exp_avg_sq, update.params)):
        if segment.tensor is not None:
            _descend_(segment, m / _denominator(v, update.descent), update.descent)
    update.local_update.add_(update.exp_avg * update.descent.lr)


def sync_parameters_(sync: ParameterSync) -> None:
    """See :meth:`Kernels.sync_parameters_`."""
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
    """See :meth:`Kernels.lamb_moments_`."""
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
    """See :meth:`Kernels.lamb_apply_`."""
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
    """Move p <- p decay - lr bounded(d), in float32 whatever the parameter's dtype.

    d counts as 0 if the tensor stands still.
    """
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
    """See :meth:`Kernels.sum_of_squares`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for run in torch.split(tensor.detach().reshape(-1), _LONG_RUN if device.type == "cpu" else _DEVICE_RUN):
            wide = run.double()
            total += torch.dot(wide, wide)
    return total
