"""The benchmarks of the host's time and of checkpoints, and the reference runs, all tiny: rows and reports come out."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launching import REPO_ROOT, run, run_python

SCRIPTS = REPO_ROOT / "scripts"
sys.path.append(str(SCRIPTS))

from _convergence import batches  # noqa: E402
from benchmark_host import HostCopies  # noqa: E402

KINDS = ["OnebitAdam", "ZeroOneAdam", "OnebitLamb", "int4 gradients", "DDP", "DDP, int4 gradients", "ZeRO-2"]
#: Numbers that lie in host memory anyway are not awaited.
WAITS = {"OnebitAdam": 1, "ZeroOneAdam": 1, "OnebitLamb": 1, "int4 gradients": 1, "DDP, int4 gradients": 1, "ZeRO-2": 1}
RUNS = [sys.executable, str(SCRIPTS / "compare_convergence.py"), "--steps", "10", "--world-sizes", "2", "--seeds", "0"]
ZERO = "ZeRO-2 and AdamW, int4 both ways"


def host_times(path: Path, *words: str) -> dict[str, Any]:
    script = str(SCRIPTS / "benchmark_host.py")
    run([sys.executable, script, "--buckets", "3", "--rounds", "1", "--json", str(path), *words])
    return json.loads(path.read_text())["found"]


@pytest.mark.full
def test_times_are_ratios_to_the_baseline(tmp_path: Path) -> None:
    rows = host_times(tmp_path / "times.json")
    baseline, *others = rows.items()
    assert baseline[1]["ratio"] == 1.0 and [name for name, _ in others] == KINDS
    assert rows["OnebitAdam"]["us_per_bucket"] > 0


def test_calls_that_wait_for_a_device_are_counted(tmp_path: Path) -> None:
    rows = host_times(tmp_path / "syncs.json", "--syncs")
    assert rows["backward alone"] == rows["all_reduce, clip, AdamW"] == rows["DDP"] == {}
    assert {name: sum(rows[name].values()) for name in WAITS} == WAITS


def test_copies_between_host_memory_and_the_device_are_counted() -> None:
    gradient = torch.ones(3)
    with HostCopies(counts := Counter()):
        steps = torch.zeros(3, device="cpu")
        later = steps[1:] + 1  # in host memory too
        assert counts == {}
        there = later.to(gradient.device)
        gradient[1:].copy_(later)
        gradient[1:].copy_(there)  # which is on the device now
        later.to(gradient.device, non_blocking=True)
    assert counts == {"to": 1, "copy_": 1}


@pytest.mark.full
def test_every_variant_of_a_checkpoint_saves_and_loads(tmp_path: Path) -> None:
    folder, out = tmp_path / "disk", tmp_path / "found.json"
    folder.mkdir()
    words = ["--parameters", "1e5", "--width", "64", "--rounds", "2", "--keep-cache", "--folder", str(folder)]
    done = run_python([str(SCRIPTS / "benchmark_checkpoint.py"), *words, "--out", str(out)])
    assert list(folder.iterdir()) == []
    found = json.loads(out.read_text())["ranks"]
    _, *names = re.findall(r"^\| (.*?) +\|", done.stdout, re.MULTILINE)
    assert names == [name for name in found[0] if name != "bytes"] and len(names) == 6
    for rank in found:
        assert 3.9e5 < rank["bytes"] < 4.6e5  # two float32 moments of half of the parameters
        for rows in (rank[name] for name in names):
            assert len(rows) == 2 and all(row["save"] >= row["blocked"] > 0 and row["load"] > 0 for row in rows)


def reference_rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines())}


@pytest.mark.full
def test_reference_runs_are_reported_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    command = [*RUNS, "--only", "optimizers", ZERO, "--output", str(tmp_path)]
    page = run(command).stdout
    assert "OnebitLamb, 2 ranks, seed 0, 10 steps: evaluation loss" in page
    rows, lines = reference_rows(tmp_path), (tmp_path / "rows.jsonl").read_text()
    assert list(rows) == ["AdamW", "Lamb", "AdamW, int4 gradients", "OnebitAdam", "ZeroOneAdam", "OnebitLamb", ZERO]
    assert all(3 < row["eval_loss"] < 9 and row["rounds"] == 10 for row in rows.values())
    ring = 4 * rows["AdamW"]["parameters"]  # 2 (W-1)/W = 1
    assert rows["AdamW"]["bytes"] == 10 * ring
    assert rows["AdamW, int4 gradients"]["bytes"] < 10 * ring / 7.6
    assert rows["OnebitAdam"]["bytes"] < 10 * ring and rows[ZERO]["bytes"] < 10 * ring / 7
    assert re.search(rf"\| OnebitLamb +\| 2 +\| 1 +\| {rows['OnebitLamb']['eval_loss']:.4f} +\| [-+]\d", page)

    report = tmp_path / "convergence.json"
    assert len(json.loads(report.read_text())) == 7
    assert "seed 0" not in run(command).stdout and (tmp_path / "rows.jsonl").read_text() == lines
    elsewhere = [*RUNS, "--only", "OnebitAdam", "--output", str(tmp_path / "other"), "--report", str(report)]
    assert "seed 0" not in run(elsewhere).stdout  # the JSON beside the report has its row


@pytest.mark.full
def test_models_that_fsdp2_shards_and_muon(tmp_path: Path) -> None:
    """On 4 ranks whatever --world-sizes says; FSDP2 and HSDP alone compute the same but for rounding."""
    run([*RUNS, "--only", "FSDP2", "Muon", "--output", str(tmp_path)], timeout=600)
    rows = reference_rows(tmp_path)
    assert {row["world_size"] for row in rows.values()} == {4}
    loss = {name: row["eval_loss"] for name, row in rows.items()}
    assert loss["HSDP"] == pytest.approx(loss["FSDP2"], rel=1e-5)
    for plain, low in (("FSDP2", "int4 gradients"), ("HSDP", "int4 gradients")):
        assert loss[f"{plain}, {low}"] != loss[plain]
        assert loss[f"{plain}, {low}"] == pytest.approx(loss[plain], rel=0.01)
    assert rows["MuonAdamW, int4 gradients"]["bytes"] < rows["MuonAdamW"]["bytes"] / 7.5
    numel = rows["HSDP"]["parameters"]  # halves of 4 bits in, and out
    assert 10 * numel / 2 / 2 < rows["HSDP, int4 gradients"]["bytes"] < 1.1 * 10 * numel / 2 / 2


def test_batches_of_about_one_length_hold_every_example_once_in_a_pass() -> None:
    lengths = torch.randint(1, 90, (400,), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(90) < lengths.unsqueeze(1)).long()
    examples = {"attention_mask": mask, "labels": torch.arange(400)}
    ranks = [list(batches(examples, 100, 8, 0, rank, 2, by_length=True)) for rank in range(2)]
    together = [torch.cat([part["labels"] for part in parts]) for parts in zip(*ranks, strict=True)]
    assert torch.equal(torch.cat(together).bincount(), torch.full((400,), 2)) and {len(t) for t in together} == {8}
    assert max(int(lengths[batch].max() - lengths[batch].min()) for batch in together) < 15
    assert len({int(lengths[batch].max()) for batch in together[:10]}) > 5  # short and long ones, one after another
