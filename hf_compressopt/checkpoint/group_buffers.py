"""The moments and errors of a param group on their way into a checkpoint and back, in the form that they have there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hf_compressopt.checkpoint.compact_tensors import BYTES, CODE, MESSAGE, TOP, room_for_messages
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.collectives.group_errors import GroupErrors
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.record import StateTensor, TensorKey
from hf_compressopt.kernels import Average
from hf_compressopt.optim.group import GroupState, Moments

#: Kinds of the errors.
WORKER, SERVER = "worker_error", "server_error"


@dataclass(frozen=True)
class GroupBuffers:
    """The moments and errors of a param group while a checkpoint is written or read.

    A save writes the optimizer's own. A load reads bytes into memory of the form that they have in the checkpoint, the
    optimizer's own if it has that form; :meth:`commit` brings them into the optimizer's form.

    Attributes:
        state: The param group.
        moments: The moments.
        errors: The errors.
    """

    state: GroupState
    moments: Moments
    errors: GroupErrors

    @classmethod
    def of(cls, state: GroupState) -> GroupBuffers:
        """Return the optimizer's own."""
        return cls(state, state.moments, state.errors)

    @classmethod
    def room(
        cls, state: GroupState, header: Header, entries: Mapping[str, TensorEntry], rank: int, *, frozen: bool
    ) -> GroupBuffers:
        """Return memory for what a checkpoint has.

        Messages that are errors are read as they are by as many ranks as saved them; others read decoded values.

        Args:
            state: The param group.
            header: The checkpoint's header, checked.
            entries: Its tensors, by name.
            rank: This rank among all ranks.
            frozen: Whether the variance does not change in the coming step.

        Raises:
            ValueError: If the header does not tell how messages are cut.
            TypeError: Likewise.
        """
        key, last = partial(TensorKey, group=state.number, rank=state.own_rank), None
        ranks = state.communicator.world_size
        saved = header.values["world_size"] if state.own_rank is None else ranks
        if str(key(MESSAGE)) in entries:
            cut = header.values["bucket_numel"], saved, header.values.get("scale_block")
            last = room_for_messages(state.layout.numel, *cut, state.device)
        shards = None if frozen else state.moments.shards or state.room_for_shards()
        moments = state.moments.room(codes=str(key(TOP)) in entries, last=last, shards=shards)
        error = entries.get(str(TensorKey(WORKER, group=state.number, rank=rank)))
        in_bytes = error is not None and error.dtype == BYTES
        alike = saved == ranks and state.communicator.levels is None
        as_saved = in_bytes and alike and state.worker_error.numel() > 0
        return cls(state, moments, state.errors.room(compact=as_saved))

    def of_parameter(self, index: int) -> dict[str, Tensor]:
        """Return the moments of a parameter, by their kinds; no momentum if messages take its place.

        Moments that ranks share out are among :meth:`pieces`, but for those of a parameter without elements.
        """
        state, moments = self.state, self.moments
        if moments.shards is not None and state.params[index].numel():
            return {}
        shape = state.params[index].shape
        kind = CODE if moments.codes.numel() else "exp_avg_sq"
        momentum = {} if moments.last else {"exp_avg": moments.exp_avg_of(index, still=False).view(shape)}
        return {**momentum, kind: moments.stored_variance(index).view(shape)}

    def pieces(self, index: int, name: str) -> Iterator[StateTensor]:
        """Yield this rank's pieces of the moments of a parameter, if the ranks share them out."""
        shape, shards = tuple(self.state.params[index].shape), self.moments.shards
        for piece in [] if shards is None else shards.pieces(index):
            for kind in ("exp_avg", "exp_avg_sq"):
                yield StateTensor.of(TensorKey(kind, name), piece[kind], shape, piece["start"])

    def of_group(self) -> Iterator[StateTensor]:
        """Yield the tensors that belong to compact moments, and to no one parameter."""
        state, moments = self.state, self.moments
        key, replicated = partial(TensorKey, group=state.number, rank=state.own_rank), state.own_rank is None
        if moments.codes.numel():
            yield StateTensor.of(key(TOP), moments.tops, replicated=replicated)
        found = [average.messages for _, average in sorted(moments.last.items()) if average.messages is not None]
        whole, start = (sum(messages.numel() for messages in found),), 0
        for messages in found:
            yield StateTensor.of(key(MESSAGE), messages, whole, start, replicated=replicated)
            start += messages.numel()

    def of_errors(self, rank: int) -> Iterator[StateTensor]:
        """Yield the errors. ``rank`` is this rank among all ranks."""
        number, errors, own_rank = self.state.number, self.errors, self.state.own_rank
        if own_rank is not None:
            yield worker_error(number, errors.worker, rank, own_group=True)
            yield StateTensor.of(TensorKey(SERVER, group=number, rank=rank), errors.server)
            return
        whole, place = errors.stored_shape, self.state.communicator.topology
        for start, part in errors.stored_worker():
            if part.numel():
                key, together = TensorKey(WORKER, group=number, rank=place.node), place.node_size
                yield StateTensor.of(key, part, whole, start, of_each_rank=True, is_error=True, node_size=together)
        for start, part in errors.stored_server():
            if part.numel():
                yield StateTensor.of(TensorKey(SERVER, group=number), part, whole, start, is_error=True)

    def commit(self, *, frozen: bool) -> None:
        """Take over what was read. ``frozen``: whether the variance does not change in the coming step."""
        state, moments = self.state, self.moments
        starts = [bucket.start for bucket in state.layout.buckets]
        mine = sorted(moments.last) == starts and all(map(self._is_mine, moments.last.values()))
        keep = state.compact and frozen  # the first stage takes float32
        moments.decode(momentum=not (keep and mine), variance=not keep)
        if state.compact:
            moments.settle()
            state.moments = moments
        if self.errors is not state.errors:
            state.errors.copy_(self.errors.worker, self.errors.server)

    def _is_mine(self, average: Average) -> bool:
        """Return whether this run cuts a bucket into such messages."""
        form = self.state.feedback[0].format
        return (average.world_size, average.scale_block) == (self.state.communicator.world_size, form.scale_block)


def worker_error(number: int, error: Tensor, rank: int, *, own_group: bool = False) -> StateTensor:
    """Describe the worker errors of a rank.

    Args:
        number: Number of the param group.
        error: [n] float32, or their bytes.
        rank: The rank among all ranks.
        own_group: Whether the param group has a process group of its own.
    """
    key = TensorKey(WORKER, group=number, rank=rank)
    return StateTensor.of(key, error, of_each_rank=not own_group, is_error=True)
