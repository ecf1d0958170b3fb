"""The size of the house, the modules that a step calls, and no module that imports itself through others."""

import graphlib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPO_ROOT, run
from tests.test_structure import PACKAGE, imports

FILES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
MODULES: dict[str, Path] = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


TOTALS = {
    "modules of the package": 91,
    "lines of the package": 25_005,
    "lines of tests": 29_065,
    "lines of scripts": 4_753,
}
CALLED = {"OnebitAdam": 15, "ZeroOneAdam": 17, "OnebitLamb": 15, "DDP, int4 gradients": 15, "ZeRO-2": 17}


def lines_of(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (REPO_ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("what", TOTALS)
def test_totals(what: str) -> None:
    folders = {"package": "hf_compressopt", "tests": "tests", "scripts": "scripts"}
    found = len(MODULES) if what.startswith("modules") else lines_of(folders[what.split()[-1]])
    assert found <= TOTALS[what], f"{found} {what}"


def test_modules_that_a_step_calls(tmp_path: Path) -> None:
    out = tmp_path / "modules.json"
    script = str(REPO_ROOT / "scripts" / "benchmark_host.py")
    run([sys.executable, script, "--modules", "--buckets", "3", "--json", str(out)])
    called = json.loads(out.read_text())["found"]
    assert {name: len(called[name]) for name in CALLED if len(called[name]) > CALLED[name]} == {}, called


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
