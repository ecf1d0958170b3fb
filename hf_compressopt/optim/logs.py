"""Log lines from inside a step."""

from __future__ import annotations

import logging
from contextlib import suppress


def write_log(logger: logging.Logger, level: int, message: str, *args: object) -> None:
    """Log a line; a handler that fails, such as one that writes to a closed stderr, does not stop the step.

    An error on one rank in the middle of a step would leave the other ranks waiting.
    """
    with suppress(Exception):
        logger.log(level, message, *args)
