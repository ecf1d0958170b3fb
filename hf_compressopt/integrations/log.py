"""The package's lines on the terminal."""

from __future__ import annotations

import logging
import sys


class _ProgressBarHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes a line without tearing the progress bars apart."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to stderr, above the bars."""
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def show_log() -> None:
    """Show the package's lines on the terminal, unless the program has set its logger up."""
    package = logging.getLogger("hf_compressopt")
    if not package.handlers and package.level == logging.NOTSET:
        handler = _ProgressBarHandler()
        handler.setFormatter(logging.Formatter("[hf_compressopt] %(message)s"))
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False
