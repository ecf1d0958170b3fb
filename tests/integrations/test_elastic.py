"""A machine that dies: torchrun's agents start the recipe's ranks again, from the last checkpoint."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.launching import REPO_ROOT, environment, free_port

STEPS, SAVE = 60, 5
LIMIT = 240.0  # seconds


def agent(port: int, log: Path, output_dir: Path) -> subprocess.Popen[bytes]:
    """An agent as on a machine of one rank, in the command of recipes/multi_node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", "--nproc_per_node", "1"]
    command += ["--max_restarts", "3", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv_id", "elastic", "--local_addr", "127.0.0.1"]
    command += ["--rdzv_conf", "last_call_timeout=15,keep_alive_interval=3"]
    command += [str(REPO_ROOT / "recipes" / "torch_loop" / "train.py"), "--use_cpu", "--output_dir", str(output_dir)]
    command += ["--max_steps", str(STEPS), "--save_steps", str(SAVE), "--freeze_step", str(2 * SAVE)]
    command += ["--block_size", "32", "--batch_size", "2", "--logging_steps", str(SAVE)]
    command += ["--resume_from_checkpoint", "last"]
    with log.open("wb") as out:
        own = environment(GLOO_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        return subprocess.Popen(command, stdout=out, stderr=out, env=own)


def children(process: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    own = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [pid for child in own for pid in (child, *children(child))]


def wait_for(what: Callable[[], bool], until: float, logs: list[Path]) -> None:
    while not what():
        if time.monotonic() > until:
            raise TimeoutError("\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs))
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            for pid in children(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the children of a process are found in /proc")
def test_two_machines_go_on_when_the_third_dies(agents: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    port, folder, until = free_port(), tmp_path / "run", time.monotonic() + LIMIT
    logs = [tmp_path / f"agent-{number}.log" for number in range(3)]
    agents.append(agent(port, logs[0], folder))
    wait_for(lambda: listens(port), until, logs[:1])  # the agents meet at the first one, which lives
    agents += [agent(port, log, folder) for log in logs[1:]]

    def saved(step: int) -> Path:
        return folder / f"step-{step}" / "compressopt.index.json"

    def ranks_of(step: int) -> int:
        return int(json.loads(saved(step).read_text())["header"]["world_size"])

    wait_for(lambda: saved(3 * SAVE).is_file(), until, logs)  # after the warmup stage
    victims = [agents[2].pid, *children(agents[2].pid)]
    assert len(victims) >= 2
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    for number in (0, 1):
        wait_for(lambda number=number: agents[number].poll() is not None, until, logs)
        assert agents[number].returncode == 0, logs[number].read_text()[-4000:]
    told = "".join(log.read_text() for log in logs)
    assert "3 ranks, from the start" in told
    resumed = set(re.findall(r"2 ranks, from \S+/step-(\d+)\n", told))
    newest = max(step for step in range(SAVE, STEPS + 1, SAVE) if ranks_of(step) == 3)
    assert (
        resumed == {str(newest)} and newest < STEPS
    )  # the last checkpoint of the three, and nothing was lost before it
    assert all(ranks_of(step) == (3 if step <= newest else 2) for step in range(SAVE, STEPS + 1, SAVE))
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", told)}
    assert losses[STEPS] < losses[newest + SAVE] + 0.5 < losses[SAVE] + 0.5
    assert f"after {STEPS} steps" in told and (folder / "model.pt").is_file()
