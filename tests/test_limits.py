"""What imports what: integrations down to kernels."""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.launching import REPO_ROOT

PACKAGE = REPO_ROOT / "hf_compressopt"
FILES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
MODULES: dict[str, Path] = {name.removesuffix(".__init__"): path for name, path in FILES.items()}
INSIDE = {name.partition(".")[2]: path for name, path in MODULES.items() if "." in name}  # "zero.config", ...


def module_of(target: str) -> str:
    """The module of an imported name: hf_compressopt.flat.Bucket is in hf_compressopt.flat."""
    return target if target in MODULES else target.rpartition(".")[0]


def test_no_module_imports_itself_through_others() -> None:
    """Imports under TYPE_CHECKING are imports, too: what knows a type knows its module."""
    graph = {
        name: {module_of(target) for target in imports(path) if target.startswith("hf_compressopt.")} - {name}
        for name, path in MODULES.items()
    }
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= set(MODULES)  # a CycleError names a circle


# A file may import what stands in a later row, or in its own room.
ROWS = [
    ["cli"],
    ["advise", "selftest", "run_report"],
    ["auto", "run", "environment", "planner"],
    ["integrations"],
    ["checkpoint", "amp"],
    ["zero", "fsdp"],
    ["optim"],
    ["grad_compression"],
    ["collectives"],
    ["kernels"],
    ["flat", "schedules", "format", "options", "announce"],
    ["quantities", "weak"],
]
LEVEL = {room: level for level, row in enumerate(ROWS) for room in row}
HOSTS = {"transformers", "accelerate"}


def room_of(module: str) -> str:
    return module.split(".")[0]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_down_only() -> None:
    seen = 0
    for name, path in INSIDE.items():
        room = room_of(name)
        for target in imports(path):
            if target.startswith("hf_compressopt."):
                seen += 1
                other = room_of(target.removeprefix("hf_compressopt."))
                assert other == room or LEVEL[other] > LEVEL[room], f"{path} imports {target}"
    assert seen > 30


def test_only_the_integrations_know_the_hosts() -> None:
    knowing = {room_of(name) for name, path in INSIDE.items() if any(t.split(".")[0] in HOSTS for t in imports(path))}
    assert knowing == {"integrations"}


def test_schedules_and_what_reads_checkpoints_know_no_torch() -> None:
    torchless = ("index", "plan", "shards", "inspect")
    files = [f"format/{name}.py" for name in torchless]
    for file in ["schedules.py", *files]:
        assert not any(target.split(".")[0] == "torch" for target in imports(PACKAGE / file))


def test_the_package_imports_its_dependencies_only() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    declared = set(re.findall(r'"([a-z]+)>=', text[text.index("dependencies = [") : text.index("[project.scripts]")]))
    hard = set(re.findall(r'"([a-z]+)>=', text[text.index("dependencies = [") : text.index("[project.optional")]))
    assert hard == {"torch", "transformers", "accelerate", "safetensors", "xxhash"}
    # for MPI and for the picture of a report; torch and transformers bring the others
    optional = {"mpi4py", "matplotlib", "tqdm", "huggingface_hub", "numpy"}
    found = {target.split(".")[0] for path in INSIDE.values() for target in imports(path)}
    others = found - set(sys.stdlib_module_names) - {"hf_compressopt", "__future__"}
    assert others <= hard | optional, f"{others - hard - optional} must be declared"
    assert "datasets" not in others and "datasets" in declared  # the recipes' alone


def test_recipes_use_public_names_only() -> None:
    recipes = PACKAGE.parent / "recipes"
    public = {"hf_compressopt", "hf_compressopt.auto"}
    for path in recipes.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_compressopt"):
                assert node.module in public, f"{path} imports {node.module}"


def test_collectives_say_what_they_ask_of_an_optimizer() -> None:
    """A layer is not gone around by Any: what takes an optimizer names its type, or a protocol."""
    seen = 0
    for path in (PACKAGE / "collectives").glob("*.py"):
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        for function in functions:
            arguments = function.args
            every = [*arguments.args, *arguments.kwonlyargs, arguments.vararg]
            for argument in filter(None, every):
                if "optimizer" in argument.arg:
                    seen += 1
                    annotation = ast.unparse(argument.annotation) if argument.annotation else "Any"
                    assert "Any" not in annotation, f"{path}: {function.name} takes {argument.arg}: {annotation}"
    assert seen > 5
