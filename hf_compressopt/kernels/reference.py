"""The kernels in pure PyTorch: the specification, the fallback on every device, and the oracle of native ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels.messages import message_nbytes, num_blocks
from hf_compressopt.kernels.operands import Average, Combination, Descent, LambOptions, Segment

# Multiplying eight 0/1 bytes, read as one little-endian int64, by this number gathers them in the top byte, the first
# byte as its least significant bit; no partial sums meet, so there are no carries.
_GATHER_BITS = 0x0102040810204080
_TOP_BYTE_SHIFT = 56
_GROUP = 4  # messages that are summed by themselves: few enough for a table of the sums that their signs can make
# Norms are taken in float32 over runs of this length, and in float64 over the runs: longer ones lose digits.
_RUN = 256
_LONG_RUN, _DEVICE_RUN = 1 << 16, 1 << 23  # elements that are turned to float64 at once, on a CPU and elsewhere


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a bucket whose message begins at ``byte`` and holds ``blocks`` scales."""

    start: int
    stop: int
    byte: int
    blocks: int


def rms(x: Tensor) -> Tensor:
    """Root mean square of all elements. x: [n] float32, n > 0. Returns [] float32."""
    return block_rms(x, x.numel()).view(())


def block_rms(x: Tensor, scale_block: int) -> Tensor:
    """Root mean square of each block. x: [n] float32, n > 0. Returns [ceil(n / scale_block)] float32."""
    whole = x.numel() // scale_block * scale_block
    scales = []
    if whole:
        scales.append(_row_norms(x[:whole].view(-1, scale_block)).div_(scale_block**0.5))
    if whole < x.numel():
        scales.append(_row_norms(x[whole:].unsqueeze(0)).div_((x.numel() - whole) ** 0.5))
    return torch.cat(scales).float()


def _row_norms(rows: Tensor) -> Tensor:
    """Norm of each row, in float32 over short runs and in float64 over the runs. rows: [r, n]. Returns [r] float64."""
    whole = rows.shape[1] // _RUN * _RUN
    parts = []
    if whole:
        runs = torch.linalg.vector_norm(rows[:, :whole].view(rows.shape[0], -1, _RUN), dim=2)
        parts.append(torch.linalg.vector_norm(runs.double(), dim=1))
    if whole < rows.shape[1]:
        parts.append(torch.linalg.vector_norm(rows[:, whole:], dim=1).double())
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0) if len(parts) > 1 else parts[0]
    return norms


def pack_signs(x: Tensor) -> Tensor:
    """Signs of x, eight to a byte, least significant bit first; 1 is negative. x: [n]. Returns [ceil(n / 8)] uint8."""
    negative = (x < 0).view(torch.uint8)
    if padding := -x.numel() % 8:
        negative = torch.cat([negative, negative.new_zeros(padding)])
    return negative.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(_TOP_BYTE_SHIFT).to(torch.uint8)


def unpack_signs(bits: Tensor, numel: int) -> Tensor:
    """The signs as +1.0 and -1.0. bits: [ceil(numel / 8)] uint8. Returns [numel] float32."""
    return _sign_table(bits.device).index_select(0, bits.to(torch.int32)).view(-1)[:numel]


@lru_cache
def _sign_table(device: torch.device) -> Tensor:
    byte = torch.arange(256, device=device).unsqueeze(1)
    bit = torch.arange(8, device=device)
    return 1.0 - 2.0 * (byte >> bit & 1).float()  # [256, 8]


def compress_chunks_(
    u: Tensor, messages: Tensor, chunks: Sequence[Chunk], scale_block: int | None, scale: Tensor | None
) -> None:
    """Write the message of each chunk of u, and leave in u what the messages miss: u <- u - Q(u).

    Args:
        u: [n] float32, updated in place.
        messages: uint8, written.
        chunks: The non-empty chunks.
        scale_block: Elements per scale, or None.
        scale: [] float32, the one scale of every chunk where ``scale_block`` is None.
    """
    for chunk in chunks:
        part = u[chunk.start : chunk.stop]
        scales = scale.view(1) if scale is not None else block_rms(part, scale_block or part.numel())
        signs = pack_signs(part)
        first_sign = chunk.byte + 4 * chunk.blocks
        messages[chunk.byte : first_sign].view(torch.float32).copy_(scales)
        messages[first_sign : first_sign + signs.numel()].copy_(signs)
        part.sub_(_scaled(unpack_signs(signs, part.numel()), scales, scale_block))


def decompress_message(message: Tensor, numel: int, scale_block: int | None) -> Tensor:
    """The elements that a message stands for. message: uint8, from its first byte on. Returns [numel] float32."""
    blocks = 1 if scale_block is None else -(-numel // scale_block)
    scales = message[: 4 * blocks].view(torch.float32)
    bits = message[4 * blocks : 4 * blocks + -(-numel // 8)]
    return _scaled(unpack_signs(bits, numel), scales, scale_block)


def mean_of_messages(messages: Tensor, numel: int, scale_block: int | None) -> Tensor:
    """Mean over ranks of one chunk's messages. messages: [W, bytes] uint8. Returns [numel].

    Groups of four are summed, in rank order, and then the groups' sums, in order.
    """

    def sum_of(group: Tensor) -> Tensor:
        total = decompress_message(group[0], numel, scale_block)
        for message in group[1:]:
            total.add_(decompress_message(message, numel, scale_block))
        return total

    first, *others = torch.split(messages, _GROUP)
    total = sum_of(first)
    for group in others:
        total.add_(sum_of(group))
    return total.mul_(1.0 / messages.shape[0])


def _scaled(signs: Tensor, scales: Tensor, scale_block: int | None) -> Tensor:
    """Multiply each block of signs by its scale, in place. signs: [n], scales: [blocks]. Returns signs."""
    if scale_block is None:
        return signs.mul_(scales)
    whole = signs.numel() // scale_block * scale_block
    signs[:whole].view(-1, scale_block).mul_(scales[: whole // scale_block].unsqueeze(1))
    signs[whole:].mul_(scales[-1])
    return signs


# -- compression ------------------------------------------------------------------------------------------------------


def compress_(z: Combination, error: Tensor, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :func:`hf_compressopt.kernels.compress_`."""
    error.add_(values_of(z))
    scale = None if scale_block is not None or z.numel == 0 else rms(error)
    compress_chunks_(error, messages, _chunks(z.numel, world_size, scale_block), scale_block, scale)


def average_compress_(messages: Tensor, error: Tensor, out: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :func:`hf_compressopt.kernels.average_compress_`."""
    numel = error.numel()
    if numel == 0:
        return
    error.add_(mean_of_messages(messages.view(world_size, -1), numel, scale_block))
    scale = None if scale_block is not None else rms(error)
    compress_chunks_(error, out, _chunks(numel, 1, scale_block), scale_block, scale)


def decompress_(y: Average, out: Tensor) -> None:
    """See :func:`hf_compressopt.kernels.decompress_`."""
    if y.messages is None:
        assert y.values is not None
        out.copy_(y.values)
        return
    for rank in range(y.world_size):
        start, stop = chunk_range(y.numel, y.world_size, rank)
        if start < stop:
            out[start:stop] = decompress_message(y.messages[rank * y.stride :], stop - start, y.scale_block)


def combine_(z: Combination, out: Tensor) -> None:
    """See :func:`hf_compressopt.kernels.combine_`."""
    if z.x is not None:
        torch.mul(z.x, z.alpha, out=out)
    else:
        out.zero_()
    for segment, (part,) in _pieces(z.grads or (), out):
        if segment.tensor is not None:
            part.add_(segment.part.float() * z.beta)
        if z.factors is not None:
            part.mul_(z.factors[segment.index])


def values_of(operand: Combination | Average) -> Tensor:
    """The values, [n] float32: not to be changed, since they may be the operand's own."""
    if isinstance(operand, Combination):
        if operand.x is not None and operand.alpha == 1 and operand.grads is None and operand.factors is None:
            return operand.x
        out = torch.empty(operand.numel, device=operand.device)
        combine_(operand, out)
        return out
    if operand.values is not None:
        return operand.values
    assert operand.messages is not None
    out = torch.empty(operand.numel, device=operand.messages.device)
    decompress_(operand, out)
    return out


def _chunks(numel: int, world_size: int, scale_block: int | None) -> list[Chunk]:
    chunks, byte = [], 0
    for rank in range(world_size):
        start, stop = chunk_range(numel, world_size, rank)
        if start < stop:
            chunks.append(Chunk(start, stop, byte, num_blocks(stop - start, scale_block)))
        byte += message_nbytes(stop - start, scale_block)
    return chunks


# -- what the optimizers do with the average --------------------------------------------------------------------------


def apply_adam_(
    y: Average,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Segment],
    descent: Descent,
    beta: float,
    corrections: Tensor | None,
) -> None:
    """See :func:`hf_compressopt.kernels.apply_adam_`."""
    values = values_of(y)
    if beta == 1:
        exp_avg.copy_(values)
    else:
        exp_avg.add_((values - exp_avg).mul_(beta))
    for segment, (m, v) in _pieces(params, exp_avg, exp_avg_sq):
        if segment.still:
            m.zero_()
        if segment.tensor is None:
            continue
        if corrections is None:
            direction = m / _denominator(v, descent)
        else:
            first, second = corrections[segment.index].unbind()
            direction = (m / first).div_(_denominator(v / second, descent))
            direction = torch.where(torch.isinf(first), 0.0, direction)
        _descend_(segment, direction, descent)


def local_step_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    local_update: Tensor,
    grads: Sequence[Segment] | None,
    params: Sequence[Segment],
    beta1: float,
    descent: Descent,
) -> None:
    """See :func:`hf_compressopt.kernels.local_step_`."""
    if grads is not None:
        combine_(Combination(exp_avg.numel(), exp_avg.device, exp_avg, beta1, grads, 1 - beta1), exp_avg)
    for segment, (m, v) in _pieces(params, exp_avg, exp_avg_sq):
        if segment.tensor is not None:
            _descend_(segment, m / _denominator(v, descent), descent)
    local_update.add_(exp_avg * descent.lr)


def sync_parameters_(
    y: Average,
    exp_avg: Tensor,
    anchor: Tensor,
    exp_avg_sq: Tensor,
    local_update: Tensor,
    params: Sequence[Segment],
    lr_sum: float,
    descent: Descent,
) -> None:
    """See :func:`hf_compressopt.kernels.sync_parameters_`."""
    values = values_of(y)
    torch.div(values, exp_avg.new_tensor(lr_sum), out=exp_avg)  # by a tensor: by a number, CUDA multiplies
    for segment, (m, own, value, v) in _pieces(params, exp_avg, anchor, values, exp_avg_sq):
        if segment.still:
            m.zero_()
        if segment.tensor is not None:
            direction = torch.zeros_like(value) if segment.still else value / _denominator(v, descent)
            own.mul_(descent.decay).sub_(direction)
            segment.part.copy_(own)
    local_update.zero_()


def lamb_moments_(
    y: Average,
    exp_avg: Tensor,
    exp_avg_sq_fresh: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Segment],
    factors: Tensor,
    sums: Tensor,
    options: LambOptions,
) -> None:
    """See :func:`hf_compressopt.kernels.lamb_moments_`."""
    values = values_of(y)
    for segment, (value, m, fresh, v) in _pieces(params, values, exp_avg, exp_avg_sq_fresh, exp_avg_sq):
        new = torch.zeros_like(value) if segment.still else value / factors[segment.index]
        gradient = (new - m * options.beta1).div_(m.new_tensor(1 - options.beta1))
        fresh.mul_(options.beta2).add_(gradient.square_().mul_(1 - options.beta2))
        m.copy_(new)
        frozen = _denominator(v, options)
        direction, ratio = _lamb_direction(segment, m, frozen), (frozen / _denominator(fresh, options)).max()
        update = _lamb_update(segment, direction, options)
        row = sums[segment.index]
        row[0] += direction.double().square_().sum()
        row[1] += update.double().square_().sum()
        row[2] = torch.maximum(row[2], torch.ones_like(row[2]) if segment.still else ratio.double())


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Tensor, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    """See :func:`hf_compressopt.kernels.lamb_apply_`."""
    for segment, (m, v) in _pieces(params, exp_avg, exp_avg_sq):
        if segment.tensor is None:
            continue
        update = _lamb_update(segment, _lamb_direction(segment, m, _denominator(v, options)), options)
        wide = segment.part.float()
        segment.part.copy_(wide - update * rates[segment.index])


def _lamb_direction(segment: Segment, m: Tensor, denominator: Tensor) -> Tensor:
    return torch.zeros_like(m) if segment.still else m / denominator  # with eps = 0 it were 0 / 0


def _lamb_update(segment: Segment, direction: Tensor, options: LambOptions) -> Tensor:
    if segment.tensor is None or options.weight_decay == 0:
        return direction
    return direction + segment.part.float() * options.weight_decay


def _descend_(segment: Segment, direction: Tensor, descent: Descent) -> None:
    """Move p <- p decay - lr d, in float32 whatever the parameter's dtype, and 0 for d where the tensor keeps still."""
    wide = segment.part.float()
    if descent.decay != 1:
        wide = wide * descent.decay
    if not segment.still:
        wide = wide - direction * descent.lr
    segment.part.copy_(wide)


def _denominator(variance: Tensor, options: Descent | LambOptions) -> Tensor:
    if options.eps_inside_sqrt:
        return square_root(variance + options.eps)
    return square_root(variance).add_(options.eps)


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded, as native kernels compute it: a CPU's torch may miss that by 1 ulp. x: [...] float32."""
    return x.double().sqrt_().float()


def _pieces(segments: Sequence[Segment], *flats: Tensor) -> Iterator[tuple[Segment, list[Tensor]]]:
    """Each segment, and where it lies in flat buffers that the segments cover."""
    start = 0
    for segment in segments:
        stop = start + segment.numel
        yield segment, [flat[start:stop] for flat in flats]
        start = stop


# -- norms ------------------------------------------------------------------------------------------------------------


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """See :func:`hf_compressopt.kernels.sum_of_squares`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for run in torch.split(tensor.detach().reshape(-1), _LONG_RUN if device.type == "cpu" else _DEVICE_RUN):
            wide = run.double()
            total += torch.dot(wide, wide)
    return total
