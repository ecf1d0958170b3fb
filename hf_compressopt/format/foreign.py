"""Checkpoints of others, which cannot hold the state of this package's objects."""

from __future__ import annotations

import sys

_FRAMES = 6  # torch's decorators lie between


def refuse_torch_checkpoint(owner: object) -> None:
    """Raise a RuntimeError if torch.distributed.checkpoint asks for the state of an object, of which it loses a part.

    Its functions for optimizers drop what belongs to no parameter, and a save keeps rank 0's errors for all ranks.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            raise RuntimeError(
                f"torch.distributed.checkpoint would lose a part of the state of {type(owner).__name__}, which differs "
                "between the ranks: save it by hf_compressopt.save_state(..., folder), and load it by load_state, "
                "beside the model's checkpoint"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back
