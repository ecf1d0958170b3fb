"""The one description of a compressed optimizer's state: what its state dicts and its files are made from, and load.

A param group has moments, values beside them (:meth:`GroupState.beside_moments`), errors, and perhaps a mask; an
optimizer has some tensors that belong to no group. :class:`GroupTensors` are those of a group: the optimizer's own, or
others, which a load fills before they take their place. :func:`describe` names them as files do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.feedback import ErrorFeedback
from hf_compressopt.flat import PIECES
from hf_compressopt.format.plan import Kind, StateTensor, TensorKey
from hf_compressopt.kernels import Average
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.moments import MOMENTS, Moments, take_pieces


@dataclass(frozen=True)
class GroupTensors:
    """Tensors of a param group: the optimizer's own, or those that a load fills."""

    state: GroupState
    moments: Moments
    errors: ErrorFeedback
    mask: Tensor | None

    @classmethod
    def of(cls, state: GroupState) -> GroupTensors:
        """Return the tensors that the optimizer has."""
        return cls(state, state.moments, state.errors, state.options.get(Kind.MASK))

    @classmethod
    def to_fill(
        cls,
        state: GroupState,
        *,
        frozen: bool,
        codes: bool = False,
        messages: Mapping[int, Average] | None = None,
        errors: ErrorFeedback | None = None,
        mask: Tensor | None = None,
    ) -> GroupTensors:
        """Return tensors that a load fills. They share the memory of what has their form already.

        Args:
            state: The param group.
            frozen: Whether the variance is frozen in the coming step, refreshed or not.
            codes: Whether the variance comes in 8 bits.
            messages: Memory for the messages that are the momentum, if it comes as such.
            errors: Memory for the errors; the optimizer's own if None.
            mask: Memory for the mask, if there is one to be read.
        """
        shards = None if frozen else state.moments.shards
        if not frozen and (shards is None or shards.topology is not state.communicator.topology):
            shards = state.new_shards()
        moments = state.moments.to_fill(codes=codes, last=messages, shards=shards)
        return cls(state, moments, state.errors if errors is None else errors, mask)

    def commit(self, *, frozen: bool) -> None:
        """Take over what was filled. ``frozen``: whether the variance is frozen in the coming step."""
        state, ranks = self.state, self.state.communicator.world_size
        state.take_moments(state.moments.loaded(self.moments, frozen=frozen, world_size=ranks, form=state.form))
        if ranks == 1:
            state.errors.take(self.errors.worker, self.errors.server)
        elif self.errors is not state.errors:
            state.errors.copy_(self.errors.worker, self.errors.server)
        if self.mask is not None:
            state.options[Kind.MASK] = self.mask.to(state.device)

    # -- as state dicts have them -------------------------------------------------------------------------------------

    def fill_parameter(self, index: int, row: Mapping[str, Any]) -> None:
        """Copy what a state dict has of a parameter; what it lacks starts anew."""
        initial = {extra.name: row.get(extra.plain, extra.initial) for extra in self.state.extras}
        for name, read in self.state.readers(index, self.moments).items():
            if name == PIECES:
                take_pieces(read(), row)
            else:
                _assign(read(), row.get(name, initial.get(name, 0.0)))

    def fill_group(self, saved: Mapping[str, Any]) -> None:
        """Copy the values that a state dict has once per group; what it lacks starts anew."""
        for extra in self.state.extras:
            if extra.per == "group":
                _assign(self.state.group_extra[extra.name], saved.get(extra.name, extra.initial))

    # -- as files have them -------------------------------------------------------------------------------------------

    def described(self, names: Sequence[str], own_kinds: Sequence[str], rank: int) -> Iterator[StateTensor]:
        """Yield the tensors of the group. ``own_kinds``: those that are each rank's own; "param" is the parameter."""
        for index, name in zip(range(len(self.state.params)), names, strict=True):
            yield from self._of_parameter(index, name, own_kinds, rank)
        yield from self._of_group()
        if self.errors.worker.numel():
            yield from self._of_errors(rank)

    def _of_parameter(self, index: int, name: str, own_kinds: Sequence[str], rank: int) -> Iterator[StateTensor]:
        state = self.state
        param = state.params[index]
        shards = self.moments.shards
        tensors: dict[str, Tensor] = {}
        if shards is not None:
            for piece in shards.pieces(index):
                for kind in MOMENTS:
                    yield StateTensor.of(TensorKey(kind, name), piece[kind], tuple(param.shape), piece["start"])
        if shards is None or not param.numel():
            tensors = {kind: stored.view(param.shape) for kind, stored in self.moments.stored_of(index).items()}
        tensors |= {kind: state.view(flat, index) for kind, flat in state.beside_moments("element").items()}
        if "param" in own_kinds:
            tensors["param"] = param.detach() if state.own_params is None else state.own_params[index]
        for kind, tensor in tensors.items():
            if state.own_rank is not None:  # only some ranks hold it, so that there is no mean over all
                yield StateTensor.of(TensorKey(kind, name, rank=state.own_rank), tensor)
            elif kind in own_kinds:
                yield StateTensor.of(TensorKey(kind, name, rank=rank), tensor, of_each_rank=True)
            else:
                yield StateTensor.of(TensorKey(kind, name), tensor, replicated=True)

    def _of_group(self) -> Iterator[StateTensor]:
        """Yield what belongs to no one parameter: the rest of compact moments, counts, and the mask."""
        state = self.state
        key = partial(TensorKey, group=state.number, rank=state.own_rank)
        replicated = state.own_rank is None
        tops = self.moments.tops_of_codes
        if tops is not None:
            yield StateTensor.of(key(Kind.TOP), tops, replicated=replicated)
        messages = [average.messages for average in self.moments.messages if average.messages is not None]
        whole = (sum(message.numel() for message in messages),)
        start = 0
        for message in messages:
            yield StateTensor.of(key(Kind.MESSAGE), message, whole, start, replicated=replicated)
            start += message.numel()
        for kind, values in {**state.beside_moments("parameter"), **state.beside_moments("group")}.items():
            yield StateTensor.of(key(kind), values, replicated=replicated)
        if self.mask is not None:
            yield StateTensor.of(key(Kind.MASK), self.mask, replicated=replicated)

    def _of_errors(self, rank: int) -> Iterator[StateTensor]:
        number, errors = self.state.number, self.errors
        if self.state.own_rank is None:
            yield from errors_of_group(errors, number, self.state.communicator)
        else:
            yield StateTensor.of(TensorKey(Kind.WORKER, group=number, rank=rank), errors.worker, is_error=True)
            yield StateTensor.of(TensorKey(Kind.SERVER, group=number, rank=rank), errors.server)


def describe(
    groups: Sequence[GroupTensors],
    names: Sequence[Sequence[str]],
    own_kinds: Sequence[str],
    tensors: Mapping[str, Tensor],
    rank: int,
) -> Iterator[StateTensor]:
    """Yield every state tensor that this rank holds a part of.

    Args:
        groups: The tensors of the param groups.
        names: The names of their parameters.
        own_kinds: The kinds that are each rank's own in the stage of the state, of groups that are ever compressed.
        tensors: Those that belong to no group.
        rank: This rank.
    """
    for group, names_of_group in zip(groups, names, strict=True):
        yield from group.described(names_of_group, own_kinds if group.state.compressed else (), rank)
    for name, tensor in tensors.items():
        yield StateTensor.of(TensorKey(Kind.OPTIMIZER, name), tensor, replicated=True)


def errors_of_group(errors: ErrorFeedback, group: int, communicator: Communicator) -> Iterator[StateTensor]:
    """Describe the errors of a param group as they are stored: of each rank or node, and of the servers."""
    topology = communicator.topology
    worker_key = TensorKey(Kind.WORKER, group=group, rank=topology.node)
    of_sender: dict[str, Any] = {"is_error": True, "of_each_rank": True, "node_size": topology.node_size}
    for start, part in errors.stored_worker():
        if part.numel():
            yield StateTensor.of(worker_key, part, errors.stored_shape, start, **of_sender)
    for start, part in errors.stored_server():
        if part.numel():
            yield StateTensor.of(TensorKey(Kind.SERVER, group=group), part, errors.stored_shape, start, is_error=True)


def errors_of_one_rank(errors: ErrorFeedback, numel: int) -> ErrorFeedback:
    """Return errors that a single rank loads, which has some only if it loads those of several ranks."""
    loaded = copy(errors)
    loaded.take(*(torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in range(2)))
    return loaded


def _assign(target: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        target.copy_(value)
    else:
        target.fill_(float(value))
