"""A checkpoint for an optimizer of Adam's family that did not save it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_compressopt.checkpoint.adam import STEP, AdamView, Entry
from hf_compressopt.checkpoint.header import COMPRESSED, PLAIN, Header
from hf_compressopt.checkpoint.source import Stored
from hf_compressopt.format.index import CheckpointIndex, TensorEntry
from hf_compressopt.format.reader import ShardFiles
from hf_compressopt.format.record import Per, StateTensor


class AdamSource(Stored):
    """A checkpoint in the form of an ordinary optimizer of Adam's family, for one that did not save it."""

    def __init__(self, view: AdamView, optimizer: str) -> None:
        """Take its description from the view.

        Args:
            view: The checkpoint.
            optimizer: Name of the class that loads it.
        """
        super().__init__(view.index)
        self._view, values = view, view.header.values
        self._entries = {_name(entry): entry for entry in view.entries.values()}
        self.entries = {name: TensorEntry(e.dtype, e.shape, ()) for name, e in self._entries.items()}
        self.header = Header.of(
            {
                "class": f"ZeroOptimizer({optimizer})",
                "stage": 0,
                "step": values["step"],
                "skipped_steps": values["skipped_steps"],
                "world_size": len(view.index.shards),
                "loss_scale": values.get("loss_scale", [1.0, 0]),
                "bytes_sent": values["bytes_sent"],
                "param_groups": view.param_groups,
            }
        )

    def check(self, tensor: StateTensor, world_size: int, files: ShardFiles) -> None:
        """See the base class; all ranks read the same."""
        for _ in self._parts(tensor, files):
            pass

    def read(self, tensor: StateTensor, world_size: int, files: ShardFiles, out: Tensor) -> None:
        """See the base class; all ranks read the same."""
        done = 0
        for part in self._parts(tensor, files):
            out[done : done + part.numel()] = part
            done += part.numel()

    def _parts(self, tensor: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        entry = self._entries.get(str(tensor.key))
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {str(tensor.key)!r}")
        return self._view.read(entry, files, tensor.start, tensor.stop)


def _name(entry: Entry) -> str:
    """The name of a tensor of AdamW's state in a checkpoint of AdamW."""
    return str(replace(entry.key, per=Per.SCALAR) if entry.key.kind == STEP else entry.key)


def source_of(index: CheckpointIndex, optimizer: str, groups: Sequence[dict[str, Any]]) -> Stored:
    """Return a checkpoint as an optimizer loads it: as its own class saved it, or else as AdamW's state.

    Compressed optimizers load what an ordinary one of Adam's family saved. Ordinary ones load what any of them saved.

    Args:
        index: The checkpoint's index, validated.
        optimizer: Name of the optimizer's class, of the wrapped one in a ZeroOptimizer.
        groups: Its param groups.

    Raises:
        ValueError: If it cannot be one of AdamW.
    """
    stored = Stored(index)
    saved, to_compressed = stored.header.optimizer, optimizer in COMPRESSED
    if saved == optimizer or (stored.header.compressed and to_compressed):
        return stored
    if saved not in (*PLAIN, *COMPRESSED) or optimizer not in (*PLAIN, *COMPRESSED):
        return stored
    view = AdamView(index)
    check_decay(view, groups, optimizer)
    return AdamSource(view, "AdamW" if to_compressed else optimizer)


def check_decay(view: AdamView, groups: Sequence[dict[str, Any]], optimizer: str) -> None:
    """Check that the weight decay of a checkpoint is of the same kind as that of the optimizer that loads it.

    Raises:
        ValueError: If one is decoupled, the other is not, and it is not 0.
    """
    for number, (saved, group) in enumerate(zip(view.param_groups, groups, strict=False)):
        own = group.get("decoupled_weight_decay", group.get("adam_w_mode", optimizer != "Adam"))
        if saved["weight_decay"] != 0 and saved["decoupled_weight_decay"] != own:
            raise ValueError(
                f"the weight decay of param group {number}, {saved['weight_decay']}, is "
                f"{'decoupled' if saved['decoupled_weight_decay'] else 'L2 regularization'} in the checkpoint, and not "
                f"in {optimizer}"
            )
