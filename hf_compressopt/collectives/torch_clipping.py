"""A guard for torch's own clipping, which sees no gradients that were freed, and would silently clip nothing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.backward import are_owned

logger = logging.getLogger(__name__)

_GUARDED = "_compressopt_guards"
_said = False
_INSTEAD = {
    "clip_grad_value_": "clip by norm with optimizer.clip_grad_norm_(max_norm), or use an optimizer without ZeRO",
    "_clip_grads_with_norm_": "call optimizer.clip_grad_norm_(max_norm) in its place, or make the optimizer with "
    "clip_grad=max_norm (OnebitAdam: max_grad_norm=max_norm)",
}


def guard_torch_clipping() -> None:
    """Make torch's functions that clip gradients raise an error if a living optimizer has freed these gradients.

    Those functions see no gradients under ZeRO, and clip nothing. :func:`hf_compressopt.register` and
    :func:`hf_compressopt.attach` call this; a plain loop may call it once at its start.

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


def warn_unguarded() -> None:
    """Warn once, without the guard, that torch's functions would silently clip nothing."""
    global _said
    if not _said and not hasattr(torch.nn.utils.clip_grad._clip_grads_with_norm_, _GUARDED):
        logger.warning(
            "training under ZeRO without clipping: optimizer.clip_grad_norm_(max_norm) clips, but "
            "torch.nn.utils.clip_grad_norm_ sees no gradients and clips nothing. hf_compressopt.guard_torch_clipping() "
            "makes it raise an error instead, and ends this warning"
        )
    _said = True


def _guarded(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        known = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if are_owned(known):
            raise RuntimeError(
                "torch.nn.utils cannot clip the gradients under ZeRO, which are shared out among the ranks: "
                f"{_INSTEAD[name]}"
            )
        return original(known, *args, **kwargs)

    setattr(clip, _GUARDED, original)
    return clip
