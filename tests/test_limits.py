"""Limits that keep the package readable: lengths of files, sizes and depths of classes, and no import circle."""

import graphlib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_structure import PACKAGE, imports

LINES, METHODS, DEPTH = 350, 45, 3

FILES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
MODULES: dict[str, Path] = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def module_of(target: str) -> str:
    """The module of an imported name: hf_compressopt.flat.Bucket is in hf_compressopt.flat."""
    return target if target in MODULES else target.rpartition(".")[0]


def own_classes() -> Iterator[type]:
    for name in MODULES:
        if name != "hf_compressopt.auto":  # which registers the optimizers with transformers
            members = inspect.getmembers(importlib.import_module(name), inspect.isclass)
            yield from (cls for _, cls in members if cls.__module__ == name)


def is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "hf_compressopt"


def depth(cls: type) -> int:
    return 1 + max((depth(base) for base in cls.__bases__ if is_ours(base)), default=0)


def methods(cls: type) -> set[str]:
    kinds = (property, classmethod, staticmethod)
    rows = ((name, value) for base in cls.__mro__ if is_ours(base) for name, value in vars(base).items())
    return {name for name, value in rows if inspect.isfunction(value) or isinstance(value, kinds)}


def test_files_can_be_read_in_one_sitting() -> None:
    lines = {str(path.relative_to(PACKAGE)): path.read_text().count("\n") for path in MODULES.values()}
    assert [file for file, count in lines.items() if count > LINES] == []


def test_classes_are_small_and_not_deep() -> None:
    classes = list(own_classes())
    assert len(classes) > 100
    assert [cls.__name__ for cls in classes if depth(cls) > DEPTH] == []
    assert {cls.__name__: len(methods(cls)) for cls in classes if len(methods(cls)) > METHODS} == {}


def for_types_only(path: Path) -> set[str]:
    """Imports of a file under `if TYPE_CHECKING`, which do not happen at run time."""
    blocks = re.findall(r"^if TYPE_CHECKING:\n((?:[ ].*\n|\n)+)", path.read_text(), re.MULTILINE)
    return {name for block in blocks for name in re.findall(r"from (\S+) import", block)}


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        name: {module_of(target) for target in imports(path) if target.startswith("hf_compressopt.")}
        - {name, *for_types_only(path)}
        for name, path in MODULES.items()
    }
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= set(MODULES)  # a CycleError names a circle
