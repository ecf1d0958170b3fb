"""The benchmark of checkpoints, tiny: every variant saves and loads, the table says so, and nothing is left behind."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.launching import REPO_ROOT, environment, run_python

SCRIPT = str(REPO_ROOT / "scripts" / "benchmark_checkpoint.py")
TINY = ["--parameters", "1e5", "--width", "64", "--rounds", "2", "--keep-cache"]


@pytest.mark.full
def test_ctrl_c_leaves_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    interrupted = subprocess.Popen(
        [sys.executable, SCRIPT, *TINY, "--folder", str(folder)],
        env=environment(),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # what a shell starts with `&` ignores it
    )
    deadline = time.monotonic() + 120
    while not list(folder.glob("*/store")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(folder.glob("*/store")), "the ranks did not begin"
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(60) != 0 and list(folder.iterdir()) == []


@pytest.mark.full
def test_every_variant_saves_and_loads(tmp_path: Path) -> None:
    folder, out = tmp_path / "disk", tmp_path / "found.json"
    folder.mkdir()
    done = run_python([SCRIPT, *TINY, "--folder", str(folder), "--out", str(out)])
    assert list(folder.iterdir()) == []
    found = json.loads(out.read_text())["ranks"]
    rows = [
        line.split(" | ")[0].removeprefix("| ").strip() for line in done.stdout.splitlines() if line.startswith("| ")
    ]
    assert rows[1:] == [name for name in found[0] if name != "bytes"] and len(rows) == 7
    for rank in found:
        assert 3.9e5 < rank["bytes"] < 4.6e5  # two float32 moments of half of the parameters
        for name in rows[1:]:
            assert len(rank[name]) == 2
            assert all(row["save"] >= row["blocked"] > 0 and row["load"] > 0 for row in rank[name])
