"""Signs and scales in pure PyTorch: the messages of :class:`hf_compressopt.kernels.formats.SignFormat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels.messages import message_nbytes, num_blocks

# Multiplying eight 0/1 bytes, read as one little-endian int64, by this number gathers them in the top byte, the first
# byte as its least significant bit; no partial sums meet, so there are no carries.
_GATHER_BITS = 0x0102040810204080
_TOP_BYTE_SHIFT = 56
_GROUP = 4  # messages that are summed first: few enough for a table of all sums that their signs can make
# Norms are taken in float32 over runs of this length, and in float64 over the runs: longer runs lose digits.
_RUN = 256


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a bucket whose message begins at ``byte`` and holds ``blocks`` scales."""

    start: int
    stop: int
    byte: int
    blocks: int


def rms(x: Tensor) -> Tensor:
    """Return the root mean square of all elements. x: [n] float32, n > 0. Returns [] float32."""
    return block_rms(x, x.numel()).view(())


def block_rms(x: Tensor, scale_block: int) -> Tensor:
    """Return the root mean square of each block. x: [n] float32, n > 0. Returns [ceil(n / scale_block)] float32."""
    whole = x.numel() // scale_block * scale_block
    scales = []
    if whole:
        scales.append(_row_norms(x[:whole].view(-1, scale_block)).div_(scale_block**0.5))
    if whole < x.numel():
        scales.append(_row_norms(x[whole:].unsqueeze(0)).div_((x.numel() - whole) ** 0.5))
    return torch.cat(scales).float()


def _row_norms(rows: Tensor) -> Tensor:
    """Return row norms, in float32 over short runs and in float64 over the runs. rows: [r, n]. Returns [r] float64."""
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
    """Pack the signs of x, eight to a byte, least significant bit first; 1 is negative.

    Args:
        x: [n], any floating-point dtype.

    Returns:
        [ceil(n / 8)] uint8.
    """
    negative = (x < 0).view(torch.uint8)
    if padding := -x.numel() % 8:
        negative = torch.cat([negative, negative.new_zeros(padding)])
    return negative.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(_TOP_BYTE_SHIFT).to(torch.uint8)


def unpack_signs(bits: Tensor, numel: int) -> Tensor:
    """Return signs as +1.0 and -1.0. bits: [ceil(numel / 8)] uint8. Returns [numel] float32."""
    return _sign_table(bits.device).index_select(0, bits.to(torch.int32)).view(-1)[:numel]


@lru_cache
def _sign_table(device: torch.device) -> Tensor:
    byte = torch.arange(256, device=device).unsqueeze(1)
    bit = torch.arange(8, device=device)
    return 1.0 - 2.0 * (byte >> bit & 1).float()  # [256, 8]


def compress_chunks_(
    u: Tensor, messages: Tensor, chunks: Sequence[Chunk], scale_block: int | None, scale: Tensor | None
) -> None:
    """Write the message of each chunk of u, and leave the rest in u: u <- u - Q(u).

    Args:
        u: [n] float32, updated in place.
        messages: uint8, written.
        chunks: The non-empty chunks.
        scale_block: Elements per scale, or None.
        scale: [] float32, the one scale of all chunks if ``scale_block`` is None.
    """
    for chunk in chunks:
        part = u[chunk.start : chunk.stop]
        scales = scale.view(1) if scale is not None else block_rms(part, scale_block or part.numel())
        signs = pack_signs(part)
        first_sign = chunk.byte + 4 * chunk.blocks
        messages[chunk.byte : first_sign].view(torch.float32).copy_(scales)
        last_sign = first_sign + signs.numel()
        messages[first_sign:last_sign].copy_(signs)
        messages[last_sign : chunk.byte + message_nbytes(part.numel(), scale_block)].zero_()  # padding
        part.sub_(_scaled(unpack_signs(signs, part.numel()), scales, scale_block))


def decompress_message(message: Tensor, numel: int, scale_block: int | None) -> Tensor:
    """Return the values of a message. message: uint8, from its first byte on. Returns [numel] float32."""
    blocks = 1 if scale_block is None else -(-numel // scale_block)
    scales = message[: 4 * blocks].view(torch.float32)
    bits = message[4 * blocks : 4 * blocks + -(-numel // 8)]
    return _scaled(unpack_signs(bits, numel), scales, scale_block)


def mean_of_messages(messages: Tensor, numel: int, scale_block: int | None) -> Tensor:
    """Return the mean over ranks of one chunk's messages. messages: [W, bytes] uint8. Returns [numel] float32.

    Groups of four are summed in rank order, and then the groups' sums, in order.
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


def chunks_of(numel: int, world_size: int, scale_block: int | None) -> list[Chunk]:
    """Return the chunks of a bucket that have elements."""
    chunks, byte = [], 0
    for rank in range(world_size):
        start, stop = chunk_range(numel, world_size, rank)
        if start < stop:
            chunks.append(Chunk(start, stop, byte, num_blocks(stop - start, scale_block)))
        byte += message_nbytes(stop - start, scale_block)
    return chunks
