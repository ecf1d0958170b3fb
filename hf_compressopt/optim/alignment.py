"""Copies of one state on all ranks that differ by rounding, as those of unlike devices may: found, and made alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.optim.functional import bit_sum
from hf_compressopt.optim.group_state import GroupState

_CHUNK = 1 << 20  # elements that are compared, or sent, at a time
_MOST = 0.01


def parameter_bits(state: GroupState) -> int:
    """A sum of the bits of a group's parameters."""
    return int(sum(bit_sum(param) for param in state.params))


def replicated_bits(state: GroupState) -> int:
    """A sum of the bits of all that the ranks hold alike after the warmup stage: parameters, moments, coefficients."""
    return int(sum(bit_sum(tensor) for tensor in _replicated(state)))


def largest_difference(states: Sequence[GroupState], steps: int, communicator: Communicator) -> float:
    """Compare this rank's parameters, moments and coefficients with rank 0's. All ranks call.

    Args:
        states: The same groups on all ranks.
        steps: Steps taken so far.
        communicator: The ranks.

    Returns:
        The largest difference of an element on any rank, as a share of what rounding can explain: its tensor's largest
        magnitude times 8 sqrt(steps) units of the last place, at most 1 % of it. Infinity if one is not finite.
    """
    worst = torch.zeros((), dtype=torch.float64, device=communicator.device)
    for tensor in (tensor for state in states for tensor in _replicated(state)):
        tolerance = min(_MOST, 8 * sqrt(steps) * torch.finfo(tensor.dtype).eps)
        difference = largest = torch.zeros((), dtype=torch.float64, device=tensor.device)
        for mine in torch.split(tensor.reshape(-1), _CHUNK):
            first = mine.clone()
            communicator.broadcast(first)
            difference = torch.maximum(difference, (mine.double() - first.double()).abs().max())
            largest = torch.maximum(largest, first.abs().max().double())
        share = torch.where(difference > 0, difference / (largest * tolerance), 0.0)
        worst = torch.maximum(worst, torch.nan_to_num(share, nan=torch.inf, posinf=torch.inf))
    communicator.all_reduce(worst, op="max").wait()
    return float(worst)


def take_first_ranks(states: Sequence[GroupState], communicator: Communicator) -> None:
    """Replace parameters, moments and coefficients by rank 0's. All ranks call."""
    for state in states:
        for tensor in _replicated(state):
            flat = tensor.reshape(-1)  # a view, or a copy of what has other strides
            for chunk in torch.split(flat, _CHUNK):
                communicator.broadcast(chunk)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


def _replicated(state: GroupState) -> Iterator[Tensor]:
    held = (*state.params, state.exp_avg, state.exp_avg_sq, *state.extra.values())
    yield from (tensor.detach() for tensor in held if tensor.numel())
