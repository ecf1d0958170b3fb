"""The errors of error feedback, and when they change: where a step uses what was averaged, and at no other time.

A pass adds the old errors to what it sends, and writes new ones beside them (:meth:`StagedErrors.begin`). They take the
place of the old ones where a step uses the averages (:meth:`StagedErrors.commit`). If gradients are dropped instead, as
by ``zero_grad()`` or a skipped batch, the old errors stay, and so do those of parameters without a gradient on any
rank: nobody has taken the part of the errors that was sent.

Several passes may make the gradients of one step, each of which averages what ``p.grad`` has by then. Such a pass goes
on from the new errors of the pass before. :class:`HandedOut` knows from ``p.grad`` which of the two it is.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import BucketErrors
from hf_compressopt.collectives.sender import Hooks, weak_hook
from hf_compressopt.flat import Bucket, FlatLayout
from hf_compressopt.kernels import Average, Combination, CompactErrors, Errors
from hf_compressopt.kernels.compact import ERROR_FORMAT, tensor_of
from hf_compressopt.kernels.memory import reads_at_once

logger = logging.getLogger(__name__)


def values_of(error: Errors) -> Tensor:
    """Return the values of errors, [n] float32, by their device's kernels. They may be the errors themselves."""
    if isinstance(error, Tensor):
        return error
    values = torch.empty(error.count, dtype=torch.float32, device=error.device)
    stride = max(ERROR_FORMAT.chunk_nbytes(error.count, error.world_size))
    average = Average(error.count, ERROR_FORMAT, error.messages, error.world_size, stride)
    kernels.on(values).decompress_(average, values)
    return values


def keep_(error: Errors, values: Tensor) -> None:
    """Take over new values, [n] float32, encoded by the kernels of their device."""
    if isinstance(error, Tensor):
        error.copy_(values)
    else:
        nothing = Combination(error.count, values.device)  # so that what is compressed is the values
        kernels.on(values).compress_(ERROR_FORMAT, nothing, values, error.messages, error.world_size)


Place = tuple[int, int, int]  # first and last element of a run of errors, and the number of its parameter
_Staged = TypeVar("_Staged", bound="StagedErrors")


class StagedErrors(ABC):
    """Errors that a pass reads and a step changes: :meth:`begin` and :meth:`commit`.

    Parameters have numbers; lists of bool say something of each of them.
    """

    _new: Any = None  # memory for new errors, of the same class
    _reuses_memory = True  # on a CPU
    _are_pending = False  # a pass has written new errors that no step has used yet
    _fault: bool | Tensor = False  # what they were made of is not finite

    @abstractmethod
    def like(self: _Staged) -> _Staged:
        """Return memory for errors of the same form."""

    @abstractmethod
    def swap_(self: _Staged, other: _Staged) -> None: ...

    def _copy_unsent_(self: _Staged, new: _Staged) -> None:  # noqa: B027
        """Copy the errors that a pass does not write; by default there are none."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """Return the memory of all errors."""

    @abstractmethod
    def places(self) -> Iterator[tuple[Errors, list[Place]]]:
        """Yield the errors of each message, and where those of each parameter lie in them."""

    def _written(self) -> Iterator[tuple[Errors, Errors, list[Place]]]:
        """Yield the errors of each message that a pass writes, the new ones of the same, and their places."""
        for (mine, places), (new, _) in zip(self.places(), self._new.places(), strict=True):
            if tensor_of(mine).data_ptr() != tensor_of(new).data_ptr():
                yield mine, new, places

    def begin(self: _Staged, kept: Sequence[bool] = ()) -> tuple[_Staged, _Staged]:
        """Begin a pass, and return the errors that it adds, and those that it writes; they may be the same.

        ``kept``: the parameters whose gradients of earlier passes, which no step has used, are in this pass's.
        """
        if self._new is None:
            self._new, self._are_pending = self.like(), False
        goes_on, self._are_pending = self._are_pending and any(kept), True
        if not goes_on:
            self._fault = False
            self._copy_unsent_(self._new)
            return self, self._new
        self._restore([not each for each in kept])
        return self._new, self._new

    def spoil(self, fault: bool | Tensor) -> None:
        """Note whether what a pass has sent was not finite, bool or [] bool: its errors count for nothing then."""
        if isinstance(fault, Tensor) and reads_at_once(fault.device):
            fault = bool(fault)
        if self._fault is False:
            self._fault = fault
        elif fault is not False and fault is not self._fault:
            self._fault = fault | self._fault

    def commit(self, taken: Sequence[bool] | None = None, *, closes: bool = True) -> None:
        """Take over the new errors of the parameters whose gradients a step has ``taken``; None is all of them.

        Those of the others are dropped, or stay pending if the commit does not close. No GPU is waited for.
        """
        if not self._are_pending:
            return
        fault = self._fault
        if isinstance(fault, Tensor):
            for before, after in zip(self.buffers(), self._new.buffers(), strict=True):
                torch.where(fault, before, after, out=after)
        if not closes:
            if fault is not True and any(taken or ()):
                for mine, new, places in self._written():
                    _copy_chosen_(mine, new, places, taken or ())
            return
        if fault is not True and (taken is None or any(taken)):
            self._restore([not each for each in taken or ()])
            self.swap_(self._new)
        self.drop()

    def drop(self) -> None:
        """Drop the new errors. A GPU, whose memory is scarce, gets theirs back: it has new memory in no time."""
        self._are_pending, self._fault = False, False
        if not self._reuses_memory or any(buffer.device.type != "cpu" for buffer in self.buffers()):
            self._new = None

    def rescale(self, factor: float) -> None:
        """Multiply new errors that no step has used yet: their gradients carried another loss scale than was told."""
        if self._are_pending:
            for _, new, _ in self._written():
                keep_(new, values_of(new) * factor)

    def _restore(self, chosen: Sequence[bool]) -> None:
        """Give the chosen parameters their old errors among the new ones; empty is none."""
        if any(chosen):
            for mine, new, places in self._written():
                _copy_chosen_(new, mine, places, chosen)

    @property
    def pending(self: _Staged) -> _Staged | None:
        """The new errors that no step has used yet; None if there are none."""
        return self._new if self._are_pending else None


def _copy_chosen_(errors: Errors, source: Errors, places: Sequence[Place], chosen: Sequence[bool]) -> None:
    """Copy the errors of the chosen parameters from others of the same form."""
    here = [place for place in places if chosen[place[2]]]
    if not here:
        return
    if len(here) == len(places):
        tensor_of(errors).copy_(tensor_of(source))
        return
    values, others = values_of(errors), values_of(source)
    for start, stop, _ in here:
        values[start:stop] = others[start:stop]
    keep_(errors, values)


class MessageErrors(StagedErrors):
    """The errors in 8 bits of one rank's message, or messages, of a slice of ZeRO. Its memory is not kept for later."""

    _reuses_memory = False

    def __init__(self, errors: CompactErrors, places: Sequence[Place]) -> None:
        self.errors, self._places = errors, list(places)

    def like(self) -> MessageErrors:
        return MessageErrors(replace(self.errors, messages=torch.empty_like(self.errors.messages)), self._places)

    def swap_(self, other: MessageErrors) -> None:
        self.errors, other.errors = other.errors, self.errors

    def buffers(self) -> list[Tensor]:
        return [self.errors.messages]

    def places(self) -> Iterator[tuple[Errors, list[Place]]]:
        yield self.errors, self._places

    def to(self, device: torch.device) -> None:
        """Move the errors, and the new ones, to a device, if they are on another one."""
        if self.errors.device == device:
            return
        for each in (self, self._new) if self._are_pending else (self,):
            each.errors = replace(each.errors, messages=each.errors.messages.to(device))

    @property
    def nbytes(self) -> int:
        """The bytes of the errors, and of new ones that no step has used yet."""
        return self.errors.messages.nbytes * (1 + self._are_pending)


class ErrorFeedback(StagedErrors):
    """The errors of the buckets of a flat layout, by bucket in ``feedback``, which are views of two buffers.

    A single rank has none, except between the load of a checkpoint of more ranks and its first compressed step; those
    are float32 values. Averages that are not ``served`` to other ranks, those of a reduce-scatter, have no server
    errors.
    """

    worker: Tensor
    server: Tensor
    feedback: list[BucketErrors]
    #: Numbers of the buckets that messages of integers leave out, since all that is in them travels in full precision.
    _unsent: Collection[int] = ()

    def __init__(
        self,
        layout: FlatLayout,
        communicator: Communicator,
        device: torch.device,
        *,
        compact: bool,
        used: bool,
        served: bool = True,
    ) -> None:
        self._layout, self._communicator, self._served = layout, communicator, served
        self.compact = compact and communicator.world_size > 1
        self._used = used and communicator.world_size > 1
        self._set(*self._zeros(device))

    def _zeros(self, device: torch.device) -> list[Tensor]:
        dtype = torch.uint8 if self.compact else torch.float32
        sizes = self.sizes_of(dtype) if self._used else (0, 0)
        return [torch.zeros(size, dtype=dtype, device=device) for size in sizes]

    def leave_out(self, numbers: Collection[int]) -> None:
        """Note which buckets messages leave out: their errors stay."""
        self._unsent = numbers

    def sizes_of(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the elements of the two buffers in use: uint8 for errors in 8 bits, float32 for values."""
        worker, server = list(chain.from_iterable(self._sent())), self._owned()
        if dtype != torch.uint8:
            return sum(worker), sum(server)
        return sum(map(CompactErrors.nbytes, worker)), sum(map(CompactErrors.nbytes, server))

    def _sent(self) -> list[list[int]]:
        """Return for each bucket the elements of the chunks that this rank sends."""
        return [self._communicator.topology.sent_numels(bucket.numel) for bucket in self._layout.buckets]

    def _owned(self) -> list[int]:
        """Return for each bucket the elements whose server this rank is."""
        ranges = (self.own_range(bucket) for bucket in self._layout.buckets)
        return [stop - start if self._served else 0 for start, stop in ranges]

    def _by_bucket(self, worker: Tensor, server: Tensor) -> list[BucketErrors]:
        """Return the parts of two buffers, of either form, that belong to each bucket."""
        servers = _errors_in(server, self._owned())
        if self._communicator.levels is None:
            numels = [bucket.numel for bucket in self._layout.buckets]
            workers = _errors_in(worker, numels, self._communicator.world_size)
            return [BucketErrors((sent,), served) for sent, served in zip(workers, servers, strict=True)]
        sent = self._sent()
        each = iter(_errors_in(worker, list(chain.from_iterable(sent))))
        shards = [tuple(error for error in islice(each, len(chunks)) if error.numel()) for chunks in sent]
        return [BucketErrors(shard, served) for shard, served in zip(shards, servers, strict=True)]

    def sent_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements [start, stop) of the flat buffer, of one bucket, whose worker errors this rank has."""
        start, stop = self._communicator.topology.sent_range(bucket.numel)
        return bucket.start + start, bucket.start + stop

    def own_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements [start, stop) of the flat buffer, of one bucket, whose server this rank is."""
        start, stop = self._communicator.topology.own_range(bucket.numel)
        return bucket.start + start, bucket.start + stop

    def take(self, worker: Tensor, server: Tensor) -> None:
        """Set the errors that a single rank sends next, [numel] float32 both, or [0] for none."""
        device = self.worker.device
        self._set(worker.to(device), server.to(device))

    def to(self, device: torch.device) -> None:
        self._set(self.worker.to(device), self.server.to(device))

    def _set(self, worker: Tensor, server: Tensor) -> None:
        self.worker, self.server = worker, server
        self._new, self._are_pending, self._fault = None, False, False
        self.feedback = self._by_bucket(worker, server)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what the next step makes anew, and but views, which a pickle would make copies of."""
        return self.__dict__ | {"_new": None, "_are_pending": False, "_fault": False, "feedback": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.feedback = self._by_bucket(self.worker, self.server)

    def like(self) -> ErrorFeedback:
        return self._with(torch.empty_like(self.worker), torch.empty_like(self.server))

    def _with(self, worker: Tensor, server: Tensor) -> ErrorFeedback:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._set(worker, server)
        return new

    def begin_sending(self) -> tuple[ErrorFeedback, ErrorFeedback]:
        """Begin a pass that writes worker errors alone: both have the server errors, which the step writes in place."""
        self._new = self._with(torch.empty_like(self.worker), self.server)
        return self.begin()

    def drop(self) -> None:
        super().drop()
        if self._new is not None and self._new.server is self.server:
            self._new = None  # the next pass may write server errors

    def swap_(self, other: ErrorFeedback) -> None:
        self.worker, other.worker = other.worker, self.worker
        self.server, other.server = other.server, self.server
        self.feedback, other.feedback = other.feedback, self.feedback

    def _copy_unsent_(self, new: ErrorFeedback) -> None:
        for number in self._unsent:
            new.feedback[number].copy_(self.feedback[number])

    def buffers(self) -> list[Tensor]:
        return [self.worker, self.server]

    def places(self) -> Iterator[tuple[Errors, list[Place]]]:
        for bucket, errors in zip(self._layout.buckets, self.feedback, strict=True):
            first = self._communicator.topology.sent_range(bucket.numel)[0]
            for error in errors.worker:
                yield error, _places(error, bucket, first)
                first += error.numel()
            yield errors.server, _places(errors.server, bucket, self._communicator.topology.own_range(bucket.numel)[0])

    def copy_(self, worker: Tensor, server: Tensor) -> None:
        """Take over the values of two buffers, of either form, and drop errors that no step has used."""
        self.drop()
        if worker.dtype == self.worker.dtype:
            self.worker.copy_(worker)
            self.server.copy_(server)
            return
        device = self.worker.device
        for mine, other in zip(self.feedback, self._by_bucket(worker.to(device), server.to(device)), strict=True):
            for error, values in zip((*mine.worker, mine.server), (*other.worker, other.server), strict=True):
                keep_(error, values_of(values))

    def values(self) -> tuple[Tensor, Tensor]:
        return self.worker_values(), self.server_values()

    def worker_values(self) -> Tensor:
        return self.joined(list(chain.from_iterable(errors.worker for errors in self.feedback)))

    def server_values(self) -> Tensor:
        return self.joined([errors.server for errors in self.feedback])

    def joined(self, errors: Sequence[Errors]) -> Tensor:
        """Return the float32 values of some of the errors, one after another."""
        joined = torch.empty(sum(error.numel() for error in errors), dtype=torch.float32, device=self.worker.device)
        for part, error in zip(torch.split(joined, [error.numel() for error in errors]), errors, strict=True):
            part.copy_(values_of(error))
        return joined

    def stored_worker(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the worker errors as a checkpoint has them, and their places among those of the whole group."""
        if self._communicator.levels is None:
            yield 0, self.worker
            return
        ranges = [self.sent_range(bucket) for bucket in self._layout.buckets]
        parts: Iterable[Tensor] = (self.joined(errors.worker) for errors in self.feedback)
        if not self.compact:  # views, which a load fills
            parts = torch.split(self.worker, [stop - start for start, stop in ranges])
        for (start, _), part in zip(ranges, parts, strict=True):
            yield start, part

    def stored_server(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the server errors of each bucket likewise; those of all servers have the layout of worker errors."""
        flat, rank, start = self._communicator.levels is None, self._communicator.rank, 0
        for bucket, errors in zip(self._layout.buckets, self.feedback, strict=True):
            error = errors.server
            if isinstance(error, Tensor) or not flat:
                yield self.own_range(bucket)[0], values_of(error)
            else:
                nbytes = ERROR_FORMAT.chunk_nbytes(bucket.numel, self._communicator.world_size)
                yield start + sum(nbytes[:rank]), error.messages
                start += sum(nbytes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.worker.shape) if self._communicator.levels is None else (self._layout.numel,)

    def to_fill(self, *, compact: bool) -> ErrorFeedback:
        """Return errors of a form that a load fills: these if they have it."""
        if compact == self.compact:
            return self
        options = {"compact": compact, "used": self._used, "served": self._served}
        return ErrorFeedback(self._layout, self._communicator, self.worker.device, **options)

    def zero_(self) -> None:
        self.drop()
        self.worker.zero_()
        self.server.zero_()

    def scale_(self, factors: Sequence[float]) -> None:
        """Multiply the errors of each parameter by its factor."""
        if not self.worker.numel():
            return
        for error, places in self.places():
            values = values_of(error)
            for start, stop, index in places:
                values[start:stop].mul_(factors[index])
            keep_(error, values)


def _places(error: Errors, bucket: Bucket, first: int) -> list[Place]:
    """Return where the errors of each parameter lie in those of the bucket's elements from ``first`` on."""
    spans = bucket.spans(first, first + error.numel())
    return [(span.offset, span.offset + span.numel, span.index) for span in spans]


def _errors_in(buffer: Tensor, counts: Sequence[int], chunks: int = 1) -> list[Errors]:
    """Return the parts of a buffer, of either form, that hold so many errors each; 0 each if the buffer is empty."""
    counts = list(counts) if buffer.numel() else [0] * len(counts)
    if buffer.dtype != torch.uint8:
        return list(torch.split(buffer, counts))
    parts = torch.split(buffer, [CompactErrors.nbytes(count, chunks) for count in counts])
    return [CompactErrors(part, count, chunks) for part, count in zip(parts, counts, strict=True)]


def in_backward() -> bool:
    """Return whether a backward pass calls."""
    return torch._C._current_graph_task_id() >= 0


def after_backward(act: Callable[[], None]) -> None:
    """Call a function, which starts no collective, after DDP's own callback at the end of this backward pass."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(act))


# -- what becomes of averaged gradients --------------------------------------------------------------------------------


class Members(NamedTuple):
    """Errors, and the parameters whose errors they are; ``as_one``: they have one number in them."""

    errors: Any  # StagedErrors
    params: Sequence[Tensor]
    as_one: bool = False

    def flags(self, flags: Mapping[Tensor, bool]) -> list[bool]:
        found = [flags.get(param, False) for param in self.params]
        return [any(found)] if self.as_one else found


class _Made(NamedTuple):
    """A gradient as a pass has left it."""

    gradient: ref[Tensor]
    version: int


_UNUSED_PASSES = 10  # without one step of an optimizer, after which a loop is told
_WATCHING: WeakSet[HandedOut] = WeakSet()


class HandedOut:
    """Averaged gradients, from the end of a pass until a step has used them or they are dropped.

    A step that has used a gradient commits its error: of an optimizer of ours by :meth:`use`, of any other, which torch
    tells, if ``watches_steps``. Where the next pass begins, a gradient that no step has used is still in ``p.grad``, to
    be accumulated on; or else it was dropped. The hook that is called first looks before the pass changes ``p.grad``.
    """

    def __init__(self, members: Callable[[], Sequence[Members]], *, watches_steps: bool, hooks: bool = True) -> None:
        """Watch the gradients of what ``members`` returns, by hooks unless :meth:`begin` is always early enough."""
        self._members, self._watches_steps, self._hooks = members, watches_steps, hooks
        self._made: dict[Tensor, _Made] = {}  # the gradients after the pass that no step has used
        self._used: dict[Tensor, bool] = {}
        self._kept: dict[Tensor, bool] | None = None  # where the next pass began, if a hook was called
        self._hooked: set[Tensor] = set()
        self._handles = Hooks()
        self._unused_passes: int | None = 0  # None after the first step
        if watches_steps:
            _watch_steps()
            _WATCHING.add(self)

    def hand_out(self, before: Mapping[Tensor, int] | None = None) -> None:
        """Note the gradients at the end of a pass.

        ``before``: versions of gradients before their averages came; the same one now has not been written.
        """
        self._kept, self._used, before = None, {}, before or {}
        grads = ((param, param.grad) for each in self._members() for param in each.params)
        there = ((param, grad) for param, grad in grads if grad is not None)
        left = {p: grad for p, grad in there if p not in before or before[p] != grad._version}
        self._made = {param: _Made(ref(grad), _version_of(grad)) for param, grad in left.items()}
        if self._hooks:
            for param in self._made:
                if param.requires_grad and param not in self._hooked:
                    self._hooked.add(param)
                    self._handles.add(param.register_hook(weak_hook(self._pass_begins)))  # type: ignore[no-untyped-call]

    def _pass_begins(self) -> None:
        """Look at ``p.grad`` before the pass adds to any; the hooks call."""
        if self._made and self._kept is None:
            self._look()

    def _look(self, *, versions: bool = True) -> None:
        """Find the gradients that are there still; with ``versions``, of which one that was written over is none."""
        self._kept = {}
        for param, made in self._made.items():
            grad = param.grad
            if grad is None or grad is not made.gradient():
                self._kept[param] = False
            else:
                self._kept[param] = not versions or _version_of(grad) == made.version

    def begin(self, *, is_first: bool = False) -> Callable[[Members], list[bool]]:
        """Begin a pass, and return what returns for each member's parameters whether earlier gradients are kept.

        ``is_first``: ``p.grad`` is still as it was before the pass.
        """
        if self._made:
            if self._kept is None:
                self._look(versions=is_first)
            if self._used:
                self._commit(closes=False)
            adds_up = any((self._kept or {}).values())
            if self._unused_passes is not None and self._watches_steps and not adds_up:
                self._unused_passes += 1
                if self._unused_passes == _UNUSED_PASSES:
                    logger.warning(
                        "no step of an optimizer has used the averaged gradients of %d passes, so that what messages "
                        "miss is not sent later: update the parameters by a torch.optim.Optimizer, or call "
                        "step_taken() of the compression's state after each update",
                        _UNUSED_PASSES,
                    )
        kept, used = self._kept or {}, self._used
        flags = {param: each and param not in used for param, each in kept.items()}
        self._made, self._kept, self._used = {}, None, {}
        return lambda member: member.flags(flags) if any(flags.values()) else []

    def use(
        self, params: Collection[Tensor] | None = None, *, checked: bool = True, skipped: Tensor | None = None
    ) -> None:
        """Note that a step uses the gradients of some parameters, by default of all; if ``checked`` those in p.grad.

        ``skipped``: whether the step changes nothing, [1], which the host does not read.
        """
        used = [p for p in self._made if (params is None or p in params) and (p.grad is not None or not checked)]
        if not used:  # nor is anything of another rank committed, which may be a thread of this process
            return
        self._used.update(dict.fromkeys(used, True))
        self._unused_passes = None
        if skipped is not None:
            for each in self._members():
                each.errors.spoil(skipped.reshape(()) != 0)
        if len(self._used) == len(self._made):
            self._commit()
            self._made, self._used = {}, {}
            self._kept = None

    def settle(self) -> None:
        """Commit what steps have used, of gradients that they have not used all of."""
        if self._used:
            self._commit(closes=False)

    def drop(self) -> None:
        """Drop the errors of gradients that no step uses."""
        for each in self._members():
            each.errors.drop()
        self._made, self._used, self._kept = {}, {}, None

    def stop_watching(self) -> None:
        """Take the hooks off until gradients are handed out again."""
        self._handles.remove()
        self._hooked.clear()

    def _commit(self, *, closes: bool = True) -> None:
        for each in self._members():
            flags = each.flags(self._used)
            each.errors.commit(None if closes and all(flags) else flags, closes=closes)

    def close(self, *, taken: bool, checked: bool = True) -> None:
        """Close a step of an optimizer of ours, by which all that it uses was handed out."""
        if taken:
            self.use(checked=checked)
            self.settle()
        self.drop()


def _version_of(grad: Tensor) -> int:
    """Return a number that grows where a gradient is written; FSDP2 writes to a DTensor's own part, others to all."""
    own = getattr(grad, "_local_tensor", None)
    return int(grad._version) + (0 if own is None else int(own._version))


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_note_step)  # gradients that the step itself drops
    register_optimizer_step_post_hook(_note_step)  # those of its closure


@torch._disable_dynamo  # type: ignore[attr-defined]
def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Note for all that are watching what a step of an optimizer uses; torch calls.

    A gradient scaler leaves it to fused optimizers to skip a step: it tells them by an attribute.
    """
    skipped = getattr(optimizer, "found_inf", None)
    for handed_out in [each for each in list(_WATCHING) if each._made]:
        params = {param for group in optimizer.param_groups for param in group["params"]}
        handed_out.use(params, skipped=skipped if isinstance(skipped, Tensor) else None)
