"""Changes of 16-bit values, bit for bit: what a rank needs that has the old values to get the new ones.

A step of fine-tuning changes a few per cent of bfloat16 parameters, most of them by one unit in the last place. Values
are compared as integers in the order of the numbers: with b the bits of a value as an int16, its key is b, or
b ^ 0x7FFF if b is negative. All patterns are alike to this: -0.0, denormals, infinities, and NaN with its payload.

**A block** of 256 elements, counted from a chunk's start, is one of

* 0 bytes: no element changes.
* 512 bytes: the new values, little-endian; zeros beyond the chunk's end.
* fewer bytes otherwise, each part from a whole byte on, least significant bits first:

  =====================  ==========================================================================================
  4 bytes                which bytes of the map are not 0: bit j of 32
  those bytes            the map: element i changes if bit ``i % 8`` of byte ``i // 8`` is set
  2 bits per change      0: key + 1; 1: key - 1; 2: it is among the next part; 3: among the last one
  4 bits each            the change of the key by 2 to 9, less 2; 8 is added if it is negative
  2 bytes each           the new value, little-endian
  =====================  ==========================================================================================

A block takes its third form if that has fewer than 512 bytes.

**The message of a chunk** of n elements: the bytes of each block, ``ceil(n / 256)`` little-endian int16 numbers; zeros
up to a multiple of 16; the blocks one after another; zeros up to a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_compressopt.kernels import reference, selfcheck
from hf_compressopt.kernels.messages import MESSAGE_ALIGNMENT
from hf_compressopt.kernels.native import address, call, mark_written

BLOCK = 256
_PLAIN = 2 * BLOCK  # bytes
_HEAD = BLOCK // 64  # bytes that say which bytes of the map are there
_MOST = 9  # by which a change of 4 bits changes a key
_AT_ONCE = 512  # blocks that the reference works on

#: dtypes whose bits these are.
DTYPES = (torch.bfloat16, torch.float16)


def blocks_of(numel: int) -> int:
    return -(-numel // BLOCK)


def head_nbytes(numel: int) -> int:
    """Return the first byte of the blocks in the message of a chunk."""
    return -(-2 * blocks_of(numel) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


def message_nbytes(numel: int, payload: int) -> int:
    """Return the bytes of the message of a chunk whose blocks have so many together."""
    return -(-(head_nbytes(numel) + payload) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


def write_message_(old: Tensor, new: Tensor, sizes: Tensor, message: Tensor) -> None:
    """Write the message of a chunk. old, new: [n] int16; sizes: what :func:`change_sizes` returns; message: uint8."""
    head = head_nbytes(old.numel())
    message[: sizes.nbytes].view(torch.int16).copy_(sizes)
    message[sizes.nbytes : head] = 0
    if message.numel() > head:
        message[-MESSAGE_ALIGNMENT:] = 0  # behind the last block
    write_changes_(old, new, sizes, _offsets(sizes), message[head:])


def read_message_(message: Tensor, values: Tensor) -> None:
    """Make a chunk's old values the new ones. message: uint8, from its first byte on; values: [n] int16, in place."""
    head = head_nbytes(values.numel())
    sizes = message[: 2 * blocks_of(values.numel())].view(torch.int16)
    apply_changes_(message[head:], sizes, _offsets(sizes), values)


def _offsets(sizes: Tensor) -> Tensor:
    """Return where each block begins. sizes: [blocks] int16. Returns [blocks] int64."""
    return torch.cumsum(sizes, 0, dtype=torch.int64).sub_(sizes)


# -- the kernels, native where they are -------------------------------------------------------------------------------


def change_sizes(old: Tensor, new: Tensor) -> Tensor:
    """Return the bytes of each block. old, new: [n] int16. Returns [blocks] int16."""
    sizes = torch.empty(blocks_of(old.numel()), dtype=torch.int16, device=old.device)
    _on(old).change_sizes_(old, new, sizes)
    return sizes


def write_changes_(old: Tensor, new: Tensor, sizes: Tensor, offsets: Tensor, payload: Tensor) -> None:
    """Write blocks. old, new: [n] int16; sizes, offsets: [blocks] int16 and int64; payload: [bytes] uint8."""
    _on(old).write_changes_(old, new, sizes, offsets, payload)


def apply_changes_(payload: Tensor, sizes: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Make old values the new ones, in place. See :func:`write_changes_`."""
    _on(values).apply_changes_(payload, sizes, offsets, values)


def _on(tensor: Tensor) -> Any:
    return Native if type(tensor) is Tensor and selfcheck.trusted("changes", tensor.device) else Reference


class Reference:
    """The kernels in PyTorch, which are the specification."""

    @staticmethod
    def change_sizes_(old: Tensor, new: Tensor, sizes: Tensor) -> None:
        for at in range(0, len(sizes), _AT_ONCE):
            size = _change(_rows(old, at), _rows(new, at)).abs()
            changed, middle, wide = _kinds(size)
            used = changed.view(-1, BLOCK // 8, 8).any(dim=2).sum(dim=1)
            codes, nibbles = (changed.sum(dim=1) + 3) // 4, (middle.sum(dim=1) + 1) // 2
            nbytes = (_HEAD + used + codes + nibbles + 2 * wide.sum(dim=1)).clamp(max=_PLAIN)
            sizes[at : at + _AT_ONCE] = torch.where(used > 0, nbytes, 0).short()

    @staticmethod
    def write_changes_(old: Tensor, new: Tensor, sizes: Tensor, offsets: Tensor, payload: Tensor) -> None:
        for at in range(0, len(sizes), _AT_ONCE):
            rows, values = sizes[at : at + _AT_ONCE], _rows(new, at)
            block = _coded(_change(_rows(old, at), values), values)
            plain = values.contiguous().view(torch.uint8).int()
            block = torch.where((rows == _PLAIN).unsqueeze(1), plain, block)
            place, there = _bytes_of(rows, offsets[at : at + _AT_ONCE])
            payload[place[there]] = block[there].to(torch.uint8)

    @staticmethod
    def apply_changes_(payload: Tensor, sizes: Tensor, offsets: Tensor, values: Tensor) -> None:
        for at in range(0, len(sizes), _AT_ONCE):
            rows, old = sizes[at : at + _AT_ONCE], _rows(values, at)
            place, there = _bytes_of(rows, offsets[at : at + _AT_ONCE])
            block = torch.zeros_like(place, dtype=torch.int32)
            block[there] = payload[place[there]].int()
            plain = (block[:, 1::2] << 8 | block[:, ::2]).short()
            new = torch.where((rows == _PLAIN).unsqueeze(1), plain, _decoded(block, old))
            new = torch.where((rows == 0).unsqueeze(1), old, new).view(-1)
            part = values[at * BLOCK : (at + _AT_ONCE) * BLOCK]
            part.copy_(new[: part.numel()])


def _rows(values: Tensor, at: int) -> Tensor:
    """Return some blocks from a block on, with zeros beyond the end, [blocks, 256] int16."""
    part = values[at * BLOCK : (at + _AT_ONCE) * BLOCK]
    return pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)


def keys(bits: Tensor) -> Tensor:
    """Return keys of bits, or bits of keys, as int16."""
    return bits ^ (bits >> 15 & 0x7FFF)


def _change(old: Tensor, new: Tensor) -> Tensor:
    return keys(new).int() - keys(old).int()


def _kinds(size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tell which elements change, which of them take 4 bits more, and which 16. size: of the changes of the keys."""
    return size > 0, (size > 1) & (size <= _MOST), size > _MOST


def _bytes_of(sizes: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the bytes of blocks, [blocks, 512], and whether they are there."""
    byte = torch.arange(_PLAIN, device=sizes.device).expand(len(sizes), _PLAIN)
    return offsets.unsqueeze(1) + byte, byte < sizes.unsqueeze(1)


class _Places:
    """Where the parts of blocks lie, as they are found out one after another; each [blocks, elements] int64."""

    def __init__(self, used: Tensor) -> None:
        """used: [blocks, 32] bool, the bytes of the map that are there."""
        self.map = _HEAD + _rank(used)
        self._end = _HEAD + used.sum(dim=1, keepdim=True)

    def take(self, chosen: Tensor, per_byte: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of the next part and the places in them, so many to a byte. chosen: [blocks, 256] bool."""
        rank = _rank(chosen)
        place = self._end + rank // per_byte
        self._end = self._end + (chosen.sum(dim=1, keepdim=True) + per_byte - 1) // per_byte
        return place.clamp(0, _PLAIN - 1), rank % per_byte

    def take_pairs(self, chosen: Tensor) -> Tensor:
        """Return the first bytes of the next part, of two bytes each."""
        return (self._end + 2 * _rank(chosen)).clamp(0, _PLAIN - 2)


def _rank(chosen: Tensor) -> Tensor:
    return (chosen.long().cumsum(dim=1) - 1).clamp(min=0)


def _coded(change: Tensor, new: Tensor) -> Tensor:
    """Return blocks in the third form, [blocks, 512] int32; one of more bytes is nonsense. new: [blocks, 256] int16."""
    changed, middle, wide = _kinds(change.abs())
    bits = (changed.int() << torch.arange(BLOCK, device=change.device, dtype=torch.int32) % 8).view(-1, BLOCK // 8, 8)
    map_ = bits.sum(dim=2, dtype=torch.int32)
    used = map_ > 0
    block = torch.zeros(len(change), _PLAIN, dtype=torch.int32, device=change.device)
    places, eight = _Places(used), torch.arange(8, device=change.device, dtype=torch.int32)
    block[:, :_HEAD] = (used.int().view(-1, _HEAD, 8) << eight).sum(dim=2, dtype=torch.int32)
    block.scatter_add_(1, places.map, map_)
    kind = torch.where(wide, 3, torch.where(middle, 2, (change < 0).int())).int()
    place, at = places.take(changed, 4)
    block.scatter_add_(1, place, torch.where(changed, kind << (2 * at).int(), 0))
    place, at = places.take(middle, 2)
    nibble = change.abs() - 2 + torch.where(change < 0, 8, 0)
    block.scatter_add_(1, place, torch.where(middle, nibble << (4 * at).int(), 0).int())
    place = places.take_pairs(wide)
    block.scatter_add_(1, place, torch.where(wide, new.int() & 0xFF, 0))
    return block.scatter_add_(1, place + 1, torch.where(wide, new.int() >> 8 & 0xFF, 0))


def _decoded(block: Tensor, old: Tensor) -> Tensor:
    """Return the new values of blocks in the third form, [blocks, 256] int16. block: [blocks, 512] int32."""
    eight = torch.arange(8, device=block.device, dtype=torch.int32)
    used = (block[:, :_HEAD].unsqueeze(2) >> eight & 1).view(-1, BLOCK // 8) > 0
    places = _Places(used)
    map_ = torch.where(used, block.gather(1, places.map), 0)
    changed = (map_.unsqueeze(2) >> eight & 1).view(-1, BLOCK) > 0
    place, at = places.take(changed, 4)
    kind = torch.where(changed, block.gather(1, place) >> (2 * at).int() & 3, -1)
    middle, wide = kind == 2, kind == 3
    change = torch.where(kind == 0, 1, torch.where(kind == 1, -1, 0))
    place, at = places.take(middle, 2)
    nibble = block.gather(1, place) >> (4 * at).int() & 0xF
    size = (nibble & 7) + 2
    change = torch.where(middle, torch.where(nibble > 7, -size, size), change)
    new = keys((keys(old).int() + change).short())
    place = places.take_pairs(wide)
    raw = (block.gather(1, place + 1) << 8 | block.gather(1, place)).short()
    return torch.where(wide, raw, new)


class Native:
    """The kernels in native code."""

    @staticmethod
    def change_sizes_(old: Tensor, new: Tensor, sizes: Tensor) -> None:
        device, numel = old.device, old.numel()
        read = [address(*named, device, torch.int16, numel) for named in (("old", old), ("new", new))]
        call("co_change_sizes", device, *read, numel, _sizes_at(sizes, numel, device))
        mark_written([sizes])

    @staticmethod
    def write_changes_(old: Tensor, new: Tensor, sizes: Tensor, offsets: Tensor, payload: Tensor) -> None:
        device, numel = old.device, old.numel()
        read = [address(*named, device, torch.int16, numel) for named in (("old", old), ("new", new))]
        rows = _sizes_at(sizes, numel, device), _offsets_at(offsets, numel, device)
        written = address("payload", payload, device, torch.uint8)
        call("co_write_changes", device, *read, numel, *rows, written)
        mark_written([payload])

    @staticmethod
    def apply_changes_(payload: Tensor, sizes: Tensor, offsets: Tensor, values: Tensor) -> None:
        device, numel = values.device, values.numel()
        rows = _sizes_at(sizes, numel, device), _offsets_at(offsets, numel, device)
        read = address("payload", payload, device, torch.uint8)
        call("co_apply_changes", device, read, *rows, address("values", values, device, torch.int16), numel)
        mark_written([values])


def _sizes_at(sizes: Tensor, numel: int, device: torch.device) -> int:
    return address("sizes", sizes, device, torch.int16, blocks_of(numel))


def _offsets_at(offsets: Tensor, numel: int, device: torch.device) -> int:
    return address("offsets", offsets, device, torch.int64, blocks_of(numel))


# -- the check of the first use ---------------------------------------------------------------------------------------


def _check(kernels: Any, data: selfcheck.Data) -> selfcheck.Written:
    """Yield what the kernels write of changes of all kinds, and of blocks of all forms."""
    use = Reference if kernels is reference else Native
    steps = data.normal()
    few = torch.where(data.normal() > 1, steps, 0.0)
    for change in (few, 8 * steps, 1000 * few, 1e6 * steps):
        old = data.normal(dtype=torch.bfloat16).view(torch.int16)
        new = keys((keys(old).int() + change.int()).clamp(-0x8000, 0x7FFF).short())
        sizes = data.zeros(blocks_of(data.numel), dtype=torch.int16)
        use.change_sizes_(old, new, sizes)
        offsets, payload = _offsets(sizes), data.zeros(int(sizes.sum()))
        use.write_changes_(old, new, sizes, offsets, payload)
        use.apply_changes_(payload, sizes, offsets, old)
        yield from ((tensor, 0.0) for tensor in (sizes, payload, old, new))


selfcheck.FAMILIES["changes"] = _check
