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


# -- who writes an attribute ------------------------------------------------------------------------------------------

# Attributes of hosts' objects that carry the name of one of ours, by file and name, and why they are set from outside.
WRITTEN_OUTSIDE = {
    ("integrations/accelerate.py", "optimizers"): "Accelerate's scheduler waits for those that it was given",
    ("integrations/trainer.py", "optim"): "Transformers reads a copy of its arguments",
    ("integrations/trainer.py", "optim_args"): "Transformers reads a copy of its arguments",
}


def functions_with_class(tree: ast.AST, owner: str | None = None) -> Iterator[tuple[ast.FunctionDef, str | None]]:
    """The functions of a module and the classes that they are in; a function includes those that are inside it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, owner
        else:
            yield from functions_with_class(node, node.name if isinstance(node, ast.ClassDef) else owner)


def written(node: ast.AST) -> Iterator[ast.expr]:
    """Targets of a statement's assignments."""
    found: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [item.optional_vars for item in node.items if item.optional_vars]
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found += target.elts
        else:
            yield target


def words(annotation: ast.AST | None) -> set[str]:
    """The names in an annotation, also in one that is a string."""
    return set() if annotation is None else set(re.findall(r"\w+", ast.unparse(annotation)))


class Classes:
    """The classes of the package: where they stand, the attributes that they declare, and the types of these."""

    def __init__(self) -> None:
        self.modules: dict[str, set[Path]] = {}
        self.protocols: set[str] = set()  # which stand for classes of other modules
        self.declaring: dict[str, set[str]] = {}  # by attribute: the classes
        self.types: dict[str, set[str]] = {}  # by attribute, method or function: the names of what it may be
        trees = {path: ast.parse(path.read_text()) for path in INSIDE.values()}
        for path, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    if any("Protocol" in ast.unparse(base) for base in node.bases):
                        self.protocols.add(node.name)
                    else:
                        self.modules.setdefault(node.name, set()).add(path)
                    for statement in node.body:
                        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                            self._note(node.name, statement.target.id, words(statement.annotation))
                        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                            self._note(node.name, statement.targets[0].id, set())
        for tree in trees.values():
            for function, owner in functions_with_class(tree):
                self.types.setdefault(function.name, set()).update(words(function.returns))
                local = self.locals_of(function, owner)
                for node in ast.walk(function):
                    for target in written(node):
                        if owner and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
                            said = words(node.annotation) if isinstance(node, ast.AnnAssign) else set()
                            self._note(owner, target.attr, said or self.types_of(value, local))

    def _note(self, owner: str, attribute: str, types: set[str]) -> None:
        self.declaring.setdefault(attribute, set()).add(owner)
        self.types.setdefault(attribute, set()).update(types)

    def locals_of(self, function: ast.FunctionDef, owner: str | None) -> dict[str, set[str]]:
        """The types of the arguments and local names of a function, as far as it says them."""
        arguments = [node for node in ast.walk(function) if isinstance(node, ast.arg)]
        local = {argument.arg: words(argument.annotation) for argument in arguments}
        if owner is not None and function.args.args:
            local[function.args.args[0].arg] = {owner}
        for node in ast.walk(function):
            value = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
            for target in written(node):
                if isinstance(target, ast.Name):
                    said = words(node.annotation) if isinstance(node, ast.AnnAssign) else set()
                    local.setdefault(target.id, set()).update(said or self.types_of(value, local))
        return local

    def types_of(self, value: ast.expr | None, local: dict[str, set[str]]) -> set[str]:
        """The names of what a value may be; of what it contains, if it is a list."""
        if isinstance(value, ast.Name):
            return local.get(value.id, set())
        if isinstance(value, ast.Attribute):
            return self.types.get(value.attr, set())
        if isinstance(value, ast.Subscript):
            return self.types_of(value.value, local)
        if isinstance(value, ast.Call):
            called = ast.unparse(value.func).rpartition(".")[2]
            if called in ("copy", "deepcopy", "replace", "zip", "enumerate", "filter", "sorted"):
                return set().union(*(self.types_of(argument, local) for argument in value.args))
            return {called} if called in self.modules else self.types.get(called, set())
        return set()


def test_only_its_own_module_writes_an_attribute() -> None:
    """Other modules call a method. An object of unknown type is of a class that declares the attribute."""
    classes = Classes()
    seen = 0
    outside: set[str] = set()
    exempt: set[tuple[str, str]] = set()
    for path in INSIDE.values():
        for function, owner in functions_with_class(ast.parse(path.read_text())):
            local = classes.locals_of(function, owner)
            targets = [target for node in ast.walk(function) for target in written(node)]
            for target in (each for each in targets if isinstance(each, ast.Attribute)):
                declaring = classes.declaring.get(target.attr, set())
                types = classes.types_of(target.value, local) - classes.protocols
                ours = types & classes.modules.keys()
                of_others = types and not ours and "Any" not in types
                if not declaring or of_others or ast.unparse(target.value) in ("self", "cls"):
                    continue
                seen += 1
                place = (str(path.relative_to(PACKAGE)), target.attr)
                owners = ours or declaring & classes.modules.keys()
                if place in WRITTEN_OUTSIDE:
                    exempt.add(place)
                elif not any(path in classes.modules[each] for each in owners):
                    outside.add(f"{place[0]}:{target.lineno} writes {ast.unparse(target)}, of {sorted(owners)}")
    assert not outside, "\n".join(sorted(outside))
    assert exempt == WRITTEN_OUTSIDE.keys() and seen > 50
