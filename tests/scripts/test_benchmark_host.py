"""The benchmark of the host's time: every kind of step is timed, and what it calls and fetches is counted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import REPO_ROOT, run

SCRIPT = str(REPO_ROOT / "scripts" / "benchmark_host.py")
KINDS = ["OnebitAdam", "ZeroOneAdam", "OnebitLamb", "int4 gradients", "DDP", "DDP, int4 gradients", "ZeRO-2"]
#: One of 0/1 Adam's reads the moving average of the noise, which lies in host memory: no device is awaited.
WAITS = {"OnebitAdam": 1, "ZeroOneAdam": 2, "OnebitLamb": 1, "int4 gradients": 1, "DDP, int4 gradients": 1, "ZeRO-2": 1}


def found(path: Path, *words: str) -> dict[str, Any]:
    run([sys.executable, SCRIPT, "--buckets", "3", "--rounds", "1", "--json", str(path), *words])
    return json.loads(path.read_text())["found"]


@pytest.mark.full
def test_times_are_ratios_to_the_baseline(tmp_path: Path) -> None:
    rows = found(tmp_path / "times.json")
    baseline, *others = rows.items()
    assert baseline[1]["ratio"] == 1.0 and [name for name, _ in others] == KINDS
    assert rows["OnebitAdam"]["us_per_bucket"] > 0


def test_calls_that_wait_for_a_device_are_counted(tmp_path: Path) -> None:
    rows = found(tmp_path / "syncs.json", "--syncs")
    assert rows["backward alone"] == rows["all_reduce, clip, AdamW"] == rows["DDP"] == {}
    assert {name: sum(rows[name].values()) for name in WAITS} == WAITS
