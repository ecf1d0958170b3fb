"""The sending of gradients: passes that the ranks count and compare, buckets in one order, and records of the sent.

A pass is one call of backward, or of a plain loop's average: :class:`StepPasses` counts, and :class:`Sender` sends its
buckets. It is fed by DistributedDataParallel's hook and plain loops (:mod:`~hf_compressopt.collectives.gradients`), and
by hooks of parameters (:mod:`~hf_compressopt.collectives.backward`). FSDP2 has no sender: it orders its units itself,
among messages of its own. It knows only after a pass whether that pass sends, and counts passes where they end.

:class:`SendRecord`: which gradients this package must send, whatever forward and its caller do. Autograd tells of every
gradient that it has added to, by a hook on the parameter that no forward can go around; who sends tells it by
:func:`note_sent`. A gradient that nobody has sent yet, or that has changed since, *waits*. A step that would use one
raises an error with its name, on every rank where it waits, before anything moves. Gradients wait if

- forward goes around DistributedDataParallel, or nobody has wrapped the module;
- the parameter was frozen when DistributedDataParallel was made, and is trainable now;
- torch does not call the hook any more.

A gradient may wait, and no step uses it: inside ``no_sync``, or if ``zero_grad()`` throws it away. Steps of a
compressed stage send what they need of each rank's own gradients, and end the waiting. A parameter that was frozen when
its record began is watched as soon as it is trainable. Ranks without a gradient that others have send zeros.

Whether a gradient waits each rank knows alone. What an optimizer has beside the parameters that records answer for, the
ranks compare once (:meth:`SendRecord.examine`), where the record knows its ranks.
"""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hf_compressopt.collectives.communicator import Communicator, digest_of
from hf_compressopt.collectives.exchange import Pipeline
from hf_compressopt.kernels.memory import fetch_later, numbers_in_place, reads_at_once

_RECORDS: WeakSet[SendRecord] = WeakSet()
_NUMBERS = count()  # of records, alike on all ranks, which send in their order
#: What schedulers change, for errors.
HYPERPARAMETERS = "the hyperparameters of their param groups (does each rank's scheduler see the same numbers?)"
_SHOWN = 4  # names in an error
_CHUNK = 1 << 18  # elements that are copied at a time
_ROUNDING = 1e-4  # relative difference of the sizes of gradients that counts as rounding
_WHY = (
    "every rank would train on its own. Call the model that prepare(), or DistributedDataParallel, has returned, and "
    "not the one inside it (.module, unwrap_model, Trainer's self.model); wrap every module that trains, after its "
    "parameters were made trainable; wrap the model anew for another optimizer than attach_ddp knows; have the last "
    "backward of a step outside no_sync; or average such gradients after backward by "
    "hf_compressopt.average_gradients(parameters)"
)


# -- how many passes ---------------------------------------------------------------------------------------------------


class PassesDiffer(RuntimeError):
    """The error of all ranks if they differ in their backward passes."""


class StepPasses:
    """The backward passes since the last step that send gradients: all ranks run as many, or all raise an error.

    The messages of a rank that runs one more would meet those of the others' step or next pass, and be averaged with
    another gradient, or hang. So the ranks compare ten numbers, 40 bytes, where such a pass begins, and before a step
    that uses it. One stands for the hyperparameters, such as the rate of a scheduler that looks at a loss of its own
    rank.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0  # since the last step
        self.before = 0  # between the last step and the one before
        self.in_loop: Communicator | None = None  # the ranks of a plain loop, whose next message is that of a pass
        self.members = 0  # the number of the parameters, once it has changed between passes
        self.hyperparameters: list[Any] = []  # of the coming step, if an optimizer has told them
        self.are_known = False  # somebody has counted one
        self.are_met = False  # the ranks have compared them in the step under way
        self.held = 0  # passes since the last step whose gradients were not thrown away
        self._posted: _Posted | None = None
        self._ranks: Sequence[Communicator] = ()  # those who compared the last pass

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a message under way."""
        return self.__dict__ | {"_posted": None, "_ranks": (), "in_loop": None}

    def run_in_loop(self, ranks: Communicator) -> None:
        """Note that a plain loop of these ranks averages gradients: its next message is that of a pass."""
        self.in_loop = ranks

    def begin(self, *communicators: Communicator, joined: bool = False) -> None:
        """Count a pass; given communicators, compare it before messages that may meet those of a step: :meth:`post`.

        Unless it would wait for a GPU: then the next comparison, or :meth:`check`, raises.
        """
        self.are_met = False
        if not joined:
            self.are_known = True
            self.count += 1
            self.held += 1
        if communicators:
            self.post(*communicators, joined=joined, doing="has no inputs left" if joined else "")
            self.check(now=False)

    def note_members(self, number: int) -> None:
        """Note the number of the parameters, if there were passes: before the first one other messages compare it."""
        if self.are_known:
            self.members = number

    def note_hyperparameters(self, rows: list[Any]) -> None:
        """Note what optimizers must have alike on all ranks in the coming step, as JSON holds it."""
        self.hyperparameters = rows

    def forget(self) -> None:
        """Begin anew after another error of all ranks."""
        self._posted = None
        self.count = self.held = 0

    def drop(self) -> None:
        """Note that what the passes have sent was thrown away."""
        self.held = 0

    def end_step(self) -> None:
        if self.count:
            self.before = self.count
        self.count = self.held = 0
        self.are_met = False

    def post(self, *communicators: Communicator, in_step: bool = False, joined: bool = False, doing: str = "") -> None:
        """Start comparing the passes with those of the other ranks, by a message that is the same in a step.

        Several communicators reach all ranks one after another, as those of a mesh's dimensions do. A rank that has
        ``joined`` has no inputs left, and follows the others (torch's Join): its own passes count for nothing.
        """
        self.check()  # what the host has not waited for
        wide = [each for each in dict.fromkeys(communicators) if each.world_size > 1]
        if not wide:
            return
        self._ranks = wide
        hyperparameters = digest_of(self.hyperparameters) if self.hyperparameters else 0
        numbers = [*map(float, (self.count, self.held, in_step, self.members, hyperparameters))]
        # one maximum says both: that of the negative numbers is minus the least of the numbers
        both = [-math.inf] * 2 * len(numbers) if joined else [*numbers, *(-number for number in numbers)]
        here = array("f", both)
        message = numbers_in_place(wide[0].reached().device, here)
        arrive = partial(_arrived, _largest(wide[0], message), wide[1:], message)
        self._posted = _Posted(wide, arrive, here, doing or self._describe(in_step))

    def check(self, *, now: bool = True) -> None:
        """Raise an error on all ranks if they differ in what was posted.

        Unless ``now``, the host does not wait for a GPU, and the next call raises.
        """
        if self._posted is None:
            return
        ranks, arrive, here, mine = self._posted
        found = arrive()
        shared = found.data_ptr() == here.buffer_info()[0]  # in host memory, where nothing is awaited
        if not now and not shared and not reads_at_once(found.device):
            self._posted = _Posted(ranks, fetch_later(found), here, mine)
            return
        self._posted = None
        largest = list(here) if shared else found.tolist()
        most, least = largest[: len(largest) // 2], largest[len(largest) // 2 :]
        alike = [high == -low for high, low in zip(most, least, strict=True)]
        if all(alike):
            return
        self.count = self.held = 0  # a script that catches the error begins anew
        if all(alike[:-1]):
            for communicator in ranks:
                communicator.require_equal(HYPERPARAMETERS, self.hyperparameters)
        everyone = [f"rank {dist.get_rank() if len(ranks) > 1 else ranks[0].rank} {mine}"]
        for communicator in ranks:
            everyone = [each for found in communicator.all_gather_object(everyone) for each in found]
        raise PassesDiffer(
            "the ranks have different numbers of backward passes in a step, of parameters, or of gradients to send, or "
            f"not all have thrown gradients away ({self.name}): {'; '.join(sorted(everyone))}. Give all ranks as many "
            "batches and micro-batches (drop_last=True), run all passes but the last one of a step inside no_sync(), "
            "and call zero_grad() and add_param_group() on all ranks or on none"
        )

    def compare(self, *communicators: Communicator, in_step: bool = False, doing: str = "") -> None:
        """Raise an error on all ranks if they differ in their passes. All ranks call."""
        self.post(*communicators, in_step=in_step, doing=doing)
        self.check()

    def meet(self, communicator: Communicator, *, now: bool = True) -> None:
        """Compare the passes, once, before a step uses them; ``now``: see :meth:`check`. All ranks call."""
        if not self.are_met:
            self.are_met = True
            self.post(communicator, in_step=True)
            self.check(now=now)

    def tell(self, doing: str) -> None:
        """Raise an error on all ranks of a plain loop, if the others do not what this rank does, which may not."""
        if self.in_loop is not None:
            self.compare(self.in_loop, in_step=True, doing=doing)

    def close(self, doing: str) -> None:
        """Raise an error on all ranks if one is still in a pass: where a training ends no step tells it. All call."""
        if self._ranks:
            self.compare(*self._ranks, in_step=True, doing=doing)

    def _describe(self, in_step: bool) -> str:
        dropped = f", {self.count - self.held} of them thrown away by zero_grad()" if self.held != self.count else ""
        if in_step:
            of = f" of {self.members} parameters" if self.members else ""
            return f"takes a step after {self.count} pass{'es' * (self.count != 1)}{of}{dropped}"
        before = f" of {self.members} parameters" if self.members else ""
        before += f" ({self.before} in the step before)" if self.before else ""
        return f"is in pass {self.count}{before}{dropped}"


class _Posted(NamedTuple):
    """A message of :class:`StepPasses` that is under way."""

    ranks: Sequence[Communicator]
    arrive: Callable[[], Tensor]  # returns the largest numbers of all ranks
    here: array[float]  # this rank's numbers; in their place the largest ones, if messages lie in host memory
    mine: str  # what this rank does, in words


def _largest(communicator: Communicator, message: Tensor) -> Callable[[], object]:
    """Start taking the largest numbers of all ranks, and return what awaits them."""
    with communicator.traffic.paused():  # metrics count the training's messages, and no checks
        return communicator.all_reduce(message, op="max").wait


def _arrived(wait: Callable[[], object], others: Sequence[Communicator], message: Tensor) -> Tensor:
    """Await a message, and take it to the ranks of the other communicators too."""
    wait()
    for each in others:
        _largest(each, message)()
    return message


# -- in which order ----------------------------------------------------------------------------------------------------


class Sender(ABC):
    """Buckets of gradients that are sent pass by pass, in one order on all ranks.

    A pass begins by :meth:`begin_pass`. A bucket is sent as soon as the gradients of all its members have
    :meth:`arrived` and the buckets before it are sent. At the end :meth:`send_rest` sends the others, with zeros for
    missing gradients, so that ranks whose graphs differ do not wait for each other. Then the ``tasks`` are drained, and
    gradients awaited anew.
    """

    def __init__(self) -> None:
        self.buckets_of: dict[Hashable, list[int]] = {}  # by member
        self._members: list[frozenset[Hashable]] = []
        self._sequence: list[int] = []
        self._completed: dict[int, None] = {}  # in the order in which their gradients came, until the ranks agree
        self._is_agreed = False
        self._awaited: list[set[Hashable]] = []
        self._next = 0
        self.sends = False  # buckets are sent in the pass under way
        self.tasks = Pipeline()  # what it has sent

    @abstractmethod
    def send(self, index: int) -> None:
        """Add the task of a bucket to the others. All ranks send the same buckets in one order."""

    # -- buckets ------------------------------------------------------------------------------------------------------

    def add_buckets(self, buckets: Iterable[Iterable[Hashable]], *, alone: bool = False) -> None:
        """Add buckets of these members behind the others, or ``alone``, in their place."""
        if alone:
            self.buckets_of = {}
            self._members = []
            self._sequence = []
        for members in map(frozenset, buckets):
            for member in members:
                self.buckets_of.setdefault(member, []).append(len(self._members))
            self._sequence.append(len(self._members))
            self._members.append(members)
        self.await_anew()

    def agree_on_order(self, communicator: Communicator) -> None:
        """Send buckets from now on in the order in which they were complete on rank 0. All ranks call, after passes."""
        if self._is_agreed or communicator.world_size == 1:
            return
        first = communicator.all_gather_object(list(self._completed))[0]
        self._sequence = [*first, *(number for number in self._sequence if number not in set(first))]
        self._is_agreed, self._completed = bool(first), {}

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_pass(self, device: torch.device | None, limit: int | None = None) -> None:
        """Begin a pass that sends buckets, whose tasks a GPU does beside backward; ``limit``: see Pipeline."""
        if self.sends or not self.tasks.is_empty:  # a pass was not finished, after an error
            self.tasks.join()
            self.await_anew()
        self.tasks, self.sends = Pipeline(limit, device), True

    def awaits(self, index: int, member: Hashable) -> bool:
        """Return whether the gradient of a member of a bucket has not come in this pass."""
        return member in self._awaited[index]

    def arrived(self, member: Hashable) -> None:
        """Note that the gradient of a member has come, and send what is due now."""
        for index in self.buckets_of.get(member, ()):
            awaited = self._awaited[index]
            awaited.discard(member)
            if not awaited and not self._is_agreed:
                self._completed.setdefault(index)
        if self.sends:
            self._send_due()

    def _send_due(self, *, all_of_them: bool = False) -> None:
        while self._next < len(self._sequence) and (all_of_them or not self._awaited[self._sequence[self._next]]):
            self._next += 1
            self.send(self._sequence[self._next - 1])

    def send_rest(self) -> None:
        """Send the buckets that have not been sent in this pass."""
        if self.sends:
            self._send_due(all_of_them=True)

    def send_chosen(self, choice: Sequence[bool]) -> None:
        """Send the chosen buckets outside a pass, in their order. All ranks call."""
        for index in self._sequence:
            if choice[index]:
                self.send(index)
        self.tasks.drain()

    def await_anew(self) -> None:
        """End a pass."""
        self._awaited = [set(members) for members in self._members]
        self._next, self.sends = 0, False


# -- what is answered for ----------------------------------------------------------------------------------------------


class SendRecord:
    """The parameters that a sender of gradients answers for, and those of them whose gradients wait to be sent.

    The hooks do not keep the record alive, and go with it.
    """

    def __init__(
        self, name: str, named: Iterable[tuple[str, Tensor]] = (), communicator: Communicator | None = None
    ) -> None:
        """Answer for parameters, for a sender of this name.

        With a communicator, the ranks compare once what an optimizer has beside them; see :meth:`examine`.
        """
        self.name = name
        self._communicator = communicator
        self.number = next(_NUMBERS)
        self.passes = StepPasses(name)
        self._examined: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # by number of parameters
        # the parameters that the ranks have compared: some optimizers make others for each step
        self._compared: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._waiting: set[Tensor] = set()
        self._known: dict[Tensor, str] = {}  # with their names
        self._frozen: set[Tensor] = set()  # of them: they take no hook until they are trainable
        self._hooks = Hooks()
        self.add(named)
        _RECORDS.add(self)
        _watch_steps()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return an empty record for a copy: its owner knows the parameters of the copy."""
        return SendRecord, (self.name,)

    def add(self, named: Iterable[tuple[str, Tensor]], *, watched: bool = True) -> None:
        """Answer for further parameters.

        Not ``watched`` are those that each rank has for itself, and FSDP2's shards, whose gradients it sends itself.
        """
        later = bool(self._known)  # a gradient that is there now came unseen
        for name, param in named:
            if self.answers_for(param):
                continue
            self._known[param] = name
            if not watched or _is_shard(param):
                continue
            if param.requires_grad:
                self._watch(param, later=later)
            else:
                self._frozen.add(param)

    def _watch(self, param: Tensor, *, later: bool) -> None:
        """Note from now on when autograd adds to the gradient of a parameter.

        This hook runs before the one by which DistributedDataParallel learns that a bucket is full: what it sends does
        not wait any more afterwards.
        """
        self._frozen.discard(param)
        hook = self._waiting.add  # a builtin costs less than a function
        self._hooks.add(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        if later and param.grad is not None:
            self._waiting.add(param)

    @property
    def is_in_use(self) -> bool:
        return bool(self._known)

    def answers_for(self, param: Tensor) -> bool:
        return param in self._known

    def name_of(self, param: Tensor) -> str:
        """The name of a parameter in errors."""
        return self._known.get(param) or f"one of shape {tuple(param.shape)}"

    def sent(self, params: Sequence[Tensor]) -> None:
        """Note that the gradients of parameters were sent, as they are now."""
        for param in [param for param in params if param in self._frozen] if self._frozen else ():
            if param.requires_grad:
                self._watch(param, later=True)
        self._waiting.difference_update(params)

    def unsent(self, params: Iterable[Tensor]) -> list[str]:
        """Name those of the parameters that have a gradient which nobody has sent."""
        for param in [param for param in self._frozen if param.requires_grad]:
            self._watch(param, later=True)
        if not self._waiting:
            return []
        return [self.name_of(p) for p in params if p.grad is not None and p in self._waiting]

    def examine(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """Check an optimizer's other parameters, for which nobody answers, when it comes here first. All ranks call.

        Somebody else may average their gradients, and a rank may have parameters of its own. But if all ranks have the
        same parameters, and other gradients, then nobody averages these.
        """
        if self._communicator is None or self._examined.get(optimizer) == len(params):
            return
        self._examined[optimizer] = len(params)
        unknown = [
            (name, param)
            for name, param in named_parameters(optimizer)
            if param.requires_grad and not _is_shard(param) and not is_answered_for(param)
        ]
        unknown = [(name, param) for name, param in unknown if param not in self._compared]
        if not unknown or not any(map(self.answers_for, params)):
            return
        for _, param in unknown:
            self._compared[param] = True
        mine = [[size_of(param), size_of(param.grad)] for _, param in unknown]
        everyone = self._communicator.all_gather_object(mine)
        names: list[str] = []
        for (name, _), rows in zip(unknown, zip(*everyone, strict=True), strict=True):
            value, gradient = rows[0]
            is_replicated = all(others == value for others, _ in rows)
            if is_replicated and any(sizes_differ(others, gradient) for _, others in rows):
                names.append(name)
        if names:
            raise RuntimeError(
                f"nobody has averaged the gradients of {listed(names)}, which {type(optimizer).__name__} has beside "
                f"those that {self.name} sends: {_WHY}. Give what each rank has for itself an optimizer of its own"
            )

    def close(self) -> None:
        """Answer for nothing any more."""
        self._hooks.remove()
        self._waiting.clear()
        self._known, self._frozen = {}, set()


def is_answered_for(param: Tensor) -> bool:
    """True if any record answers for a parameter."""
    return any(record.answers_for(param) for record in _RECORDS)


def note_sent(params: Sequence[Tensor]) -> None:
    """Note that the gradients of parameters were sent, as they are now, whoever answers for them."""
    for record in _RECORDS:
        record.sent(params)


def check_bucket(bucket: Any) -> None:
    """Check that what DistributedDataParallel gives to a hook is a bucket of dense gradients; alike on all ranks."""
    if isinstance(bucket, tuple):
        raise ValueError(
            'torch._dynamo.config.optimize_ddp="python_reducer" gives hooks single gradients inside compiled code, '
            "where no messages of few bits can be sent: leave it at its default, True, before DistributedDataParallel "
            "is made"
        )
    if bucket.buffer().is_sparse:
        raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")


def as_it_is(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future whose value is there: a buffer, for DDP hooks that leave it local."""
    future = future_on(buffer.device)
    future.set_result(buffer)
    return future


def future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """Return a future of gradients on a device, for DDP hooks."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def size_of(tensor: Tensor | None) -> float | None:
    """The sum of the absolute values of a dense tensor; None if there is none."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    chunks = torch.split(tensor.detach().reshape(-1), _CHUNK)
    return float(sum(chunk.abs().sum(dtype=torch.float64) for chunk in chunks))


def sizes_differ(size: float | None, first: float | None) -> bool:
    """Return whether two sizes differ by more than rounding, or only one of them is there."""
    if size is None or first is None:
        return size is not first
    if not (math.isfinite(size) and math.isfinite(first)):
        return math.isfinite(size) != math.isfinite(first)
    return abs(size - first) > _ROUNDING * max(size, first)


def _is_shard(param: Tensor) -> bool:
    return hasattr(param, "device_mesh")


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """The parameters of an optimizer with their names, or with numbers and shapes."""
    rows: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        unnamed = [f"parameter {len(rows) + at} {tuple(p.shape)}" for at, p in enumerate(group["params"])]
        rows += zip(group.get("param_names", unnamed), group["params"], strict=True)
    return rows


def listed(names: Sequence[str]) -> str:
    """Some of the names, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)
    register_optimizer_step_post_hook(_check_closure)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error before a step that would use a gradient which was to be sent, and was not; torch calls this."""
    if not _PLAIN and not _records_in_use():
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    given = kwargs.get("grads", args[2] if len(args) > 2 else None)  # step(closure, grads) of a compressed optimizer
    if getattr(optimizer, "sends_gradients", False) or given is not None:  # in this step
        note_sent(params)
    else:
        require_sent(optimizer)
    _end_step(_records_in_use(), params)


def require_sent(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if a step would use a gradient which was to be sent, and was not."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    records = _records_in_use()
    if any(record.unsent(params) for record in records):
        records.clear()  # it would keep them alive
        records += _records_without_garbage()  # one that nobody uses any more is no reason for an error
    for record in records:
        record.examine(optimizer, params)
        if names := record.unsent(params):
            record.passes.tell(f"takes a step with gradients of {listed(names)} that were not averaged: {_WHY}")
            raise RuntimeError(
                f"{record.name} has not sent the gradients of {listed(names)}, with which "
                f"{type(optimizer).__name__}.step() would move them: {_WHY}"
            )


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error after a step that has used gradients of its closure which were to be sent, and were not."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None or hasattr(optimizer, "sends_gradients"):  # which looks before it moves anything
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(record.unsent(params) for record in _records_in_use()):
        return
    for record in _records_without_garbage():
        if names := record.unsent(params):
            raise RuntimeError(
                f"{record.name} has not sent the gradients of {listed(names)}, which the closure of "
                f"{type(optimizer).__name__}.step() has computed, and which have moved them: {_WHY}"
            )


def _records_in_use() -> list[SendRecord]:
    return sorted((record for record in _RECORDS if record.is_in_use), key=lambda record: record.number)


def _records_without_garbage() -> list[SendRecord]:
    """Return the records in use without those of a DistributedDataParallel that was given up, and wrapped anew."""
    gc.collect()
    return _records_in_use()


def _end_step(records: Iterable[SendRecord], params: Sequence[Tensor]) -> None:
    for record in records:
        if record.passes.count and any(map(record.answers_for, params)):
            record.passes.end_step()
    for first, passes in _PLAIN.items():
        if passes.count and any(param is first for param in params):
            passes.end_step()


#: The passes of plain loops, by the first of the parameters that they average.
_PLAIN: MutableMapping[Tensor, StepPasses] = WeakTensorKeyDictionary()


def forget_plain_passes() -> None:
    """Begin anew after an error in an average of a plain loop: the ranks may have counted for other parameters."""
    for passes in _PLAIN.values():
        passes.forget()


def passes_of(params: Sequence[Tensor]) -> StepPasses:
    """The passes after which a plain loop averages these parameters."""
    if not params:
        return StepPasses("average_gradients")
    if params[0] not in _PLAIN:
        _watch_steps()
        _PLAIN[params[0]] = StepPasses("average_gradients")
    return _PLAIN[params[0]]


# -- hooks -------------------------------------------------------------------------------------------------------------


class Hooks:
    """The hooks that an object has on others. They are removed when it goes."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        finalize(self, _remove, self._handles).atexit = False

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove them all."""
        _remove(self._handles)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def weak_hook(method: Callable[..., object], *args: Any) -> Callable[[object], None]:
    """Return a hook that calls a method with these arguments while its object lives."""
    weak = WeakMethod(method)

    def call(_: object) -> None:
        if (alive := weak()) is not None:
            alive(*args)

    return call
