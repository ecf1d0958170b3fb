"""The script of the reference runs: rows, a report, and no finished run repeated."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPO_ROOT, run

SCRIPT = [sys.executable, str(REPO_ROOT / "scripts" / "compare_convergence.py")]
SHORT = ["--steps", "10", "--world-sizes", "2", "--seeds", "0", "--only"]
OPTIMIZERS = ["AdamW", "Lamb", "AdamW, int4 gradients", "OnebitAdam", "ZeroOneAdam", "OnebitLamb"]
ZERO = "ZeRO-2 and AdamW, int4 both ways"


@pytest.mark.full
def test_rows_and_report_come_out_and_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    command = [*SCRIPT, *SHORT, "optimizers", ZERO, "--output", str(tmp_path)]
    page = run(command).stdout
    assert "OnebitLamb, 2 ranks, seed 0, 10 steps: evaluation loss" in page
    lines = (tmp_path / "rows.jsonl").read_text()
    rows = {row["name"]: row for row in map(json.loads, lines.splitlines())}
    assert list(rows) == [*OPTIMIZERS, ZERO]
    assert all(3 < row["eval_loss"] < 9 and row["rounds"] == 10 for row in rows.values())
    ring = 4 * rows["AdamW"]["parameters"]  # 2 (W-1)/W = 1
    assert rows["AdamW"]["bytes"] == 10 * ring
    assert rows["AdamW, int4 gradients"]["bytes"] < 10 * ring / 7.6
    assert rows["OnebitAdam"]["bytes"] < 10 * ring and rows[ZERO]["bytes"] < 10 * ring / 7
    assert re.search(rf"\| OnebitLamb +\| 2 +\| 1 +\| {rows['OnebitLamb']['eval_loss']:.4f} +\| [-+]\d", page)

    report = tmp_path / "convergence.json"
    assert len(json.loads(report.read_text())) == 7
    assert "seed 0" not in run(command).stdout and (tmp_path / "rows.jsonl").read_text() == lines
    elsewhere = [*SCRIPT, *SHORT, "OnebitAdam", "--output", str(tmp_path / "other"), "--report", str(report)]
    assert "seed 0" not in run(elsewhere).stdout  # the JSON beside the report has its row


@pytest.mark.full
def test_models_that_fsdp2_shards_and_muon(tmp_path: Path) -> None:
    """On 4 ranks whatever --world-sizes says; FSDP2 and HSDP alone compute the same but for rounding."""
    run([*SCRIPT, *SHORT, "FSDP2", "Muon", "--output", str(tmp_path)], timeout=600)
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert {row["world_size"] for row in rows.values()} == {4}
    loss = {name: row["eval_loss"] for name, row in rows.items()}
    assert loss["HSDP"] == pytest.approx(loss["FSDP2"], rel=1e-5)
    for plain, low in (("FSDP2", "int4 gradients"), ("FSDP2", "int4 both ways"), ("HSDP", "int4 gradients")):
        assert loss[f"{plain}, {low}"] != loss[plain]
        assert loss[f"{plain}, {low}"] == pytest.approx(loss[plain], rel=0.01)
    assert rows["MuonAdamW, int4 gradients"]["bytes"] < rows["MuonAdamW"]["bytes"] / 7.5
    numel = rows["HSDP"]["parameters"]  # halves of 4 bits in, and out
    assert 10 * numel / 2 / 2 < rows["HSDP, int4 gradients"]["bytes"] < 1.1 * 10 * numel / 2 / 2
