"""The gradients of one step: collected, checked, measured, and agreed upon by all ranks before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.optim.functional import sum_of_squares

Grads = list[list["Tensor | None"]]  # one list per param group, one entry per trainable parameter


def flatten_given(grads: Iterable[Any], group_sizes: Sequence[int]) -> list[Tensor | None]:
    """Gradients handed to ``step(grads=...)`` as one list: per parameter, or per group a list of these.

    Raises:
        ValueError: If their number is not that of the parameters.
    """
    given = list(grads)
    if given and all(isinstance(entry, (list, tuple)) for entry in given):
        given = list(chain.from_iterable(given))
    if len(given) != sum(group_sizes):
        raise ValueError(
            f"grads must hold one gradient (or None) per parameter, {sum(group_sizes)} in all, got {len(given)}"
        )
    return given


def find_fault(params: Sequence[Tensor], grads: Sequence[Tensor | None], names: Sequence[str]) -> Exception | None:
    """What is wrong with these gradients, in words; None where nothing is."""
    for param, grad, name in zip(params, grads, names, strict=True):
        if grad is None:
            continue
        if grad.layout != torch.strided:
            return TypeError(
                f"the gradient of {name} is sparse ({grad.layout}); only dense gradients are supported: make the "
                "embedding with sparse=False"
            )
        if not grad.is_floating_point():
            return TypeError(f"the gradient of {name} is {grad.dtype}; legal are real floating-point gradients")
        if grad.shape != param.shape:
            return ValueError(
                f"the gradient of {name} has shape {tuple(grad.shape)}; legal is the parameter's, {tuple(param.shape)}"
            )
        if grad.device != param.device:
            return ValueError(f"the gradient of {name} is on {grad.device}, its parameter on {param.device}")
    return None


def reduced_square_norm(grads: Iterable[Tensor | None], device: torch.device, fault: Exception | None) -> Tensor:
    """Square of the norm of averaged gradients, which every rank finds alike. Returns [] float64.

    Raises:
        Exception: ``fault``, where there is one; averaged gradients have it on every rank.
    """
    if fault is not None:
        raise fault
    return sum_of_squares([grad for grad in grads if grad is not None], device)


def local_square_norm(
    grads: Iterable[Tensor | None], communicator: Communicator, fault: Exception | None = None
) -> Tensor:
    """Mean over ranks of the squared norm of their local gradients. One scalar all-reduce; all ranks call.

    It is at least the square of the norm of the mean, and at most W times that.

    Args:
        grads: This rank's gradients.
        communicator: The ranks.
        fault: What is wrong with this rank's gradients.

    Returns:
        [] float64, alike on all ranks; not finite exactly where an element on any rank is not.

    Raises:
        Exception: ``fault`` on the ranks that have one, and a RuntimeError on the others.
    """
    device = communicator.device
    square = torch.zeros((), dtype=torch.float64, device=device)
    if fault is None:
        square = sum_of_squares([grad for grad in grads if grad is not None], device)
    agreed = torch.stack([square / communicator.world_size, torch.full_like(square, float(fault is not None))])
    communicator.all_reduce(agreed).wait()
    if fault is not None:
        raise fault
    if float(agreed[1]) > 0:
        raise RuntimeError(f"{int(agreed[1])} other rank(s) were given gradients that cannot be used; see their errors")
    return agreed[0]
