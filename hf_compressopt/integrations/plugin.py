"""The options of plain Accelerate, and the optimizer that they put in the place of an Adam or AdamW."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from hf_compressopt.grad_compression import MessageOptions
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.integrations.capabilities import saves_shards
from hf_compressopt.integrations.optim_args import (
    check_grad_compression,
    check_param_compression,
    did_you_mean,
    parse_value,
    text_options,
)
from hf_compressopt.integrations.zero import check_takes_stage, partitioned
from hf_compressopt.optim.options import MAX_UPDATE, check_zero_stage

_Value = TypeVar("_Value")
#: Fields that all compressed optimizers take as they are, ``state`` if it is set.
OPTIONS = (
    *("warmup_bits", "scale_block", "variance_floor", "clip", "bucket_cap_mb", "state", "communicator"),
    *("topology", "node_size", "node_bits", "zero_stage"),
)

AUTO = "auto"
_OF_THE_BUILD = ("COMPRESSOPT_CUDA_ARCHITECTURES", "COMPRESSOPT_PORTABLE_ONLY")


def _from_env(name: str, default: _Value, *kinds: type) -> Callable[[], _Value]:
    """A default factory that reads the environment variable COMPRESSOPT_<name> if it is set."""

    def read() -> _Value:
        variable = f"COMPRESSOPT_{name}"
        text = os.environ.get(variable)
        return default if text is None else parse_value(variable, text, kinds)

    return read


def _freeze_step_from_env() -> int | str:
    name = "COMPRESSOPT_FREEZE_STEP"
    text = os.environ.get(name, AUTO)
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise ValueError(f"{name} must be an int, or 'auto', got {text!r}") from None


def check_variables() -> None:
    """Check that every COMPRESSOPT_... variable is one that the package reads.

    Raises:
        ValueError: If one is not; the message names the nearest.
    """
    legal = [
        f"COMPRESSOPT_{name}" for name in ("OPTIM", "KERNELS", *(f.name.upper() for f in fields(CompressOptPlugin)))
    ]
    for name in sorted(os.environ):
        if name.startswith("COMPRESSOPT_") and name not in (*legal, *_OF_THE_BUILD):
            raise ValueError(f"no option has the environment variable {name}{did_you_mean(name, legal)}")


@dataclass
class CompressOptPlugin:
    """Options for plain Accelerate: the optimizer that replaces an Adam or AdamW given to ``prepare``.

    Every field defaults from the environment variable ``COMPRESSOPT_<FIELD>``, in capitals; ``COMPRESSOPT_OPTIM`` is
    another name for that of ``optimizer``.

    Attributes:
        optimizer: "onebit_adam" (the default without zero_stage and grad_compression), "zero_one_adam" or
            "onebit_lamb"; "none" leaves every optimizer as it is.
        freeze_step: Last step of the first stage (0/1 Adam's var_freeze_step), or "auto": the variance decides, at the
            latest after the share of the run that Trainer allows too. The length of the run is ``total_steps``, or
            that of a learning-rate scheduler given to ``prepare``.
        warmup_bits: Bits per element of the averaged gradients of the first stage: 4, 8, 16 or 32.
        grad_compression: "int4" or "int8": average the gradients of ordinary optimizers by messages of 4 or 8 bits per
            element. Not supported with the optimizers above, so ``optimizer`` is "none" then. With zero_stage it is
            ZeroOptimizer's option.
        param_compression: "int4" or "int8", with zero_stage: give the updated parameters to all ranks by such messages.
        total_steps: Optimizer steps of the run, for freeze_step="auto"; None takes the scheduler's.
        scale_block: Elements that share a scale in a message, a multiple of 8; None is one scale per message.
        variance_floor: Share of its tensor's mean to which the frozen second moment of every element is raised.
        max_update: Learning rates that an element moves at most in a step of the compressed stage; None or 0 is off.
            OnebitLamb has no such bound.
        clip: "sketch", "local" or "late": the norm by which gradients are clipped after the first stage. With "late",
            of OnebitAdam, it is that of the step before, and messages leave during backward.
        bucket_cap_mb: MiB of float32 values that are sent together.
        state: "compact" or "float32": the form of errors, and after the first stage of moments, in memory; None is the
            optimizer's own default.
        communicator: "auto", or the name of a torch.distributed backend.
        topology: "flat", "two-level" or "auto": the way of compressed messages between nodes of several ranks, also
            with grad_compression.
        node_size: Consecutive ranks per node, for two levels; None takes them from the launcher and the host names.
        node_bits: Bits per element of what the ranks of a node average, in two levels: 32, or 16 for bfloat16.
        zero_stage: 1 or 2: every fresh element-wise optimizer becomes a ZeroOptimizer of it, and ``optimizer`` is
            "none" unless it is given. With "onebit_adam" 1: the ranks share out the moments of its first stage; 2: its
            gradients leave and are freed while backward runs, too, and models get no DDP. Not supported with the
            other two optimizers. 0 is off.
        gradient_as_bucket_view: Whether gradients that travel in the messages of this package lie in DDP's own buckets:
            DDP's option of that name, which saves a copy of all gradients. False leaves DDP's option as it is.
        async_save: True to write the optimizers' states in the background in ``save_state``. The next save, a load,
            ``end_training`` and the end of the process wait for it.

    Raises:
        ValueError: For an unknown name, a freeze_step or total_steps that is not legal, or an environment variable of
            a wrong type.
    """

    optimizer: str = field(default_factory=lambda: CompressOptPlugin.optimizer_from_env())
    freeze_step: int | str = field(default_factory=_freeze_step_from_env)
    scale_block: int | None = field(default_factory=_from_env("SCALE_BLOCK", 4096, int, type(None)))
    variance_floor: float = field(default_factory=_from_env("VARIANCE_FLOOR", 0.01, float))
    max_update: float | None = field(default_factory=_from_env("MAX_UPDATE", MAX_UPDATE, float, type(None)))
    clip: str = field(default_factory=_from_env("CLIP", "sketch", str))
    bucket_cap_mb: float = field(default_factory=_from_env("BUCKET_CAP_MB", 25.0, float))
    communicator: str = field(default_factory=_from_env("COMMUNICATOR", "auto", str))
    zero_stage: int = field(default_factory=_from_env("ZERO_STAGE", 0, int))
    async_save: bool = field(default_factory=_from_env("ASYNC_SAVE", False, bool))
    grad_compression: str = field(default_factory=_from_env("GRAD_COMPRESSION", "none", str))
    total_steps: int | None = field(default_factory=_from_env("TOTAL_STEPS", None, int, type(None)))
    warmup_bits: int = field(default_factory=_from_env("WARMUP_BITS", 4, int))
    state: str | None = field(default_factory=_from_env("STATE", None, str, type(None)))
    param_compression: str = field(default_factory=_from_env("PARAM_COMPRESSION", "none", str))
    topology: str = field(default_factory=_from_env("TOPOLOGY", AUTO, str))
    node_size: int | None = field(default_factory=_from_env("NODE_SIZE", None, int, type(None)))
    node_bits: int = field(default_factory=_from_env("NODE_BITS", 32, int))
    gradient_as_bucket_view: bool = field(default_factory=_from_env("GRADIENT_AS_BUCKET_VIEW", True, bool))

    def __post_init__(self) -> None:
        """Check the names, the messages and the schedule; the optimizer checks the other options."""
        check_variables()
        self.message_options()
        if self.zero_stage not in (0, 1, 2):
            raise ValueError(f"zero_stage must be 0, 1 or 2, got {self.zero_stage!r}")
        ordinary = self.zero_stage or self.grad_compression != "none"
        self.optimizer = self.optimizer or ("none" if ordinary else "onebit_adam")
        if self.optimizer not in (*ALGORITHMS, "none"):
            raise ValueError(f"optimizer must be one of {[*ALGORITHMS, 'none']}, got {self.optimizer!r}")
        if self.freeze_step != AUTO and not _is_count(self.freeze_step):
            raise ValueError(f"freeze_step must be an int >= 1, or 'auto', got {self.freeze_step!r}")
        if self.total_steps is not None and not _is_count(self.total_steps):
            raise ValueError(f"total_steps must be an int >= 1, or None, got {self.total_steps!r}")
        check_grad_compression(self.grad_compression, "" if self.optimizer == "none" else self.optimizer)
        check_param_compression(self.param_compression, self.zero_stage if self.partitions else None)
        if self.zero_stage and not self.partitions:
            check_takes_stage(self.optimizer, self.zero_stage)
            cls, form = ALGORITHMS[self.optimizer], self.state or "compact"
            check_zero_stage(self.zero_stage, cls.__name__, cls.zero_stages, self.warmup_bits, form, self.clip)

    @property
    def partitions(self) -> bool:
        """True if ordinary optimizers become a ZeroOptimizer of them."""
        return self.zero_stage > 0 and self.optimizer == "none"

    def message_options(self) -> MessageOptions:
        """The options of ``grad_compression``'s messages, checked."""
        return MessageOptions(self.topology, self.node_size, self.node_bits, self.bucket_cap_mb)

    @staticmethod
    def optimizer_from_env() -> str:
        """The value of COMPRESSOPT_OPTIM, or of its longer form COMPRESSOPT_OPTIMIZER; "" if neither is set.

        Raises:
            ValueError: If the two differ.
        """
        short, long = (os.environ.get(f"COMPRESSOPT_{name}", "") for name in ("OPTIM", "OPTIMIZER"))
        if short and long and short != long:
            raise ValueError(f"COMPRESSOPT_OPTIM={short} and COMPRESSOPT_OPTIMIZER={long} differ: set one of them")
        return short or long

    def convert(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace a fresh Adam or AdamW by the compressed optimizer, or any optimizer by ZeRO's.

        The param groups are the same objects, so that a scheduler made for the old optimizer drives the new one.

        Raises:
            ValueError: If the optimizer has taken steps, or Adam has a weight decay (its L2 is not decoupled).
        """
        if self.partitions:
            return partitioned(optimizer, self.zero_stage, **self.zero_options())
        if self.optimizer == "none" or not _is_plain_adam(optimizer):
            return optimizer
        self._check_replaceable(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether it ever steps
        cls = ALGORITHMS[self.optimizer]
        given: dict[str, Any] = {"freeze_step": self.freeze_step} if hasattr(cls, "schedule_class") else {}
        if self.max_update != MAX_UPDATE or "max_update" in text_options(cls):
            given["max_update"] = self.max_update  # a class that does not know it says so
        given |= self.common_options()
        made = cls(optimizer.param_groups, **given)
        if self.freeze_step == AUTO:
            made.defer_schedule([])
        return made

    @property
    def ddp_compression(self) -> str:
        """The compression of gradients that DDP averages; "none" under ZeRO, which averages them itself."""
        return "none" if self.partitions else self.grad_compression

    def common_options(self) -> dict[str, Any]:
        """The fields that a compressed optimizer takes as they are."""
        unset = {"state"} if self.state is None else set()
        return {name: getattr(self, name) for name in OPTIONS if name not in unset}

    def zero_options(self) -> dict[str, Any]:
        """The fields that ZeroOptimizer takes as they are."""
        names = ("bucket_cap_mb", "communicator", "grad_compression", "param_compression", "topology", "node_size")
        return {name: getattr(self, name) for name in names}

    def leaves_alone(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the reason why an optimizer is not replaced by the compressed one that the plugin names, or ""."""
        if self.optimizer == "none" or _is_plain_adam(optimizer) or saves_shards(optimizer):
            return ""
        name = type(optimizer).__name__
        return (
            f"{name} stays as it is, and the gradients of its parameters are not compressed: "
            f"CompressOptPlugin(optimizer={self.optimizer!r}) replaces Adam and AdamW, not other optimizers and not "
            f"subclasses with a step of their own. Give AdamW to prepare, or set optimizer='none' to keep {name}"
        )

    def _check_replaceable(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} has taken steps already: prepare it before the first one, so that "
                f"{self.optimizer} can replace it"
            )
        decays = any(group["weight_decay"] for group in optimizer.param_groups)
        if decays and not isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(
                f"Adam with weight_decay is L2 regularization, which {self.optimizer} does not support: use AdamW"
            )


def _is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True for Adam, AdamW, and subclasses that do not change the step."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return False
    own = {inspect.unwrap(cls.step) for cls in (torch.optim.Adam, torch.optim.AdamW)}  # torch wraps steps to profile
    return inspect.unwrap(type(optimizer).step) in own


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
