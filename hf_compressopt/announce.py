"""The lines of a log that are written once: what is attached, and after its first step what it saves.

They are the same in Trainer, Accelerate and a loop of one's own, on rank 0.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from hf_compressopt.quantities import duration, with_unit

logger = logging.getLogger(__name__)
#: A ratio of bytes that is worth a line in the log.
_NOTABLE = 1.05
_LINK = 1.25e8  # bytes per second of 1 Gbit/s


class Announced(Protocol):
    """An optimizer, or a compression of gradients."""

    @property
    def communicator(self) -> Any: ...  # the ranks

    def describe(self) -> str: ...  # one line
    def metrics(self) -> dict[str, float]: ...


class Announcement:
    """What the log has been told of one optimizer or compression."""

    def __init__(
        self, plain: str = "DDP", remedy: str = "use an ordinary optimizer with grad_compression=int4"
    ) -> None:
        """``plain`` is what would send the gradients in its place, ``remedy`` what helps if it sends more than that."""
        self._plain, self._remedy = plain, remedy
        self._attached = False
        self.is_open = True  # not all lines were written

    def leave_to_others(self) -> None:
        """Say nothing: the lines of another object tell of this one too."""
        self._attached, self.is_open = True, False

    def begin(self, state: Announced, describe_more: Callable[[], str] = str) -> None:
        """Say before the first step what is attached, with more in parentheses."""
        if self._attached:
            return
        self._attached = True
        if state.communicator.rank == 0 and state.communicator.world_size > 1:
            show_log()
            more = describe_more()
            write_log(logger, logging.INFO, "attached %s%s", state.describe(), f" ({more})" if more else "")

    def end(self, state: Announced, describe_memory: Callable[[], str] = str) -> None:
        """Say after the first step that has sent something how much less it was, or more."""
        if state.communicator.rank != 0 or state.communicator.world_size == 1:
            self.is_open = False
        if not self.is_open:
            return
        metrics, ranks = state.metrics(), state.communicator.topology.node_size  # of a node, which share its link
        sent, ratio = metrics["bytes_sent_step"] * ranks, metrics["compression_ratio"]
        if sent == 0 or ratio == 0:  # of parameters without elements
            return
        self.is_open = False
        link, plain = " over each node's link" * (ranks > 1), with_unit(sent * ratio)
        words = list(filter(None, [describe_memory()]))
        if ratio >= _NOTABLE:
            fewer = f"{self._plain} would send {plain} a step{link}, this run sends {with_unit(sent)}"
            words.insert(0, f"{fewer} ({ratio:.1f}x fewer)")
        elif ratio <= 1 / _NOTABLE:
            more = f"this run sends {with_unit(sent)} a step{link}, {1 / ratio:.1f}x more than {self._plain}"
            write_log(logger, logging.WARNING, "%s, which would send %s: %s", more, plain, self._remedy)
        if words:
            write_log(logger, logging.INFO, "%s", "; ".join(words))


def write_log(logger: logging.Logger, level: int, message: str, *args: object) -> None:
    """Log a line; a failing handler, such as one of a closed stderr, must not leave the other ranks waiting."""
    with suppress(Exception):
        logger.log(level, message, *args)


class _ProgressBarHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes a line above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a terminal that is gone must not end the training
            text = self.format(record)
            if "tqdm" in sys.modules:
                sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)


def show_log(*, always: bool = False) -> None:
    """Show the package's lines on the terminal, unless the program has configured the package's logger.

    A program that has configured the root logger shows them itself; ``always`` shows them all the same.
    """
    package = logging.getLogger("hf_compressopt")
    if package.handlers or package.level != logging.NOTSET or (logging.root.handlers and not always):
        return
    handler = _ProgressBarHandler()
    handler.setFormatter(logging.Formatter("[hf_compressopt] %(message)s"))
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False


def totals(*states: Announced) -> tuple[float, float]:
    """Return the bytes that DDP would have sent over a node's link in this process, and those that were sent."""
    metrics = [state.metrics() for state in states]
    return sum(row["bytes_uncompressed"] for row in metrics), sum(row["bytes_on_link"] for row in metrics)


def closing_line(*states: Announced) -> str:
    """Say at the end of a run what it has sent; "" for nothing."""
    plain, sent = totals(*states)
    return in_words(plain, sent) if sent else ""


def in_words(plain: float, sent: float) -> str:
    """Compare the bytes of a run with those of DDP, and tell how long the difference takes on a slow link."""
    text = f"sent {with_unit(sent)}, DDP would have sent {with_unit(plain)}"
    if plain <= sent * _NOTABLE:
        return text
    return f"{text} ({plain / sent:.1f}x fewer): about {duration((plain - sent) / _LINK)} less on a link of 1 Gbit/s"
