"""Options of a ZeroOptimizer. Each error names the value, what is legal, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.topology import AUTO, TopologyOptions
from hf_compressopt.flat import bucket_numel_of
from hf_compressopt.grad_compression import FORMATS
from hf_compressopt.kernels import IntegerFormat
from hf_compressopt.optim.options import check_at_least, check_count, resolve_communicator

#: dtypes of parameters, of gradients on the wire, of averages and of state.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SHORT_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class LossScale:
    """The factor of the loss before backward, which keeps small float16 gradients from becoming zero.

    Attributes:
        value: The present factor.
        growth_interval: Steps without an overflow after which the factor doubles; 0 keeps it fixed.
        good_steps: Steps without an overflow since the factor changed.
        of_scaler: The factor of a GradScaler, which comes on top.
    """

    value: float = 1.0
    growth_interval: int = 0
    good_steps: int = 0
    of_scaler: float = 1.0

    @property
    def of_gradients(self) -> float:
        """The factor that the gradients of the coming backward carry."""
        return self.value * self.of_scaler

    def update(self, overflow: bool) -> None:
        """Count a step: halve the factor after an overflow, double it after ``growth_interval`` good steps."""
        if self.growth_interval == 0:
            return
        if overflow:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0


@dataclass(frozen=True)
class Precision:
    """The scaling and rounding of gradients.

    Attributes:
        sent: dtype on the wire; None is the parameter's.
        kept: dtype of the averages; None is the parameter's.
        before: Factor of gradients before they are sent. None is 1 / world size if ``after`` is None, and else 1.
        after: Factor of the sum of the gradients, beside 1 / world size; None leaves the sum as it is.
    """

    sent: torch.dtype | None = None
    kept: torch.dtype | None = None
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Options of a ZeroOptimizer; each of them is also a keyword argument of it.

    Args:
        stage: 1 or 2.
        communicator: "auto", the name of a torch.distributed backend, "mpi", or a Communicator.
        bucket_cap_mb: MiB of float32 gradients that are sent at the same time; None is 25.
        reduce_bucket_size: ``bucket_cap_mb`` in elements.
        allgather_bucket_size: Elements of parameters that are gathered at the same time; None is as many as are
            reduced.
        overlap_comm: Send gradients while backward runs.
        reduce_scatter: Must be True. An all-reduce would send twice as much.
        communication_data_type: dtype of gradients on the wire, such as "bf16"; None is the parameter's.
        gradient_accumulation_dtype: dtype of the averages; None is the parameter's.
        postscale_gradients: Divide the sum of the gradients by the number of ranks, instead of each gradient.
        gradient_predivide_factor: With postscale_gradients: divide by this before the sum, by the rest after it.
        round_robin_gradients: Assign the parts of the slices to the ranks in turn.
        contiguous_gradients: Move each gradient into its slice, and free it, as soon as it exists. With False this
            happens when the slice is sent.
        ignore_unused_parameters: Accept parameters that had no gradient on any rank; False raises an error.
        clip_grad: Clip gradients to this norm in step(); 0 is off. ``max_grad_norm`` means the same.
        loss_scale: Factor of the loss in :meth:`ZeroOptimizer.backward` and ``scale_loss``; "dynamic" adapts it.
        initial_loss_scale: First factor of a dynamic loss scale.
        loss_scale_window: Steps without an overflow after which a dynamic loss scale doubles.
        master_dtype: dtype of the master copies of bfloat16 and float16 parameters. The parameters' own dtype means
            no master copies: updates are rounded at once.
        state_dtype: dtype of element-wise state between steps; None is the master's.
        offload_optimizer: Keep masters, states and gradients in page-locked host memory, and update on the CPU.
        comm_backend_name: DeepSpeed's spelling of ``communicator``.
        grad_compression: "int4" or "int8": send gradients in messages of 4 or 8 bits per element, with error feedback.
            "none" is full precision, as are parameters of one dimension always.
        param_compression: "int4" or "int8": give the updated parameters to all ranks in messages of 4 or 8 bits per
            element: what the float32 masters, which each rank keeps of its part, are ahead of them.
        topology: "flat", "hierarchical" or "auto": the way of gradients and parameters between nodes of several ranks.
            Param groups with a process group of their own are always flat.
        node_size: Consecutive ranks per node, for two levels; None takes them from the launcher and the host names.

    Raises:
        ValueError: For an option outside its range.
        TypeError: For an option of another type.
    """

    stage: int = 2
    communicator: str | Communicator | None = None
    bucket_cap_mb: float | None = None
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    overlap_comm: bool = True
    reduce_scatter: bool = True
    communication_data_type: torch.dtype | str | None = None
    gradient_accumulation_dtype: torch.dtype | str | None = None
    postscale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    round_robin_gradients: bool = False
    contiguous_gradients: bool = True
    ignore_unused_parameters: bool = True
    clip_grad: float = 0.0
    loss_scale: float | str = 1.0
    initial_loss_scale: float = 65536.0
    loss_scale_window: int = 1000
    master_dtype: torch.dtype | str = torch.float32
    state_dtype: torch.dtype | str | None = None
    offload_optimizer: bool | str | None = False
    comm_backend_name: str | None = None
    grad_compression: str = "none"
    param_compression: str = "none"
    topology: str = AUTO
    node_size: int | None = None

    def __post_init__(self) -> None:
        """Check every option."""
        check_stage(self.stage)
        for option in fields(self):
            if option.type == "bool" and not isinstance(value := getattr(self, option.name), bool):
                raise TypeError(f"{option.name} must be True or False, got {value!r}")
        if not self.reduce_scatter:
            raise ValueError(
                "reduce_scatter must be True, got False: an all-reduce would send twice as much and change nothing"
            )
        check_at_least("clip_grad", self.clip_grad, 0)
        self._check_sizes()
        self._check_predivision()
        self._check_compression()
        _ = self.precision, self.master, self.kept_state, self.transport  # each checks the options that it reads
        self.topology_options()
        self.make_loss_scale()
        if self.offload_optimizer not in (False, None, True, "cpu", "none"):
            raise ValueError(f"offload_optimizer must be True, 'cpu' or False, got {self.offload_optimizer!r}")
        if self.offload:
            require_accelerator("offload_optimizer")

    def _check_sizes(self) -> None:
        if self.bucket_cap_mb is not None and self.reduce_bucket_size is not None:
            raise ValueError(
                f"bucket_cap_mb={self.bucket_cap_mb} (MiB of float32 values) and reduce_bucket_size="
                f"{self.reduce_bucket_size} (values) are two spellings of one option: give one"
            )
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        _ = self.reduce_numel  # it checks bucket_cap_mb

    def _check_predivision(self) -> None:
        factor = self.gradient_predivide_factor
        check_at_least("gradient_predivide_factor", factor, 0)
        if not self.postscale_gradients and factor != 1.0:
            raise ValueError(
                f"gradient_predivide_factor={factor} needs postscale_gradients=True: otherwise gradients are divided "
                "by the number of ranks before the sum"
            )
        if factor == 0:
            raise ValueError("gradient_predivide_factor must be > 0, got 0")

    def _check_compression(self) -> None:
        for name in ("grad_compression", "param_compression"):
            if getattr(self, name) not in (*FORMATS, "none"):
                raise ValueError(f"{name} must be one of {[*FORMATS, 'none']}, got {getattr(self, name)!r}")
        if self.grad_compression != "none" and (self.communication_data_type or self.postscale_gradients):
            name = "communication_data_type" if self.communication_data_type else "postscale_gradients"
            raise ValueError(
                f"{name}={getattr(self, name)} has no effect with grad_compression={self.grad_compression}: gradients "
                "travel as integers, with scales of their own. Leave one of the two out"
            )
        if self.param_compression != "none" and self.master != torch.float32:
            raise ValueError(
                f"param_compression={self.param_compression} needs float32 masters, got master_dtype="
                f"{self.master_dtype}: leave one of the two out"
            )

    @cached_property
    def grad_form(self) -> IntegerFormat | None:
        """Form of the messages of gradients; None is full precision."""
        return None if self.grad_compression == "none" else IntegerFormat(FORMATS[self.grad_compression])

    @cached_property
    def param_form(self) -> IntegerFormat | None:
        """Form of the messages of parameters; None is full precision."""
        return None if self.param_compression == "none" else IntegerFormat(FORMATS[self.param_compression])

    @cached_property
    def reduce_numel(self) -> int:
        """Elements of the gradients that are sent at the same time."""
        if self.reduce_bucket_size is not None:
            return self.reduce_bucket_size
        return bucket_numel_of(25.0 if self.bucket_cap_mb is None else self.bucket_cap_mb)

    @cached_property
    def gather_numel(self) -> int:
        """Elements of the parameters that are gathered at the same time."""
        return self.allgather_bucket_size or self.reduce_numel

    @cached_property
    def precision(self) -> Precision:
        """Scaling and rounding of gradients."""
        sent = as_dtype("communication_data_type", self.communication_data_type)
        kept = as_dtype("gradient_accumulation_dtype", self.gradient_accumulation_dtype)
        if not self.postscale_gradients:
            return Precision(sent, kept)
        factor = float(self.gradient_predivide_factor)
        return Precision(sent, kept, None if factor == 1.0 else 1.0 / factor, factor)

    @cached_property
    def master(self) -> torch.dtype:
        """Dtype of the master copies of 16-bit parameters."""
        return as_dtype("master_dtype", self.master_dtype) or torch.float32

    @cached_property
    def kept_state(self) -> torch.dtype | None:
        """Dtype of element-wise state between steps; None is the master's."""
        return as_dtype("state_dtype", self.state_dtype)

    @cached_property
    def offload(self) -> bool:
        """True if masters and states live in host memory."""
        return self.offload_optimizer in (True, "cpu")

    @cached_property
    def transport(self) -> str | Communicator | None:
        """The communicator that its two spellings ask for."""
        return resolve_communicator(self.communicator, self.comm_backend_name, False)

    def topology_options(self) -> TopologyOptions:
        """Return the options of the topology, checked."""
        return TopologyOptions(self.topology, self.node_size)

    def describe(self) -> str:
        """Describe the compression for a log; "" without any."""
        forms = {"gradients": self.grad_compression, "parameters": self.param_compression}
        return "".join(f", {what} as {form}" for what, form in forms.items() if form != "none")

    def make_loss_scale(self) -> LossScale:
        """Make a loss scale at its start.

        Raises:
            ValueError: For an option outside its range.
        """
        option, initial, window = self.loss_scale, self.initial_loss_scale, self.loss_scale_window
        if option == "dynamic":
            if not initial >= 1 or window < 1:
                raise ValueError(f"initial_loss_scale and loss_scale_window must be >= 1, got {initial} and {window}")
            return LossScale(float(initial), window)
        if isinstance(option, bool) or not isinstance(option, (int, float)) or not 0 < option < float("inf"):
            raise ValueError(f"loss_scale must be a number > 0 or 'dynamic', got {option!r}")
        return LossScale(float(option))

    @classmethod
    def split(cls, config: ZeroConfig | None, options: dict[str, Any]) -> tuple[ZeroConfig, dict[str, Any]]:
        """Separate ZeroOptimizer's options from the wrapped optimizer's, given as one object or among ``options``.

        Raises:
            TypeError: If ``config`` is no ZeroConfig.
            ValueError: If one is given in ``config`` and by itself.
        """
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config must be a ZeroConfig or None, got {config!r}")
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in options.items() if name in names}
        if config is not None and own:
            raise ValueError(f"{sorted(own)} must be part of config=ZeroConfig(...), as the other options of ZeRO are")
        inner = {name: value for name, value in options.items() if name not in names}
        return config or cls(**own), inner


def check_stage(stage: Any) -> None:
    """Raise a ValueError for a stage other than 1 and 2."""
    if isinstance(stage, bool) or stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage!r}")


def as_dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """Read a floating-point dtype: itself, or a name such as "bf16"; a ValueError for anything else."""
    found = _SHORT_NAMES.get(value, getattr(torch, value, None)) if isinstance(value, str) else value
    if value is not None and found not in DTYPES:
        raise ValueError(f"{name} must be one of 'fp32', 'bf16', 'fp16', a torch dtype, or None, got {value!r}")
    return found if isinstance(found, torch.dtype) else None


def require_accelerator(what: str) -> None:
    """Raise a ValueError if there is no device with memory of its own."""
    if not torch.accelerator.is_available():
        raise ValueError(
            f"{what} moves optimizer state from an accelerator's memory to the host's, and there is no accelerator "
            "here: leave it out"
        )
