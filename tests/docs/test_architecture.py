"""docs/dev/architecture.md: its names exist in the code."""

import inspect
import re
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.launching import REPO_ROOT

PAGE = REPO_ROOT / "docs" / "dev" / "architecture.md"
PACKAGE = REPO_ROOT / "hf_compressopt"
# `optim/base.py:CompressedOptimizer.step`, `optim/base.py`, `zero/`; relative to the package
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
    for path, name in walks:
        found = inspect.unwrap(getattr(find(path, name), "fget", None) or find(path, name))
        assert Path(inspect.getsourcefile(found) or "").resolve() == (PACKAGE / path).resolve(), (path, name)
