"""The options of one Trainer or Accelerator: made once, and asked by whoever wants a value."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_compressopt.grad_compression import FORMATS, FULL, MessageOptions
from hf_compressopt.integrations.algorithms import ALGORITHMS, saves_shards
from hf_compressopt.options import options_of
from hf_compressopt.schedules import AUTO
from hf_compressopt.zero.config import EXACT, check_optimizer_class
from hf_compressopt.zero.optimizer import ZeroOptimizer

NONE = "none"
GRAD_COMPRESSION = "grad_compression="


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Requests to a Trainer or an Accelerator: what it does with optimizers and gradients.

    The plug-in makes them for Accelerate (:meth:`CompressOptPlugin.run_options`), ``--optim_args`` and environment
    variables for Trainer (:func:`~hf_compressopt.integrations.optim_args.read_optim_args`).

    Raises:
        ValueError: For compressions that are unknown, or that do not go together.
    """

    asked: str = ""  # the user's words for an optimizer of this package; "" if nobody has asked for one
    by_trainer: bool = False  # Trainer makes the optimizer; else the one that is given to prepare is replaced
    optimizer: str = NONE  # a name of ALGORITHMS
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # of an optimizer of this package
    zero: dict[str, Any] = field(default_factory=dict)  # of ZeroOptimizer, with ``stage``; empty without ZeRO
    grad_compression: str = NONE  # of ordinary optimizers without ZeRO
    param_compression: str = AUTO  # of models that FSDP2 shards
    messages: MessageOptions = field(default_factory=MessageOptions)  # of grad_compression
    total_steps: int | None = None
    async_save: bool = False
    gradient_as_bucket_view: bool = True  # in DDP, where gradients travel in messages of this package
    others: str = ""  # the rest of --optim_args, for Trainer's own optimizer

    def __post_init__(self) -> None:
        """Check what the two compressions may be."""
        values = {"grad_compression": self.grad_compression, "param_compression": self.param_compression, **self.zero}
        check_grad_compression(values["grad_compression"], self.optimizer)
        check_param_compression(values["param_compression"], values["grad_compression"], under_zero=bool(self.zero))

    @property
    def compresses(self) -> str:
        """The option that compresses the gradients of ordinary optimizers, with its value; "" if none does."""
        return "" if self.grad_compression == NONE else f"{GRAD_COMPRESSION}{self.grad_compression}"

    @property
    def sender(self) -> str:
        """The sender of gradients by these options, as errors name it; "" if it is the host itself."""
        if self.compresses or self.zero:
            return self.compresses or ZeroOptimizer.__name__
        return "" if self.optimizer == NONE else self.optimizer

    @property
    def keeps_models_out_of_ddp(self) -> bool:
        """True if models get no DistributedDataParallel, whatever optimizer is given to ``prepare``."""
        return not self.by_trainer and (bool(self.zero) or self.optimizer_options.get("zero_stage") == 2)

    # -- what becomes of an optimizer that is given to prepare --------------------------------------------------------

    def convert(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace a fresh Adam or AdamW by the compressed optimizer, or any optimizer by ZeRO's; see the plug-in."""
        if self.by_trainer:
            return optimizer
        if self.zero:
            return _partitioned(optimizer, **self.zero)
        if self.optimizer == NONE or not _is_plain_adam(optimizer):
            return optimizer
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
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether it ever steps
        cls: Any = ALGORITHMS[self.optimizer]
        replacement: torch.optim.Optimizer = cls(optimizer.param_groups, **self.optimizer_options)
        return replacement

    def why_left_alone(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the reason why :meth:`convert` does not replace an optimizer that it could be meant for, or ""."""
        if self.by_trainer or self.optimizer == NONE or _is_plain_adam(optimizer) or saves_shards(optimizer):
            return ""
        name = type(optimizer).__name__
        return (
            f"{name} stays as it is, and the gradients of its parameters are not compressed: "
            f"CompressOptPlugin(optimizer={self.optimizer!r}) replaces Adam and AdamW, not other optimizers and not "
            f"subclasses with a step of their own. Give AdamW to prepare, or set optimizer='none' to keep {name}"
        )


def _partitioned(optimizer: torch.optim.Optimizer, **zero: Any) -> torch.optim.Optimizer:
    """Replace a fresh optimizer by a partitioned one, with the same param group objects."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer
    kept_apart = getattr(optimizer, "args", None)  # where bitsandbytes keeps optim_bits
    check_optimizer_class(type(optimizer), vars(kept_apart) if hasattr(kept_apart, "__dict__") else {})
    if any(float(row.get("step", 1)) > 0 for row in optimizer.state.values() if row):  # Adagrad's begins at 0
        raise ValueError(
            f"{type(optimizer).__name__} has taken steps already: prepare it before the first one, so that its state "
            "can be partitioned"
        )
    values = {**vars(optimizer), **optimizer.defaults}
    names = [name for name in inspect.signature(type(optimizer).__init__).parameters if name in values]
    inner = {name: values[name] for name in names if name not in ("self", "params")}
    if lost := _lost(optimizer, inner):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} was given something that cannot be read from it, and would be lost where it is made anew for ZeRO "
            f"({lost}): give prepare a ZeroOptimizer(params, {name}, ...) with the options of {name}"
        )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether it ever steps
    return ZeroOptimizer(optimizer.param_groups, type(optimizer), **zero, **inner)


def _lost(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> str:
    """Say what an optimizer that is made anew with these options has otherwise than a fresh one; "" if nothing."""
    try:
        anew = vars(type(optimizer)([torch.zeros(1, requires_grad=True)], **options))
    except TypeError as error:
        return str(error)
    numbers = {name: value for name, value in anew.items() if isinstance(value, (int, float, str, tuple))}
    return ", ".join(
        f"{name} is {vars(optimizer)[name]!r}, and would be {value!r}"
        for name, value in numbers.items()
        if name in vars(optimizer) and vars(optimizer)[name] != value
    )


def _is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True for Adam, AdamW, and subclasses that do not change the step."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return False
    steps = {inspect.unwrap(cls.step) for cls in (torch.optim.Adam, torch.optim.AdamW)}  # torch wraps them to profile
    return inspect.unwrap(type(optimizer).step) in steps


# -- checks of values, which the hosts' options share -----------------------------------------------------------------


def options_for(optimizer: str, values: dict[str, Any], chosen: Collection[str]) -> dict[str, Any]:
    """Return the values that a compressed optimizer has options for; those ``chosen`` must be among them."""
    cls: Any = ALGORITHMS[optimizer]
    legal = options_of(cls)
    for name in chosen:
        if name not in legal:
            raise ValueError(f"{optimizer} has no {name}, got {name}={values[name]!r}: leave it out")
    return {name: value for name, value in values.items() if name in legal}


def check_optimizer(name: str, option: str = "optimizer") -> None:
    """Check the name of a compressed optimizer; it may be "none"."""
    legal = [*ALGORITHMS, NONE]
    if name not in legal:
        raise ValueError(f"{option} must be one of {legal}, got {name!r}")


def check_stage_or_none(stage: Any) -> None:
    """Check a zero_stage, of which 0 is none."""
    if stage not in (0, 1, 2):
        raise ValueError(f"zero_stage must be 0, 1 or 2, got {stage!r}")


def check_takes_stage(name: str, stage: Any) -> None:
    """Check that a compressed optimizer knows ZeRO; its constructor checks the stage."""
    if len(ALGORITHMS[name].zero_stages) > 1:
        return
    raise ValueError(
        f"zero_stage={stage} is not supported with {name}, whose ranks need whole moments. Use onebit_adam with "
        f'zero_stage={stage}, or an ordinary optimizer (--optim zero{stage}_adamw; in a plugin optimizer="none", '
        f"zero_stage={stage})"
    )


def check_grad_compression(value: str, optimizer: str) -> None:
    """Check a grad_compression beside the compressed optimizer, or "none"."""
    legal = [*FORMATS, FULL, NONE]
    if value not in legal:
        raise ValueError(f"grad_compression must be one of {legal}, got {value!r}")
    if value != NONE and optimizer != NONE:
        raise ValueError(
            f"grad_compression={value} is for ordinary optimizers, such as adamw_torch: {optimizer} sends gradients in "
            "a way of its own. Leave grad_compression out, or choose an ordinary optimizer"
        )


def check_param_compression(value: str, grad_compression: str, *, under_zero: bool) -> None:
    """Check a param_compression beside a grad_compression."""
    legal = [*FORMATS, *EXACT, NONE]
    if value not in legal:
        raise ValueError(f"param_compression must be one of {legal}, got {value!r}")
    if under_zero or value in (AUTO, NONE) or (value == "exact" and grad_compression != NONE):
        return
    raise ValueError(
        f"param_compression={value} is an option of ZeRO, whose ranks send updated parameters: give zero_stage=1 or 2, "
        "or leave it out; DDP sends no parameters, and FSDP2 gathers them in full precision, or by "
        f"param_compression=exact beside grad_compression=int4 ({FULL} leaves gradients as they are)"
    )
