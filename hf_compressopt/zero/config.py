"""The arguments of a ZeroOptimizer, checked: options, optimizers and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import Any

import torch

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.topology import AUTO, TopologyOptions
from hf_compressopt.flat import bucket_numel_of
from hf_compressopt.grad_compression import FORMATS
from hf_compressopt.kernels import IntegerFormat
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.math import is_shard
from hf_compressopt.optim.options import check_at_least, check_count, check_parameter, resolve_communicator

#: dtypes of parameters, of gradients on the wire, of averages and of state.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Values of ``param_compression`` by which 16-bit parameters are sent as their changes.
EXACT = ("exact", AUTO)
_WITHOUT_EFFECT = ("round_robin_gradients", "contiguous_gradients", "ignore_unused_parameters")
_SHORT_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _derived() -> Any:
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Options of a ZeroOptimizer; each of them is also a keyword argument of it.

    Args:
        stage: 1 or 2.
        communicator: "auto", the name of a torch.distributed backend, "mpi", or a Communicator.
        bucket_cap_mb: MiB of float32 gradients that are sent together, > 0; None is 100 on CUDA devices, else 25.
        reduce_bucket_size: ``bucket_cap_mb`` in elements.
        allgather_bucket_size: Elements of parameters gathered at a time; None is as many as are reduced.
        overlap_comm: Send gradients while backward runs.
        communication_data_type: dtype of gradients on the wire, such as "bf16"; None is the parameter's.
        gradient_accumulation_dtype: dtype of the averages; None is the parameter's.
        postscale_gradients: Divide the sum of gradients by the number of ranks, not each gradient.
        gradient_predivide_factor: With postscale_gradients: divide by this before the sum, by the rest after it.
        round_robin_gradients: Accepted for DeepSpeed's sake, without effect, as the next two are.
        contiguous_gradients: Each gradient moves into its slice, and is freed, at once.
        ignore_unused_parameters: Parameters without a gradient on any rank are left as they are.
        clip_grad: Clip gradients to this norm in step(); 0 is off. ``max_grad_norm`` means the same.
        loss_scale: Factor of the loss in :meth:`ZeroOptimizer.backward` and ``scale_loss``; "dynamic" adapts it.
        initial_loss_scale: First factor of a dynamic loss scale.
        loss_scale_window: Steps without an overflow after which a dynamic loss scale doubles.
        master_dtype: dtype of the master weights of bfloat16 and float16 parameters. The parameters' own dtype means
            none: updates are rounded at once.
        state_dtype: dtype of element-wise state between steps; None is the master's.
        offload_optimizer: Keep master weights, state and gradients in page-locked host memory, and update on the CPU.
        comm_backend_name: DeepSpeed's spelling of ``communicator``.
        grad_compression: "int4" or "int8": send gradients in 4 or 8 bits per element, with error feedback. "none" is
            full precision, which parameters of one dimension always have.
        param_compression: "exact": send the changes of bfloat16 or float16 parameters, bit for bit, mostly in 0.3 to 3
            bits per element. "auto" is that for such parameters, and full precision for others; "none" is always full
            precision. "int4" or "int8": send updated parameters in 4 or 8 bits per element, as differences between the
            float32 master weights of their owner and the parameters.
        topology: "flat", "hierarchical" or "auto": the way of gradients and parameters between nodes of several ranks.
            Param groups with a process group of their own are always flat.
        node_size: Consecutive ranks per node, if hierarchical; None takes them from the launcher and the host names.

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
    param_compression: str = AUTO
    topology: str = AUTO
    node_size: int | None = None

    # what follows from the options
    reduce_numel: int = _derived()  #: Elements of the gradients that are sent at the same time.
    gather_numel: int = _derived()  #: Elements of the parameters that are gathered at the same time.
    sent: torch.dtype | None = _derived()  #: Of gradients on the wire; None is the parameter's.
    kept: torch.dtype | None = _derived()  #: Of the averages; None is the parameter's.
    grad_form: IntegerFormat | None = _derived()  #: Of the messages of gradients; None is full precision.
    param_form: IntegerFormat | None = _derived()  #: Of the messages of parameters; None is bit for bit.
    exact: bool = _derived()  #: True if parameters of 16 bits with master copies are sent as changes, bit for bit.
    master: torch.dtype = _derived()  #: Of the master copies of 16-bit parameters.
    kept_state: torch.dtype | None = _derived()  #: Of element-wise state between steps; None is the master's.
    transport: str | Communicator | None = _derived()
    levels: TopologyOptions = _derived()
    offload: bool = _derived()  #: True if masters and states live in host memory.

    def __post_init__(self) -> None:
        """Check every option, and read it once."""
        check_stage(self.stage)
        for option in fields(self):
            if option.init and option.type == "bool" and not isinstance(value := getattr(self, option.name), bool):
                raise TypeError(f"{option.name} must be True or False, got {value!r}")
        check_at_least("clip_grad", self.clip_grad, 0)
        self._check_sizes()
        self._check_loss_scale()
        numel = self.reduce_bucket_size or bucket_numel_of(self.bucket_cap_mb)
        vars(self).update(  # once: later the options are frozen
            reduce_numel=numel,
            gather_numel=self.allgather_bucket_size or numel,
            sent=_as_dtype("communication_data_type", self.communication_data_type),
            kept=_as_dtype("gradient_accumulation_dtype", self.gradient_accumulation_dtype),
            grad_form=_as_form("grad_compression", self.grad_compression),
            param_form=_as_form("param_compression", self.param_compression, *EXACT),
            exact=self.param_compression in EXACT,
            master=_as_dtype("master_dtype", self.master_dtype) or torch.float32,
            kept_state=_as_dtype("state_dtype", self.state_dtype),
            transport=resolve_communicator(self.communicator, self.comm_backend_name, False),
            levels=TopologyOptions(self.topology, self.node_size),
            offload=self.offload_optimizer in (True, "cpu"),
        )
        self._check_gradients()
        if self.offload_optimizer not in (False, None, True, "cpu", "none"):
            raise ValueError(f"offload_optimizer must be True, 'cpu' or False, got {self.offload_optimizer!r}")
        if self.offload:
            require_accelerator("offload_optimizer")

    def on(self, device: torch.device) -> ZeroConfig:
        """Return the options for parameters on a device, which decides the size of buckets that nobody has chosen."""
        numel = self.reduce_bucket_size or bucket_numel_of(self.bucket_cap_mb, device.type)
        if numel == self.reduce_numel:
            return self
        config = replace(self)
        vars(config).update(reduce_numel=numel, gather_numel=self.allgather_bucket_size or numel)
        return config

    def without_effect(self) -> list[str]:
        """List the options, as name=value, that were given and change nothing here."""
        chosen = [option for option in fields(self) if option.name in _WITHOUT_EFFECT]
        values = [(option.name, getattr(self, option.name), option.default) for option in chosen]
        return [f"{name}={value}" for name, value, default in values if value != default]

    def _check_sizes(self) -> None:
        if self.bucket_cap_mb is not None and self.reduce_bucket_size is not None:
            raise ValueError(
                f"bucket_cap_mb={self.bucket_cap_mb} (MiB of float32 values) and reduce_bucket_size="
                f"{self.reduce_bucket_size} (values) are two spellings of one option: give one"
            )
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    def _check_gradients(self) -> None:
        factor = self.gradient_predivide_factor
        check_at_least("gradient_predivide_factor", factor, 0)
        if factor == 0:
            raise ValueError("gradient_predivide_factor must be > 0, got 0")
        if not self.postscale_gradients and factor != 1.0:
            raise ValueError(
                f"gradient_predivide_factor={factor} needs postscale_gradients=True: otherwise gradients are divided "
                "by the number of ranks before the sum"
            )
        for name in ("communication_data_type", "postscale_gradients") if self.grad_form else ():
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect with grad_compression={self.grad_compression}: "
                    "gradients travel as integers, with scales of their own. Leave one of the two out"
                )
        if self.param_compression == "exact" and self.master.itemsize == 2:
            raise ValueError(
                f"param_compression=exact needs master copies, got master_dtype={self.master_dtype}: leave one of the "
                "two out"
            )
        if self.param_form is not None and self.master != torch.float32:
            raise ValueError(
                f"param_compression={self.param_compression} needs float32 masters, got master_dtype="
                f"{self.master_dtype}: leave one of the two out"
            )

    def _check_loss_scale(self) -> None:
        scale = self.loss_scale
        initial, window = self.initial_loss_scale, self.loss_scale_window
        if scale == "dynamic":
            if not initial >= 1 or window < 1:
                raise ValueError(f"initial_loss_scale and loss_scale_window must be >= 1, got {initial} and {window}")
        elif isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            raise ValueError(f"loss_scale must be a number > 0 or 'dynamic', got {scale!r}")

    def rows(self) -> list[str]:
        """Return the options that all ranks must have alike, as text."""
        local = ("communicator", "comm_backend_name")  # an object of this rank, perhaps
        return [f"{o.name}={getattr(self, o.name)!r}" for o in fields(self) if o.init and o.name not in local]

    @classmethod
    def split(cls, config: ZeroConfig | None, options: dict[str, Any]) -> tuple[ZeroConfig, dict[str, Any]]:
        """Separate ZeroOptimizer's options, given as one object or among ``options``, from the wrapped optimizer's."""
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config must be a ZeroConfig or None, got {config!r}")
        names = {option.name for option in fields(cls) if option.init}
        of_zero = {name: value for name, value in options.items() if name in names}
        if config is not None and of_zero:
            raise ValueError(
                f"{sorted(of_zero)} must be part of config=ZeroConfig(...), as the other options of ZeRO are"
            )
        inner = {name: value for name, value in options.items() if name not in names}
        return config or cls(**of_zero), inner


def check_stage(stage: Any) -> None:
    """Raise a ValueError for a stage other than 1 and 2."""
    if isinstance(stage, bool) or stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage!r}")


def _as_form(name: str, compression: Any, *others: str) -> IntegerFormat | None:
    if compression not in (*FORMATS, *others, "none"):
        raise ValueError(f"{name} must be one of {[*FORMATS, *others, 'none']}, got {compression!r}")
    return IntegerFormat(FORMATS[compression]) if compression in FORMATS else None


def _as_dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    dtype = _SHORT_NAMES.get(value, getattr(torch, value, None)) if isinstance(value, str) else value
    if value is not None and dtype not in DTYPES:
        raise ValueError(f"{name} must be one of 'fp32', 'bf16', 'fp16', a torch dtype, or None, got {value!r}")
    return dtype if isinstance(dtype, torch.dtype) else None


def require_accelerator(what: str) -> None:
    """Raise a ValueError if there is no device with memory of its own."""
    if not torch.accelerator.is_available():
        raise ValueError(
            f"{what} moves optimizer state from an accelerator's memory to the host's, and there is no accelerator "
            "here: leave it out"
        )


# -- optimizers and parameters ----------------------------------------------------------------------------------------

_IN_BLOCKS = (
    "it keeps its state in blocks with a scale each, which cannot be cut at any element: use it without ZeRO, or "
    "torch.optim.AdamW here (state_dtype='bf16' makes its state small)"
)
#: Names of the optimizers that are known to need more than elements, and why; "~Name" is any name with that part.
_WHOLE_TENSORS = {
    "Muon MuonAdamW SOAP Kron ~Shampoo ~GaLore ~APOLLO": "it needs whole matrices: use it without ZeRO, or AdamW here",
    "Adafactor CAME": "it needs whole rows and columns: use it without ZeRO, or AdamW here",
    "Lomo AdaLomo": "it updates during backward: use it without ZeRO",
    "LAMB Lamb FusedLAMB LARS": "its update of a tensor takes a norm of the whole tensor: use hf_compressopt.Lamb",
    "StableAdamW NovoGrad AdamP SGDP ~Prodigy ~DAdapt": (
        "its update takes statistics over whole tensors or over all of them: use it without ZeRO, or AdamW here"
    ),
    "ZeroOptimizer ZeroRedundancyOptimizer": "it partitions by itself: give the class that it wraps",
    "LBFGS": "it needs the whole gradient as one vector: use it without ZeRO",
    "SparseAdam": "it takes sparse gradients, which are not partitioned: use AdamW with sparse=False embeddings",
    "~8bit ~4bit ~Fp8": _IN_BLOCKS,
    "~ScheduleFree": "its train() and eval() exchange whole parameters: use it without ZeRO, or AdamW here",
}
_NO_FAMILY = "Optimizer8bit"  # the base of all optimizers of bitsandbytes, those of 32 bits too


def check_optimizer_class(optimizer_class: Any, options: Mapping[str, Any] | None = None) -> None:
    """Check that an optimizer can be partitioned, with these options."""
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_class must be a subclass of torch.optim.Optimizer, such as torch.optim.AdamW, got "
            f"{optimizer_class!r}; its options follow as keyword arguments"
        )
    name, options = optimizer_class.__name__, options or {}
    reason = None
    if issubclass(optimizer_class, CompressedOptimizer):
        reason = (
            "its error feedback needs whole buckets on every rank; use ZeroOptimizer with torch.optim.AdamW or Lamb, "
            "or OnebitAdam, which has an option zero_stage of its own"
        )
    elif options.get("optim_bits", 32) != 32:
        name, reason = f"{name} with optim_bits={options['optim_bits']}", _IN_BLOCKS
    elif not issubclass(optimizer_class, Lamb):
        bases = [base.__name__ for base in optimizer_class.__mro__ if base.__name__ != _NO_FAMILY]
        reason = next((why for names, why in _WHOLE_TENSORS.items() if _names_any(names.split(), bases)), None)
    if reason:
        raise ValueError(f"{name} cannot be partitioned: {reason}")
    if options.get("percentile_clipping", 100) != 100:
        raise ValueError(
            f"percentile_clipping must be 100, got {options['percentile_clipping']}: {name} would clip by the norms of "
            "this rank's parts of tensors; use clip_grad"
        )


def _names_any(names: Sequence[str], bases: Sequence[str]) -> bool:
    return any(name == base or (name[0] == "~" and name[1:] in base) for name in names for base in bases)


def take_clipping(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], clip_grad: float
) -> tuple[dict[str, Any], float]:
    """Read ``max_grad_norm`` as ``clip_grad``, 0 for off: a wrapped optimizer would clip by this rank's part."""
    taken = signature(optimizer_class).parameters
    if "max_grad_norm" not in options:
        by_default = taken.get("max_grad_norm")
        if by_default is not None and by_default.default not in (0, None):
            raise ValueError(
                f"{optimizer_class.__name__} clips to max_grad_norm={by_default.default} by this rank's part of the "
                "gradients: give max_grad_norm=..., which is then the norm over all ranks, or 0 to turn it off"
            )
        return options, clip_grad
    inner, limit = {**options, "max_grad_norm": 0.0}, options["max_grad_norm"] or 0.0
    if "max_grad_norm" not in taken:
        del inner["max_grad_norm"]
    check_at_least("max_grad_norm", limit, 0)
    if limit > 0 and clip_grad > 0:
        raise ValueError(f"max_grad_norm={limit} and clip_grad={clip_grad} are two spellings of one option: give one")
    return inner, clip_grad or float(limit)


def check_parameters(group: dict[str, Any], number: int, config: ZeroConfig) -> None:
    """Check the trainable parameters of a param group."""
    for param in group["params"]:
        if not param.requires_grad:
            continue  # frozen parameters are not partitioned
        if is_shard(param):
            raise TypeError(
                f"parameters must be whole tensors, got shards of FSDP or tensor parallelism in param group {number}: "
                "use the optimizer without ZeRO, its state is sharded as the parameters are"
            )
        check_parameter(param, DTYPES, number)
        if config.param_compression == "exact" and param.dtype.itemsize != 2:
            raise TypeError(
                f"param_compression=exact sends changes of bfloat16 and float16 parameters, got {param.dtype} in param "
                f"group {number}: load the model in bfloat16 (dtype=torch.bfloat16; autocast leaves it in float32), or "
                "use param_compression=auto, by which all others travel in full precision"
            )
        if param.dtype == torch.float64 and (config.grad_form is not None or config.param_form is not None):
            raise TypeError(
                f"parameters must be float32, bfloat16 or float16 with grad_compression={config.grad_compression} and "
                f"param_compression={config.param_compression}, whose messages are less precise than float64, got "
                f"float64 in param group {number}"
            )
