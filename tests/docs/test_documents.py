"""The README files and docs/: commands and options that exist, examples that run, links that lead somewhere."""

import inspect
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_compressopt import cli
from tests.support.harness import run_ranks
from tests.support.launching import REPO_ROOT
from tests.support.trainer_runs import same_on_all_ranks, use_accelerate

README = REPO_ROOT / "README.md"
DOCS = sorted((REPO_ROOT / "docs").rglob("*.md"))
RECIPES = sorted((REPO_ROOT / "recipes").glob("*/README.md"))
DOCUMENTS = [README, REPO_ROOT / "CONTRIBUTING.md", *DOCS, *RECIPES]
PROGRAMS = "accelerate git hf-compressopt make mpirun pip python sbatch sudo torchrun"
# Every program prints its words and runs nothing; a word of a block that is not one of these programs is an error.
PRELUDE = f"""
set -eu; PATH=/nowhere; TRAIN="recipes/causal_lm/train.py --tiny --output_dir runs"
tell() {{ printf '%s\\037' "$@"; printf '\\036'; }}
for program in {PROGRAMS}; do eval "$program() {{ tell $program \\"\\$@\\"; }}"; done
"""


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def changed(document: Path) -> list[str]:
    """The text after the diffs of a document; in a block, a line with # begins the next diff."""
    diffs = [diff for text in blocks(document, "diff") for diff in re.split(r"^#.*\n", text, flags=re.MULTILINE)]
    return ["".join(re.findall(r"^[+ ] (.*\n)", diff, re.MULTILINE)) for diff in diffs if diff]


def commands(document: Path) -> Iterator[list[str]]:
    """The words of each command: in bash blocks, expanded by bash, in diffs, and in the text."""
    for text in re.findall(r"`(python scripts/[^`]*)`", document.read_text()):
        yield text.split()
    script = PRELUDE + "\n".join(blocks(document, "bash"))
    script += "\n".join(text for text in changed(document) if text.startswith("torchrun"))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=REPO_ROOT)
    assert done.returncode == 0, f"{document}: {done.stderr}"
    for record in done.stdout.split("\036")[:-1]:
        yield record.split("\037")[:-1]


ALL_COMMANDS = [words for document in (README, *DOCS, *RECIPES) for words in commands(document)]


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO_ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text()):
        target = (document.parent / file) if file else document
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


def test_every_page_and_recipe_is_listed() -> None:
    pages = [str(page.relative_to(REPO_ROOT / "docs")) for page in DOCS]
    recipes = [str(page.relative_to(REPO_ROOT)) for page in RECIPES]
    index, site = (REPO_ROOT / "docs" / "README.md").read_text(), (REPO_ROOT / "mkdocs.yml").read_text()
    assert [page for page in pages if page != "README.md" and f"]({page})" not in index] == []
    assert [page for page in [*(f"docs/{page}" for page in pages), *recipes] if f": {page}\n" not in site] == []
    assert all(f"]({recipe})" in README.read_text() for recipe in recipes)


def test_the_readme_is_a_landing_page() -> None:
    lines = README.read_text().splitlines()
    assert "alpha" in " ".join(lines[:6]) and "GPU" in " ".join(lines[:6]), "the status is late"
    assert [line for line in lines if line.startswith("make ")] == ["make demo", "make test"]
    assert len(lines) <= 130 and max(map(len, lines)) <= 130


def test_targets_and_files_of_commands_exist() -> None:
    makefile = (REPO_ROOT / "Makefile").read_text()
    for words in ALL_COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
        files = [word for word in words if word.startswith(("recipes/", "scripts/"))]
        assert all((REPO_ROOT / file).exists() for file in files), words


def test_options_of_scripts_exist() -> None:
    shared = "".join(path.read_text() for path in (REPO_ROOT / "scripts").glob("_*.py"))
    ours = [words for words in ALL_COMMANDS if any(word.startswith("scripts/") for word in words)]
    assert len(ours) > 5
    for words in ours:
        (script,) = (word for word in words if word.startswith("scripts/"))
        text = (REPO_ROOT / script).read_text() + shared
        assert all(f'"{word}"' in text for word in words if word.startswith("--")), words


def test_options_of_our_command_exist(capsys: pytest.CaptureFixture[str]) -> None:
    ours = [words[1:] for words in ALL_COMMANDS if words[0] == "hf-compressopt"]
    assert {words[0] for words in ours} >= {"env", "estimate", "inspect", "consolidate", "import", "from-deepspeed"}
    for command, *words in ours:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert all(re.search(rf"{word}\b", text) for word in words if word.startswith("--")), (command, words)


def test_options_of_optimizers_are_on_the_options_page() -> None:
    known = re.findall(r"^\| `(\w+)` \|", (REPO_ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    known += ["zero_stage", "async_save", "help"]
    for words in ALL_COMMANDS:
        given = [words[place + 1] for place, word in enumerate(words) if word == "--optim_args"]
        for option in ",".join(given).split(",") if given else []:
            assert option.partition("=")[0].strip() in known, words


def test_options_of_training_scripts_exist() -> None:
    scripts: list[list[str]] = []
    for words in ALL_COMMANDS:
        found = [place for place, word in enumerate(words) if re.fullmatch(r"(recipes/.*|\w+)\.py", word)]
        scripts += [words[place:] for place in found[-1:]]
    recipes = {Path(words[0]).parent.name for words in scripts if "/" in words[0]}
    assert len(scripts) > 14 and recipes == {path.parent.name for path in RECIPES}
    assert run_ranks(1, unknown_options, scripts, timeout=240)[0] == []


def unknown_options(rank: int, world_size: int, commands: list[list[str]]) -> list[str]:
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

    import hf_compressopt.auto  # noqa: F401  a script of the user's, started by hf_compressopt.run

    unknown = []
    for script, *words in commands:
        if "recipes/lora/" in script and not (find_spec("peft") and find_spec("trl")):
            continue  # the extra "lora" is not installed
        names: dict[str, Any] = {"HfArgumentParser": HfArgumentParser}  # of a script of the user's
        if "/" in script:
            names = runpy.run_path(str(REPO_ROOT / script), run_name="recipe")
        if "HfArgumentParser" in names:
            training = Seq2SeqTrainingArguments if "Seq2SeqTrainer" in names else TrainingArguments
            own = [names[name] for name in ("Arguments", "ModelArguments", "DataArguments") if name in names]
            unknown += HfArgumentParser((*own, training)).parse_known_args(words)[1]
        elif "parse_arguments" in names:
            with mock.patch("sys.argv", [script, *words]):
                names["parse_arguments"]()  # exits at an option that it does not know
    return unknown


def test_the_examples_run_as_printed(tmp_path: Path) -> None:
    examples = [text for document in (README, *DOCS, *RECIPES) for text in blocks(document, "python")]
    examples += [text for text in changed(README) if not text.startswith("torchrun")]
    assert len(examples) >= 14
    ran = run_ranks(2, run_examples, examples, str(tmp_path), timeout=240)
    assert ran[0] == ran[1] and {"OnebitAdam", "FusedAdam", "ZeroOptimizer"} <= set(ran[0])
    assert (tmp_path / "checkpoint" / "compressopt.index.json").is_file()


def run_examples(rank: int, world_size: int, examples: list[str], directory: str) -> list[str]:
    """Run each with the names that a user has there; the class of the optimizer that each leaves behind."""
    import os

    import hf_compressopt

    class Model(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return SimpleNamespace(loss=super().forward(inputs).square().mean())

    use_accelerate(rank, world_size)
    os.chdir(directory)
    optimizers = []
    for text in examples:
        torch.manual_seed(0)
        model = Model(6, 5)
        if "accelerator" not in text and "DistributedDataParallel" not in text:  # DDP refuses such a model
            model.unused = torch.nn.Parameter(torch.ones(3))  # its gradient is None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        names = {
            "torch": torch,
            "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
            "loader": torch.utils.data.DataLoader([{"inputs": torch.ones(6) * n} for n in range(8)], batch_size=2),
            "inputs": torch.ones(2, 6) * (rank + 1),
            "loss": model(torch.ones(2, 6) * (rank + 1)).loss,
            "world_size": world_size,
            **{name: getattr(hf_compressopt, name) for name in hf_compressopt.__all__},
        }
        exec(compile(text, "README", "exec"), names)
        left: Any = names["optimizer"]
        optimizers.append(type(getattr(left, "optimizer", left)).__name__)
        assert same_on_all_ranks(model.parameters())
    return optimizers


def test_the_versions_in_the_documentation_are_those_that_test_compat_installs() -> None:
    page = (REPO_ROOT / "docs" / "quickstart.md").read_text()
    for name in ("oldest", "newest"):
        pins = dict(re.findall(r"^(\w+)==(\S+)$", (REPO_ROOT / "compat" / f"{name}.txt").read_text(), re.MULTILINE))
        told = ", ".join(f"{package} {pins[package]}" for package in ("torch", "transformers", "accelerate"))
        assert re.search(rf"^\| .*{name}.* \| {re.escape(told)} \|$", page, re.MULTILINE), told


def test_the_site_shows_roles_of_docstrings_as_names() -> None:
    shown = runpy.run_path(str(REPO_ROOT / "scripts" / "make_site.py"))["on_page_content"]
    html = "<p>:class:<code>~a.b.Adam</code>, :meth:<code>Adam.step</code>::</p>"
    assert shown(html) == "<p><code>Adam</code>, <code>Adam.step</code>:</p>"


PACKAGE = REPO_ROOT / "hf_compressopt"
# `optim/base.py:CompressedOptimizer.step`, `optim/base.py`, `zero/`; relative to the package
NAME = re.compile(r"`((?:\w+/)*(?:\w+\.py)?)(?::([\w.]+))?`")


def test_what_the_page_on_the_architecture_names_is_where_it_says() -> None:
    page = (REPO_ROOT / "docs" / "dev" / "architecture.md").read_text()
    found = NAME.findall(page)
    assert any(path and name for path, name in found)
    for path, name in found:
        assert (PACKAGE / path).exists(), path
        if path and name:
            module = import_module(".".join(["hf_compressopt", *Path(path).with_suffix("").parts]))
            value = reduce(getattr, name.split("."), module)
            source = inspect.getsourcefile(inspect.unwrap(getattr(value, "fget", None) or value)) or ""
            assert Path(source).resolve() == (PACKAGE / path).resolve(), (path, name)


def test_every_invariant_has_a_test_and_every_test_an_invariant() -> None:
    page = (REPO_ROOT / "docs" / "dev" / "invariants.md").read_text()
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert listed == list(range(1, len(listed) + 1)) and len(listed) > 30
    marks = (
        re.findall(r"mark\.invariant\(([\d, ]+)\)", path.read_text()) for path in (REPO_ROOT / "tests").rglob("*.py")
    )
    held = {int(number) for found in marks for group in found for number in group.split(",")}
    assert held == set(listed)


NOTEBOOK = REPO_ROOT / "recipes" / "first_run.ipynb"


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_links_of_the_notebook_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]*)", "".join(cells("markdown")))
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"cell {number}", "exec"), names)
    adamw, int4, onebit = names["runs"].values()
    assert [entry["step"] for entry in adamw] == [10, 20, 30, 40]
    assert [entry["compressopt/stage"] for entry in onebit] == [0, 0, 1, 1]
    first, last = (onebit[number]["compressopt/bytes_sent_step"] for number in (0, -1))
    assert int4[0]["compressopt/bytes_sent_step"] == pytest.approx(first, rel=0.03) and last < first / 3
    assert all(abs(mine["loss"] / theirs["loss"] - 1) < 0.1 for mine, theirs in zip(int4, adamw, strict=True))
    assert "OnebitAdam" in names["inspected"]
