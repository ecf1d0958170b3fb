"""Conversion of checkpoints to and from one file of AdamW's state: ``hf-compressopt consolidate`` and ``import``.

A file for torch.load holds the state dict of ``torch.optim.AdamW``: parameters have numbers, in the order of the param
groups. A safetensors file holds ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>`` and ``step/<parameter>`` (float32
[]). It also holds ``max_exp_avg_sq/<parameter>`` and ``master/<parameter>`` (float32 copies of 16-bit parameters), if
the checkpoint has them. Its metadata has ``param_groups`` as JSON: for each param group the hyperparameters, and
``params``, a list of ``{"name", "shape", "dtype"}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from hf_compressopt.checkpoint.io import has_checkpoint, save_state
from hf_compressopt.checkpoint.load import AdamView, Entry
from hf_compressopt.checkpoint.partitioned import PlainState
from hf_compressopt.checkpoint.save import bytes_of
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.format.index import (
    BY_PLACE,
    DEFAULT_PREFIX,
    DTYPES,
    INDEX_NAME,
    CheckpointIndex,
    StrPath,
    check_prefix,
    errors_naming,
    find_indices,
    name_by_place,
)
from hf_compressopt.format.plan import MASTER, Kind
from hf_compressopt.format.shards import ShardFiles, durable_file, temporary_name, write_shard
from hf_compressopt.optim.moments import MOMENTS
from hf_compressopt.optim.options import check_at_least, check_betas
from hf_compressopt.optim.state import STATE_KEY

#: Options of a param group in the state dict of torch's AdamW that are no hyperparameters.
_HOW_TO_RUN = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
_SWITCHES = ("amsgrad", "maximize", "bias_correction")
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "initial_lr", *_SWITCHES)
_KINDS = (Kind.STEP, *MOMENTS, "max_exp_avg_sq", MASTER)
_MOST_STEPS = 2**53
_SAFETENSORS, _TORCH = ".safetensors", (".pt", ".pth", ".bin")


def find_index(directory: StrPath, prefix: str | None = None) -> Path | None:
    """Return the index of a folder's checkpoint, or None if there is none."""
    folder = Path(directory)
    indices = find_indices(folder, prefix)
    by_default = [path for path in indices if path.name.startswith(DEFAULT_PREFIX)]
    indices = by_default or indices  # others beside it are of gradients, perhaps
    if len(indices) > 1:
        prefixes = ", ".join(path.name.removesuffix(INDEX_NAME.format(prefix="")) for path in indices)
        raise ValueError(f"{folder} holds the checkpoints of several optimizers: give --prefix, one of {prefixes}")
    return indices[0] if indices else None


def consolidate(index_path: Path, out: StrPath, *, force: bool = False) -> list[str]:
    """Write a checkpoint of any of our optimizers as one file of AdamW's state, verified.

    The moments are those that the run itself uses: see :mod:`hf_compressopt.checkpoint.load`. The file gets its name
    only when it is whole. One of safetensors takes little memory. Returns sentences about what the checkpoint has and
    the file does not.
    """
    path = Path(out)
    if path.suffix not in (_SAFETENSORS, *_TORCH):
        raise ValueError(f"{path} must end in {_SAFETENSORS} or in one of {', '.join(_TORCH)}")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists: give another name, or --force to replace it")
    index = CheckpointIndex.read(index_path)
    if path.resolve() in {(index_path.parent / shard.file).resolve() for shard in index.shards}:
        raise ValueError(f"{path} is a shard of the checkpoint itself: give another name")
    with errors_naming(index_path):
        with ShardFiles(index_path.parent, index) as files:
            view = AdamView(index, files)
            if path.suffix == _SAFETENSORS:
                _write_safetensors(path, view)
                return view.notes
            save_torch_file(path, _packed(view))
    masters = sum(entry.key.kind == MASTER for entry in view.found.values())
    left_out = [f"{masters} float32 master copies are left out: AdamW has none; a {_SAFETENSORS} file keeps them"]
    return view.notes + (left_out if masters else [])


def _write_safetensors(path: Path, view: AdamView) -> None:
    groups = [
        {**group, "params": parameters}
        for group, parameters in zip(view.param_groups, view.index.parameters, strict=True)
    ]
    metadata = {"format": "pt", "optimizer": "AdamW", "param_groups": json.dumps(groups)}
    layout = {name: (entry.dtype, entry.shape) for name, entry in view.found.items()}
    write_shard(path, layout, metadata, lambda name: map(bytes_of, view.read_parts(view.found[name])))


def _packed(view: AdamView) -> dict[str, Any]:
    """Return the state dict of torch's AdamW, in memory."""
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    count = 0
    for group, parameters in zip(view.param_groups, view.index.parameters, strict=True):
        numbers = list(range(count, count + len(parameters)))
        count += len(parameters)
        packed["param_groups"].append({**group, **_HOW_TO_RUN, "params": numbers})
        for number, parameter in zip(numbers, parameters, strict=True):
            for kind in (Kind.STEP, *MOMENTS, "max_exp_avg_sq"):
                if (entry := view.found.get(f"{kind}/{parameter['name']}")) is not None:
                    packed["state"].setdefault(number, {})[kind] = _whole(view, entry)
    return packed


def save_torch_file(path: Path, contents: Any) -> None:
    """Save for torch.load, durably: the file is whole, or as it was."""
    with durable_file(temporary_name(path), final=path) as file:
        torch.save(contents, file)


def _whole(view: AdamView, entry: Entry) -> Tensor:
    whole, start = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu"), 0
    flat = whole.view(-1)
    for part in view.read_parts(entry):
        flat[start : start + part.numel()] = part
        start += part.numel()
    return whole


# -- the other way ----------------------------------------------------------------------------------------------------


class _Imported(PlainState):
    """The state of a file, which this process saves alone; ``by_place``: its parameters have places, and no names."""

    reserved = ()  # a file of ZeroOptimizer's state has master copies

    def __init__(self, optimizer: torch.optim.Optimizer, by_place: bool) -> None:
        super().__init__(optimizer, TorchCommunicator(alone=True))
        self._by_place = by_place

    def header(self) -> dict[str, Any]:
        header = super().header()
        return {**header, BY_PLACE: True} if self._by_place else header


def import_state(source: StrPath, directory: StrPath, *, prefix: str = DEFAULT_PREFIX, force: bool = False) -> None:
    """Make a checkpoint of a file of AdamW's state: a Trainer's ``optimizer.pt``, or what :func:`consolidate` wrote.

    A file for torch.load has no names: its parameters are identified by their places in the param groups, as in torch.
    """
    path = Path(source)
    check_prefix(prefix)
    if has_checkpoint(directory, prefix=prefix) and not force:
        raise FileExistsError(f"{directory} holds a checkpoint already: give another folder, or --force to replace it")
    by_place = path.suffix != _SAFETENSORS
    state = _Imported(_from_torch_file(path) if by_place else _from_safetensors(path), by_place)
    try:
        save_state(state, directory, prefix=prefix)
    except (ValueError, TypeError) as error:  # of its names
        raise ValueError(f"{path} cannot be imported: {error}") from error


@contextmanager
def _must_be_adamw(path: Path) -> Iterator[None]:
    """Name the file in every error inside the block: it can hold anything."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} is not a state of AdamW: it lacks {error}") from error
    except Exception as error:
        raise ValueError(f"{path} is not a state of AdamW: {error}") from error


def _from_safetensors(path: Path) -> torch.optim.Optimizer:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise ValueError(f"{path} is not readable as safetensors: {error}") from error
    with _must_be_adamw(path):
        groups = json.loads(metadata["param_groups"])
        params = [group["params"] for group in groups]
        rows = [
            [{kind: tensors[name] for kind in _KINDS if (name := f"{kind}/{p['name']}") in tensors} for p in group]
            for group in params
        ]
        named = [[(p["name"], _placeholder(p["shape"], getattr(torch, p["dtype"]))) for p in group] for group in params]
        return _optimizer(groups, named, rows)


def _from_torch_file(path: Path) -> torch.optim.Optimizer:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the file can hold anything
        told = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path} is not readable by torch.load: {type(error).__name__}: {told}") from error
    if not isinstance(loaded, dict) or not {"state", "param_groups"} <= loaded.keys():
        raise ValueError(f"{path} is not an optimizer's state dict: it has no 'state' and 'param_groups'")
    if STATE_KEY in loaded:
        raise ValueError(
            f"{path} is the state dict of one rank, or a stub, of an optimizer of hf_compressopt: load the checkpoint "
            "in its folder with hf_compressopt.load_state"
        )
    with _must_be_adamw(path):
        groups = loaded["param_groups"]
        rows = [[loaded["state"].get(number, {}) for number in group["params"]] for group in groups]
        named = [
            [(name_by_place(number, place), _placeholder_of(row)) for place, row in enumerate(group)]
            for number, group in enumerate(rows)
        ]
        return _optimizer(groups, named, rows)


def _placeholder_of(row: dict[str, Any]) -> nn.Parameter:
    """Return a parameter that this state fits; without state, a frozen one."""
    if not row:
        return nn.Parameter(torch.empty(0), requires_grad=False)
    if not {Kind.STEP, *MOMENTS} <= row.keys():
        raise ValueError(f"the state of a parameter has {sorted(row)}, and must have step, exp_avg and exp_avg_sq")
    return _placeholder(row["exp_avg"].shape, row["exp_avg"].dtype)


def _placeholder(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter of this shape that takes the memory of one element."""
    if dtype not in {getattr(torch, name) for name in DTYPES} or not dtype.is_floating_point:
        raise ValueError(f"a parameter must have a floating-point dtype, got {dtype}")
    return nn.Parameter(torch.empty((), dtype=dtype).expand(tuple(shape)))


def _optimizer(
    groups: Sequence[dict[str, Any]],
    named: Sequence[Sequence[tuple[str, nn.Parameter]]],
    rows: Sequence[Sequence[dict[str, Any]]],
) -> torch.optim.Optimizer:
    decoupled = [group.get("decoupled_weight_decay", group.get("adam_w_mode", True)) for group in groups]
    cls = torch.optim.AdamW if all(decoupled) else torch.optim.Adam
    made = [
        {**dict(_hyperparameters(group)), "params": list(params)} for group, params in zip(groups, named, strict=True)
    ]
    _check_sizes(tensor for states in rows for row in states for kind, tensor in row.items() if kind in _KINDS)
    optimizer = cls(made)
    for params, states in zip(named, rows, strict=True):
        for (name, param), row in zip(params, states, strict=True):
            if row:
                optimizer.state[param] = dict(_checked_state(name, row, param))
    return optimizer


def _check_sizes(values: Iterable[Any]) -> None:
    """Check that tensors have memory of their own: with strides of 0 a small file could fill a disk."""
    nbytes_in: dict[int, int] = {}  # of the tensors in a storage, by its address
    for value in values:
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 1:
            storage = value.untyped_storage()
            nbytes = nbytes_in.get(storage.data_ptr(), 0) + value.nbytes
            nbytes_in[storage.data_ptr()] = nbytes
            if nbytes > storage.nbytes():
                raise ValueError(
                    f"its tensors share memory: {nbytes} bytes of them lie in a storage of {storage.nbytes()} bytes; "
                    "save clones of them"
                )


def _checked_state(name: str, row: dict[str, Any], param: Tensor) -> Iterator[tuple[str, Any]]:
    for kind in _KINDS:
        value = row.get(kind)
        if value is None:
            continue
        if kind == Kind.STEP:
            if isinstance(value, (bool, str)) or not 0 <= float(value) < _MOST_STEPS:
                raise ValueError(f"the step of {name} must be a number from 0 to {_MOST_STEPS}, got {value!r}")
        elif not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
            raise ValueError(f"{kind} of {name} must be a dense tensor of floating-point numbers")
        elif value.shape != param.shape:
            raise ValueError(f"{kind} of {name} has shape {list(value.shape)}, the parameter {list(param.shape)}")
        yield kind, value


def _hyperparameters(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _HYPERPARAMETERS:
        if (value := group.get(key)) is None:
            continue
        if key == "betas":
            value = tuple(map(float, value))
            check_betas(value)
        elif key in _SWITCHES:
            if not isinstance(value, bool):
                raise TypeError(f"{key} must be True or False, got {value!r}")
        else:
            check_at_least(key, value, 0)
            value = float(value)
        yield key, value
