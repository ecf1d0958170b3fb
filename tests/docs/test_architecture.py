"""docs/architecture.md: its names exist in the code, and its walks are those of a real step and a real load."""

import inspect
import re
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.support.harness import run_ranks
from tests.support.launching import REPO_ROOT

PAGE = REPO_ROOT / "docs" / "architecture.md"
PACKAGE = REPO_ROOT / "hf_compressopt"
# `optim/compressed.py:CompressedOptimizer.step`, `optim/compressed.py`, `zero/`; relative to the package
NAME = re.compile(r"`((?:\w+/)*(?:\w+\.py)?)(?::([\w.]+))?`")


def names() -> list[tuple[str, str]]:
    return [(path, name) for path, name in NAME.findall(PAGE.read_text()) if path]


def find(path: str, name: str) -> Any:
    module = import_module(".".join(["hf_compressopt", *Path(path).with_suffix("").parts]))
    return reduce(getattr, name.split("."), module)


def test_files_and_folders_exist() -> None:
    assert [path for path, _ in names() if not (PACKAGE / path).exists()] == []


def test_functions_exist_in_the_files_that_the_page_names() -> None:
    walks = [(path, name) for path, name in names() if name]
    assert len(walks) > 20
    for path, name in walks:
        found = inspect.unwrap(getattr(find(path, name), "fget", None) or find(path, name))
        assert Path(inspect.getsourcefile(found) or "").resolve() == (PACKAGE / path).resolve(), (path, name)


def files_of(heading: str) -> set[str]:
    """The files in the numbered list of a walk."""
    section = re.search(rf"^## The walk of a {heading}\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    steps = re.findall(r"^\d+\. .*(?:\n   .*)*", section[1], re.MULTILINE)
    return {path for step in steps for path, name in NAME.findall(step) if path.endswith(".py")}


# Where a walk has come to a kernel, a collective call, or a file.
STOPS = {
    "gradient": "compress_ average_compress_ apply_adam_ all_to_all all_gather agree",
    "load": "read plan_load plan_reads blocks",
}


def passed(act: Callable[[], object], heading: str) -> set[str]:
    """The files of the package that are on the stack at the stops of a walk."""
    found: set[str] = set()

    def enter(frame: FrameType | None, event: str, argument: object) -> None:
        if event != "call" or frame is None or frame.f_code.co_name not in STOPS[heading].split():
            return
        stack = []
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                stack.append(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())
            frame = frame.f_back
        found.update(stack)

    sys.setprofile(enter)
    try:
        act()
    finally:
        sys.setprofile(None)
    found.discard("collectives/agreement.py")  # which calls a function on all ranks and compares the outcomes
    return {path.replace("kernels/reference.py", "kernels/native.py") for path in found}


def walks(rank: int, world_size: int, folder: str) -> dict[str, set[str]]:
    """The files that a compressed step and a load pass."""
    from hf_compressopt import OnebitAdam, load_state, save_state

    param = torch.nn.Parameter(torch.zeros(100))
    optimizer = OnebitAdam([param], freeze_step=1)
    for _ in range(2):
        param.grad = torch.ones(100)
        optimizer.step()
    found = {"gradient": passed(optimizer.step, "gradient")}
    save_state(optimizer, folder)
    return {**found, "load": passed(lambda: load_state(optimizer, folder), "load")}


def test_the_walks_are_short_and_those_of_a_real_run(tmp_path: Path) -> None:
    """A gradient passes at most 9 files, a load at most 8."""
    found = run_ranks(2, walks, str(tmp_path))[0]
    for heading, most in (("gradient", 9), ("load", 8)):
        assert found[heading] == files_of(heading) and len(found[heading]) <= most, heading
