"""The command ``hf-compressopt report``: what a run of Trainer has sent, from its folder, with a picture."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_compressopt.announce import in_words
from hf_compressopt.quantities import with_unit

_STATE = "trainer_state.json"
_PREFIX = "compressopt/"
_MOST_ROWS = 20


@dataclass(frozen=True)
class Line:
    """A line of the log of a run."""

    step: int
    loss: float
    sent: float  # bytes in its last step
    plain: float  # that DDP would have sent in it
    total: float  # bytes so far
    stage: float | None  # of a compressed optimizer
    node_size: float  # ranks that send so much over the link of a node


def run(arguments: argparse.Namespace) -> int:
    """Tell what a run has sent, and what DDP would have sent, from the folder that Trainer wrote it to.

    Writes a picture of loss and bytes beside it, if matplotlib is installed. Exit code 0, or 2 if the folder has no log
    with numbers of hf_compressopt.
    """
    state = find_state(Path(arguments.directory))
    lines, totals = read(state)
    facts = {"log": str(state), **totals, "lines": [vars(line) for line in lines]}
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    print("\n".join(_text(lines, totals)))
    picture = Path(arguments.picture or Path(arguments.directory) / "compressopt_report.png")
    try:
        draw(lines, picture)
    except ImportError:
        print(f"no picture: matplotlib is not installed (pip install matplotlib writes {picture})")
    else:
        print(f"picture: {picture}")
    return 0


def find_state(folder: Path) -> Path:
    """Return the file in which Trainer keeps the log of a run: in its folder, or in its last checkpoint."""
    logs = [(-1, folder / _STATE)] if (folder / _STATE).is_file() else []
    for path in folder.glob(f"checkpoint-*/{_STATE}"):
        if number := re.fullmatch(r"checkpoint-(\d+)", path.parent.name):
            logs.append((int(number[1]), path))
    if not logs:
        raise ValueError(
            f"{folder} holds no {_STATE}: give the --output_dir of a run of Trainer that has saved a checkpoint, or "
            "whose script calls trainer.save_state()"
        )
    return min(logs)[1] if logs[0][0] == -1 else max(logs)[1]


def read(path: Path) -> tuple[list[Line], dict[str, float]]:
    """Return the lines of the log, and the bytes over a node's link in the whole run: sent, and those of DDP."""
    try:
        history = json.loads(path.read_text())["log_history"]
        rows = [row for row in history if "loss" in row and f"{_PREFIX}bytes_sent" in row]
        lines = [_line(row) for row in rows]
        last: dict[str, Any] = next((row for row in reversed(history) if f"{_PREFIX}bytes_uncompressed" in row), {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no log of Trainer's: {error}") from None
    if not lines:
        raise ValueError(
            f"{path} has no numbers of hf_compressopt: was the script started by `python -m hf_compressopt.run`, with "
            "--optim_args grad_compression=int4 or an optimizer of this package?"
        )
    at_end = last.get(f"{_PREFIX}bytes_on_link", 0)
    was_resumed = at_end < lines[-1].total * lines[-1].node_size  # then the last line knows what came since alone
    if last and not was_resumed:
        return lines, {"sent": at_end, "plain": last[f"{_PREFIX}bytes_uncompressed"]}
    sent = plain = before = 0.0
    for line in lines:
        on_link = (line.total - before) * line.node_size
        sent += on_link
        plain += on_link * line.plain / line.sent if line.sent else 0.0
        before = line.total
    return lines, {"sent": sent, "plain": plain}


def _line(row: dict[str, Any]) -> Line:
    sent = float(row[f"{_PREFIX}bytes_sent_step"])
    plain, stage = sent * float(row[f"{_PREFIX}compression_ratio"]), row.get(f"{_PREFIX}stage")
    loss, total = float(row["loss"]), float(row[f"{_PREFIX}bytes_sent"])
    node_size = float(row.get(f"{_PREFIX}node_size", 1))
    return Line(int(row["step"]), loss, sent, plain, total, None if stage is None else float(stage), node_size)


def _text(lines: list[Line], totals: dict[str, float]) -> list[str]:
    """The totals first, then some of the lines."""
    every = max(1, -(-len(lines) // _MOST_ROWS))
    shown = lines[every - 1 :: every]
    table = [f"{'step':>8}  {'loss':>8}  {'sent a step':>12}  {'DDP':>9}  {'fewer':>7}"]
    for line in shown:
        fewer = f"{line.plain / line.sent:.1f}x" if line.sent else ""
        cells = f"{with_unit(line.sent):>12}  {with_unit(line.plain):>9}  {fewer:>7}"
        table.append(f"{line.step:>8}  {line.loss:>8.4g}  {cells}{'  compressed stage' if line.stage else ''}")
    return [in_words(totals["plain"], totals["sent"]), "", *table, ""]


def draw(lines: list[Line], path: Path) -> None:
    """Draw the loss, and the bytes of a step beside those of DDP, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    steps = [line.step for line in lines]
    left.plot(steps, [line.loss for line in lines], color="#4269d0", linewidth=2)
    left.set(xlabel="step", ylabel="loss", title="loss")
    right.plot(steps, [line.sent / 1e6 for line in lines], color="#4269d0", linewidth=2, label="this run")
    right.plot(steps, [line.plain / 1e6 for line in lines], color="#9498a0", linewidth=2, label="DDP would send")
    right.set(xlabel="step", ylabel="MB", yscale="log", title="sent a step by a rank")
    right.legend()
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
