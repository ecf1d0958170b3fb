"""Averages of gradients: in the rounds of a backward pass, in plain loops, and inside a step.

Gradients are divided into buckets, each of which travels on its own: in messages of integers with error feedback, or as
it is. An optimizer says in which form its gradients travel, or that they stay local.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _take_tensors

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import DIGEST_BOUND, Communicator, Traffic
from hf_compressopt.collectives.exchange import BucketErrors, Task, all_reduce, in_runs
from hf_compressopt.collectives.feedback import ErrorFeedback, HandedOut, Members
from hf_compressopt.collectives.sender import (
    Sender,
    StepPasses,
    forget_plain_passes,
    future_on,
    note_sent,
    passes_of,
    size_of,
)
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.flat import Bucket, FlatLayout
from hf_compressopt.kernels import INTEGER_BITS, Average, Combination, IntegerFormat, Segment
from hf_compressopt.kernels.memory import address_of, in_memory, is_direct, numbers_on, overwrite_, reads_at_once
from hf_compressopt.kernels.messages import travels_in_full
from hf_compressopt.schedules import Stage, StepPlan

_BUCKET_BYTES = 25 * 2**20
_Grads = Mapping[Tensor, Tensor | None]
#: What ends the average of a bucket by whether a gradient of its owner is not finite, which the host may not know.
_Finish = Callable[[bool | Tensor], None]
_Done = Callable[[bool | Tensor], None]
_FORMATS = {bits: IntegerFormat(bits) for bits in INTEGER_BITS}


# -- buckets of gradients ---------------------------------------------------------------------------------------------


@dataclass
class GradientBucket(ABC):
    """Gradients that travel together; all gradients of an ``owner`` are dropped together."""

    completes_in_step: ClassVar[bool] = False  # nothing is written into the gradients: the step may await the average
    is_alone: ClassVar[bool] = False  # sent with no other bucket
    bucket: Bucket
    params: Sequence[Tensor]
    communicator: Communicator
    owner: int

    def members(self) -> Iterator[Tensor]:
        return (self.params[piece.index] for piece in self.bucket.pieces)

    @abstractmethod
    def form(self) -> str:
        """Name the form of the messages."""

    @classmethod
    @abstractmethod
    def average(cls, run: Sequence[Any], grads: _Grads) -> Task[tuple[Tensor | None, _Finish]]:
        """Average the gradients of a run of buckets over the ranks; ``grads`` has those that are there.

        Returns whether an element is not finite, [] bool, alike on all ranks, and a function that ends the exchange;
        None if the owner finds that out by itself.
        """

    def segments(self, grads: _Grads) -> list[Segment]:
        pieces = self.bucket.pieces
        return [Segment(grads.get(self.params[p.index]), p.start, p.numel, p.index) for p in pieces]

    def set_completion(self, finish: Callable[[], object]) -> None:
        """Take what the owner calls in its step to await the average, if the bucket ``completes_in_step``."""
        raise NotImplementedError("abstract")


@dataclass
class IntegerBucket(GradientBucket):
    """Gradients that travel as integers with error feedback, in the unit of a gradient without loss scale."""

    errors: ErrorFeedback
    number: int  # among the buckets of the errors
    bits: int
    in_full: Sequence[bool] = ()  # the parameters whose gradients travel in another bucket
    loss_scale: float = 1.0
    #: Of the pass under way.
    old: BucketErrors = field(init=False)
    new: BucketErrors = field(init=False)

    def form(self) -> str:
        return f"int{self.bits}"

    def begin(self, old: ErrorFeedback, new: ErrorFeedback, loss_scale: float) -> None:
        """Begin a pass, with the errors that it adds, those that it writes, and the factor of its gradients."""
        self.old, self.new, self.loss_scale = old.feedback[self.number], new.feedback[self.number], loss_scale

    def segments(self, grads: _Grads) -> list[Segment]:
        found = super().segments(grads)
        return [replace(s, tensor=None) if self.in_full[s.index] else s for s in found] if self.in_full else found

    @classmethod
    def average(cls, run: Sequence[IntegerBucket], grads: _Grads) -> Task[tuple[Tensor, _Finish]]:
        form, ranks, scale = _FORMATS[run[0].bits], run[0].communicator, run[0].loss_scale
        old, new = [bucket.old for bucket in run], [bucket.new for bucket in run]
        segments = [bucket.segments(grads) for bucket in run]
        rows = zip(run, segments, strict=True)
        zs = [Combination(b.bucket.numel, ranks.device, grads=mine, beta=1.0 / scale) for b, mine in rows]
        averages = yield from all_reduce(zs, old, form, ranks, new)
        use = kernels.on(ranks.device)
        for average, mine in zip(averages, segments, strict=True):
            use.add_(average, mine, 0.0, scale)

        def finish(fault: bool | Tensor) -> None:
            for bucket in run:
                bucket.errors.spoil(fault)

        return use.any_nan(*averages), finish


@dataclass
class PlainBucket(GradientBucket):
    """Gradients that travel by an all-reduce in ``dtype``, without error feedback."""

    is_alone: ClassVar[bool] = True  # the bits of a sum depend on the place in the message
    dtype: torch.dtype

    def form(self) -> str:
        return str(self.dtype)

    @classmethod
    def average(cls, run: Sequence[PlainBucket], grads: _Grads) -> Task[tuple[Tensor, _Finish]]:
        (bucket,) = run
        ranks, segments = bucket.communicator, bucket.segments(grads)
        values = torch.empty(bucket.bucket.numel, dtype=torch.float32, device=ranks.device)
        # times 1/W first, as DDP does
        z = Combination(values.numel(), values.device, grads=segments, beta=1.0 / ranks.world_size)
        use = kernels.on(values)
        use.combine_(z, values)
        values = values.to(bucket.dtype)
        handle = ranks.all_reduce(values)
        yield None
        handle.wait()
        use.add_(Average(values.numel(), values=values.float()), segments)
        return ~values.isfinite().all(), lambda dropped: None


def plain_buckets(
    params: Sequence[Tensor],
    communicator: Communicator,
    owner: int,
    *,
    bucket_numel: int = _BUCKET_BYTES // 4,
    dtype: torch.dtype | None = None,
) -> list[GradientBucket]:
    """Return buckets of gradients without error feedback; ``dtype`` None takes that of the parameters."""
    buckets: list[GradientBucket] = []
    for own, members in groupby(params, key=lambda param: param.dtype):
        alike = list(members)
        layout = FlatLayout.build([param.numel() for param in alike], bucket_numel)
        buckets += [PlainBucket(bucket, alike, communicator, owner, dtype or own) for bucket in layout.buckets]
    return buckets


def low_bit_buckets(
    errors: ErrorFeedback,
    layout: FlatLayout,
    params: Sequence[Tensor],
    communicator: Communicator,
    owner: int,
    bits: int,
    *,
    dtype: torch.dtype | None = None,
    in_full: Sequence[bool] = (),
    with_frozen: bool = False,
) -> list[GradientBucket]:
    """Return buckets of integers, with errors of the same layout, and of what travels in full precision beside them.

    These are ``in_full``, by default what :func:`travels_in_full` names; of frozen ones only ``with_frozen``.
    """
    in_full = in_full or [travels_in_full(param) for param in params]
    found: list[GradientBucket] = []
    rows = enumerate(layout.buckets)
    unsent = [number for number, bucket in rows if all(in_full[piece.index] for piece in bucket.pieces)]
    errors.leave_out(unsent)
    for number, bucket in enumerate(layout.buckets):
        if number not in unsent:
            found.append(IntegerBucket(bucket, params, communicator, owner, errors, number, bits, in_full))
    beside = [param for param, each in zip(params, in_full, strict=True) if each]
    beside = [param for param in beside if with_frozen or param.requires_grad or param.is_meta]
    return found + plain_buckets(beside, communicator, owner, bucket_numel=layout.bucket_numel, dtype=dtype)


def begin_pass(buckets: Sequence[GradientBucket], handed_out: HandedOut, loss_scale: float) -> None:
    """Give buckets of integers the errors and the loss scale of a pass."""
    kept, begun = handed_out.begin(), dict[int, tuple[ErrorFeedback, ErrorFeedback]]()
    for bucket in buckets:
        if isinstance(bucket, IntegerBucket) and id(bucket.errors) not in begun:
            begun[id(bucket.errors)] = bucket.errors.begin(kept(Members(bucket.errors, bucket.params)))
    give_errors(buckets, begun, loss_scale)


def give_errors(
    buckets: Iterable[GradientBucket], begun: Mapping[int, tuple[ErrorFeedback, ErrorFeedback]], loss_scale: float
) -> None:
    """Give buckets of integers their part of the old and the new errors, by the id of what they belong to."""
    for bucket in buckets:
        if isinstance(bucket, IntegerBucket):
            bucket.begin(*begun[id(bucket.errors)], loss_scale)


def runs_of(buckets: Iterable[GradientBucket]) -> Iterator[list[GradientBucket]]:
    """Divide buckets, in their order, into what is sent together; those that take an all-reduce are sent alone."""
    for _, alike in groupby(buckets, key=lambda b: (b.form(), b.owner, id(b.communicator), id(b) * b.is_alone)):
        together = list(alike)
        yield from in_runs(together, lambda bucket: bucket.bucket.numel, together[0].communicator)


class GradientRounds(Sender):
    """The exchange of the gradients of one step, again and again, while backward makes them known."""

    def __init__(self) -> None:
        super().__init__()
        self._buckets: list[GradientBucket] = []
        self._runs: list[list[GradientBucket]] = []  # what is sent together of them
        self._averaged: set[Tensor] = set()  # the parameters whose gradients become averages
        self._grads: dict[Tensor, Tensor | None] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._averages: list[tuple[int, Tensor | None, _Finish]] = []
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._checked = ""
        self.before: dict[Tensor, int] = {}  # versions of gradients that DDP writes only for what a rank has used

    def begin(self, buckets: Sequence[GradientBucket], communicator: Communicator | None = None) -> None:
        """Start a round of these buckets, in order; ranks compare other buckets than before, given a communicator."""
        if len(buckets) != len(self._buckets) or any(a is not b for a, b in zip(buckets, self._buckets, strict=True)):
            self._buckets = list(buckets)
            self._runs = list(runs_of(buckets))
            averaging = (bucket for bucket in buckets if not bucket.completes_in_step)
            self._averaged = {param for bucket in averaging for param in bucket.members()}
            together = (chain.from_iterable(bucket.members() for bucket in run) for run in self._runs)
            self.add_buckets(together, alone=True)
            rows = [(b.form(), b.owner, [(p.index, p.start, p.stop) for p in b.bucket.pieces]) for b in buckets]
            mine = repr(rows)
            if communicator is not None and mine != self._checked:
                forms = sorted({bucket.form() for bucket in buckets})
                communicator.require_equal(
                    "warmup_bits, bucket_cap_mb, or the parameters whose gradients they average",
                    [forms, len(buckets), zlib.crc32(mine.encode())],
                )
                self._checked = mine
        self._grads, self._copies, self._averages = {}, [], []
        self.begin_pass(buckets[0].communicator.device if buckets else None)

    def add(self, param: Tensor, grad: Tensor | None) -> bool:
        """Hand over the gradient of a parameter; the round overwrites it.

        Returns False if it is in no bucket of the round, and has elements that nobody sends.
        """
        if param not in self.buckets_of:
            return param.numel() == 0
        if grad is not None and not (is_direct(grad) and address_of(grad)):
            original, grad = grad, in_memory("the gradient", grad)
            self._copies.append((original, grad))
        self._grads[param] = grad
        self.arrived(param)
        return True

    def send(self, index: int) -> None:
        self.tasks.add(self._exchange(self._runs[index]))

    def _exchange(self, run: list[GradientBucket]) -> Task[None]:
        not_finite, finish = yield from run[0].average(run, self._grads)
        self._averages.append((run[0].owner, not_finite, finish))

    def finish(self, done: _Done | None = None) -> None:
        """End the round, and say whether a gradient is not finite, [] bool where the host would wait for it."""
        self.send_rest()
        self.tasks.drain()
        self.await_anew()
        averages, self._averages = self._averages, []
        flags: dict[int, list[Tensor]] = {}
        for owner, flag, _ in averages:
            if flag is not None:
                flags.setdefault(owner, []).append(flag)
        dropped: dict[int, Any] = {owner: torch.stack(mine).any() for owner, mine in flags.items()}
        if dropped and reads_at_once(next(iter(dropped.values())).device):
            dropped = dict(zip(dropped, torch.stack([*dropped.values()]).tolist(), strict=True))
        for owner, _, finish in averages:
            finish(dropped.get(owner, False))
        for original, copy in self._copies:
            overwrite_(original, copy)
        self._copies, self._grads = [], {}
        if done is not None:
            faults = list(dropped.values())
            late = bool(faults) and isinstance(faults[0], Tensor)
            done(torch.stack(faults).any() if late else any(faults))

    def _leave_to_steps(self) -> bool:
        """Send the rest, and let the owners end the round in their steps; False if a bucket writes into gradients."""
        if not self._buckets or not all(bucket.completes_in_step for bucket in self._buckets):
            return False
        self.send_rest()
        self.tasks.join()  # whoever writes to the gradients now waits until they are read
        self._copies = []  # what is written into them is nothing
        for bucket in self._buckets:
            bucket.set_completion(self.finish)
        return True

    def add_ddp_bucket(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        start: Callable[[], None],
        done: _Done | None = None,
        refuse: Callable[[Sequence[Tensor]], None] = lambda params: None,
    ) -> torch.futures.Future[Tensor]:
        """Take the gradients of a bucket of DDP's; messages travel while backward computes further gradients.

        The last bucket, or the step, awaits them. No callback starts a collective: all ranks start them in one order.
        ``refuse`` is called with parameters that are in no bucket of the round; their gradients stay local.
        """
        buffer = bucket.buffer()
        future = future_on(buffer.device)
        if bucket.index() == 0:
            self._futures, self.before = [], {}
            start()
        elif not self._futures:
            raise RuntimeError(
                "a bucket came before the first one of its step: was the hook registered in a backward pass?"
            )
        self._futures.append((future, buffer))
        params, grads = bucket.parameters(), bucket.gradients()
        self._note_versions(params, grads)
        rows = zip(params, grads, strict=True)
        unknown = [param for param, grad in rows if not self.add(param, _in_order_of(param, grad))]
        if unknown:
            refuse(unknown)
        note_sent([param for param in params if param in self._averaged])
        if bucket.is_last():
            if not self._leave_to_steps():
                self.finish(done)
            futures, self._futures = self._futures, []
            for waiting, gradients in futures:
                waiting.set_result(gradients)
        return future

    def _note_versions(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Note the versions of gradients, unless DDP's bucket is their memory."""
        own = [param.grad for param in params]
        rows = zip(own, grads, strict=True)
        if any(mine is not None and mine.numel() and mine.data_ptr() != grad.data_ptr() for mine, grad in rows):
            found = ((param, mine) for param, mine in zip(params, own, strict=True) if mine is not None)
            self.before.update((param, mine._version) for param, mine in found)


def _in_order_of(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as DDP stores it, by the strides of a dense parameter: DDP's own view ignores the strides."""
    if param.is_contiguous():
        return grad
    strides = torch.empty_like(param, device="meta").stride()
    return grad.as_strided(param.shape, strides) if strides == param.stride() else grad


# -- optimizers whose gradients are sent here -------------------------------------------------------------------------


class AveragedForms(Protocol):
    """The form in which an optimizer's averaged gradients travel."""

    bits: int

    @property
    def rounds(self) -> GradientRounds: ...
    def buckets(
        self, loss_scale: float | None, *, owner: int = 0, present: Sequence[Tensor] | None = None
    ) -> list[GradientBucket]: ...
    def hand_out(self, before: Mapping[Tensor, int] | None = None) -> None: ...


class OverlapForms(Protocol):
    """The messages that an optimizer sends of local gradients during backward."""

    def forget_clipping(self) -> None: ...  # of gradients that no step has taken
    def sent_by_hook(self) -> None: ...  # from now on, after the ranks have compared their passes
    def due(self, plan: StepPlan, before: StepPlan) -> bool: ...
    def buckets(self, loss_scale: float | None, *, owner: int, present: Collection[Tensor]) -> list[GradientBucket]: ...
    def note_gradients(self) -> None: ...


class PlannedOptimizer(Protocol):
    """An optimizer whose plan says of each step whether its gradients are averaged, and in which form they travel."""

    param_groups: list[dict[str, Any]]
    own_tensors: ClassVar[Mapping[Stage, Sequence[str]]]
    zero_stage: int

    @property
    def communicator(self) -> Communicator: ...
    @property
    def traffic(self) -> Traffic: ...
    @property
    def plan(self) -> StepPlan: ...
    @property
    def last_plan(self) -> StepPlan: ...
    @property
    def trainable_parameters(self) -> list[Tensor]: ...
    @property
    def ranks_are_apart(self) -> bool: ...
    @property
    def warmup_gradients(self) -> AveragedForms: ...
    @property
    def overlap(self) -> OverlapForms | None: ...
    @property
    def passes(self) -> StepPasses: ...  # for the coming step, as far as a hook or average_gradients tells
    def own_parameters(self) -> list[Tensor]: ...  # those of param groups with a process group of their own
    def shared_parameters(self) -> list[tuple[str, Tensor]]: ...  # the others, with their names
    def hyperparameters(self) -> list[Any]: ...  # what must be alike on all ranks in a step, as JSON holds it
    def require_same_options(self) -> None: ...
    def label_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None: ...
    def join_hook(self) -> Any: ...


# -- plain loops, and param groups with gradients of their own --------------------------------------------------------


def average_gradients(
    optimizer_or_params: PlannedOptimizer | Iterable[Tensor],
    process_group: dist.ProcessGroup | None = None,
    *,
    loss_scale: float | None = None,
) -> None:
    """Average ``p.grad`` over the ranks, in place, for a training loop without DDP. All ranks call.

    Call it between ``backward()`` and ``step()``::

        loss.backward()
        average_gradients(optimizer)
        optimizer.step()

    Given a compressed optimizer, it does what the optimizer's plan says,
    in the form that its ``warmup_bits`` say: in steps that need local gradients it does nothing. A parameter without a
    gradient on some of the ranks counts as zero there; one without a gradient on any rank stays without.

    Args:
        optimizer_or_params: A compressed optimizer, or parameters, alike on all ranks.
        process_group: The ranks, for parameters; None is the default group. An optimizer knows its own.
        loss_scale: Factor that the gradients carry, such as a ``GradScaler.get_scale()``, for an optimizer. Without it
            a hf_compressopt.GradScaler tells the optimizer after each step.

    Raises:
        TypeError: If a gradient is sparse.
        ValueError: If a process_group is given with an optimizer, and if the ranks differ in the gradients that they
            average, or in how.
    """
    rounds: GradientRounds | None = None
    if isinstance(optimizer_or_params, Iterable):
        params = [p for p in optimizer_or_params if p.requires_grad]
        passes = passes_of(params)
        passes.begin()
        device = params[0].device if params else None
        communicator: Communicator = TorchCommunicator(process_group, device=device)
        passes.post(communicator)
    else:
        if process_group is not None:
            raise ValueError("process_group belongs to parameters: an optimizer knows its own ranks")
        optimizer_or_params.require_same_options()
        if not optimizer_or_params.plan.reduce_grads:
            return
        own = {id(p) for p in optimizer_or_params.own_parameters()}  # step() averages these over their own ranks
        params = [p for p in optimizer_or_params.trainable_parameters if id(p) not in own]
        communicator, form = optimizer_or_params.communicator, optimizer_or_params.warmup_gradients
        passes = optimizer_or_params.passes
        passes.note_members(sum(param.requires_grad for param in params))
        passes.note_hyperparameters(optimizer_or_params.hyperparameters())
        passes.begin()
        passes.compare(communicator)  # before messages that may meet those of a step
        if communicator.world_size > 1 and form.bits < 32:
            buckets = form.buckets(loss_scale)[::-1]
            if buckets:
                rounds = form.rounds
                rounds.begin(buckets, communicator)
    if communicator.world_size > 1:
        with torch.no_grad():
            _average(params, communicator, rounds, passes)
            if rounds is not None:
                form.hand_out()
        note_sent(params)


#: The parameters, by id, of which the ranks have compared the values.
_COMPARED: dict[tuple[int, ...], None] = {}
_SPARSE = 1 << 30  # more than any number of parameters


@lru_cache(maxsize=16)
def _digest_of(shapes: tuple[torch.Size, ...], values: tuple[float, ...]) -> int:
    return zlib.crc32(repr([list(map(list, shapes)), values]).encode()) % DIGEST_BOUND


def _values_of_new(params: Sequence[Tensor]) -> tuple[float, ...]:
    """Return a number that stands for each parameter, if these are averaged for the first time; else nothing."""
    key = tuple(map(id, params))
    if key in _COMPARED:
        return ()
    if len(_COMPARED) == 16:
        _COMPARED.pop(next(iter(_COMPARED)))
    _COMPARED[key] = None
    return tuple(size_of(param) or 0.0 for param in params)


def _check_alike(params: Sequence[Tensor], communicator: Communicator) -> None:
    """Raise a ValueError on all ranks if they average other parameters, or in another order. All ranks call."""
    shapes = [list(param.shape) for param in params]
    everyone = communicator.all_gather_object([shapes, [size_of(param) for param in params]])
    others = [rank for rank, (theirs, _) in enumerate(everyone) if theirs != everyone[0][0]]
    if others:
        raise ValueError(
            f"ranks {others} differ from rank 0 in the number, the order or the shapes of the parameters that they "
            f"average: rank {others[0]} has {len(everyone[others[0]][0])}, rank 0 {len(everyone[0][0])}"
        )
    values = [found for _, found in everyone]
    if all(sorted(found) == sorted(values[0]) for found in values) and any(found != values[0] for found in values):
        raise ValueError("the ranks average the same parameters in another order: give all of them the same order")


def _average(
    params: Sequence[Tensor], communicator: Communicator, rounds: GradientRounds | None, passes: StepPasses
) -> None:
    missing = sum(p.grad is None for p in params)
    sparse = any(p.grad is not None and p.grad.layout != torch.strided for p in params)
    count = numbers_on(communicator.device, [float(missing + _SPARSE * sparse)], torch.float64)[0]
    values = _values_of_new(params)
    digest = _digest_of(tuple(p.shape for p in params), values)
    (counts, *_), (alike, *_) = communicator.sum_and_compare([count], [digest], None, None)
    if not alike:
        try:
            _check_alike(params, communicator)
        except ValueError:
            passes.forget()
            forget_plain_passes()
            raise
    passes.check()
    if counts >= _SPARSE:
        raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")
    has_grad = [True] * len(params)
    if counts:
        present = numbers_on(communicator.device, [float(p.grad is not None) for p in params])
        communicator.all_reduce(present, op="max").wait()
        has_grad = [bool(found) for found in present.tolist()]
    rows = [p for p, found in zip(params, has_grad, strict=True) if found]
    for p in rows:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if rounds is not None:
        for p in reversed(params):
            rounds.add(p, p.grad)
        rounds.finish()
        return
    by_dtype = groupby([p.grad for p in rows if p.grad is not None], key=lambda grad: (grad.dtype, grad.device))
    buckets = (_take_tensors(list(grads), _BUCKET_BYTES) for _, grads in by_dtype)  # type: ignore[no-untyped-call]
    for bucket in chain.from_iterable(buckets):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])  # [numel of the bucket]
        flat.mul_(1.0 / communicator.world_size)
        communicator.all_reduce(flat).wait()
        for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            overwrite_(grad, part.view(grad.shape))


def average_group(
    grads: Sequence[Tensor | None], layout: FlatLayout, shapes: Sequence[torch.Size], communicator: Communicator
) -> list[Tensor | None]:
    """Average one param group's local gradients: new float32 tensors, or None without a gradient on any rank."""
    device = communicator.device
    mine = [float(grad is not None) for grad in grads]
    present = numbers_on(device, mine)
    flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)  # [numel]
    for grad, start, numel in zip(grads, layout.starts, layout.numels, strict=True):
        if grad is not None:
            flat[start : start + numel] = grad.reshape(-1)
    flat.mul_(1.0 / communicator.world_size)
    handles = [communicator.all_reduce(present, op="max")]
    handles += [communicator.all_reduce(flat[bucket.start : bucket.stop]) for bucket in layout.buckets]
    for handle in handles:
        handle.wait()
    views = [flat[start : start + numel] for start, numel in zip(layout.starts, layout.numels, strict=True)]
    rows = zip(views, shapes, mine if all(mine) else present.tolist(), strict=True)
    return [view.view(shape) if has_grad else None for view, shape, has_grad in rows]
