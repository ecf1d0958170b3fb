"""Slices in messages of 4 or 8 bits: gradients to their owners, and parameters back to all ranks.

Gradients go up in one phase with error feedback (LoCo, arXiv 2407.04480). Rank r sends, and the owner averages in
float32, in rank order:

    u_r = g_r + worker_error;  message <- Q(u_r);  worker_error <- u_r - Q(u_r);  g = mean_r Q(u_r)     (1)

Parameters come down as differences (SDP4Bit, arXiv 2410.15526). The owner has float32 masters, and all ranks have alike
replicas, the parameters that the model computes with:

    message <- Q(master - replica);  replica <- replica + Q(master - replica) on all ranks              (2)

What a message misses is still there in the next difference, so that (2) needs no error feedback of its own.

In the hierarchical topology the ranks of a node first average what they have for the owners at each place, at full
precision. Then (1) is among the peers: r and W are nodes, and each rank has the errors of the parts that it sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import (
    Task,
    all_gather,
    in_place_order,
    in_rank_order,
    reduce_scatter,
    summed,
)
from hf_compressopt.kernels import Average, Combination, CompactErrors, IntegerFormat, Segment
from hf_compressopt.kernels.compact import ERROR_FORMAT
from hf_compressopt.kernels.memory import is_direct
from hf_compressopt.zero.parts import Part, Slice


class SliceErrors:
    """The errors of this rank's messages of a slice, in 8 bits, in the unit of a gradient without loss scale.

    Those of passes since the last step lie beside it until the step is taken, or dropped with them.
    """

    def __init__(self, form: IntegerFormat, numel: int, world_size: int, device: torch.device) -> None:
        self.form, self.kept = form, CompactErrors.zeros(numel, world_size, device)  # of the last step that was taken
        self._pending: CompactErrors | None = None

    @property
    def latest(self) -> CompactErrors:
        """The errors that the next message takes up."""
        return self.kept if self._pending is None else self._pending

    def pending(self) -> CompactErrors:
        """Return the errors since the last step, to be written; they are :attr:`latest` if there are any."""
        if self._pending is None:
            self._pending = replace(self.kept, messages=torch.empty_like(self.kept.messages))
        return self._pending

    def keep(self) -> None:
        self.kept, self._pending = self.latest, None

    def drop(self) -> None:
        self._pending = None

    def rescale(self, factor: float) -> None:
        """Multiply the errors since the last step, whose unit turned out to be another one."""
        if self._pending is not None:
            errors = self._pending
            for start, stop, message in ERROR_FORMAT.chunks(errors.messages, errors.count, errors.world_size):
                ERROR_FORMAT.scales(message, stop - start).mul_(factor)

    def to(self, device: torch.device) -> None:
        if device != self.kept.device:
            self.kept = replace(self.kept, messages=self.kept.messages.to(device))
            if self._pending is not None:
                self._pending = replace(self._pending, messages=self._pending.messages.to(device))

    def take(self, messages: Tensor) -> None:
        """Take over the bytes of errors that :attr:`kept` had, and drop those since."""
        self.check(messages)
        self.kept.messages.copy_(messages)
        self._pending = None

    def check(self, messages: Tensor) -> None:
        wanted = self.kept.messages
        if messages.shape != wanted.shape or messages.dtype != wanted.dtype:
            raise ValueError(
                f"worker errors of {messages.dtype} {list(messages.shape)} do not fit a slice whose errors are uint8 "
                f"{list(wanted.shape)}: were they saved with the same bucket size, number of ranks and topology?"
            )

    def copy_from(self, other: SliceErrors) -> None:
        self.take(other.kept.messages)
        if other._pending is not None:
            self.pending().messages.copy_(other._pending.messages)

    @property
    def nbytes(self) -> int:
        return sum(errors.messages.numel() for errors in (self.kept, self._pending) if errors is not None)


def send_gradients(buffer: Tensor, communicator: Communicator, errors: SliceErrors, loss_scale: float) -> Task[Tensor]:
    """Average every rank's part of a slice, [part_numel] float32, as (1) says; errors wait for their ``keep()``."""
    levels, peers = communicator.levels, communicator
    if levels is not None:
        buffer, node, peers = in_place_order(buffer, communicator), levels.node, levels.peers
        sizes = [buffer.numel() // node.world_size] * node.world_size
        buffer = yield from summed(buffer, sizes, node, 1.0 / node.world_size)
    z = Combination(buffer.numel(), buffer.device, grads=[Segment(buffer, 0, buffer.numel(), 0)], beta=1.0 / loss_scale)
    # parts are the chunks, since ALIGN is a multiple of 8
    task = reduce_scatter(z, [errors.latest], [errors.pending()], errors.form, peers, loss_scale, last=True)
    del buffer, z
    return (yield from task)


def send_differences(
    params: Sequence[Tensor], parts: Sequence[Part], cut: Slice, communicator: Communicator, form: IntegerFormat
) -> Task[None]:
    """Bring all replicas nearer to the masters, as (2) says."""
    nbytes, count = form.nbytes(cut.part_numel), communicator.world_size
    device = params[next(iter(cut.places))].device
    ahead = torch.zeros(cut.part_numel, dtype=torch.float32, device=device)
    for part in parts:
        place = ahead[part.span.offset : part.span.offset + part.span.numel]
        torch.sub(part.tensor.to(device), part.replica_in(params[part.param]), out=place)
    gathered = torch.empty(count * nbytes, dtype=torch.uint8, device=device)
    message = gathered[communicator.topology.own_chunk * nbytes :][:nbytes]
    kernels.on(message).compress_(form, Combination(cut.part_numel, device), ahead, message, 1)
    del ahead
    yield from all_gather(gathered, communicator)
    messages = in_rank_order(gathered, communicator)
    with replicas_of(cut, params) as replicas:
        kernels.on(messages).add_(Average(cut.numel, form, messages, count, nbytes), replicas, decay=1.0)
    for part in parts:
        part.note_replica(params[part.param])


@contextmanager
def replicas_of(cut: Slice, params: Sequence[Tensor]) -> Iterator[list[Segment]]:
    """Give the elements of the parameters in a slice as segments that cover it, to be changed inside."""
    flats = {number: params[number].detach().reshape(-1).resolve_neg() for number in cut.places}
    rows = [(start, Segment(None, 0, stop - start, 0)) for start, stop in cut.gaps]
    for number, spans in cut.places.items():
        rows += [(begin, Segment(flats[number], span.start, span.numel, number)) for begin, span in spans]
    yield [segment for _, segment in sorted(rows, key=lambda row: row[0])]
    for number, flat in flats.items():
        if not is_direct(params[number]):  # flat is a copy
            params[number].detach().copy_(flat.view(params[number].shape))
