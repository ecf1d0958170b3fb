"""The one owner of a parameter's gradients: an optimizer that takes them out of ``p.grad`` while backward runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)

_ATTACHED: WeakSet[GradientOwner] = WeakSet()
_steps_are_watched = False


class GradientOwner:
    """The hooks of one object on parameters. They do not keep it alive, and they go when it is gone.

    A parameter has one owner at most. A new one takes over, with a warning. An ordinary optimizer is not seen before
    its first step: if the owner has taken the gradients which that step should have used, the step raises an error.

    Attributes:
        name: The kind of optimizer, for messages.
        detached: Whether the hooks were removed: gradients stay in ``p.grad``.
    """

    def __init__(self, name: str, arrived: Callable[[int], None], holds: Callable[[], bool]) -> None:
        self.name, self.detached = name, False
        self._arrived, self._holds = WeakMethod(arrived), WeakMethod(holds)
        self._handles: list[RemovableHandle] = []
        self._owned: set[int] = set()  # by id: the owner of the methods keeps the parameters alive
        finalize(arrived.__self__, _remove, self._handles).atexit = False  # type: ignore[attr-defined]

    def hook(self, params: Sequence[Tensor]) -> None:
        """Own more parameters; their numbers follow those of earlier ones."""
        global _steps_are_watched
        take_over(params, self.name)
        for number, param in enumerate(params, start=len(self._handles)):
            hook = _hook(self._arrived, number)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._owned.update(map(id, params))
        _ATTACHED.add(self)
        if not _steps_are_watched:
            register_optimizer_step_post_hook(_check_step)
            _steps_are_watched = True

    def detach(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)
        self.detached = True
        _ATTACHED.discard(self)

    def require_attached(self) -> None:
        """Check that the owner still gets gradients."""
        if self.detached:
            raise RuntimeError(
                f"this {self.name} gets no gradients any more: it was detached, or another optimizer of some of its "
                "parameters followed; use the newer one, and give each parameter to one optimizer only"
            )

    @property
    def holds_gradients(self) -> bool:
        """True if gradients were taken that no step has used."""
        holds = self._holds()
        return holds is not None and holds()

    def owned_of(self, params: Iterable[Tensor]) -> int:
        """Count the parameters that are owned."""
        return sum(id(param) in self._owned for param in params)


def _hook(arrived: WeakMethod[Callable[[int], None]], number: int) -> Callable[[Tensor], None]:
    def gradient_arrived(_: Tensor) -> None:
        if (method := arrived()) is not None:
            method(number)

    return gradient_arrived


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _owners_of(params: Sequence[Tensor]) -> list[GradientOwner]:
    return [owner for owner in list(_ATTACHED) if owner.owned_of(params)]


def are_owned(params: Iterable[Tensor]) -> bool:
    """Return whether the gradient of one of the parameters is taken away while backward runs."""
    return bool(_ATTACHED and _owners_of(list(params)))


def take_over(params: Sequence[Tensor], name: str) -> None:
    """Detach the owners of parameters, because an optimizer or averaging of this name follows."""
    for owner in _owners_of(params):
        owner.detach()
        logger.warning(
            "%s takes over parameters of an earlier %s that is still alive: that one gets no more gradients, and its "
            "step() raises an error",
            name,
            owner.name,
        )


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error after the step of an optimizer whose gradients a living owner has taken; torch calls this.

    An owner that has taken its own step holds nothing; so wrappers around it pass, too.
    """
    for owner in [owner for owner in _ATTACHED if owner.holds_gradients]:
        taken = owner.owned_of(param for group in optimizer.param_groups for param in group["params"])
        if taken:
            owner.detach()
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() moved {taken} of its parameters not at all: a {owner.name} that is "
                "still alive took their gradients during backward. It is detached now: run backward again, and the "
                "next step has them. Give each parameter to one optimizer only, and delete an optimizer, or call its "
                "detach(), before another one of the same parameters follows"
            )
