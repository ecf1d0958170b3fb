"""Progress of big checkpoints: shown on a terminal, and nowhere else."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.support.launching import environment

SAVE_AND_LOAD = """
import sys
import torch
from hf_compressopt import load_state, save_state
from hf_compressopt.format import progress

progress.BIG = int(sys.argv[2])
weight = torch.nn.Parameter(torch.ones(100_000))
optimizer = torch.optim.AdamW([weight])
weight.grad = torch.ones_like(weight)
optimizer.step()
save_state(optimizer, sys.argv[1])
load_state(optimizer, sys.argv[1])
"""


def shown(folder: Path, big: int, terminal: bool) -> str:
    """What a save and a load, which are big from so many bytes on, write to stderr."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    words = [sys.executable, "-c", SAVE_AND_LOAD, str(folder), str(big)]
    assert subprocess.run(words, env=environment(), stderr=theirs, timeout=60).returncode == 0
    os.write(theirs, b"END")
    found = b""
    while not found.endswith(b"END"):
        found += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    return found.decode()


def test_big_checkpoints_show_their_progress_on_a_terminal(tmp_path: Path) -> None:
    text = shown(tmp_path / "a", 1000, terminal=True)
    assert "saving compressopt-" in text and "loading compressopt.index.json" in text and "800k" in text
    assert "saving" not in shown(tmp_path / "b", 10**9, terminal=True)
    assert "saving" not in shown(tmp_path / "c", 1000, terminal=False)
