"""An optimizer that is not partitioned, as a checkpoint sees it: with the tensors of a ZeroOptimizer around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.state import (
    Header,
    LoadPlan,
    State,
    check_keys,
    groups_to_load,
    room_for,
    value_of_parameter,
)
from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.format.index import TensorEntry, name_by_place
from hf_compressopt.format.plan import MASTER, REPLICA, Per, StateTensor, TensorKey, dtype_name, keys_by_parameter
from hf_compressopt.optim.options import check_count, plain_group
from hf_compressopt.zero.state_dict import FUNCTIONAL

#: Number of a parameter in state dicts, a key of its state, and what was read for it.
_Row = tuple[int, TensorKey, Tensor]


class PlainState(State):
    """The state of an ordinary optimizer, which every rank holds alike."""

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator | None = None) -> None:
        """Wrap an optimizer."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "the state of LBFGS belongs to no parameter, so that a checkpoint cannot hold it: save "
                "optimizer.state_dict() with torch.save"
            )
        self._optimizer, self._name = optimizer, type(optimizer).__name__
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        if self._name == "ZeroRedundancyOptimizer" or any(hasattr(p, "placements") for p in params):
            raise TypeError(
                f"the state of {self._name} must be alike on all ranks, and here each has a part of it: "
                "use ZeroOptimizer, or save it as its own documentation says"
            )
        device = next((param.device for param in params), torch.device("cpu"))
        names: list[list[str]] = [[] for _ in optimizer.param_groups]
        trainable: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        self._numbers: list[int] = []  # of the trainable parameters, in state dicts
        number = count()
        for index, group in enumerate(optimizer.param_groups):
            called = group.get("param_names", [name_by_place(index, place) for place in range(len(group["params"]))])
            for param, name in zip(group["params"], called, strict=True):
                place = next(number)
                if param.requires_grad:
                    names[index].append(name)
                    trainable[index].append(param)
                    self._numbers.append(place)
        own = communicator or make_communicator(None, None, device=device, traffic=Traffic())
        super().__init__(own, names, trainable)

    def _called(self, names: Sequence[Sequence[str]]) -> Iterator[tuple[int, Tensor, str]]:
        """Yield each trainable parameter with its number in state dicts and its name."""
        return zip(self._numbers, chain.from_iterable(self.params), chain.from_iterable(names), strict=True)

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """See the base class."""
        tensors = []
        for _, param, name in self._called(names):
            state = self._optimizer.state.get(param, {})
            self._check_keys(state)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or key != "step"):
                    tensors.append(StateTensor.of(TensorKey(key, name), value, replicated=True))
                elif value is not None:
                    tensors.append(value_of_parameter(key, name, value, replicated=True))
        return tensors

    def _check_keys(self, state: Mapping[Any, Any]) -> None:
        check_keys(state, self._name)

    def header(self) -> dict[str, Any]:
        """The header of a ZeroOptimizer around it, of stage 0."""
        steps = [int(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        return {
            "class": f"ZeroOptimizer({self._name})",
            "stage": 0,
            "step": max(steps, default=0),
            "skipped_steps": 0,
            "world_size": self.communicator.world_size,
            "loss_scale": [1.0, 0],
            "bytes_sent": 0,
            "param_groups": [plain_group(group) for group in self._optimizer.param_groups],
        }

    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """See the base class."""
        if header.values.get("class") != f"ZeroOptimizer({self._name})":
            raise ValueError(f"the state is of {header.title}, this optimizer is {self._name}")
        check_count("world_size", header.values.get("world_size"))
        groups = groups_to_load(self._optimizer.param_groups, header, names, entries)
        rows = list(self._rows(names, entries))
        wanted = [StateTensor.of(key, local, entries[str(key)].shape, replicated=True) for _, key, local in rows]
        return LoadPlan(wanted, lambda: self._commit(rows, groups))

    def _rows(self, names: Sequence[Sequence[str]], entries: Mapping[str, TensorEntry]) -> Iterator[_Row]:
        of_parameter = keys_by_parameter(entries)
        # a load_state_dict of the optimizer's own may refuse what was read, and then the state must be as it was
        in_place = type(self._optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        in_place = in_place and not self._optimizer._optimizer_load_state_dict_pre_hooks
        for number, param, name in self._called(names):
            for key in of_parameter.get(name, []):
                entry = entries[str(key)]
                if key.kind == REPLICA:
                    continue
                if key.kind == MASTER and entry.dtype == dtype_name(param) and entry.shape == tuple(param.shape):
                    yield number, key, param.detach()  # the parameter lagged behind it
                    continue
                if key.kind == MASTER:
                    raise ValueError(f"it has a master copy of {name}, which an optimizer without ZeRO does not use")
                if entry.shape != tuple(param.shape) and key.per is Per.ELEMENT:
                    raise ValueError(f"{key} has shape {list(entry.shape)}, the parameter {list(param.shape)}")
                in_use = in_place and key.per is Per.ELEMENT
                live = self._optimizer.state.get(param, {}).get(key.kind) if in_use else None
                yield number, key, room_for(live, entry.shape, entry.dtype)

    def _commit(self, rows: Sequence[_Row], groups: Sequence[dict[str, Any]]) -> None:
        packed = self._optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        for number, key, value in rows:
            if key.kind == MASTER:
                continue
            state.setdefault(number, {})[key.kind] = value.item() if key.per is Per.NUMBER else value
        for mine, saved in zip(packed["param_groups"], groups, strict=True):
            for name, value in saved.items():
                if name in mine and name not in FUNCTIONAL:
                    mine[name] = torch.full_like(mine[name], value) if isinstance(mine[name], Tensor) else value
        self._optimizer.load_state_dict({**packed, "state": state})
