"""Checks of options: every error names the value, the legal values, and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import SIGNS_PER_BYTE
from hf_compressopt.kernels import INTEGER_BITS
from hf_compressopt.kernels.memory import why_not_dense
from hf_compressopt.optim.math import is_shard

_NOT_LOADED = ("params", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
_NO_HYPERPARAMETERS = ("params", "param_names", "process_group", "exp_avg_mask")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Why there is no option "state".
NO_STATE = (
    "state is no option any more: OnebitAdam, ZeroOneAdam and gradients of 4 or 8 bits keep their errors, and these "
    "two optimizers their frozen variance, in 8 bits; OnebitLamb keeps its state in float32. Leave it out"
)


def check_at_least(name: str, value: Any, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"{name} must be a number >= {low}, got {value!r}")
    if not bool(value >= low):
        raise ValueError(f"{name} must be >= {low}, got {value}")
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_count(name: str, value: Any, low: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")


def check_scale_block(value: Any) -> None:
    if value is not None and (not isinstance(value, int) or value < 1 or value % SIGNS_PER_BYTE):
        raise ValueError(f"scale_block must be a positive multiple of {SIGNS_PER_BYTE}, or None, got {value!r}")


def resolve_communicator(
    communicator: str | Communicator | None, comm_backend_name: str | None, cuda_aware: bool
) -> str | Communicator | None:
    """Return the communicator option, given by one of two spellings."""
    if communicator is not None and comm_backend_name is not None:
        raise ValueError(
            f"communicator={communicator!r} and comm_backend_name={comm_backend_name!r} are two spellings of one "
            "option: give one"
        )
    chosen = communicator if communicator is not None else comm_backend_name
    if not isinstance(cuda_aware, bool) or (cuda_aware and chosen != "mpi"):
        raise ValueError(f"cuda_aware must be False, got {cuda_aware!r}: it belongs to communicator='mpi'")
    return chosen


def check_betas(betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for index, beta in enumerate(betas):
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1:
            raise ValueError(f"betas[{index}] must be in [0, 1), got {beta!r}")


def names_by_group(default: Sequence[Sequence[str]], explicit: Sequence[str] | None) -> list[list[str]]:
    """Names per param group: the explicit ones, one for each parameter and all different, or else the default ones."""
    count = sum(map(len, default))
    names = list(chain.from_iterable(default) if explicit is None else explicit)
    if len(names) != count or len(set(names)) != len(names):
        raise ValueError(
            f"there must be a different name for each of the {count} trainable parameters, got {len(names)} names, "
            f"{len(set(names))} different ones: give names=..."
        )
    rest = iter(names)
    return [[next(rest) for _ in group] for group in default]


@contextmanager
def without_state_moved(
    groups: Sequence[dict[str, Any]], known: Iterable[Tensor], param_group: dict[str, Any]
) -> Iterator[None]:
    """A context for adding a param group, whose trainable parameters without state leave the groups they are in.

    A parameter that was frozen has no state; once it trains, a new group may take it over. After an error all
    parameters are back in their groups.
    """
    entries = param_group["params"]
    param_group["params"] = entries = [entries] if isinstance(entries, Tensor) else list(entries)
    params = [entry[-1] if isinstance(entry, tuple) else entry for entry in entries]
    with_state = {id(param) for param in known}
    moved = {id(p) for p in params if isinstance(p, Tensor) and p.requires_grad and id(p) not in with_state}
    before = [(group[key], list(group[key])) for group in groups for key in ("params", "param_names") if key in group]
    for group in groups:
        stays = [id(param) not in moved for param in group["params"]]
        for key in ("param_names", "params"):
            if key in group:
                group[key][:] = [entry for entry, kept in zip(group[key], stays, strict=True) if kept]
    try:
        yield
    except BaseException:
        for changed, old in before:
            changed[:] = old
        raise


def check_group(group: dict[str, Any], number: int) -> None:
    for name in ("lr", "eps", "weight_decay"):
        check_at_least(name, group.get(name, 0), 0)
    check_betas(group["betas"])
    for name in ("bias_correction", "eps_inside_sqrt", "non_freeze"):
        if not isinstance(group.get(name, False), bool):
            raise TypeError(f"{name} must be True or False, got {group[name]!r} in param group {number}")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"{name} must be False, got {group[name]} in param group {number}")
    for param in group["params"]:
        if is_shard(param):
            raise TypeError(
                f"parameters must be whole tensors, got shards of FSDP or tensor parallelism in param group {number}: "
                "compressed optimizers need DistributedDataParallel; use an ordinary optimizer with FSDP"
            )
        check_parameter(param, DTYPES, number)
        _check_device(param, group["params"][0], number)
    if (mask := group.get("exp_avg_mask")) is not None:
        check_mask(mask, group["params"], number)


def _check_device(param: Tensor, first: Tensor, number: int) -> None:
    if param.device != first.device:
        raise ValueError(
            f"all parameters must be on one device, got {first.device} and, in param group {number}, {param.device}: "
            "make an optimizer for each device"
        )


def check_parameter(param: Tensor, dtypes: tuple[torch.dtype, ...], number: int) -> None:
    if param.dtype not in dtypes:
        raise TypeError(f"parameters must be one of {dtypes}, got {param.dtype} in param group {number}")
    if (problem := why_not_dense(param)) is not None:
        raise TypeError(f"parameters must be dense, got {problem} in param group {number}")
    repeated = any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True))
    if repeated and param.numel() > 0 and param.requires_grad:
        raise ValueError(
            f"the elements of a parameter must not share memory, got shape {tuple(param.shape)} with strides "
            f"{param.stride()} in param group {number}: copy it with .clone() after .expand()"
        )


def check_mask(mask: Any, params: list[Tensor], number: int) -> None:
    """Check that a momentum mask broadcasts to every parameter of a group."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"exp_avg_mask must be a tensor, got {type(mask).__name__} in param group {number}")
    for param in params:
        try:
            mask.expand(param.shape)
        except RuntimeError:
            raise ValueError(
                f"exp_avg_mask of shape {tuple(mask.shape)} must broadcast to every parameter of param group {number}, "
                f"got one of shape {tuple(param.shape)}: give the parameter a group of its own"
            ) from None


def in_lists(params: Any) -> tuple[Any, torch.device]:
    """Return the parameters of a constructor with lists for iterators, and the device of the first one."""
    if isinstance(params, (Tensor, str)):
        return params, torch.device("cpu")  # torch refuses it
    params = list(params)
    entries: list[Any] = []
    for entry in params:
        if isinstance(entry, dict) and "params" in entry and not isinstance(entry["params"], Tensor):
            entry["params"] = list(entry["params"])
            entries += entry["params"]
        else:
            entries.append(entry["params"] if isinstance(entry, dict) else entry)
    tensors = (entry[-1] if isinstance(entry, tuple) else entry for entry in entries)
    return params, next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))


def check_last_group(
    groups: list[dict[str, Any]],
    check: Callable[[dict[str, Any], int], None] = check_group,
    *,
    one_device: bool = False,
) -> None:
    """Check the param group that was added last; remove it if it is not valid."""
    try:
        check(groups[-1], len(groups) - 1)
        if one_device and groups[-1]["params"]:
            first = next(group["params"][0] for group in groups if group["params"])
            _check_device(groups[-1]["params"][0], first, len(groups) - 1)
    except (ValueError, TypeError):
        groups.pop()
        raise


def check_plain(group: dict[str, Any], saved: Any, number: int) -> None:
    """Check that the hyperparameters of a saved group are of the kind of this group's, and in their ranges."""
    for key, value in group_from_plain(saved).items():
        here = group.get(key)
        if here is not None and _kind(value) != _kind(here):
            raise ValueError(f"{key} must be of the kind of {here!r}, got {value!r} in param group {number}")
        if key in ("lr", "eps", "weight_decay") and _kind(value) is float:
            check_at_least(f"{key} of param group {number}", value, 0)
        if key == "betas":
            for beta in value:  # a few optimizers have three
                check_betas((beta, beta))


def _kind(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_kind(entry) for entry in value]
    return float if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) else type(value)


def check_ranks(saved: int, world_size: int, local_groups: list[int]) -> None:
    """Check that a checkpoint of ``saved`` ranks can be loaded on ``world_size``."""
    if local_groups and saved != world_size:
        raise ValueError(
            f"it was saved by {saved} rank(s) and this run has {world_size}, and the param groups {local_groups} have "
            f"a process_group of their own, whose parameters not all ranks hold: resume on {saved}"
        )


def loadable_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a saved param group, without those of torch's Adam that have no effect here."""
    if group.get("decoupled_weight_decay") is False and group["weight_decay"] != 0:
        raise ValueError(
            f"the state dict is of Adam with L2 regularization, weight_decay={group['weight_decay']}, which is not "
            "decoupled: load an AdamW state dict, or one with weight_decay=0"
        )
    return {key: deepcopy(value) for key, value in group.items() if key not in _NOT_LOADED}


def plain_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group's hyperparameters as JSON holds them."""
    values = {key: plain_value(value) for key, value in group.items() if key not in _NO_HYPERPARAMETERS}
    return {key: value for key, value in values.items() if value is not None}


def plain_value(value: Any) -> Any:
    """Return a hyperparameter as JSON holds it; None for a value that is no hyperparameter."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(entry, (int, float)) for entry in value):
        return list(value)
    return None


def group_from_plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group's hyperparameters, read from JSON."""
    if not isinstance(group, dict):
        raise ValueError(f"a param group must be an object, got {group!r}")
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in group.items()
        if key not in _NO_HYPERPARAMETERS
    }


def check_zero_stage(stage: Any, name: str, stages: Sequence[int], warmup_bits: int, clip: str = "sketch") -> None:
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(f"zero_stage must be an int, one of {list(stages)}, got {stage!r}")
    if stage and tuple(stages) == (0,):
        raise ValueError(
            f"zero_stage={stage} is not supported with {name}, whose ranks need whole moments: use OnebitAdam with "
            f"zero_stage={2 if stage == 2 else 1}, or ZeroOptimizer with an ordinary optimizer"
        )
    if stage not in stages:
        raise ValueError(f"zero_stage must be one of {list(stages)}, got {stage}")
    if stage == 2 and clip == "local":
        raise ValueError(
            f"zero_stage=2 needs clip='late', its default, got {clip!r}: messages leave before the norm is known"
        )
    if stage and warmup_bits not in INTEGER_BITS:
        raise ValueError(
            f"zero_stage={stage} needs warmup_bits to be one of {list(INTEGER_BITS)}, got {warmup_bits}: gradients and "
            "updates travel in that many bits"
        )


def refuse_uneven_inputs(optimizer: Any) -> None:
    raise ValueError(
        f"{type(optimizer).__name__} does not support uneven inputs (torch's Join, Accelerate's join_uneven_inputs): "
        "all ranks take every step together. Give all as many batches: drop_last=True in the DataLoader, or "
        "even_batches=True in Accelerate"
    )
