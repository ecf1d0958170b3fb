"""Start programs: as a user would, through torchrun or accelerate, or in forks that have imported torch already."""

import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.forking import forked

REPO_ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port below those that outgoing connections take."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment(**more: str) -> dict[str, str]:
    """The caller's, less what a launcher sets, with one thread per rank and no GPU."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    python_path = os.pathsep.join(filter(None, [str(REPO_ROOT), env.get("PYTHONPATH", "")]))
    return {**env, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": python_path, **more}


def torchrun(world_size: int) -> list[str]:
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, "--nproc_per_node", str(world_size), "--master_port", str(free_port())]


def accelerate_launch(world_size: int) -> list[str]:
    module = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(world_size)]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [*module, *options, "--main_process_port", str(free_port())]


def own_network() -> list[str]:
    """The start of a command that runs in a network namespace of its own; [] where this user may make none."""
    if shutil.which("unshare"):
        for flags in ("-n", "-rn"):
            if subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0:
                return ["unshare", flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    return []


def run(
    command: list[str], timeout: float = 240, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end; an AssertionError shows the output of what failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment(**env))
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done


def run_python(
    words: list[str], ranks: int = 0, timeout: float = 240, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Do what ``python words...`` does, in a fork that has imported torch, to an end with this exit code, or any.

    words: a script, "-m" and a module, or "-c" and code; then the arguments. With ranks >= 1, do it in so many forks,
    as torchrun would: their output comes rank after rank, and the exit code is the largest. The package is imported
    anew; what must see a fresh interpreter (imports, threads, the end of a process) needs ``run``.
    """
    variables = environment(**env)
    if ranks:
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        variables |= {name: str(value) for name, value in place.items()}
    with tempfile.TemporaryDirectory() as folder:
        outputs, processes = [], []
        for rank in range(max(ranks, 1)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            outputs.append((Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")))
            paths = [str(path) for path in outputs[-1]]
            processes.append(forked(_be_python, words, {**variables, **own}, os.getcwd(), *paths, daemon=False))
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            for process in processes:
                process.kill()
                process.join()
        out, err = ("".join(path.read_text() for path in kind) for kind in zip(*outputs, strict=True))
    assert not late, f"{' '.join(words)}: ranks {late} did not end within {timeout:g} s\n{out[-4000:]}\n{err[-6000:]}"
    found = max(abs(process.exitcode or 0) for process in processes)
    assert code in (None, found), f"{' '.join(words)} ended with {found}\n{out[-4000:]}\n{err[-6000:]}"
    return subprocess.CompletedProcess(words, found, out, err)


def _be_python(words: list[str], variables: dict[str, str], cwd: str, out: str, err: str) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.path[:0] = [path for path in variables["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
