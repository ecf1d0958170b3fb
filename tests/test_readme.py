"""What the README files print: commands and options that exist, examples that run, versions that were tested."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.harness import run_ranks
from tests.support.launching import REPO_ROOT
from tests.support.trainer_runs import same_on_all_ranks, use_accelerate

README = REPO_ROOT / "README.md"
RECIPES = sorted((REPO_ROOT / "recipes").glob("*/README.md"))
PROGRAMS = "accelerate hf-compressopt make mpirun pip python sbatch sudo torchrun"
# Every program tells its words and runs nothing; a word of the block that is no program here is an error.
PRELUDE = f"""
set -eu; PATH=/nowhere; TRAIN="recipes/causal_lm/train.py --tiny --output_dir runs"
tell() {{ printf '%s\\037' "$@"; printf '\\036'; }}
for program in {PROGRAMS}; do eval "$program() {{ tell $program \\"\\$@\\"; }}"; done
"""


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def commands(document: Path) -> Iterator[list[str]]:
    """The programs and their words in a document's bash blocks, expanded by bash; what one block sets the next has."""
    script = PRELUDE + "\n".join(blocks(document, "bash"))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=REPO_ROOT)
    assert done.returncode == 0, f"{document}: {done.stderr}"
    for record in done.stdout.split("\036")[:-1]:
        yield record.split("\037")[:-1]


@pytest.mark.parametrize("document", [README, *RECIPES], ids=lambda path: path.parent.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert all((document.parent / link).exists() for link in links), links


def test_commands_name_files_targets_and_options_that_exist() -> None:
    recipes: list[list[str]] = []
    for document in (README, *RECIPES):
        for words in commands(document):
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", (REPO_ROOT / "Makefile").read_text(), re.MULTILINE), words
            assert all((REPO_ROOT / word).exists() for word in words if word.startswith(("recipes/", "scripts/"))), (
                words
            )
            found = [place for place, word in enumerate(words) if re.fullmatch(r"recipes/.*\.py", word)]
            recipes += [words[place:] for place in found[-1:]]
    assert len(recipes) > 12 and {Path(words[0]).parent.name for words in recipes} == {p.parent.name for p in RECIPES}
    assert run_ranks(1, unknown_options, recipes, timeout=240)[0] == []


def unknown_options(rank: int, world_size: int, commands: list[list[str]]) -> list[str]:
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

    unknown = []
    for script, *words in commands:
        names = runpy.run_path(str(REPO_ROOT / script), run_name="recipe")
        if "HfArgumentParser" in names:
            training = Seq2SeqTrainingArguments if "Seq2SeqTrainer" in names else TrainingArguments
            own = [names[name] for name in ("Arguments", "ModelArguments", "DataArguments") if name in names]
            unknown += HfArgumentParser((*own, training)).parse_known_args(words)[1]
        elif "parse_arguments" in names:
            before, sys.argv = sys.argv, [script, *words]
            names["parse_arguments"]()  # exits at an option that it does not know
            sys.argv = before
    return unknown


def test_the_examples_run_as_printed(tmp_path: Path) -> None:
    examples = [text for document in (README, *RECIPES) for text in blocks(document, "python")]
    assert len(examples) >= 5
    ran = run_ranks(2, run_examples, examples, str(tmp_path), timeout=240)
    assert ran[0] == ran[1] and {"OnebitAdam", "FusedAdam"} <= set(ran[0])
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
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        names = {
            "torch": torch,
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
            "loader": torch.utils.data.DataLoader([{"inputs": torch.ones(6) * n} for n in range(8)], batch_size=2),
            "loss": model(torch.ones(2, 6) * (rank + 1)).loss,
            "world_size": world_size,
            **{name: getattr(hf_compressopt, name) for name in hf_compressopt.__all__},
        }
        exec(compile(text, "README", "exec"), names)
        left: Any = names["optimizer"]
        optimizers.append(type(getattr(left, "optimizer", left)).__name__)
        assert same_on_all_ranks(model.parameters())
    return optimizers


def test_the_versions_in_the_readme_are_those_that_test_compat_installs() -> None:
    for name in ("oldest", "newest"):
        pins = dict(re.findall(r"^(\w+)==(\S+)$", (REPO_ROOT / "compat" / f"{name}.txt").read_text(), re.MULTILINE))
        told = ", ".join(f"{package} {pins[package]}" for package in ("torch", "transformers", "accelerate"))
        assert re.search(rf"^\| .*{name}.* \| {re.escape(told)} \|$", README.read_text(), re.MULTILINE), told


def test_the_readme_lists_every_recipe() -> None:
    assert all(f"](recipes/{recipe.parent.name}/README.md)" in README.read_text() for recipe in RECIPES)
