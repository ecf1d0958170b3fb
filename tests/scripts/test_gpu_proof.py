"""The proof on a GPU, rehearsed on the CPU; and what becomes of a path or a part that fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

from _paths import NEEDS_GPU, PATHS, run_paths, verdict  # noqa: E402
from benchmark_kernels import gpt2  # noqa: E402
from gpu_proof import PARTS, WAITS, Proof, measure_step, tell_step  # noqa: E402

CPU = torch.device("cpu")


def proof(out: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Rehearse. Returns the exit code, the lines that were written, and the output."""
    command = [sys.executable, str(REPO_ROOT / "scripts" / "gpu_proof.py"), "--device", "cpu", "--out", str(out)]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    lines = [json.loads(line) for line in (out / "proof.jsonl").read_text().splitlines()]
    return done.returncode, lines, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_rehearsal_on_a_cpu_passes(tmp_path: Path) -> None:
    """Within 4 minutes, of which it takes 70 seconds on two idle cores. What there is no time for is named."""
    code, lines, output = proof(tmp_path, "--minutes", "4")
    assert code == 0, output
    assert {line["part"] for line in lines if line.get("what") in ("end", "part")} == PARTS.keys()
    paths = [line["path"] for line in lines if line["part"] == "C" and "path" in line]
    assert paths == [name for paths in PATHS.values() for name in paths if name not in NEEDS_GPU]
    assert {line["what"] for line in lines if line["part"] == "D"} == {"kernel", "step", "end"}


@pytest.mark.parametrize("name", ["int4, fused AdamW", "OnebitAdam, warmup", "ZeroOneAdam, variance"])
def test_steps_are_measured_with_what_travels_in_low_bits(name: str) -> None:
    row = measure_step(name, gpt2(32, 2, 512), 2, 0.1, CPU)
    assert row["waits"] <= WAITS.get(name, 1), row["kinds"]
    assert 0 < row["bytes"] < 1.2 * row["parameters"]  # float32 is 4, signs and 4 bits less than 1


def test_what_a_part_leaves_out_by_its_time_is_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    run_paths(2, CPU, rows.append, ["FusedAdam", "Lamb"], end=0.0)
    assert [(row["path"], row["ok"], row["because"]) for row in rows] == [
        (name, None, "no time is left") for name in ("FusedAdam", "Lamb")
    ]
    proof_of_d = Proof("D", tmp_path, CPU, 0.0)
    tell_step(proof_of_d, "tiny", "Lamb", [32], 1, 25.0)
    assert json.loads((tmp_path / "proof.jsonl").read_text())["because"] == "no time is left"


def test_a_part_that_has_no_time_or_no_gpu_is_named(tmp_path: Path) -> None:
    code, lines, _ = proof(tmp_path, "--minutes", "0.01")
    assert code == 0 and [(line["part"], line["ok"]) for line in lines] == [(part, None) for part in PARTS]
    code, lines, _ = proof(tmp_path, "--minutes", "10", "--part", "E")
    assert code == 0 and [line["what"] for line in lines] == ["ncu", "end"]


def test_a_path_that_fails_spoils_no_other() -> None:
    rows: list[dict[str, Any]] = []
    run_paths(2, CPU, rows.append, ["no such path", "FusedAdam"])
    assert [(row["path"], row["ok"]) for row in rows] == [("no such path", False), ("FusedAdam", True)]
    assert "KeyError" in rows[0]["error"]


def test_a_verdict_names_what_is_wrong() -> None:
    def ranks(**second: Any) -> list[dict[str, Any]]:
        part = {"digest": "a", "losses": [2.0, 1.0], "waits_in_backward": 0}
        return [{"seconds": 1.0, "native": part | more, "reference": part} for more in ({}, second)]

    assert verdict("OnebitAdam", ranks(), "cuda")["ok"]
    assert "other parameters" in verdict("OnebitAdam", ranks(digest="b"), "cuda")["error"]
    assert "waits 2 times" in verdict("OnebitAdam", ranks(waits_in_backward=2), "cuda")["error"]
    found = ranks()
    found[0]["native"] |= {"losses": [1.0, 1.1]}
    assert (
        verdict("Lamb", found, "cuda")["error"]
        == "the loss does not fall; the loss is not that of the reference kernels"
    )
    found[1]["native"] = {"error": "TimeoutError: rank 0 is gone"}
    assert verdict("Lamb", found, "cuda")["error"] == "TimeoutError: rank 0 is gone"
