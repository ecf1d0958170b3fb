"""What is answered for: every parameter whose gradient this package must send, whatever forward and its caller do.

Gradients are sent by DistributedDataParallel's hook, by hooks of the parameters (ZeRO), by FSDP2's hook, in a plain
loop, or in a step. Each of these tells here what it has sent (:func:`note_sent`). Autograd tells of every gradient that
it has added to, by a hook on the parameter that no forward can go around. So a gradient *waits* from the moment that
autograd has changed it until it is sent, and an optimizer whose step would use one that waits raises an error with its
name, on all ranks that have it, before anything moves: a forward that goes around DistributedDataParallel, a parameter
that became trainable later, a module that nobody wrapped, a hook that is not called any more.

A gradient that waits is no error by itself: inside ``no_sync`` all of them do, and those that ``zero_grad()`` throws
away never come to a step. A parameter without a gradient is no error either. Whether a gradient waits each rank knows
alone. By messages the ranks compare two things: once, the parameters that an optimizer has beside those that are
answered for, and in each pass or step how many passes there were (:mod:`~hf_compressopt.collectives.passes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.passes import StepPasses

_RECORDS: WeakSet[SendRecord] = WeakSet()
_steps_are_watched = False
_SHOWN = 4  # names in an error
_REMEMBERED = 16  # lists of parameters of plain loops
_CHUNK = 1 << 18  # elements that are copied at a time
_ROUNDING = 1e-4  # relative difference of the sizes of gradients that counts as rounding
_WHY = (
    "every rank would train on its own. Call the model that prepare(), or DistributedDataParallel, has returned, and "
    "not the one inside it (.module, unwrap_model, Trainer's self.model); wrap every module that trains, after its "
    "parameters were made trainable; have the last backward of a step outside no_sync; or average such gradients after "
    "backward by hf_compressopt.average_gradients(parameters)"
)


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
        self.name, self._communicator = name, communicator
        self.passes = StepPasses(name)
        self._examined: set[tuple[int, int]] = set()  # optimizers, by id and number of parameters
        self._waiting: set[Tensor] = set()
        self._known: dict[Tensor, str] = {}  # with their names
        self._frozen: set[Tensor] = set()  # of them: they take no hook until they are trainable
        self._handles: list[RemovableHandle] = []
        finalize(self, _remove, self._handles).atexit = False
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
        """Note from now on when autograd adds to the gradient of a parameter. A builtin costs less than a function."""
        self._frozen.discard(param)
        hook = self._waiting.add
        self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
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
        key = id(optimizer), len(params)
        if self._communicator is None or key in self._examined:
            return
        self._examined.add(key)
        unknown = [
            (name, param)
            for name, param in named_parameters(optimizer)
            if param.requires_grad and not _is_shard(param) and not is_answered_for(param)
        ]
        if not unknown or not any(map(self.answers_for, params)):
            return
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
        _remove(self._handles)
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


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _watch_steps() -> None:
    global _steps_are_watched
    if not _steps_are_watched:
        register_optimizer_step_pre_hook(_check_step)
        _steps_are_watched = True


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error before a step that would use a gradient which was to be sent, and was not; torch calls this."""
    records = [record for record in _RECORDS if record.is_in_use]
    if not records and not _PLAIN:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    given = kwargs.get("grads", args[2] if len(args) > 2 else None)  # step(closure, grads) of a compressed optimizer
    if getattr(optimizer, "sends_gradients", False) or given is not None:  # in this step
        note_sent(params)
        _end_step(records, params)
        return
    for record in records:
        record.examine(optimizer, params)
        if names := record.unsent(params):
            record.passes.tell(f"takes a step with gradients of {listed(names)} that were not averaged: {_WHY}")
            raise RuntimeError(
                f"{record.name} has not sent the gradients of {listed(names)}, with which "
                f"{type(optimizer).__name__}.step() would move them: {_WHY}"
            )
    _end_step(records, params)


def _end_step(records: Iterable[SendRecord], params: Sequence[Tensor]) -> None:
    for record in records:
        if record.passes.count and any(map(record.answers_for, params)):
            record.passes.end_step()
    for first, passes in _PLAIN.values():
        if passes.count and any(param is first() for param in params):
            passes.end_step()


#: The averages of plain loops: by the parameters' ids, the first one, and how often they were averaged.
_PLAIN: dict[tuple[int, ...], tuple[ref[Tensor], StepPasses]] = {}


def forget_plain_passes() -> None:
    """Begin anew after an error in an average of a plain loop: the ranks may have counted for other parameters."""
    for _, passes in _PLAIN.values():
        passes.forget()


def passes_of(params: Sequence[Tensor]) -> StepPasses:
    """The passes after which a plain loop averages these parameters; those of the last few lists are remembered."""
    if not params:
        return StepPasses("average_gradients")
    key = tuple(map(id, params))
    first, passes = _PLAIN.get(key, (None, None))
    if first is None or passes is None or first() is not params[0]:
        _watch_steps()
        passes = StepPasses("average_gradients")
        if len(_PLAIN) == _REMEMBERED:
            _PLAIN.pop(next(iter(_PLAIN)))
        _PLAIN[key] = ref(params[0]), passes
    return passes
