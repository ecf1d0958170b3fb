"""Exact parameters: the changes of 16-bit parameters on the wire in place of the parameters, bit for bit.

The owner of a part of a slice has float32 masters. It knows the values that all ranks have, which are in the
parameter, and those that they shall have, which the masters round to. It sends what changed
(:mod:`hf_compressopt.kernels.changes`):

    message <- changes(parameter, round(master));  parameter <- parameter + message on all ranks        (3)

How long a message is depends on the step. So all parts are updated first. One small all-gather then tells all ranks
the lengths of all messages, and the host waits once; then the messages follow, consecutive ones together.

(3) needs alike parameters on all ranks. Each rank sends a digest of the bits that it has of each slice along with the
lengths. A slice of which the ranks have different bits travels in full, as do those whose changes would take more
bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import Pipeline, Task, all_gather
from hf_compressopt.flat import Partition
from hf_compressopt.kernels import changes
from hf_compressopt.kernels.memory import flat_view, in_memory, is_direct
from hf_compressopt.zero.config import ZeroConfig
from hf_compressopt.zero.parts import Part, digest_of_bits, write_span
from hf_compressopt.zero.reducer import gather_parameters

logger = logging.getLogger(__name__)

#: Bytes of all ranks' messages up to which those of consecutive slices are sent together.
TOGETHER_NBYTES = 1 << 23


@dataclass
class _Waiting:
    """A slice whose parts are updated, and not yet sent."""

    cut: Partition
    communicator: Communicator
    parts: Sequence[Part]  # this rank's
    sizes: Tensor  # [blocks] int16, of the changes of this rank's part
    digest: Tensor  # [] int64, of the bits of the whole slice before the update
    dtype: torch.dtype
    payloads: Sequence[int] = ()  # bytes of each rank's blocks, once they are known

    @property
    def plain_nbytes(self) -> int:
        """Bytes of a rank's part in full."""
        return self.cut.chunk_numel * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        return self.sizes.device

    def message_nbytes(self, rank: int) -> int:
        return changes.message_nbytes(self.cut.owned_numels[rank], self.payloads[rank])


class ExactParameters:
    """The sender of the exact parameters of one step."""

    def __init__(self, tensors: Sequence[Tensor], config: ZeroConfig) -> None:
        self._tensors, self._config = tensors, config
        self._waiting: dict[Communicator, list[_Waiting]] = {}
        self.numel = 0  # of all slices that were given
        self.nbytes = 0  # that all ranks together put on the wire for them, each once

    @property
    def bits_per_parameter(self) -> float | None:
        """Bits of a parameter in the messages of this step; None if no slice was given."""
        return 8 * self.nbytes / self.numel if self.numel else None

    def takes(self, cut: Partition, communicator: Communicator) -> bool:
        """Return whether the parameters of a slice are sent exactly; the same on all ranks."""
        if not self._config.exact or communicator.world_size == 1:
            return False
        dtypes = {self._tensors[number].dtype for number in cut.spans}
        return len(dtypes) == 1 and dtypes <= {*changes.DTYPES} - {self._config.master}

    @torch.no_grad()
    def add(self, cut: Partition, communicator: Communicator, parts: Sequence[Part]) -> None:
        """Take a slice whose parts of this rank are updated, and not yet written into the parameters."""
        example = self._tensors[next(iter(cut.spans))]
        sizes = torch.empty(0, dtype=torch.int16, device=example.device)
        if parts:
            old, _ = self._values(cut, communicator.rank)
            sizes = changes.change_sizes(old, _rounded(cut, communicator.rank, parts, example))
        digests = [digest_of_bits(_flat(self._tensors[index])[start:stop]) for index, start, stop in cut.stretches]
        digest = digests[0]
        for other in digests[1:]:
            digest = digest * 31 + other
        self._waiting.setdefault(communicator, []).append(
            _Waiting(cut, communicator, parts, sizes, digest, example.dtype)
        )

    @torch.no_grad()
    def send(self, pipeline: Pipeline) -> None:
        """Exchange the lengths, and start to send all slices. All ranks call."""
        tables = []
        for communicator, waiting in self._waiting.items():
            rows = [torch.stack([each.sizes.sum(dtype=torch.int64), each.digest]) for each in waiting]
            mine = torch.cat([row.to(communicator.device) for row in rows])
            table = mine.new_empty(communicator.world_size * mine.numel())
            communicator.all_gather(table, mine).wait()
            self.nbytes += table.nbytes
            tables.append(table)
        if not tables:
            return
        numbers = iter(torch.cat([table.to(tables[0].device) for table in tables]).tolist())  # the host waits here
        for communicator, waiting in self._waiting.items():
            world_size = communicator.world_size
            found = [[(next(numbers), next(numbers)) for _ in waiting] for _ in range(world_size)]
            self._start(waiting, [[row[index] for row in found] for index in range(len(waiting))], pipeline)

    def _start(
        self, waiting: Sequence[_Waiting], rows: Sequence[Sequence[tuple[int, int]]], pipeline: Pipeline
    ) -> None:
        """Start to send slices of one communicator. rows: of each slice the length and the digest of each rank."""
        exact, plain, different = [], [], 0
        for each, row in zip(waiting, rows, strict=True):
            each.payloads = [payload for payload, _ in row]
            self.numel += sum(stop - start for _, start, stop in each.cut.stretches)
            alike = len({digest for _, digest in row}) == 1
            different += not alike
            ranks = range(len(row))
            if not alike or max(map(each.message_nbytes, ranks)) > each.plain_nbytes:
                plain.append(each)
            elif any(each.payloads):  # else nothing changes on any rank
                exact.append(each)
        if different and waiting[0].communicator.rank == 0:
            logger.warning(
                "%d of %d slices of parameters are sent in full: the ranks have different values in them. Other code "
                "must write the same ones on all ranks",
                different,
                len(waiting),
            )
        for each in plain:
            for part in each.parts:
                part.write_back()
            nbytes = each.cut.numel * each.dtype.itemsize
            self.nbytes += nbytes
            pipeline.add(gather_parameters(self._tensors, each.cut, each.communicator), nbytes)
        for run in _runs(exact):
            ranks = range(run[0].communicator.world_size)
            stride = max(sum(each.message_nbytes(rank) for each in run) for rank in ranks)
            self.nbytes += stride * len(ranks)
            pipeline.add(self._gather(run, stride), stride * len(ranks))

    def _gather(self, run: Sequence[_Waiting], stride: int) -> Task[None]:
        """Send the changes of some slices together, as (3) says; a rank's messages have ``stride`` bytes at most."""
        communicator = run[0].communicator
        rank, world_size = communicator.rank, communicator.world_size
        order = run[0].cut.order
        together = torch.empty(world_size * stride, dtype=torch.uint8, device=run[0].device)
        for each, message in _messages(run, rank, together[order[rank] * stride :][:stride]):
            old, _ = self._values(each.cut, rank)
            new = _rounded(each.cut, rank, each.parts, self._tensors[next(iter(each.cut.spans))])
            changes.write_message_(old, new, each.sizes, message)
            for part in each.parts:
                part.write_back(new[part.span.offset :][: part.span.numel].view(each.dtype))
        yield from all_gather(together, communicator)
        for owner in range(world_size):
            if owner == rank:
                continue
            for each, message in _messages(run, owner, together[order[owner] * stride :][:stride]):
                values, is_copy = self._values(each.cut, owner)
                changes.read_message_(message, values)
                if not is_copy:
                    continue
                for span in each.cut.chunks[owner]:
                    written = values[span.offset :][: span.numel].view(each.dtype)
                    write_span(self._tensors[span.index], span.start, span.stop, written)

    def _values(self, cut: Partition, rank: int) -> tuple[Tensor, bool]:
        """Return the bits of the parameters in a rank's part, [n] int16, and whether they are a copy."""
        spans = cut.chunks[rank]
        tensor = self._tensors[spans[0].index]
        if len(spans) == 1 and spans[0].offset == 0 and is_direct(tensor):
            return _flat(tensor)[spans[0].start : spans[0].stop].view(torch.int16), False
        values = torch.zeros(cut.owned_numels[rank], dtype=torch.int16, device=tensor.device)
        for span in spans:
            bits = _flat(self._tensors[span.index]).view(torch.int16)
            values[span.offset :][: span.numel] = bits[span.start : span.stop]
        return values, True


def _flat(tensor: Tensor) -> Tensor:
    """Return a parameter as [n], in its memory if it is contiguous."""
    return flat_view(in_memory("a parameter", tensor))


def _rounded(cut: Partition, rank: int, parts: Sequence[Part], example: Tensor) -> Tensor:
    """Return the bits that this rank's masters round to, [n] int16."""
    values = torch.zeros(cut.owned_numels[rank], dtype=example.dtype, device=example.device)
    for part in parts:
        values[part.span.offset :][: part.span.numel] = part.tensor.to(example.device, non_blocking=True)
    return values.view(torch.int16)


def _runs(waiting: Sequence[_Waiting]) -> Iterator[list[_Waiting]]:
    """Divide slices, in their order, into runs that are sent together."""
    run: list[_Waiting] = []
    total = 0
    for each in waiting:
        ranks = range(each.communicator.world_size)
        nbytes = len(ranks) * max(map(each.message_nbytes, ranks))
        if run and (total + nbytes > TOGETHER_NBYTES or each.device != run[0].device):
            yield run
            run, total = [], 0
        run.append(each)
        total += nbytes
    if run:
        yield run


def _messages(run: Sequence[_Waiting], rank: int, place: Tensor) -> Iterator[tuple[_Waiting, Any]]:
    """Yield the slices of which a rank has parameters, and its messages; then set what is left of the place to 0."""
    at = 0
    for each in run:
        nbytes = each.message_nbytes(rank)
        if nbytes:
            yield each, place[at : at + nbytes]
        at += nbytes
    if rank == run[0].communicator.rank:
        place[at:] = 0
