"""Real MPI: `mpirun` from the extra `mpi`, host buffers."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPO_ROOT, free_port, run

SCRIPTS = REPO_ROOT / "tests" / "support" / "programs"


def mpirun(world_size: int) -> list[str]:
    program = str(Path(sys.executable).parent / "mpirun")
    return [program, "--allow-run-as-root", "--oversubscribe", "-n", str(world_size), sys.executable]


@pytest.mark.parametrize("world_size", [2, 3])
def test_mpi_gives_the_bits_of_gloo_and_resumes(world_size: int, tmp_path: Path) -> None:
    done = run([*mpirun(world_size), str(SCRIPTS / "mpi_family.py"), str(tmp_path / "store"), str(tmp_path)])
    found = json.loads(done.stdout.split("FOUND ", 1)[1].splitlines()[0])
    for name in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"):
        assert len(found[name]["ranks"]) == world_size
        for rank in found[name]["ranks"]:
            assert rank["same"] and rank["name"] == "mpi", (name, found[name])
            assert rank["sent"][0] == rank["sent"][1] > 0
    assert "no CUDA support" in found["refusals"]["mpi"] and "cuda_aware=False" in found["refusals"]["mpi"]
    assert "'smoke_signals'" in found["refusals"]["smoke_signals"] and "'mpi'" in found["refusals"]["smoke_signals"]


def test_trainer_trains_and_resumes_under_mpirun(tmp_path: Path) -> None:
    def train(directory: str, *more: str) -> dict[str, object]:
        options = "communicator=mpi,freeze_step=2,scale_block=64"
        words = [
            "--use_cpu",
            "--output_dir",
            str(tmp_path / directory),
            "--optim",
            "onebit_adam",
            "--optim_args",
            options,
        ]
        words += (
            "--max_steps 6 --logging_steps 1 --save_steps 4 --per_device_train_batch_size 2 --report_to none".split()
        )
        command = [*mpirun(2), "-m", "hf_compressopt.run", str(SCRIPTS / "plain_trainer_script.py"), *words, *more]
        done = run(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        assert "2 rank(s) over mpi" in done.stderr
        return json.loads((tmp_path / directory / "trainer_state.json").read_text())

    whole = train("whole")["log_history"]
    rows = [row for row in whole if "loss" in row]  # type: ignore[attr-defined]
    assert [row["compressopt/stage"] for row in rows] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    resumed = train("resumed", "--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-4"))["log_history"]
    assert [row["loss"] for row in resumed if "loss" in row][-2:] == [row["loss"] for row in rows][-2:]  # type: ignore
