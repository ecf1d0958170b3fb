"""recipes/first_run.ipynb runs as it stands, on two CPU processes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import REPO_ROOT

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
