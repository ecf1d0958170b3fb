"""The benchmark of training over slow links: rows and tables come out, and its networks are gone afterwards."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import REPO_ROOT, environment, run

SCRIPT = [sys.executable, str(REPO_ROOT / "scripts" / "benchmark_network.py")]
SMALL = ["--models", "tiny", "--methods", "ddp", "onebit_adam", "--rounds", "1", "--steps", "3", "--slow-steps", "3"]


def namespaces_can_be_made() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    probe = f"co{os.getpid()}-test"
    made = subprocess.run(("ip", "netns", "add", probe), capture_output=True).returncode == 0
    subprocess.run(("ip", "netns", "del", probe), capture_output=True)
    return made


needs_namespaces = pytest.mark.skipif(
    not namespaces_can_be_made(), reason="making network namespaces needs root, and the tools ip and tc"
)


def own_namespaces(pid: int) -> list[str]:
    listed = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True).stdout
    return re.findall(rf"^co{pid}-\S+", listed, re.MULTILINE)


def test_loopback(tmp_path: Path) -> None:
    report = tmp_path / "network.md"
    text = run([*SCRIPT, "--loopback", *SMALL, "--report", str(report)]).stdout
    assert report.read_text() in text
    rows = {row["method"]: row for row in json.loads(report.with_suffix(".json").read_text())}
    assert set(rows) == {"ddp", "onebit_adam"} and all(len(row["seconds"]) == 1 for row in rows.values())
    assert rows["ddp"]["sent"] == pytest.approx(4 * rows["ddp"]["numel"], rel=0.1)  # 2 (W-1)/W values of 4 bytes
    assert rows["onebit_adam"]["sent"] < rows["ddp"]["sent"] / 8  # of so small a model half are headers
    assert "| OnebitAdam | " in text


@needs_namespaces
def test_every_rank_has_a_link_of_its_own_speed(tmp_path: Path) -> None:
    report = tmp_path / "network.md"
    process = subprocess.Popen(
        [*SCRIPT, *SMALL, "--links", "1 Gbit/s", "100 Mbit/s", "--report", str(report)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    rows = json.loads(report.with_suffix(".json").read_text())
    assert [(row["link"], row["method"]) for row in rows] == [
        (link, method) for link in ("1 Gbit/s", "100 Mbit/s") for method in ("ddp", "onebit_adam")
    ]
    assert all(row["sent"] == pytest.approx(4 * row["numel"], rel=0.1) for row in rows if row["method"] == "ddp")
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "OnebitAdam against DDP fp32" in report.read_text() and own_namespaces(process.pid) == []


@needs_namespaces
def test_ctrl_c_leaves_nothing_behind() -> None:
    process = subprocess.Popen([*SCRIPT, *SMALL, "--rounds", "999"], env=environment(), start_new_session=True)
    end = time.monotonic() + 60
    while len(own_namespaces(process.pid)) < 3 and time.monotonic() < end:
        time.sleep(0.2)
    ranks = subprocess.run(("pgrep", "-s", str(process.pid)), capture_output=True, text=True).stdout.split()
    assert len(own_namespaces(process.pid)) == 3 and str(process.pid) in ranks
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=60) != 0
    assert own_namespaces(process.pid) == []
    assert not subprocess.run(("pgrep", "-s", str(process.pid)), capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize(("arguments", "message"), [(["--ranks", "1"], "--ranks must be >= 2, got 1")])
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    done = subprocess.run([*SCRIPT, *arguments], env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
