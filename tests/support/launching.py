"""Start programs as a user would: through torchrun or accelerate, in processes of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """The caller's, less what a launcher sets, with one thread per rank and no GPU."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    python_path = os.pathsep.join(filter(None, [str(REPO_ROOT), env.get("PYTHONPATH", "")]))
    return {**env, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": python_path, **more}


def torchrun(world_size: int) -> list[str]:
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, "--nproc_per_node", str(world_size), "--master_port", str(free_port())]


def run(command: list[str], timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; an AssertionError shows the output of what failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(**env))
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done
