"""The options of Accelerate and of environment variables: the plug-in, and what nobody has read of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_compressopt.grad_compression import MessageOptions
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.integrations.run_options import (
    NONE,
    RunOptions,
    check_optimizer,
    check_stage_or_none,
    check_takes_stage,
    options_for,
)
from hf_compressopt.optim.onebit_adam import OnebitAdam
from hf_compressopt.optim.options import NO_STATE, check_count, check_zero_stage
from hf_compressopt.options import (
    PREFIX,
    did_you_mean,
    options_of,
    read_variables,
    texts_of,
    variables_of,
    with_variables,
)
from hf_compressopt.schedules import AUTO, Schedule
from hf_compressopt.zero.optimizer import ZeroOptimizer

_SHARED = {name: option.default for name, option in options_of(OnebitAdam).items()}


@dataclass
@with_variables
class CompressOptPlugin:
    """Options for plain Accelerate: the optimizer that replaces an Adam or AdamW given to ``prepare``.

    Every field defaults from the environment variable ``COMPRESSOPT_<FIELD>``, in capitals; ``COMPRESSOPT_OPTIM`` is
    another name for that of ``optimizer``. ``freeze_step``, ``warmup_bits``, ``scale_block``, ``variance_floor``,
    ``max_update``, ``variance_interval``, ``clip``, ``topology`` and ``node_bits`` are options of the compressed
    optimizers.

    Attributes:
        optimizer: "onebit_adam" (the default without zero_stage and grad_compression), "zero_one_adam" or
            "onebit_lamb"; "none" leaves every optimizer as it is.
        grad_compression: "int4" or "int8": average the gradients of ordinary optimizers in 4 or 8 bits per element. Not
            supported with the optimizers above, so ``optimizer`` is "none" then. With zero_stage it is ZeroOptimizer's
            option. "float32" is for models that FSDP2 shards: trainable parameters beside the shards, such as adapters
            that came later, are averaged in full precision, and the others by FSDP2.
        param_compression: How updated parameters are sent, with zero_stage; see ZeroConfig. "exact" beside
            grad_compression is also for models that FSDP2 shards over all ranks; see compress_fsdp.
        total_steps: Optimizer steps of the run, for freeze_step="auto"; None takes the steps of a learning-rate
            scheduler given to ``prepare``.
        bucket_cap_mb: MiB of float32 values that are sent together, > 0. None is the size of DDP's buckets with
            grad_compression, else 100 on CUDA devices and 25 on others.
        communicator: "auto", or the name of a torch.distributed backend.
        zero_stage: 1 or 2: partition every fresh element-wise optimizer by ZeroOptimizer; ``optimizer`` is "none" then,
            unless it is given. With "onebit_adam" it is that optimizer's option, and with 2 models get no DDP. Not
            supported with the other two. 0 is off.
        gradient_as_bucket_view: Keep gradients that this package sends in DDP's buckets only, by DDP's option of that
            name, which saves a copy of all gradients. False leaves DDP's option as it is.
        async_save: Write the optimizers' states in the background in ``save_state``. The next save, a load,
            ``end_training`` and the end of the process wait for it.

    Raises:
        ValueError: For an unknown name, a number out of its range, options that do not go together, or an environment
            variable of a wrong type.
        TypeError: For a number of a wrong type.
    """

    optimizer: str = ""
    freeze_step: int | str = _SHARED["freeze_step"]
    scale_block: int | None = _SHARED["scale_block"]
    variance_floor: float = _SHARED["variance_floor"]
    max_update: float | None = _SHARED["max_update"]
    variance_interval: int | None = _SHARED["variance_interval"]
    clip: str = _SHARED["clip"]
    bucket_cap_mb: float | None = None
    communicator: str = AUTO
    zero_stage: int = _SHARED["zero_stage"]
    async_save: bool = False
    grad_compression: str = NONE
    total_steps: int | None = None
    warmup_bits: int = _SHARED["warmup_bits"]
    param_compression: str = AUTO
    topology: str = _SHARED["topology"]
    node_bits: int = _SHARED["node_bits"]
    gradient_as_bucket_view: bool = True

    def __post_init__(self) -> None:
        """Check the names, the messages and the schedule; the optimizer checks the other options."""
        check_variables()
        check_stage_or_none(self.zero_stage)
        ordinary = self.zero_stage or self.grad_compression != NONE
        self.optimizer = self.optimizer or (NONE if ordinary else "onebit_adam")
        check_optimizer(self.optimizer)
        Schedule(self.freeze_step)
        if self.total_steps is not None:
            check_count("total_steps", self.total_steps)
        self.run_options()
        if self.zero_stage and self.optimizer != NONE:
            check_takes_stage(self.optimizer, self.zero_stage)
            cls = ALGORITHMS[self.optimizer]
            check_zero_stage(self.zero_stage, cls.__name__, cls.zero_stages, self.warmup_bits, self.clip)

    def run_options(self) -> RunOptions:
        """The options as a Trainer or an Accelerator carries them."""
        asked = ""
        zero: dict[str, Any] = {}
        optimizer_options: dict[str, Any] = {}
        partitions = self.zero_stage > 0 and self.optimizer == NONE
        if partitions:
            asked = f"CompressOptPlugin(zero_stage={self.zero_stage})"
            zero = {"stage": self.zero_stage, **self._options_of(ZeroOptimizer)}
        elif self.optimizer != NONE:
            asked = f"CompressOptPlugin(optimizer={self.optimizer!r})"
            values = self._options_of(OnebitAdam)
            chosen = [name for name, value in values.items() if value != OPTIONS[name].default]
            optimizer_options = options_for(self.optimizer, values, chosen)
        return RunOptions(
            asked=asked,
            optimizer=self.optimizer,
            optimizer_options=optimizer_options,
            zero=zero,
            grad_compression=NONE if partitions else self.grad_compression,  # ZeRO averages them itself
            param_compression=AUTO if partitions else self.param_compression,
            messages=MessageOptions(self.topology, None, self.node_bits, self.bucket_cap_mb),
            total_steps=self.total_steps,
            async_save=self.async_save,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )

    def _options_of(self, cls: type) -> dict[str, Any]:
        """The fields that a class has options for; the run's length is fitted when it is known to be right."""
        names = [option.name for option in fields(self) if option.name in options_of(cls)]
        return {name: getattr(self, name) for name in names if name != "total_steps"}

    def convert(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace a fresh Adam or AdamW by the compressed optimizer, or any optimizer by ZeRO's.

        The param groups are the same objects, so that a scheduler made for the old optimizer drives the new one.

        Raises:
            ValueError: If the optimizer has taken steps, or Adam has a weight decay (its L2 is not decoupled).
        """
        return self.run_options().convert(optimizer)


# -- environment variables --------------------------------------------------------------------------------------------

#: The options that have environment variables.
OPTIONS = options_of(CompressOptPlugin)
_OF_THE_BUILD = (f"{PREFIX}CUDA_ARCHITECTURES", f"{PREFIX}PORTABLE_ONLY")
_READ_ANYWAY = ("async_save", "gradient_as_bucket_view")


def options_from_variables() -> dict[str, Any]:
    """The options that environment variables set, by the names of the plug-in's fields."""
    check_variables()
    return read_variables({name: option.kinds for name, option in OPTIONS.items()})


def check_variables() -> None:
    """Check that every COMPRESSOPT_... variable is one that the package reads."""
    legal = [variable for name in OPTIONS for variable in variables_of(name)]
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in (*legal, *_OF_THE_BUILD):
            if variable == f"{PREFIX}STATE":
                raise ValueError(f"{variable}: {NO_STATE}")
            hint = did_you_mean(variable, [*legal, f"HF_{PREFIX}KERNELS"])
            raise ValueError(f"no option has the environment variable {variable}{hint}")


class Unread:
    """Requests of a program that hf_compressopt.run has started, until a Trainer or an Accelerator has read them."""

    def __init__(self) -> None:
        self.variables: list[str] = []
        self.flags: list[str] = []  # of the command line; Trainer reads them

    def clear(self) -> None:
        """Note that a Trainer has read both; other Trainers of the program may want nothing."""
        self.variables.clear()
        self.flags.clear()

    def watch_variables(self) -> None:
        """Raise an error at the first step of an optimizer on several ranks if nothing has read them until then.

        A plain loop reads none of them, and would train in full precision without a word.
        """
        self.variables = [variable for name in OPTIONS if name not in _READ_ANYWAY for variable in texts_of(name)]
        if self.variables:
            register_optimizer_step_pre_hook(lambda *_: self.check_variables())

    def check_variables(self) -> None:
        """Raise an error if nothing has read the variables; on all ranks, whose programs are the same."""
        if self.variables and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(self.describe_variables())

    def describe_variables(self) -> str:
        """Say which variables nothing has read, and what to do; "" if there are none."""
        if not self.variables:
            return ""
        values = ", ".join(f"{name}={os.environ.get(name, '')}" for name in self.variables)
        return (
            f"nothing in this program has read {values}: Trainer reads such variables with an optimizer of this "
            "package, and Accelerate with COMPRESSOPT_OPTIM, COMPRESSOPT_GRAD_COMPRESSION or COMPRESSOPT_ZERO_STAGE. A "
            "loop needs hf_compressopt.OnebitAdam with attach_ddp, GradientCompression or ZeroOptimizer in the script; "
            "else remove the variables"
        )


UNREAD = Unread()
