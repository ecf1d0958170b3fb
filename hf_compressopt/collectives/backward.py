"""Hooks of parameters that feed a sender while backward runs: passes, ``no_sync``, and several senders in one process.

A pass is one call of backward. At its end the rest is sent, so that ranks whose graphs differ do not wait for each
other.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import Pipeline
from hf_compressopt.collectives.sender import Hooks, Sender, StepPasses, weak_hook

logger = logging.getLogger(__name__)

_NESTED = BackwardCFunction.apply.__code__  # the frame in which an autograd function of the user's calls backward


class Client(Protocol):
    """An object whose gradients are sent in passes. All ranks call its methods in one order, but for ``take``."""

    def follow(self) -> None: ...  # the parameters, to the devices to which a model was moved
    def begin_pass(self) -> bool: ...  # whether buckets are sent in the pass; alike on all ranks
    def take(self, number: int) -> bool: ...  # the gradient of a parameter; False leaves it for later
    def send(self, index: int) -> None: ...  # a bucket: add its task to those of the passes
    def end_pass(self) -> None: ...  # after all buckets, whose tasks have ended
    def interrupted(self) -> None: ...  # after a backward pass that raised before its end
    def holds_gradients(self) -> bool: ...  # whether gradients were taken that no step has used
    def drop_of(self, numbers: Collection[int]) -> None: ...  # what was taken of parameters: it was thrown away


class ClipsTogether(Protocol):
    """An optimizer that clips by a norm on which all ranks agree."""

    @property
    def communicator(self) -> Communicator: ...
    @property
    def local_gradients(self) -> bool: ...  # whether gradients of the coming step are this rank's own
    @property
    def trainable_parameters(self) -> list[Tensor]: ...
    def note_clipping(self, norm: float | Tensor, max_norm: float) -> None: ...  # of averaged gradients


# The order of messages is a matter of the process, not of one optimizer. Numbers are alike on all ranks.
_LIVING: WeakSet[BackwardPasses] = WeakSet()
_NUMBERS = count()


class BackwardPasses(Sender):
    """The backward passes of some parameters, whose gradients a client takes by hooks.

    Of several in a process, the one made first sends while backward runs. The others send at its end, one after
    another: even if graphs complete the parameters of two optimizers in different orders, all ranks send in one.
    Gradients stay in ``p.grad`` if it is not ``enabled``, ``done`` until the next step, or ``detached``.

    A parameter belongs to one at most: a new one takes over, with a warning. An ordinary optimizer is not seen before
    its first step: that raises an error if the gradients which it should have used were taken. The hooks keep no
    client alive, and go with it.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        communicator: Communicator,
        *,
        limit: int | None = None,
        counted: StepPasses | None = None,
    ) -> None:
        """Take the gradients for a client, with at most ``limit`` bytes of messages under way.

        ``counted``: the passes so far, of what this takes the place of.
        """
        super().__init__()
        self.enabled = True
        self.done = self.detached = False
        self._has_accumulated = False  # gradients may have come into p.grad, inside no_sync, that nobody has looked at
        self.name = name
        self._client = ref(client)
        self._communicator = communicator
        self._limit = limit
        self.tasks = Pipeline(limit, communicator.device)
        self.passes = counted or StepPasses(name)  # compared where a pass begins, and before a step uses them
        self._hooks = Hooks()
        self._owned: dict[int, int] = {}  # numbers of parameters, by id: the client keeps them alive
        self._open = self._begun = False
        self._compared = False  # with the DistributedDataParallel models of this process
        self._task: int | None = None  # of the pass under way, and of a backward that an autograd function in it called
        self._nested: int | None = None
        self._number = next(_NUMBERS)
        self._world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        _LIVING.add(self)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def add(self, params: Sequence[Tensor], buckets: Iterable[Iterable[int]]) -> None:
        """Add parameters, whose numbers follow those of earlier ones, and buckets of the numbers of their members."""
        take_over(params, self.name)
        guard_torch_clipping()
        _watch_zero_grad()
        numbered = list(enumerate(params, start=len(self._owned)))
        for number, param in numbered:
            hook = weak_hook(self.gradient_arrived, number)
            self._hooks.add(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._owned.update((id(param), number) for number, param in numbered)
        self.passes.note_members(len(self._owned))
        self.add_buckets(buckets)
        _watch_steps()

    def detach(self) -> None:
        self._hooks.remove()
        self.detached = True

    def require_attached(self) -> None:
        if self.detached:
            raise RuntimeError(
                f"this {self.name} gets no gradients any more: it was detached, or another optimizer of some of its "
                "parameters followed; use the newer one, and give each parameter to one optimizer only"
            )

    def owned_of(self, params: Iterable[Tensor]) -> int:
        """Count the parameters whose gradients come here."""
        return 0 if self.detached else sum(id(param) in self._owned for param in params)

    def holds_gradients(self) -> bool:
        return not self.detached and (client := self._client()) is not None and client.holds_gradients()

    def may_hold_gradients(self) -> bool:
        """Return whether there was a pass since the last step, as all ranks know, or gradients were taken."""
        return not self.detached and (self.passes.count > 0 or self.holds_gradients())

    def drop_of(self, params: Iterable[Tensor]) -> None:
        """Drop what was taken of some parameters, whose gradients were thrown away. All ranks call."""
        client, mine = self._client(), {self._owned[id(param)] for param in params if id(param) in self._owned}
        if mine and client is not None:
            client.drop_of(mine)

    # -- passes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``p.grad`` inside; the next pass outside sends them with its own."""
        before = self.enabled
        self.enabled = False
        self._has_accumulated = True
        try:
            yield
        finally:
            self.enabled = before

    def note_accumulated_seen(self) -> bool:
        """Return whether gradients may have come into ``p.grad`` inside ``no_sync`` since the last call."""
        has_accumulated, self._has_accumulated = self._has_accumulated, False
        return has_accumulated

    @torch.no_grad()
    def gradient_arrived(self, number: int) -> None:
        """Take the gradient of a parameter, and send the buckets that are complete now. Its hook calls."""
        if not self.enabled or self.done:
            return
        client = self._owner()
        if self._enters_task(client) and not self._open:
            if not self._elders():
                self._begin()
            self._open = True
        if self._begun and not self.sends:
            return
        if client.take(number):
            self.arrived(number)

    def send(self, index: int) -> None:
        self._owner().send(index)

    def _enters_task(self, client: Client) -> bool:
        """Record the autograd task under way, and return whether it is new."""
        task = torch._C._current_graph_task_id()
        if task == self._task or task == self._nested:
            return False
        if _inside_another_backward():
            self._nested = task
        else:
            if self._task is not None:
                client.interrupted()
            self._task = task
            Variable._execution_engine.queue_callback(self.flush)
        return True

    @torch.no_grad()
    def flush(self) -> None:
        """End a pass: send the rest. All ranks call."""
        if not self._open:
            return
        for elder in self._elders():
            elder.flush()
        if not self._begun:
            self._begin()
        self._close()
        try:
            self.send_rest()
            self.passes.check()
            if self.sends:
                self.tasks.drain()
                self._owner().end_pass()
        finally:
            self.await_anew()

    def _close(self) -> None:
        self._task = self._nested = None
        self._open = self._begun = False

    def leave_gradients(self, done: bool) -> None:
        """Leave gradients in ``p.grad`` from now on, or take them again: those before were used or thrown away."""
        self.done = done

    def meet(self) -> None:
        """End a pass, and compare the passes of all ranks before a step uses them. All ranks call."""
        self.flush()
        if not self.passes.are_met:
            self._owner().follow()
            self.passes.meet(self._communicator)

    def empty_pass(self) -> None:
        """Take part in a pass without gradients that come now. All ranks call, or have a pass."""
        self._open = True
        self.flush()

    def _owner(self) -> Client:
        client = self._client()
        assert client is not None  # it owns this object
        return client

    def _begin(self) -> None:
        self._owner().follow()
        try:
            self.passes.begin(self._communicator)
        except RuntimeError:
            self._close()
            raise
        if not self._compared and self._communicator.world_size > 1:
            self._compared = True
            self._check_no_ddp()
        sends, self._begun = self._owner().begin_pass(), True
        if sends:
            self.begin_pass(self._communicator.device, self._limit)

    def _check_no_ddp(self) -> None:
        """Raise if a DistributedDataParallel model averages gradients that are sent from here."""
        if self._name_in_ddp():
            gc.collect()  # it may be one that was given up
        if name := self._name_in_ddp():
            raise ValueError(
                f"{self.name} averages the gradient of {name} during backward, and so does a DistributedDataParallel "
                "around the model: each would be sent twice. Do not wrap the model (Trainer and Accelerate do not); if "
                "other parameters need DistributedDataParallel, call "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) before"
            )

    def _name_in_ddp(self) -> str:
        """The name of a parameter of a DistributedDataParallel model whose gradient is sent from here; "" for none."""
        for model in [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]:
            for name, param in model.module.named_parameters():
                if param.requires_grad and id(param) in self._owned and name not in model.parameters_to_ignore:
                    return str(name)
        return ""

    def _elders(self) -> list[BackwardPasses]:
        """Return those that send before this one."""
        if self._communicator.world_size == 1 or len(_LIVING) == 1:
            return []
        elders = [each for each in _LIVING if each._number < self._number and each._world is self._world]
        return sorted((each for each in elders if not each.detached), key=lambda each: each._number)


def _inside_another_backward() -> bool:
    """Tell whether an autograd function inside another backward called this one, as reentrant checkpointing does."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def take_over(params: Sequence[Tensor], name: str) -> None:
    """Detach the owners of parameters, because an optimizer or averaging of this name follows."""
    for owner in [passes for passes in list(_LIVING) if passes.owned_of(params)]:
        owner.detach()
        logger.warning(
            "%s takes over parameters of an earlier %s that is still alive: that one gets no more gradients, and its "
            "step() raises an error",
            name,
            owner.name,
        )


def is_taken(param: Tensor) -> bool:
    """True if a living owner takes the gradient of a parameter by its hook."""
    return any(passes.owned_of([param]) for passes in list(_LIVING))


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_check_step)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error after the step of an optimizer whose gradients a living owner has taken; torch calls this."""
    for owner in [passes for passes in list(_LIVING) if passes.holds_gradients()]:
        taken = owner.owned_of(param for group in optimizer.param_groups for param in group["params"])
        if taken:
            owner.detach()
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() moved {taken} of its parameters not at all: a {owner.name} that is "
                "still alive took their gradients during backward. It is detached now: run backward again, and the "
                "next step has them. Give each parameter to one optimizer only, and delete an optimizer, or call its "
                "detach(), before another one of the same parameters follows"
            )


# -- zero_grad() of models and of wrappers, which sees no gradients that were freed, and would keep them ---------------


@functools.cache
def _watch_zero_grad() -> None:
    of_modules, of_optimizers = nn.Module.zero_grad, torch.optim.Optimizer.zero_grad

    @functools.wraps(of_modules)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        of_modules(self, set_to_none)
        _drop_of(self.parameters)

    @functools.wraps(of_optimizers)
    def zero_grad_of_optimizer(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        of_optimizers(self, set_to_none)  # such as that of a wrapper, which has the param groups of what it wraps
        _drop_of(lambda: chain.from_iterable(group["params"] for group in self.param_groups))

    setattr(nn.Module, of_modules.__name__, zero_grad)
    setattr(torch.optim.Optimizer, of_optimizers.__name__, zero_grad_of_optimizer)


def _drop_of(params: Callable[[], Iterable[Tensor]]) -> None:
    for owner in [passes for passes in list(_LIVING) if passes.may_hold_gradients()]:
        owner.drop_of(params())


# -- torch's own clipping, which sees no gradients that were freed, and would silently clip nothing --------------------

_GUARDED = "_compressopt_guards"
#: Optimizers whose gradients are each rank's own in some steps, until torch's functions have clipped them there.
_APART: WeakSet[ClipsTogether] = WeakSet()
_WATCHED: WeakSet[ClipsTogether] = WeakSet()  # all of them
_INSTEAD = {
    "clip_grad_value_": "clip by norm with optimizer.clip_grad_norm_(max_norm), or use an optimizer without ZeRO",
    "_clip_grads_with_norm_": "call optimizer.clip_grad_norm_(max_norm) in its place, or make the optimizer with "
    "clip_grad=max_norm (OnebitAdam: max_grad_norm=max_norm)",
}


def guard_torch_clipping() -> None:
    """Make torch's functions that clip gradients raise an error if a living optimizer has freed these gradients.

    Those functions see no gradients under ZeRO, and clip nothing. :func:`hf_compressopt.register` and
    :func:`hf_compressopt.attach` call this, and so does an optimizer that frees gradients, or has gradients of its own
    on each rank: for those a warning says that ranks clip by different norms.

    ``clip_grad_norm_`` clips by ``_clip_grads_with_norm_``, which it looks up at each call: the guard reaches scripts
    that imported ``clip_grad_norm_`` before. Other parameters are clipped as ever.
    """
    modules = (torch.nn.utils.clip_grad, torch.nn.utils)
    for name in _INSTEAD:
        original = getattr(modules[0], name, None)
        if original is None or hasattr(original, _GUARDED):
            continue
        guarded = _guarded(original, name)
        for module in modules:
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                setattr(module, alias, guarded)


def watch_clipping(optimizer: ClipsTogether) -> None:
    """Warn once if torch's functions clip gradients of this optimizer that are each rank's own; note other clipping.

    Refuse a GradScaler that decides on each rank alone whether this optimizer takes a step.
    """
    _APART.add(optimizer)
    _WATCHED.add(optimizer)
    guard_torch_clipping()
    _guard_torch_scaler()


def _note_clipping(params: Sequence[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Tell the optimizers whose averaged gradients were clipped: errors have the unit of gradients that were not."""
    ids = {id(param) for param in params}
    for optimizer in list(_WATCHED):
        if optimizer.local_gradients:
            continue
        having = [id(param) for param in optimizer.trainable_parameters if param.grad is not None]
        if having and ids.issuperset(having):
            optimizer.note_clipping(total_norm, max_norm)


def _warn_of_different_norms(params: Sequence[Tensor]) -> None:
    for optimizer in list(_APART):
        if optimizer.communicator.world_size == 1 or not optimizer.local_gradients:
            continue
        own = {id(param) for param in optimizer.trainable_parameters}
        if any(id(param) in own for param in params):
            _APART.discard(optimizer)
            logger.warning(
                "torch.nn.utils clips each rank by the norm of its own gradients, which %s has in this stage: ranks "
                "scale them by different factors, and the loss suffers. Call optimizer.clip_grad_norm_(max_norm), "
                "which clips alike on all ranks, or give the optimizer max_grad_norm",
                type(optimizer).__name__,
            )


def _guarded(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        known = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _warn_of_different_norms(known)
        if any(passes.owned_of(known) for passes in list(_LIVING)):
            raise RuntimeError(
                "torch.nn.utils cannot clip the gradients under ZeRO, which are shared out among the ranks: "
                f"{_INSTEAD[name]}"
            )
        result = original(known, *args, **kwargs)
        if name == "_clip_grads_with_norm_":
            given = dict(zip(("max_norm", "total_norm"), args, strict=False)) | kwargs
            _note_clipping(known, given["max_norm"], given["total_norm"])
        return result

    setattr(clip, _GUARDED, original)
    return clip


# -- torch's GradScaler, which skips a step on the ranks whose own gradients are not finite ----------------------------


@functools.cache
def _guard_torch_scaler() -> None:
    stock = torch.amp.GradScaler
    original = stock.step

    @functools.wraps(original)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        methods = ("unscale_", "_unscale_grads_")
        if self.is_enabled() and all(getattr(type(self), name) is getattr(stock, name) for name in methods):
            _refuse_scaler_of(optimizer)
        return original(self, optimizer, *args, **kwargs)

    setattr(stock, original.__name__, step)


def _refuse_scaler_of(optimizer: torch.optim.Optimizer) -> None:
    inner: object = optimizer
    while hasattr(inner, "optimizer"):  # a host's wrapper
        inner = inner.optimizer
    if any(each is inner and each.communicator.world_size > 1 for each in _WATCHED):
        raise ValueError(
            f"torch's GradScaler decides on each rank alone whether {type(inner).__name__} takes a step, and the "
            "others would wait for a rank that skips it: use hf_compressopt.GradScaler, with the same arguments"
        )
