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

import _convergence_report  # noqa: E402
import _network_report  # noqa: E402
import benchmark_time_to_loss  # noqa: E402
import make_comparison  # noqa: E402
from _network_methods import Row  # noqa: E402

DOCS = REPO_ROOT / "docs"


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((DOCS / f"{name}.json").read_text())


def test_the_tables_of_convergence() -> None:
    arguments = Namespace(
        world_sizes=[2, 4, 8], seeds=[0, 1, 2], tuning_seeds=[10, 11, 12], steps=1000, ablation_steps=300
    )
    page = (DOCS / "convergence.md").read_text()
    results = _convergence_report.Results(rows_of("convergence"), arguments)
    assert _convergence_report.rendered(page, results, arguments) == page


def test_the_tables_of_the_comparison() -> None:
    page = (DOCS / "comparison.md").read_text()
    assert make_comparison.rendered(page, rows_of("convergence"), rows_of("rivals")) == page


@pytest.mark.parametrize("name", [*sorted(file.stem for file in DOCS.glob("network*.json")), "rivals", "avx512"])
def test_the_tables_of_the_network(name: str) -> None:
    page = (DOCS / ("nodes.md" if name in ("network_nodes", "network_hsdp") else f"{name}.md")).read_text()
    rows = [Row(**row) for row in rows_of(name)]
    for place in {(row.model, row.ranks, row.per_node) for row in rows}:
        lines = _network_report.table([row for row in rows if (row.model, row.ranks, row.per_node) == place])
        assert "\n".join(lines) in page, place


@pytest.mark.parametrize(("name", "links"), [("time_to_loss", ["1 Gbit/s", "100 Mbit/s"]), ("bytes_of_runs", [])])
def test_the_tables_of_losses_over_time(name: str, links: list[str]) -> None:
    page, rows = (DOCS / f"{name}.md").read_text(), [benchmark_time_to_loss.Row(**row) for row in rows_of(name)]
    numbers = dict.fromkeys(("ranks", "threads", "batch_size", "tokens", "steps", "seed", "rounds", "window"), 0)
    made = benchmark_time_to_loss.report(rows, Namespace(links=links, report=None, **numbers)).splitlines()
    tables = [line for line in made if line.startswith(("|", "**"))]
    assert len(tables) >= 5
    assert [line for line in page.splitlines() if line.startswith(("|", "**"))] == tables


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
    rows = [benchmark_time_to_loss.Row(**row) for row in rows_of("time_to_loss") if row["link"] == "100 Mbit/s"]
    target = benchmark_time_to_loss.NEAR * next(row for row in rows if row.method == "adamw").losses[-1]
    seconds = {row.method: benchmark_time_to_loss.seconds_to(row, target) or 0.0 for row in rows}
    readme = " ".join((REPO_ROOT / "README.md").read_text().split())
    said = re.search(r"At 100 Mbit/s `onebit_adam` reaches AdamW's loss ([\d.]+) times .*? and ([\d.]+) times", readme)
    assert said is not None
    found = [f"{seconds[method] / seconds['onebit_adam']:.1f}" for method in ("adamw", "fp16")]
    assert list(said.groups()) == found


def test_the_losses_of_the_readme() -> None:
    """The least and the most that 1-bit Adam's means over the seeds lie below AdamW's, on 2, 4 and 8 ranks."""
    rows = rows_of("convergence")
    arguments = Namespace(seeds=[0, 1, 2], tuning_seeds=[], steps=1000, ablation_steps=300)
    results, run = (
        _convergence_report.Results(rows, arguments),
        _convergence_report.ALL_RUNS["OnebitAdam, state=compact"],
    )
    found = []
    for ranks in (2, 4, 8):
        mine = results(run, ranks, arguments.seeds)
        difference = _convergence_report.differences(mine, results.partner_of(run, ranks, arguments.seeds))
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
