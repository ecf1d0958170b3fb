"""This rank's parts of the parameters, and the ordinary optimizers that update them, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.zero.messages import in_host_memory, write_span
from hf_compressopt.zero.partition import Span

#: Keys of a param group that are not the wrapped optimizer's.
OWN_KEYS = ("params", "param_names", "process_group", "model_parallel")
_COMPARED = 1 << 15  # elements that are compared with their master copies at a time


@dataclass
class Piece:
    """A part of a parameter that this rank updates.

    Attributes:
        span: Which part.
        slice: Number of the slice that it travels in.
        group: Number of the param group.
        tensor: [span.numel], what the wrapped optimizer takes for a parameter: the memory of the parameter itself, or
            a master copy of another dtype or in another place.
        direct: Whether it is the memory of the parameter itself.
    """

    span: Span
    slice: int
    group: int
    tensor: Tensor
    direct: bool

    @property
    def param(self) -> int:
        """Number of the parameter."""
        return self.span.param

    def write_back(self, param: Tensor) -> None:
        """Round a master copy to the parameter."""
        if not self.direct:
            write_span(param, self.span.start, self.span.stop, self.tensor)

    def follow(self, param: Tensor) -> bool:
        """Look at the parameter anew: at its memory, if it was moved, and at values that others have put there.

        A master copy keeps its digits where the parameter still is what it rounds to, and takes the parameter's value
        everywhere else. The comparison is of values: torch counts no version for writes through ``.data``.

        Returns:
            Whether the piece is on another device now.
        """
        part = param.detach().reshape(-1)[self.span.start : self.span.stop]
        if not self.direct:
            _take_over(self.tensor, part)
            return False
        moved = part.device != self.tensor.device
        if not param.is_contiguous() or part.dtype != self.tensor.dtype:  # model.to(channels_last), or to another dtype
            self.tensor.data, self.direct = part.to(self.tensor.dtype, copy=True), False
        elif moved or part.data_ptr() != self.tensor.data_ptr():
            self.tensor.data = part
        return moved


def _take_over(master: Tensor, part: Tensor) -> None:
    """Give a master copy the elements of its parameter that are not what it rounds to."""
    if master.device.type == "cpu" and part.device.type == "cpu":
        for begin in range(0, part.numel(), _COMPARED):  # small enough for a cache; seldom is there a difference
            rows = slice(begin, begin + _COMPARED)
            if not torch.equal(master[rows].to(part.dtype), part[rows]):
                _keep_digits(master[rows], part[rows])
    else:
        _keep_digits(master, part)


def _keep_digits(master: Tensor, part: Tensor) -> None:
    here = master.to(part.device)
    master.copy_(torch.where(here.to(part.dtype) == part, here, part.to(master.dtype)))


def make_piece(
    span: Span, slice_number: int, group: int, param: Tensor, master_dtype: torch.dtype, offload: bool
) -> Piece:
    """The part of a parameter that this rank updates; a master copy only where its own memory will not do."""
    wide = master_dtype if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
    if param.is_contiguous() and param.dtype == wide and not offload:
        return Piece(span, slice_number, group, param.detach().view(-1)[span.start : span.stop], True)
    master = param.detach().reshape(-1)[span.start : span.stop].to(wide, copy=True)
    return Piece(span, slice_number, group, in_host_memory(master) if offload else master, False)


class UpdateBucket:
    """Some consecutive slices, and the wrapped optimizer of this rank's pieces of them.

    Each bucket has an instance of its own, so that one bucket's parameters are on their way while the next is updated.

    Attributes:
        slices: Numbers of the slices.
        pieces: This rank's pieces.
        inner: The wrapped optimizer; None where this rank has no piece.
    """

    def __init__(
        self,
        slices: Sequence[int],
        pieces: Sequence[Piece],
        groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        state_dtype: torch.dtype | None,
    ) -> None:
        """Make the wrapped optimizer.

        Args:
            slices: Numbers of the slices.
            pieces: This rank's pieces of them.
            groups: All param groups.
            make: Makes an optimizer from param groups.
            state_dtype: dtype in which element-wise state is kept between steps; None leaves it alone.
        """
        self.slices, self.pieces = tuple(slices), list(pieces)
        self._state_dtype = state_dtype
        self._numbers = sorted({piece.group for piece in pieces})
        self.inner: torch.optim.Optimizer | None = None
        if pieces:
            self.inner = make([{**hyperparameters(groups[n]), "params": self._tensors(n)} for n in self._numbers])

    def _tensors(self, group: int) -> list[Tensor]:
        return [piece.tensor for piece in self.pieces if piece.group == group]

    def take_hyperparameters(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over what a scheduler may have changed in the groups that users see."""
        for number, group in self._inner_groups():
            group.update(hyperparameters(groups[number]))

    def give_hyperparameters(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give back what the wrapped optimizer may have changed in its groups."""
        for number, group in self._inner_groups():
            groups[number].update(hyperparameters(group))

    def _inner_groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if self.inner is not None:
            yield from zip(self._numbers, self.inner.param_groups, strict=True)

    def step(self) -> None:
        """Update the pieces that have a gradient."""
        if self.inner is not None:
            with WideState(self, self._state_dtype):
                self.inner.step()

    def measure(self) -> Iterator[tuple[Piece, Tensor]]:
        """Lamb's first half of a step; see :meth:`Lamb.measure`."""
        if isinstance(self.inner, Lamb):
            with WideState(self, self._state_dtype):
                measured = self.inner.measure()
            by_tensor = {id(piece.tensor): piece for piece in self.pieces}
            for tensor, squares in measured:
                yield by_tensor[id(tensor)], squares

    def apply(self, ratios: dict[int, Tensor]) -> None:
        """Lamb's second half of a step, with the trust ratio of each parameter."""
        if isinstance(self.inner, Lamb):
            with WideState(self, self._state_dtype):
                self.inner.apply({p.tensor: ratios[p.param] for p in self.pieces if p.tensor.grad is not None})

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The wrapped optimizer's state of a piece; empty before the first step."""
        if self.inner is None:
            return {}
        state: dict[str, Any] = self.inner.state.get(piece.tensor, {})
        return state

    def move_state(self, piece: Piece) -> None:
        """Move the state of a piece to where the piece is."""
        state = self.state_of(piece)
        for name in element_state(state, piece):
            state[name] = state[name].to(piece.tensor.device)


class WideState:
    """Inside, element-wise state has its piece's dtype; outside, the dtype in which it is kept."""

    def __init__(self, bucket: UpdateBucket, kept: torch.dtype | None) -> None:
        """See the class; ``kept`` None changes nothing."""
        self._bucket, self._kept = bucket, kept

    def __enter__(self) -> None:
        """Widen."""
        self._convert(None)

    def __exit__(self, *_: object) -> None:
        """Narrow."""
        self._convert(self._kept)

    def _convert(self, dtype: torch.dtype | None) -> None:
        if self._kept is None:
            return
        for piece in self._bucket.pieces:
            state = self._bucket.state_of(piece)
            for name in element_state(state, piece):
                state[name] = state[name].to(dtype or piece.tensor.dtype)


def element_state(state: dict[str, Any], piece: Piece) -> list[str]:
    """Names of the state tensors that have one value per element of the piece."""
    return [name for name, value in state.items() if isinstance(value, Tensor) and value.shape == piece.tensor.shape]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What of a param group is the wrapped optimizer's."""
    return {key: value for key, value in group.items() if key not in OWN_KEYS}
