"""No module of the package imports itself through others."""

import graphlib
import re
from pathlib import Path

from tests.test_structure import PACKAGE, imports

FILES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
MODULES: dict[str, Path] = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def module_of(target: str) -> str:
    """The module of an imported name: hf_compressopt.flat.Bucket is in hf_compressopt.flat."""
    return target if target in MODULES else target.rpartition(".")[0]


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
