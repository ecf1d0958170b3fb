"""The package's log, read while a test runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_to(handler: logging.Handler) -> Iterator[None]:
    """Inside, the package logs from INFO on, to this handler too."""
    logger = logging.getLogger("hf_compressopt")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Inside, the list that is yielded gets the package's log lines."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with log_to(handler):
        yield lines
