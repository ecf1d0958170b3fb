"""The optimizers and parameters that ZeroOptimizer takes. Each error names the value, what is legal, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.math import is_shard
from hf_compressopt.optim.options import check_at_least, check_parameter
from hf_compressopt.zero.config import DTYPES, ZeroConfig

# The optimizers that are known to need more than elements, by class name, and by a part of the name for families.
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
    """Check that an optimizer can be partitioned, with these options.

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
            "use ZeroOptimizer with torch.optim.AdamW or Lamb, or OnebitAdam, which has an option zero_stage of its own"
        )
    if issubclass(optimizer_class, Lamb):
        return
    for name in [cls.__name__ for cls in optimizer_class.__mro__ if cls.__name__ != _NO_FAMILY]:
        reasons = [_WHOLE_TENSORS.get(name), *(reason for part, reason in _FAMILIES.items() if part in name)]
        if any(reasons):
            raise ValueError(f"{optimizer_class.__name__} cannot be partitioned: {next(filter(None, reasons))}")
    if options.get("optim_bits", 32) != 32:
        raise ValueError(
            f"{optimizer_class.__name__} with optim_bits={options['optim_bits']} cannot be partitioned: {_IN_BLOCKS}"
        )
    if options.get("percentile_clipping", 100) != 100:
        raise ValueError(
            f"percentile_clipping must be 100, got {options['percentile_clipping']}: {optimizer_class.__name__} would "
            "clip by the norms of this rank's parts of tensors; use clip_grad"
        )


def take_clipping(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], clip_grad: float
) -> tuple[dict[str, Any], float]:
    """Read ``max_grad_norm`` as ``clip_grad``; a wrapped optimizer that has it would clip by this rank's part.

    Returns:
        The wrapped optimizer's options with ``max_grad_norm`` off, and the norm to clip to; 0 is off.

    Raises:
        ValueError: If ``clip_grad`` is given too, or the optimizer clips unless it is told not to.
    """
    taken = signature(optimizer_class).parameters
    if "max_grad_norm" not in options:
        by_default = taken.get("max_grad_norm")
        if by_default is not None and by_default.default not in (0, None):
            raise ValueError(
                f"{optimizer_class.__name__} clips to max_grad_norm={by_default.default} by this rank's part of the "
                "gradients: give max_grad_norm=..., which is then the norm over all ranks, or 0 to turn it off"
            )
        return options, clip_grad
    inner, wanted = {**options, "max_grad_norm": 0.0}, options["max_grad_norm"] or 0.0
    if "max_grad_norm" not in taken:
        del inner["max_grad_norm"]
    check_at_least("max_grad_norm", wanted, 0)
    if wanted > 0 and clip_grad > 0:
        raise ValueError(f"max_grad_norm={wanted} and clip_grad={clip_grad} are two spellings of one option: give one")
    return inner, clip_grad or float(wanted)


def check_parameters(params: Sequence[Tensor], number: int, config: ZeroConfig) -> None:
    """Check the trainable parameters of param group ``number``.

    Raises:
        TypeError: For a dtype or layout that is not supported.
        ValueError: If several elements of a parameter share memory.
    """
    for param in params:
        if not param.requires_grad:
            continue  # frozen parameters are not partitioned
        if is_shard(param):
            raise TypeError(
                f"parameters must be whole tensors, got shards of FSDP or tensor parallelism in param group {number}: "
                "use the optimizer without ZeRO, its state is sharded as the parameters are"
            )
        check_parameter(param, DTYPES, number)
        if param.dtype == torch.float64 and (config.grad_form is not None or config.param_form is not None):
            raise TypeError(
                f"parameters must be float32, bfloat16 or float16 with grad_compression={config.grad_compression} and "
                f"param_compression={config.param_compression}, whose messages are less precise than float64, got "
                f"float64 in param group {number}"
            )
