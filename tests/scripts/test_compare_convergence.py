"""The script of the reference runs: rows, a report, and no finished run repeated."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "compare_convergence.py"
OPTIMIZERS = ["AdamW", "Lamb", "AdamW, int4 gradients", "OnebitAdam", "ZeroOneAdam", "OnebitLamb"]


def run_script(*arguments: object, only: Sequence[str] = ("optimizers",)) -> str:
    words = [
        sys.executable,
        SCRIPT,
        "--steps",
        10,
        "--world-sizes",
        2,
        "--seeds",
        0,
        "--only",
        *only,
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([str(word) for word in words], env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.full
def test_a_run_becomes_a_row_of_the_report_and_is_not_repeated(tmp_path):
    assert "[1/1] OnebitAdam, 2 ranks" in run_script("--output", tmp_path, only=["OnebitAdam"])
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert 3 < row["eval_loss"] < 9 and row["rounds"] == 10
    assert f"| OnebitAdam | 2 | 1 | {row['eval_loss']:.4f} (" in (tmp_path / "convergence.md").read_text()
    again = run_script("--output", tmp_path / "other", "--report", tmp_path / "convergence.md", only=["OnebitAdam"])
    assert "[1/" not in again and f"| {row['eval_loss']:.4f} (" in (tmp_path / "convergence.md").read_text()


@pytest.mark.full
def test_threads_and_processes_give_the_same_numbers(tmp_path):
    rows = {}
    for ranks in ("threads", "processes"):
        run_script("--output", tmp_path / ranks, "--ranks", ranks)
        lines = (tmp_path / ranks / "rows.jsonl").read_text().splitlines()
        rows[ranks] = [{**json.loads(line), "seconds": None} for line in lines]
    assert [row["name"] for row in rows["threads"]] == OPTIMIZERS
    assert rows["threads"] == rows["processes"]


@pytest.mark.full
def test_rows_and_report_come_out_and_a_finished_run_is_not_repeated(tmp_path):
    assert "[6/6] OnebitLamb, 2 ranks" in run_script("--output", tmp_path)
    lines = (tmp_path / "rows.jsonl").read_text()
    rows = {row["name"]: row for row in map(json.loads, lines.splitlines())}
    assert list(rows) == OPTIMIZERS
    assert all(3 < row["eval_loss"] < 9 for row in rows.values())
    ring = 4 * rows["AdamW"]["parameters"]  # 2 (W-1)/W = 1
    assert rows["AdamW"]["bytes"] == 10 * ring
    assert rows["AdamW, int4 gradients"]["bytes"] < 10 * ring / 7.6
    assert rows["OnebitAdam"]["bytes"] < 10 * ring and rows["OnebitAdam"]["rounds"] == 10

    report = tmp_path / "again.md"
    report.write_text("kept\n" + (tmp_path / "convergence.md").read_text().replace("| OnebitLamb |", "| stale |"))
    assert "[1/" not in run_script("--output", tmp_path, "--report", report)
    assert (tmp_path / "rows.jsonl").read_text() == lines
    text = report.read_text()
    assert text == "kept\n" + (tmp_path / "convergence.md").read_text()
    assert f"| OnebitLamb | 2 | 1 | {rows['OnebitLamb']['eval_loss']:.4f} (" in text
    assert len(json.loads((tmp_path / "again.json").read_text())) == 6
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")
