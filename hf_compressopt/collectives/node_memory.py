"""Memory that the ranks of one host share: blocks that one rank writes, and the others read.

A block is a file without a name (memfd). A rank opens the blocks of another one through that one's process, so that
nothing is left behind by a run that was killed, and a small /dev/shm is no limit. The memory of a block exists from
the start: a write never fails for want of it.

Who may write and read when is up to operations, which all ranks number alike. An operation has at most one block of
each rank. Its ranks tell each other of them by tickets. A ticket also tells how many operations its rank has finished,
so that the others know when they may write to a block again; and whether the block is new: a rank may let go of a new
one, and end, only when the others have opened it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MIB = 1 << 20
#: Name of the files, which /proc tells.
_NAME = "hf_compressopt"
#: Bytes at the start of the first block by which others recognize it.
_SECRET = 16


@dataclass
class Block:
    """Memory of this rank, for one operation at a time.

    Attributes:
        number: Its number on this rank.
        descriptor: Number of its file in this process.
        memory: Its bytes, uint8.
        free_after: All ranks have read it when they have finished as many operations; None while it is being written.
        new: Whether the others may not have opened it.
    """

    number: int
    descriptor: int
    memory: Tensor
    free_after: int | None = 0
    new: bool = True

    @classmethod
    def make(cls, number: int, nbytes: int) -> Block:
        """Allocate a block.

        Raises:
            OSError: If there is no memory for it, or if the system has no such files.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create()")
        descriptor = os.memfd_create(_NAME)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            block = cls(number, descriptor, _mapped(descriptor, nbytes))
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(block, os.close, descriptor)
        return block


@dataclass(frozen=True)
class Claim:
    """What a rank tells the others of itself, so that these can open its blocks: its host, process and first block."""

    host: str
    process: int
    descriptor: int
    nbytes: int
    secret: str


class NodeMemory:
    """This rank's blocks, and those of the others that it has opened.

    Operations are numbered from 0 in the order of :meth:`begin`, which must be alike on all ranks.

    Attributes:
        rank: This rank's number among those of the node.
        off: Whether no block is to be had any more.
    """

    def __init__(self, ranks: int, rank: int, limit: int) -> None:
        """Start without blocks.

        Args:
            ranks: Ranks that share memory.
            rank: This rank's number among them.
            limit: The most bytes that this rank's blocks may have together.
        """
        self.off = False
        self.rank, self._limit = rank, limit
        self._blocks: list[Block] = []
        self._others: list[dict[int, Tensor]] = [{} for _ in range(ranks)]  # blocks, by their numbers
        self._processes = [os.getpid()] * ranks
        self._begun = 0
        self._finished: set[int] = set()
        self._read = [0] * ranks  # operations that each rank has finished

    def claim(self, host: str) -> Claim:
        """Make the first block, and return what the others need.

        Raises:
            OSError: If there is no such memory.
        """
        block, secret = self._new(_SECRET), secrets.token_bytes(_SECRET)
        block.memory[:_SECRET] = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        return Claim(host, os.getpid(), block.descriptor, block.memory.numel(), secret.hex())

    def open(self, claims: Sequence[Claim]) -> None:
        """Open the first block of every other rank, by rank.

        Raises:
            OSError: If this process cannot, or if the rank is on another host.
        """
        for rank, claim in enumerate(claims):
            if rank == self.rank:
                continue
            if claim.host != claims[self.rank].host:
                raise OSError(f"rank {rank} of the node is on {claim.host}, this one on {claims[self.rank].host}")
            self._processes[rank] = claim.process
            memory = _opened(claim.process, claim.descriptor, claim.nbytes)
            if bytes(memory[:_SECRET].tolist()).hex() != claim.secret:
                raise OSError(f"process {claim.process} is another one for this rank than for rank {rank} of the node")
            self._others[rank][0] = memory
        self._blocks[0].new = False  # once all ranks have told that they got this far

    def block(self, nbytes: int) -> Block | None:
        """Return a block of at least ``nbytes`` bytes that nobody reads any more; None if there is no memory for it."""
        done = min(self._read)
        free = [b for b in self._blocks if b.free_after is not None and b.free_after <= done]
        found = min((b for b in free if b.memory.numel() >= nbytes), key=lambda b: b.memory.numel(), default=None)
        try:
            found = found or self._new(nbytes)
        except OSError:
            return None
        found.free_after = None
        return found

    def give_back(self, block: Block) -> None:
        """Let a block be used again that no operation has taken."""
        block.free_after = 0

    def _new(self, nbytes: int) -> Block:
        whole = max(1, -(-nbytes // _MIB)) * _MIB
        if sum(block.memory.numel() for block in self._blocks) + whole > self._limit:
            raise OSError(f"the blocks of a rank may have {self._limit} bytes together")
        self._blocks.append(Block.make(len(self._blocks), whole))
        return self._blocks[-1]

    def begin(self, block: Block | None) -> tuple[int, list[int]]:
        """Begin an operation; None is no block.

        Returns:
            The number of the operation, and this rank's ticket for it: block, descriptor, bytes, whether the block is
            new, and the operations that this rank has finished.
        """
        number = self._begun
        self._begun += 1
        if block is None:
            return number, [-1, 0, 0, 0, self._read[self.rank]]
        block.free_after, new, block.new = number + 1, block.new, False
        place = [block.number, block.descriptor, block.memory.numel(), int(new)]
        return number, [*place, self._read[self.rank]]

    def rows(self, tickets: Sequence[Sequence[int]]) -> list[Tensor] | None:
        """Return the block of each rank for an operation, uint8; None if a rank has none.

        Raises:
            OSError: If a block cannot be opened.
        """
        rows: list[Tensor] = []
        for rank, (block, descriptor, nbytes, _, read) in enumerate(tickets):
            self._read[rank] = max(self._read[rank], read)
            if block < 0:
                continue
            if rank == self.rank:
                rows.append(self._blocks[block].memory)
                continue
            opened = self._others[rank]
            if block not in opened:
                opened[block] = _opened(self._processes[rank], descriptor, nbytes)
            rows.append(opened[block])
        return rows if len(rows) == len(tickets) else None

    @staticmethod
    def any_new(tickets: Sequence[Sequence[int]]) -> bool:
        """Return whether a block of an operation is new."""
        return any(new for *_, new, _ in tickets)

    def finish(self, number: int) -> None:
        """Tell that this rank has read all that it needs of an operation."""
        self._finished.add(number)
        while self._read[self.rank] in self._finished:
            self._finished.remove(self._read[self.rank])
            self._read[self.rank] += 1


def _opened(process: int, descriptor: int, nbytes: int) -> Tensor:
    path = f"/proc/{process}/fd/{descriptor}"
    if _NAME not in os.readlink(path):  # in another container the number may be that of any process and file
        raise OSError(f"{path} is no memory of a rank, but {os.readlink(path)}")
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(own, nbytes)
    finally:
        os.close(own)


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """Return the memory of a file, [nbytes] uint8; all its pages are in place."""
    if os.fstat(descriptor).st_size < nbytes:
        raise OSError(f"a block of {nbytes} bytes has {os.fstat(descriptor).st_size}")
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=flags), dtype=torch.uint8)
