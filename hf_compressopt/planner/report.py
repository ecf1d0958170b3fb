"""Tables of what the planner predicts."""

from __future__ import annotations

from typing import Any

from hf_compressopt.planner.advice import (
    EVERY_STEP,
    advised,
    against_plain,
    bytes_of,
    index_of,
    plain_of,
    seconds_of,
)
from hf_compressopt.planner.memory import MEMORY
from hf_compressopt.quantities import with_unit


def memory_table(rows: dict[str, dict[str, int]]) -> str:
    gigabytes = ([name, *(f"{nbytes / 1e9:,.3f}" for nbytes in parts.values())] for name, parts in rows.items())
    return _table([["", *MEMORY], *gigabytes])


def time_table(rows: dict[str, dict[str, dict[str, float]]], compute: float) -> str:
    """Render the steps of :func:`~hf_compressopt.planner.advice.as_json`."""
    lines = [["", "stage", "sent by a rank", "out of a node", "step", "of compute"]]
    for name, stages in rows.items():
        for number, (stage, step) in enumerate(stages.items()):
            names = "" if number else name, "" if stage == EVERY_STEP else stage
            sent, on_link = f"{step['sent'] / 1e6:,.1f} MB", f"{step['on_link'] / 1e6:,.1f} MB"
            seconds = f"{step['seconds'] * 1e3:,.1f} ms"
            lines.append([*names, sent, on_link, seconds, f"{step['seconds'] / compute:.2f} x"])
    return _table(lines)


def ranking_table(choices: list[dict[str, Any]]) -> str:
    """Render all ways of :func:`~hf_compressopt.planner.advice.ranked`, the fastest first."""
    lines = [["", "step", "run", "sent a step", "against DDP", "memory", "flags"]]
    for number, choice in enumerate(choices, 1):
        step, run = f"{choice['step_seconds'] * 1e3:,.1f} ms", f"{choice['run_seconds'] / 3600:,.2f} h"
        sent, memory = f"{choice['step_bytes'] / 1e6:,.2f} MB", f"{choice['memory_bytes'] / 1e9:,.3f} GB"
        flags = choice["flags"] + (f"  ({choice['note']})" if choice["note"] else "")
        lines.append([f"{number:2} {choice['name']}", step, run, sent, against_plain(choice), memory, flags])
    return _table(lines, left=(0, 6))


def short_table(choices: list[dict[str, Any]]) -> str:
    """Render DDP, the advice, and the fastest of the ways with the same changes, from the smallest change on."""
    fastest: dict[int, dict[str, Any]] = {}
    for choice in choices:
        fastest.setdefault(choice["change"], choice)
    plain = plain_of(choices)
    kept = [plain["name"], advised(choices)["name"], *(choice["name"] for choice in fastest.values())]
    lines = [["", "step", "sent a step", "against DDP", "memory", ""]]
    for choice in sorted(choices, key=index_of):
        if choice["name"] in kept:
            memory = with_unit(choice["memory_bytes"])
            lines.append(
                [choice["name"], seconds_of(choice), bytes_of(choice), against_plain(choice), memory, choice["note"]]
            )
    return _table(lines, left=(0, 5))


def _table(rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """Align columns: those of ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        sized = enumerate(zip(row, widths, strict=True))
        cells = [text.ljust(width) if column in left else text.rjust(width) for column, (text, width) in sized]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
