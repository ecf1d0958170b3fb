"""Decisions that all ranks take together: all raise or none does, and nobody waits for a rank that has stopped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

_DIGEST_BITS = 20
DIGEST_BOUND = 1 << _DIGEST_BITS
#: Bits of a digest that are compared as one number: sums of its squares over thousands of ranks are exact.
_BITS_TOGETHER = {torch.float64: 20, torch.float32: 5}
_Result = TypeVar("_Result")


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until it is done."""


class Agreement(ABC):
    """The collective decisions of a group of ranks. All ranks call each method; all methods block.

    Attributes:
        world_size: Ranks in the group.
        device: Device of small tensors.
    """

    world_size: int
    device: torch.device

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Waitable:
        """Start reducing ``tensor`` over the ranks, in place. ``op`` is "sum" or "max"."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (anything that JSON holds), in rank order."""

    def require_equal(self, what: str, mine: Any) -> None:
        """Check that every rank has the same value (anything that JSON holds).

        Raises:
            ValueError: On all ranks, if one differs from rank 0's.
        """
        everyone = self.all_gather_object(mine)
        different = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if different:
            raise ValueError(
                f"ranks {different} differ from rank 0 in {what}: rank {different[0]} has "
                f"{everyone[different[0]]}, rank 0 {everyone[0]}"
            )

    def raise_together(self, error: Exception | None, others: type[Exception] = RuntimeError) -> None:
        """Raise on every rank if any rank has an error.

        Raises:
            Exception: This rank's own error if it has one, else one of type ``others`` that quotes the others'.
        """
        failed = self.gather_errors(error)
        if failed:
            raise error or others(failed)

    def gather_errors(self, error: Exception | None) -> str:
        """Return every rank's error as text; "" if no rank has one."""
        return self.gather_outcomes(None, error)[1]

    def gather_outcomes(self, outcome: Any, error: Exception | None) -> tuple[list[Any], str]:
        """Return every rank's outcome (anything that JSON holds), and the errors as :meth:`gather_errors` does."""
        outcomes = self.all_gather_object((outcome, None if error is None else f"{type(error).__name__}: {error}"))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
        told = f"another rank failed, so this one stops too; {'; '.join(failed)}" if failed else ""
        return [outcome for outcome, _ in outcomes], told

    def gather_together(
        self,
        action: Callable[[], _Result],
        undo: Callable[[], None] = lambda: None,
        others: type[Exception] = OSError,
    ) -> list[_Result]:
        """Run ``action`` on every rank and return every rank's result (anything that JSON holds).

        If the action fails on any rank, run ``undo`` and raise on all: this rank's own error, or one of type ``others``
        if it has none. If a rank is gone, nothing is undone, because the ranks cannot tell what the others know.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        results, failed = self.gather_outcomes(result, error)
        if failed:
            undo()
            raise error or others(failed)
        return results

    def run_together(
        self,
        action: Callable[[], _Result],
        undo: Callable[[], None] = lambda: None,
        others: type[Exception] = OSError,
    ) -> _Result:
        """As :meth:`gather_together`, for any kind of result; returns this rank's."""
        results: list[_Result] = []
        self.gather_together(lambda: results.append(action()), undo, others)
        return results[0]

    def sum_and_compare(
        self,
        values: Sequence[Tensor],
        digests: Sequence[int],
        dtype: torch.dtype = torch.float64,
        sketch: Tensor | None = None,
    ) -> tuple[list[float], list[bool]]:
        """Sum some values over the ranks, and compare some numbers, in one small all-reduce and one fetch.

        Numbers are all alike if and only if their mean square is the square of their mean.

        Args:
            values: [] each, as many on all ranks.
            digests: Numbers in [0, DIGEST_BOUND), as many on all ranks.
            dtype: Of the message, float64 or float32.
            sketch: [k], of whose mean over the ranks the squared norm is wanted, too.

        Returns:
            The sums, and the squared norm behind them; and for each digest whether all ranks have the same one.
        """
        bits = _BITS_TOGETHER[dtype]
        shifts = range(0, _DIGEST_BITS, bits)
        pieces = [digest >> shift & (1 << bits) - 1 for digest in digests for shift in shifts]
        squares = [float(number) for piece in pieces for number in (piece, piece * piece)]
        head = torch.stack([value.to(self.device, dtype) for value in values])
        parts = [head, torch.tensor(squares, dtype=dtype, device=self.device)]
        message = torch.cat(parts if sketch is None else [*parts, sketch.to(self.device, dtype)])
        self.all_reduce(message).wait()
        if sketch is not None:
            count = len(values) + len(squares)
            square = message[count:].double().div(self.world_size).square().sum()
            message = torch.cat([message[:count].double(), square.view(1)])
        found = message.tolist()
        sums = [int(number) for number in found[len(values) : len(values) + len(squares)]]
        same = [self.world_size * square == total**2 for total, square in zip(sums[::2], sums[1::2], strict=True)]
        alike = [all(same[at : at + len(shifts)]) for at in range(0, len(same), len(shifts))]
        return found[: len(values)] + found[len(values) + len(squares) :], alike
