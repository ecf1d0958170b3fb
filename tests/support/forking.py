"""Processes that have imported torch already: forks of a server that only imports."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

# Importing them takes seconds, and starts no thread but one of the allocator's, which may be missing in a fork.
# torch._dynamo: the first step of an optimizer imports it.
TORCH = ["torch", "torch._dynamo"]
TRANSFORMERS = ["transformers.trainer", "transformers.models.gpt2.modeling_gpt2"]


def forked(target: Callable[..., None], *args: Any, daemon: bool = True) -> BaseProcess:
    """Start a process that calls the module-level function and, with daemon=True, ends with this one."""
    context = multiprocessing.get_context("forkserver")
    trainer = any(name.startswith(("tests.integrations.", "tests.support.trainer_runs")) for name in sys.modules)
    context.set_forkserver_preload(TORCH + TRANSFORMERS if trainer else TORCH)
    process = context.Process(target=_call, args=(dict(os.environ), target, args), daemon=daemon)
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads would not survive a fork
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return process


def _call(environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.freeze()  # the modules: looking through them would take longer than most tests, and copy their memory
    target(*args)
