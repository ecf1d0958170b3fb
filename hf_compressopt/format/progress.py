"""A progress bar for what takes long. It needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Bytes from which on it takes long.
BIG = 10**9


@contextmanager
def progress(what: str, nbytes: int, *, shown: bool | None = None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr that the yielded function moves on by as many bytes; ``HF_HUB_DISABLE_PROGRESS_BARS=1`` is off.

    Args:
        what: What it says beside.
        nbytes: Bytes in all.
        shown: Whether to show it; None shows it on a terminal where there are :data:`BIG` bytes or more.
    """
    if not (sys.stderr.isatty() and nbytes >= BIG if shown is None else shown):
        yield lambda _: None
        return
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, leave=False) as bar:  # type: ignore[no-untyped-call]
        yield bar.update
