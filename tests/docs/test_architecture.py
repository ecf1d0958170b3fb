"""The names in docs/architecture.md exist in the code."""

import inspect
import re
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

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


def test_the_walks_are_short() -> None:
    """The numbered lists: a gradient passes at most 9 files, a load at most 8."""
    text = PAGE.read_text()
    for heading, most in (("gradient", 9), ("load", 8)):
        section = re.search(rf"^## [^\n]*{heading}[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, heading
        steps = re.findall(r"^\d+\. .*(?:\n   .*)*", section[1], re.MULTILINE)
        files = {path for step in steps for path, name in NAME.findall(step) if path.endswith(".py")}
        assert 3 <= len(steps) and len(files) <= most, (heading, sorted(files))
