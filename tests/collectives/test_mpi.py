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


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mpi_gives_the_bits_of_gloo_and_resumes(world_size: int, tmp_path: Path) -> None:
    done = run([*mpirun(world_size), str(SCRIPTS / "mpi_family.py"), str(tmp_path / "store"), str(tmp_path)])
    found = json.loads(done.stdout.split("FOUND ", 1)[1].splitlines()[0])
    for name in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"):
        assert len(found[name]["ranks"]) == world_size
        for rank in found[name]["ranks"]:
            assert rank["same"] and "over mpi" in rank["name"], (name, found[name])
            assert ("hierarchical on" in rank["name"]) == (world_size == 4), (name, found[name])
            assert rank["sent"][0] == rank["sent"][1] > 0
    assert "no CUDA support" in found["refusals"]["mpi"] and "cuda_aware=False" in found["refusals"]["mpi"]
    assert "'smoke_signals'" in found["refusals"]["smoke_signals"] and "'mpi'" in found["refusals"]["smoke_signals"]


@pytest.mark.full
def test_trainer_trains_and_resumes_under_mpirun(tmp_path: Path) -> None:
    command = [*mpirun(2), str(SCRIPTS / "mpi_trainer.py"), str(tmp_path)]
    done = run(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert done.stderr.count("2 rank(s) over mpi") == 2
    states = [json.loads((tmp_path / name / "trainer_state.json").read_text()) for name in ("whole", "resumed")]
    whole, resumed = ([row for row in state["log_history"] if "loss" in row] for state in states)
    assert [row["compressopt/stage"] for row in whole] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert [row["loss"] for row in resumed][-2:] == [row["loss"] for row in whole][-2:]
