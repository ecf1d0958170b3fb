"""A progress bar for long reads and writes. It needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Bytes from which on a bar is shown.
BIG = 10**9


@contextmanager
def progress(what: str, nbytes: int, *, shown: bool | None = None) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr; ``HF_HUB_DISABLE_PROGRESS_BARS=1`` turns it off.

    Args:
        what: The text beside the bar.
        nbytes: Bytes in all.
        shown: Whether to show it. None shows it on a terminal, for :data:`BIG` bytes or more.

    Yields:
        A function that takes the number of bytes that are done since its last call.
    """
    if not (sys.stderr.isatty() and nbytes >= BIG if shown is None else shown):
        yield lambda _: None
        return
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, leave=False) as bar:  # type: ignore[no-untyped-call]
        yield bar.update
