"""Saves that are under way, or begin, when a process of several ranks ends."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hf_compressopt.format.inspect import collect

SCRIPT = textwrap.dedent(
    """
    import atexit, os, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    from hf_compressopt import OnebitAdam, async_save_state, save_state

    ending, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    params = [nn.Parameter(torch.ones(40))]
    optimizer = OnebitAdam(params, lr=1e-2, freeze_step=2)
    optimizer.step(lambda: params[0].square().sum().backward())

    allocate = os.posix_fallocate

    def allocate_late(*args):  # a shard takes longer than the rest of the program
        time.sleep(1.0)
        allocate(*args)

    os.posix_fallocate = allocate_late
    if ending == "exit handler that saves":
        atexit.register(save_state, optimizer, folder)
    elif ending == "exit handler that saves in the background":
        atexit.register(async_save_state, optimizer, folder)
    else:
        async_save_state(optimizer, folder)
    if ending == "error":
        raise ValueError("the training has failed")
    """
)


@pytest.mark.parametrize(
    "ending", ["last act", "error", "exit handler that saves", "exit handler that saves in the background"]
)
def test_the_end_of_the_process_waits_for_a_save(ending: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "checkpoint"
    script.write_text(SCRIPT)
    launcher = "--standalone --nproc_per_node=2 --max-restarts=0".split()
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(script), ending, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    (facts,) = collect(folder, verify=True)
    assert not facts["problems"] and facts["step"] == 1 and facts["ranks"] == 2, done.stderr
    assert not list(folder.glob("*.tmp"))
    assert (done.returncode == 0) == (ending != "error"), done.stderr
    assert "RuntimeError" not in done.stderr
