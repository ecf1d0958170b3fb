"""Checks of ZeroOptimizer's options: every error names the value, what is legal, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.optim.compressed import CompressedOptimizer
from hf_compressopt.optim.grad_norm import is_shard
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.options import check_at_least, check_count, check_parameter
from hf_compressopt.zero.messages import FLOAT_BYTES, Precision

_MB = 1 << 20
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NORM_OF_A_TENSOR = "its update of a tensor takes a norm of the whole tensor: use hf_compressopt.Lamb"
_MATRICES = "it needs whole matrices: use it without ZeRO, or AdamW here"
_ROWS_AND_COLUMNS = "it needs whole rows and columns: use it without ZeRO, or AdamW here"
_STATISTICS = "its update takes statistics over whole tensors or over all of them: use it without ZeRO, or AdamW here"
_IN_BLOCKS = (
    "it keeps its state in blocks with a scale each, which cannot be cut at any element: use it without ZeRO, or "
    "torch.optim.AdamW here (state_dtype='bf16' makes its state small)"
)
_WHOLE_TENSORS = {
    "Muon": _MATRICES,
    "Adafactor": _ROWS_AND_COLUMNS,
    "CAME": _ROWS_AND_COLUMNS,
    "Lomo": "it updates during backward: use it without ZeRO",
    "AdaLomo": "it updates during backward: use it without ZeRO",
    "LBFGS": "it needs the whole gradient as one vector: use it without ZeRO",
    "SparseAdam": "it takes sparse gradients, which are not partitioned: use AdamW with sparse=False embeddings",
    "ZeroRedundancyOptimizer": "it partitions by itself: give the class that it wraps",
    "ZeroOptimizer": "it partitions by itself: give the class that it wraps",
    "SOAP": _MATRICES,
    "Kron": _MATRICES,
    "LAMB": _NORM_OF_A_TENSOR,
    "Lamb": _NORM_OF_A_TENSOR,
    "FusedLAMB": _NORM_OF_A_TENSOR,
    "LARS": _NORM_OF_A_TENSOR,
    "StableAdamW": _STATISTICS,
    "NovoGrad": _STATISTICS,
    "AdamP": _STATISTICS,
    "SGDP": _STATISTICS,
}
#: The same, for families of classes: part of the name.
_FAMILIES = {
    "Prodigy": _STATISTICS,
    "DAdapt": _STATISTICS,
    "Shampoo": _MATRICES,
    "GaLore": _MATRICES,
    "APOLLO": _MATRICES,
    "ScheduleFree": "its train() and eval() exchange whole parameters: use it without ZeRO, or AdamW here",
    "8bit": _IN_BLOCKS,
    "4bit": _IN_BLOCKS,
    "Fp8": _IN_BLOCKS,
}
_NO_FAMILY = "Optimizer8bit"  # the base of all optimizers of bitsandbytes, those of 32 bits too


def check_optimizer_class(optimizer_class: Any, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Check that an optimizer can be partitioned.

    Args:
        optimizer_class: The wrapped optimizer's class.
        options: The wrapped optimizer's options.

    Raises:
        TypeError: If it is no optimizer class.
        ValueError: If it is known to need whole tensors, to keep its state in blocks, or to send by itself.
    """
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_class must be a subclass of torch.optim.Optimizer, such as torch.optim.AdamW, got "
            f"{optimizer_class!r}; its options follow as keyword arguments"
        )
    if issubclass(optimizer_class, CompressedOptimizer):
        raise ValueError(
            f"{optimizer_class.__name__} cannot be partitioned: its error feedback needs whole buckets on every rank; "
            f"use {optimizer_class.__name__} without zero_stage, or ZeroOptimizer with torch.optim.AdamW or Lamb"
        )
    if issubclass(optimizer_class, Lamb):
        return
    for cls in optimizer_class.__mro__:
        if (reason := _reason_against(cls.__name__)) is not None:
            raise ValueError(f"{optimizer_class.__name__} cannot be partitioned: {reason}")
    if options.get("optim_bits", 32) != 32:
        raise ValueError(
            f"{optimizer_class.__name__} with optim_bits={options['optim_bits']} cannot be partitioned: {_IN_BLOCKS}"
        )
    if options.get("percentile_clipping", 100) != 100:
        raise ValueError(
            f"percentile_clipping must be 100, got {options['percentile_clipping']}: {optimizer_class.__name__} would "
            "clip by the norms of this rank's parts of tensors; use clip_grad"
        )


def _reason_against(name: str) -> str | None:
    """The reason why a class of this name cannot be partitioned, or None if there is none."""
    if name in _WHOLE_TENSORS:
        return _WHOLE_TENSORS[name]
    return next((reason for part, reason in _FAMILIES.items() if part in name and name != _NO_FAMILY), None)


def take_clipping(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], clip_grad: float
) -> tuple[dict[str, Any], float]:
    """Read the wrapped optimizer's ``max_grad_norm``, which would clip by this rank's part, as ``clip_grad``.

    Returns:
        The wrapped optimizer's options without ``max_grad_norm``, and the norm to clip to; 0 is off.

    Raises:
        ValueError: If ``clip_grad`` is given too, or the optimizer clips unless it is told not to.
    """
    if "max_grad_norm" not in options:
        by_default = signature(optimizer_class).parameters.get("max_grad_norm")
        if by_default is not None and by_default.default not in (0, None):
            raise ValueError(
                f"{optimizer_class.__name__} clips to max_grad_norm={by_default.default} by this rank's part of the "
                "gradients: give max_grad_norm=..., which then is the norm over all ranks, or 0"
            )
        return options, clip_grad
    inner, wanted = {**options, "max_grad_norm": 0.0}, options["max_grad_norm"] or 0.0
    check_at_least("max_grad_norm", wanted, 0)
    if wanted > 0 and clip_grad > 0:
        raise ValueError(f"max_grad_norm={wanted} and clip_grad={clip_grad} are two spellings of one option: give one")
    return inner, clip_grad or float(wanted)


def check_stage(stage: Any) -> None:
    """Check the stage.

    Raises:
        ValueError: If it is not 1 or 2.
    """
    if isinstance(stage, bool) or stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage!r}")


def check_flags(**flags: Any) -> None:
    """Check options that are True or False.

    Raises:
        TypeError: For one that is neither.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def bucket_sizes(
    bucket_cap_mb: float | None, reduce_bucket_size: int | None, allgather_bucket_size: int | None
) -> tuple[int, int]:
    """Elements that are reduced, and gathered, together.

    Raises:
        ValueError: If one is less than 1, or both spellings of the first are given.
        TypeError: If one is no number.
    """
    if bucket_cap_mb is not None and reduce_bucket_size is not None:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb} (MiB of float32 values) and reduce_bucket_size={reduce_bucket_size} "
            "(values) are two spellings of one option: give one"
        )
    if reduce_bucket_size is not None:
        check_count("reduce_bucket_size", reduce_bucket_size)
        reduce = reduce_bucket_size
    else:
        cap = 25.0 if bucket_cap_mb is None else bucket_cap_mb
        check_at_least("bucket_cap_mb", cap, 0)
        reduce = int(cap * _MB / FLOAT_BYTES)
        if reduce < 1:
            raise ValueError(f"bucket_cap_mb must be > 0 and hold at least one float32 value, got {cap}")
    if allgather_bucket_size is not None:
        check_count("allgather_bucket_size", allgather_bucket_size)
    return reduce, allgather_bucket_size or reduce


def make_precision(
    communication_data_type: torch.dtype | str | None,
    gradient_accumulation_dtype: torch.dtype | str | None,
    postscale_gradients: bool,
    gradient_predivide_factor: float,
) -> Precision:
    """How gradients are scaled and rounded.

    Raises:
        ValueError: For a dtype that is none, or a factor that is not positive or has no effect.
    """
    check_flags(postscale_gradients=postscale_gradients)
    check_at_least("gradient_predivide_factor", gradient_predivide_factor, 0)
    sent = as_dtype("communication_data_type", communication_data_type)
    kept = as_dtype("gradient_accumulation_dtype", gradient_accumulation_dtype)
    if not postscale_gradients:
        if gradient_predivide_factor != 1.0:
            raise ValueError(
                f"gradient_predivide_factor={gradient_predivide_factor} needs postscale_gradients=True: without it all "
                "of the division comes first"
            )
        return Precision(sent, kept)
    if gradient_predivide_factor == 0:
        raise ValueError("gradient_predivide_factor must be > 0, got 0")
    before = None if gradient_predivide_factor == 1.0 else 1.0 / gradient_predivide_factor
    return Precision(sent, kept, before, float(gradient_predivide_factor))


def as_dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype from itself or a name such as "bf16", "fp32", "bfloat16".

    Raises:
        ValueError: For anything else.
    """
    short = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    found = value
    if isinstance(value, str):
        found = short.get(value, getattr(torch, value, None))
    if value is not None and found not in _DTYPES:
        raise ValueError(f"{name} must be one of 'fp32', 'bf16', 'fp16', a torch dtype, or None, got {value!r}")
    return found if isinstance(found, torch.dtype) else None


def check_parameters(params: list[Tensor], number: int) -> None:
    """Check the trainable parameters of a param group.

    Raises:
        TypeError: For a dtype or layout that is not supported.
        ValueError: If several elements of a parameter share memory.
    """
    for param in params:
        if not param.requires_grad:
            continue  # it is not partitioned
        if is_shard(param):
            raise TypeError(
                f"parameters must be whole tensors, got shards of FSDP or tensor parallelism in param group {number}: "
                "use the optimizer without ZeRO, its state is sharded as the parameters are"
            )
        check_parameter(param, _DTYPES, number)


def wants_offload(option: Any) -> bool:
    """Read ``offload_optimizer``: False, None, True or "cpu".

    Raises:
        ValueError: For anything else, or where there is no accelerator whose memory could be saved.
    """
    if option not in (False, None, True, "cpu", "none"):
        raise ValueError(f"offload_optimizer must be True, 'cpu' or False, got {option!r}")
    if option in (True, "cpu"):
        require_accelerator("offload_optimizer")
        return True
    return False


def require_accelerator(what: str) -> None:
    """Check that there is a device with memory of its own.

    Raises:
        ValueError: If there is none.
    """
    if not torch.accelerator.is_available():
        raise ValueError(
            f"{what} moves optimizer state from an accelerator's memory to the host's, and there is no accelerator "
            "here: leave it out"
        )
