"""The options of plain Accelerate, and the optimizer that they put in the place of an Adam or AdamW."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from hf_compressopt.integrations.options import COMPRESSED, parse_value
from hf_compressopt.integrations.zero import partitioned, refuse_zero_stage
from hf_compressopt.optim.compressed import CompressedOptimizer

_Value = TypeVar("_Value")


def _from_env(name: str, default: _Value, *kinds: type) -> Callable[[], _Value]:
    """A default factory: the environment variable COMPRESSOPT_<name> where it is set."""

    def read() -> _Value:
        variable = f"COMPRESSOPT_{name}"
        text = os.environ.get(variable)
        return default if text is None else parse_value(variable, text, kinds)

    return read


@dataclass
class CompressOptPlugin:
    """Options for plain Accelerate: the optimizer that takes the place of an Adam or AdamW given to ``prepare``.

    Every field defaults from the environment variable ``COMPRESSOPT_<FIELD>``, in capitals.

    Attributes:
        optimizer: "onebit_adam" (where zero_stage is 0), "zero_one_adam" or "onebit_lamb"; "none" leaves every
            optimizer as it is.
        freeze_step: Last step of the first stage (0/1 Adam's var_freeze_step).
        scale_block: Elements that share a scale in a message, a multiple of 8; None is one scale per message.
        variance_floor: Share of its tensor's mean to which the frozen second moment of every element is raised.
        bucket_cap_mb: MiB of float32 values that are sent together.
        communicator: "auto", or the name of a torch.distributed backend.
        zero_stage: 1 or 2: every fresh element-wise optimizer becomes a ZeroOptimizer of it; not with the optimizers
            above, so that ``optimizer`` is "none" then. 0 is off.
        async_save: Whether ``save_state`` leaves the writing of the optimizers' states to the background. The next
            save, a load, ``end_training`` and the end of the process wait for it.

    Raises:
        ValueError: For a name that is not there, or an environment variable of a wrong type.
    """

    optimizer: str = field(default_factory=_from_env("OPTIMIZER", "", str))
    freeze_step: int = field(default_factory=_from_env("FREEZE_STEP", 100_000, int))
    scale_block: int | None = field(default_factory=_from_env("SCALE_BLOCK", 4096, int, type(None)))
    variance_floor: float = field(default_factory=_from_env("VARIANCE_FLOOR", 0.01, float))
    bucket_cap_mb: float = field(default_factory=_from_env("BUCKET_CAP_MB", 25.0, float))
    communicator: str = field(default_factory=_from_env("COMMUNICATOR", "auto", str))
    zero_stage: int = field(default_factory=_from_env("ZERO_STAGE", 0, int))
    async_save: bool = field(default_factory=_from_env("ASYNC_SAVE", False, bool))

    def __post_init__(self) -> None:
        """Check the optimizer's name; the other options are checked where the optimizer is made."""
        if self.zero_stage not in (0, 1, 2):
            raise ValueError(f"zero_stage must be 0, 1 or 2, got {self.zero_stage!r}")
        self.optimizer = self.optimizer or ("none" if self.zero_stage else "onebit_adam")
        if self.optimizer not in (*COMPRESSED, "none"):
            raise ValueError(f"optimizer must be one of {[*COMPRESSED, 'none']}, got {self.optimizer!r}")
        if self.zero_stage and self.optimizer != "none":
            refuse_zero_stage(self.optimizer, self.zero_stage)

    def convert(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The compressed optimizer in the place of a fresh Adam or AdamW, with zero_stage the partitioned one of any.

        The param groups are the same objects, so that a scheduler made for the old optimizer drives the new one.

        Raises:
            ValueError: If the optimizer has taken steps, or Adam has a weight decay (its L2 is not decoupled).
        """
        if self.zero_stage:
            return partitioned(
                optimizer, self.zero_stage, bucket_cap_mb=self.bucket_cap_mb, communicator=self.communicator
            )
        if self.optimizer == "none" or not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            return optimizer
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} has taken steps already: prepare it before the first one, so that "
                f"{self.optimizer} can take its place"
            )
        decays = any(group["weight_decay"] for group in optimizer.param_groups)
        if decays and not isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(
                f"Adam with weight_decay is L2 regularization, which {self.optimizer} does not have: use AdamW"
            )
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether it ever steps
        make: Callable[..., CompressedOptimizer] = COMPRESSED[self.optimizer]
        return make(
            optimizer.param_groups,
            **{COMPRESSED[self.optimizer].freeze_option: self.freeze_step},
            scale_block=self.scale_block,
            variance_floor=self.variance_floor,
            bucket_cap_mb=self.bucket_cap_mb,
            communicator=self.communicator,
        )
