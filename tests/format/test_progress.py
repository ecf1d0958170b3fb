"""Progress of big checkpoints: shown on a terminal, and nowhere else."""

import fcntl
import os
import pty
import struct
import termios
import time
from pathlib import Path

import huggingface_hub.utils
import pytest
import torch

from hf_compressopt import load_state, save_state
from hf_compressopt.format import shards
from tests.support.forking import forked


def save_and_load(stderr: str, folder: str, big: int) -> None:
    """Save and load in a process of its own. big: from so many bytes on, a checkpoint counts as big."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_NOCTTY), 2)
    shards.BIG = big
    weight = torch.nn.Parameter(torch.ones(100_000))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    save_state(optimizer, folder)
    load_state(optimizer, folder)


def shown(folder: Path, big: int, terminal: bool) -> str:
    """The text that a save and a load write to stderr."""
    if not terminal:
        (file := folder.with_suffix(".stderr")).touch()
        process = forked(save_and_load, str(file), str(folder), big)
        process.join(60)
        assert process.exitcode == 0, file.read_text()
        return file.read_text()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    process = forked(save_and_load, os.ttyname(theirs), str(folder), big)
    process.join(60)
    assert process.exitcode == 0
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


def test_a_progress_bar_obeys_hugging_faces_switch(capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> str:
        with shards.progress("adam.pt", 10**10, shown=True) as advance:
            time.sleep(0.15)  # it is drawn at most every 0.1 s
            advance(5 * 10**9)
        return capsys.readouterr().err

    assert "adam.pt:  50%|" in (text := told()) and "5.00G/10.0G" in text
    huggingface_hub.utils.disable_progress_bars()
    try:
        assert told() == ""
    finally:
        huggingface_hub.utils.enable_progress_bars()
