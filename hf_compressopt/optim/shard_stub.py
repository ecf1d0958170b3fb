"""State dicts of optimizers whose state may lie in the shards of a checkpoint, and then is a stub in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Key of a state dict for everything that torch's own state dicts have no place for.
STATE_KEY = "compressopt"
#: The text of a stub in place of an optimizer's state.
STUB_NOTE = "a stub: the state is in compressopt.index.json and the safetensors files beside this one"


def make_stub(packed: dict[str, Any], step: int) -> dict[str, Any]:
    """Replace the state in one of torch's state dicts by a stub."""
    packed["state"] = {}
    # torch's own optimizers refuse one group too many; they would take an empty state for a fresh one
    packed["param_groups"].append({"params": [], STATE_KEY: STUB_NOTE})
    packed[STATE_KEY] = {"stub": True, "step": step}
    return packed


def load_with_hooks(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any], dict[str, Any] | None], None],
    *,
    in_shards: bool,
) -> None:
    """Load a state dict between the hooks that torch calls around a load.

    Args:
        optimizer: The optimizer.
        state_dict: Its state dict.
        load: Loads a state dict that is no stub, given the entry under ``STATE_KEY``, or None.
        in_shards: Load nothing: the state comes from shards.

    Raises:
        ValueError: For a stub, unless the state comes from shards.
    """
    state_dict = state_dict.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    own = state_dict.get(STATE_KEY)
    if own is not None and own.get("stub") and not in_shards:
        raise ValueError(
            "this state dict is a stub: the state itself lies beside it, in compressopt.index.json and its safetensors "
            "files; load it with hf_compressopt.load_state(optimizer, directory), or through Trainer or Accelerate "
            "with hf_compressopt registered"
        )
    if not in_shards:
        load(state_dict, own)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


@contextmanager
def switched(owner: object, name: str, value: bool) -> Iterator[None]:
    """Set an attribute of an object inside the block, and restore it afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
