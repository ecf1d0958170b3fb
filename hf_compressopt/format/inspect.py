"""A look at the checkpoints of a folder, and whether they are whole: ``hf-compressopt inspect``. It needs no torch."""

from __future__ import annotations

from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from hf_compressopt.format.index import CheckpointError, CheckpointIndex, StrPath, find_indices
from hf_compressopt.format.shards import ShardFiles, absent_shards, not_whole


def collect(directory: StrPath, *, prefix: str | None = None, verify: bool = False) -> list[dict[str, Any]]:
    """Look at the checkpoints of a folder: all, or the one whose files start with ``prefix``.

    Returns for each, as JSON holds it, ``index`` (the file), ``verified``, ``problems``, and what ``_look`` finds.
    """
    return [_look(path, verify) for path in find_indices(Path(directory), prefix)]


def last_checkpoint(directory: StrPath) -> Path | None:
    """Return the newest folder checkpoint-<step> inside one of a run that holds a checkpoint of this package."""
    found = []
    for path in Path(directory).glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdecimal() and any(find_indices(path, None)):
            found.append((int(number), path))
    return max(found)[1] if found else None


def _look(path: Path, verify: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"index": str(path), "verified": verify, "problems": []}
    try:
        index = CheckpointIndex.read(path)
    except CheckpointError as error:
        facts["problems"].append(str(error))
        return facts
    header, parameters = index.header, list(chain.from_iterable(index.parameters))
    ranks = header.get("world_size")
    if ranks != len(index.shards):
        facts["problems"].append(f"{path} says that {ranks!r} rank(s) saved it, and names {len(index.shards)} shard(s)")
    absent = {number: str(not_whole(problem)) for number, problem in absent_shards(path.parent, index).items()}
    with ShardFiles(path.parent, index, absent) as files:
        problems = [_problem(files, index, number, verify) for number in range(len(index.shards))]
    facts["problems"] += [problem for problem in problems if problem]
    return {
        **facts,
        "save_id": index.save_id,
        "optimizer": header.get("optimizer", header.get("class")),
        "step": header.get("step"),
        "stage": header.get("stage"),
        "ranks": ranks,
        "header": header,
        "groups": len(index.parameters),
        "parameters": len(parameters),
        "elements": sum(prod(parameter["shape"]) for parameter in parameters),
        "bytes": sum(shard.bytes for shard in index.shards),
        "shards": [
            {"file": shard.file, "bytes": shard.bytes, "whole": problem is None}
            for shard, problem in zip(index.shards, problems, strict=True)
        ],
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "bytes": entry.numel * entry.itemsize,
                "shards": sorted({piece.shard for piece in entry.pieces}),
            }
            for name, entry in index.tensors.items()
        },
    }


def _problem(files: ShardFiles, index: CheckpointIndex, number: int, verify: bool) -> str | None:
    try:
        file = files[number]
        for entry in index.tensors.values():
            for piece in (piece for piece in entry.pieces if piece.shard == number):
                file.check_piece(piece, entry)
                for _ in file.blocks(piece, entry) if verify else ():
                    pass
    except CheckpointError as error:
        return str(error)
    return None


def render(facts: dict[str, Any]) -> str:
    """Return the text of one entry of the list that :func:`collect` returns, without control characters."""
    return "\n".join(map(printable, _lines(facts)))


def printable(text: str) -> str:
    """Escape what is not printable: names in a file may hold sequences that overwrite what a terminal shows."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _lines(facts: dict[str, Any]) -> list[str]:
    checked = "every byte was read" if facts["verified"] else "sizes and headers; --verify reads every byte"
    lines = [f"{facts['index']}: {'DAMAGED' if facts['problems'] else f'whole ({checked})'}"]
    lines += [f"  PROBLEM: {problem}" for problem in facts["problems"]]
    if "header" not in facts:
        return lines
    rows = {
        "optimizer": facts["optimizer"],
        "step": facts["step"],
        **({} if facts["stage"] is None else {"stage": facts["stage"]}),
        "saved by": f"{facts['ranks']} rank(s)",
        "parameters": f"{facts['parameters']:,} in {facts['groups']} group(s), {facts['elements']:,} elements",
        "shards": f"{len(facts['shards'])}, {facts['bytes']:,} bytes",
        "tensors": f"{len(facts['tensors']):,}",
    }
    lines += [f"  {name:12}{value}" for name, value in rows.items()]
    kinds: dict[tuple[str, str], list[int]] = {}
    for name, tensor in facts["tensors"].items():
        kinds.setdefault((name.partition("/")[0], tensor["dtype"]), []).append(tensor["bytes"])
    width = max((len(kind) for kind, _ in kinds), default=0)
    lines += [
        f"    {kind:{width}}  {dtype:9}{sum(sizes):>16,} bytes in {len(sizes):,} tensor(s)"
        for (kind, dtype), sizes in sorted(kinds.items())
    ]
    return lines
