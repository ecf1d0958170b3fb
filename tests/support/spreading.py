"""Cases that `make test` takes, and those that only `make test-full` takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

_Case = TypeVar("_Case")


@dataclass(frozen=True)
class Share:
    """Every ``count``-th case from ``place`` on; or, as the rest, all others."""

    place: int
    count: int
    rest: bool = False

    def of(self, cases: Iterable[_Case]) -> list[_Case]:
        return [case for number, case in enumerate(cases) if (number % self.count == self.place) != self.rest]


def spread(*whole: int, shared: tuple[int, ...]) -> list[Any]:
    """Parameters (world_size, share): all cases on ``whole`` ranks, each on one of ``shared``, rest in long tests."""
    rows = [pytest.param(ranks, Share(0, 1), id=f"{ranks}") for ranks in whole]
    for place, ranks in enumerate(shared):
        rows.append(pytest.param(ranks, Share(place, len(shared)), id=f"{ranks}-share"))
        rest = Share(place, len(shared), rest=True)
        rows.append(pytest.param(ranks, rest, id=f"{ranks}-rest", marks=pytest.mark.full))
    return rows


def short(cases: Iterable[Any], kept: Sequence[Any]) -> list[Any]:
    """Parameters: the cases of ``kept`` in `make test`, the others in `make test-full`."""
    rows = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [pytest.param(*row, marks=() if case in kept else pytest.mark.full) for case, row in rows]
