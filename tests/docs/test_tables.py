"""Every table of measured numbers is what the rows beside it say."""

import json
import re
import statistics
import sys
from argparse import Namespace
from typing import Any

import pytest

from hf_compressopt import cli
from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

import benchmark_network  # noqa: E402
import benchmark_time_to_loss  # noqa: E402
import compare_convergence  # noqa: E402

DOCS = REPO_ROOT / "docs"


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((DOCS / f"{name}.json").read_text())


CONVERGENCE = Namespace(world_sizes=[2, 4, 8], seeds=[0, 1, 2], tuning_seeds=[10, 11, 12], steps=1000)


def test_the_tables_of_convergence() -> None:
    page = (DOCS / "convergence.md").read_text()
    results = compare_convergence.Results(rows_of("convergence"), CONVERGENCE)
    assert compare_convergence.rendered(page, results, CONVERGENCE) == page


@pytest.mark.parametrize(
    ("name", "page"), [("network", "network"), ("network_nodes", "nodes"), ("network_hsdp", "nodes")]
)
def test_the_tables_of_the_network(name: str, page: str) -> None:
    text, rows = (DOCS / f"{page}.md").read_text(), benchmark_network.read_rows(DOCS / f"{name}.json")
    assert len(rows) == len(rows_of(name))
    for place in {(row.model, row.ranks, row.per_node) for row in rows}:
        lines = benchmark_network.table([row for row in rows if (row.model, row.ranks, row.per_node) == place])
        assert "\n".join(lines) in text, place


def test_the_table_of_bytes_of_runs() -> None:
    page, rows = (DOCS / "bytes_of_runs.md").read_text(), benchmark_time_to_loss.read_rows(DOCS / "bytes_of_runs.md")
    numbers = dict.fromkeys(("ranks", "threads", "batch_size", "tokens", "steps", "seed"), 0)
    made = benchmark_time_to_loss.report(rows, Namespace(links=[], report=None, **numbers)).splitlines()
    tables = [line for line in made if line.startswith("|")]
    assert len(tables) >= 5
    assert [line for line in page.splitlines() if line.startswith("|")] == tables


def test_the_table_of_the_readme() -> None:
    names = {"ddp": "DDP, `adamw_torch`", "fp16": "DDP, 16-bit gradients", "powersgd": "DDP, PowerSGD of rank 1"}
    names |= {"onebit_adam": "`onebit_adam`", "zero_one_adam": "`zero_one_adam`"}
    measured = {
        (row["method"], row["link"]): 1e3 * statistics.median(row["seconds"])
        for row in rows_of("network")
        if (row["model"], row["ranks"]) == ("30M", 2)
    }
    readme = (REPO_ROOT / "README.md").read_text()
    links = ("10 Gbit/s", "1 Gbit/s", "100 Mbit/s")
    assert f"| {' | '.join(links)} |" in readme
    for method, name in names.items():
        cells = (f"{measured[method, link]:.0f}" for link in links)
        assert f"| {name} | {' | '.join(cells)} |" in readme


def test_the_times_of_the_readme() -> None:
    rows = benchmark_time_to_loss.read_rows(DOCS / "time_to_loss.md")
    rows = [row for row in rows if row.link == "100 Mbit/s"]
    target = benchmark_time_to_loss.NEAR * next(row for row in rows if row.method == "adamw").losses[-1]
    seconds = {row.method: benchmark_time_to_loss.seconds_to(row, target) or 0.0 for row in rows}
    readme = " ".join((REPO_ROOT / "README.md").read_text().split())
    said = re.search(r"At 100 Mbit/s `onebit_adam` reaches AdamW's loss ([\d.]+) times .*? and ([\d.]+) times", readme)
    assert said is not None
    found = [f"{seconds[method] / seconds['onebit_adam']:.1f}" for method in ("adamw", "fp16")]
    assert list(said.groups()) == found


def test_the_losses_of_the_readme() -> None:
    """The least and the most that 1-bit Adam's means over the seeds lie below AdamW's, on 2, 4 and 8 ranks."""
    results = compare_convergence.Results(rows_of("convergence"), CONVERGENCE)
    run, seeds = compare_convergence.ALL_RUNS["OnebitAdam, state=compact"], CONVERGENCE.seeds
    found = []
    for ranks in (2, 4, 8):
        mine = results(run, ranks, seeds)
        difference = compare_convergence.differences(mine, results.partner_of(run, ranks, seeds))
        assert difference is not None and len(difference[1]) == 3
        found.append(-difference[0])
    said = re.search(r"(\d\.\d) to (\d\.\d) %\s+below", (REPO_ROOT / "README.md").read_text())
    assert said is not None and (f"{min(found):.1f}", f"{max(found):.1f}") == said.groups()


@pytest.mark.parametrize(("link", "row"), [("100G", 0), ("25G", 1), ("10G", 1), ("2.5G", 2), ("1G", 3), ("100M", 3)])
def test_the_choices_of_the_readme_are_those_of_the_planner(
    link: str, row: int, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (REPO_ROOT / "README.md").read_text()
    (command,) = re.findall(r"^hf-compressopt (estimate .*)$", readme, re.MULTILINE)
    words = command.split()
    words[words.index("--bandwidth") + 1] = link
    assert cli.main([*words, "--json"]) == 0
    _, optim, *options = json.loads(capsys.readouterr().out)["advised"].split()
    table = readme.split("| network between the machines | `--optim` |\n|---|---|\n")[1].splitlines()
    # fused_adam is AdamW: a model of the network cannot tell them apart
    assert f"`{'fused_adam' if (optim, row) == ('adamw_torch', 0) else optim}`" in table[row]
    assert all(f"`{option}`" in table[row] for option in options[1:])
