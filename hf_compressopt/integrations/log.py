"""The package's lines on the terminal, and its numbers in the hosts' logs."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, Protocol

from hf_compressopt.checkpoint.io import DEFAULT_PREFIX

_LOGGED = (
    "stage",
    "zero_stage",
    "bytes_sent",
    "bytes_sent_step",
    "bytes_sent_in_node",
    "compression_ratio",
    "seconds_communication",
    "gradient_noise_scale",
)


class HasMetrics(Protocol):
    """An optimizer, or a compression of gradients, that counts what it does."""

    def metrics(self) -> dict[str, float]: ...  # noqa: D102


class _ProgressBarHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes a line above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to stderr; a terminal that is gone must not end the training."""
        from tqdm import tqdm

        with suppress(Exception):
            tqdm.write(self.format(record), file=sys.stderr)


def show_log() -> None:
    """Show the package's lines on the terminal, unless the program has configured the package's logger."""
    package = logging.getLogger("hf_compressopt")
    if not package.handlers and package.level == logging.NOTSET:
        handler = _ProgressBarHandler()
        handler.setFormatter(logging.Formatter("[hf_compressopt] %(message)s"))
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False


def describe_saving(state: Any) -> str:
    """Compare the bytes of the last step with those of full precision; "" if it did not send fewer.

    Args:
        state: An optimizer, or a compression of gradients, with a communicator.
    """
    metrics = state.metrics()
    sent, ratio = metrics["bytes_sent_step"], metrics.get("compression_ratio", 1.0)
    if sent == 0 or ratio < 1.05:
        return ""
    ranks = state.communicator.topology.node_size  # of a node, which share its link
    link = " over each node's link" if ranks > 1 else ""
    full, sent = (_with_unit(value * ranks) for value in (sent * ratio, sent))
    return f"full precision would send {full} a step{link}, this run sends {sent} ({ratio:.1f}x fewer)"


def _with_unit(nbytes: float) -> str:
    """Bytes with three digits and a decimal unit."""
    units = ("B", "kB", "MB", "GB")
    place = next((i for i in range(len(units) - 1) if nbytes < 999.5 * 1000**i), len(units) - 1)
    return f"{nbytes / 1000**place:.3g} {units[place]}"


def prefix_of(number: int) -> str:
    """The start of the file names, and of the metrics, of an accelerator's optimizer with this number."""
    return DEFAULT_PREFIX if number == 0 else f"{DEFAULT_PREFIX}_{number}"


def prefixed_metrics(optimizer: HasMetrics, prefix: str = DEFAULT_PREFIX) -> dict[str, float]:
    """The metrics for a log line, as ``<prefix>/<name>``."""
    metrics = optimizer.metrics()
    return {f"{prefix}/{name}": metrics[name] for name in _LOGGED if name in metrics}
