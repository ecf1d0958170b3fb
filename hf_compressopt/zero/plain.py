"""An optimizer that is not partitioned, as a checkpoint sees it: with the tensors of a ZeroOptimizer around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.flat import StateTensor
from hf_compressopt.optim.flat_optimizer import SCALAR
from hf_compressopt.optim.options import check_count, check_plain, group_from_plain, plain_group
from hf_compressopt.zero.state import MASTER, NUMBER, check_keys, room_for, value_of_parameter
from hf_compressopt.zero.state_dict import FUNCTIONAL


class PlainState:
    """The state of an ordinary optimizer, which every rank holds alike.

    Attributes:
        communicator: All ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator | None = None) -> None:
        """See the class.

        Args:
            optimizer: The optimizer.
            communicator: The ranks that hold it; all ranks if None.

        Raises:
            TypeError: For an optimizer whose state is shared out among the ranks by others, or belongs to no parameter.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "the state of LBFGS belongs to no parameter, so that a checkpoint cannot hold it: save "
                "optimizer.state_dict() with torch.save"
            )
        self._optimizer = optimizer
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer" or any(hasattr(p, "placements") for p in params):
            raise TypeError(
                f"the state of {type(optimizer).__name__} must be alike on all ranks, and here each has a part of it: "
                "use ZeroOptimizer, or save it as its own documentation says"
            )
        device = next((param.device for param in params), torch.device("cpu"))
        self.communicator = communicator or make_communicator(None, None, device=device, traffic=Traffic())
        self._read: list[tuple[int, str, Tensor]] = []  # number of a parameter, key, value: from a checkpoint

    def _params(self) -> Iterator[tuple[int, int, Tensor, str]]:
        """Of each trainable parameter: number in state dicts, number of its group, itself, and torch's name of it."""
        number = 0
        for index, group in enumerate(self._optimizer.param_groups):
            names = group.get("param_names", [f"group{index}.{place}" for place in range(len(group["params"]))])
            for param, name in zip(group["params"], names, strict=True):
                if param.requires_grad:
                    yield number, index, param, name
                number += 1

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Names of the trainable parameters, per group: ``names`` in the order of all of them, or torch's param_names.

        Raises:
            ValueError: If their number is not that of the trainable parameters, or one occurs twice.
        """
        params = list(self._params())
        names = [name for *_, name in params] if names is None else names
        if len(names) != len(params) or len(set(names)) != len(names):
            raise ValueError(
                f"there must be a different name for each of the {len(params)} trainable parameters, got "
                f"{len(names)} names, {len(set(names))} different ones: give names=..."
            )
        grouped: list[list[str]] = [[] for _ in self._optimizer.param_groups]
        for (_, group, _, _), name in zip(params, names, strict=True):
            grouped[group].append(name)
        return grouped

    def shared_parameters(self) -> list[list[Tensor]]:
        """The trainable parameters of each param group."""
        grouped: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for _, group, param, _ in self._params():
            grouped[group].append(param)
        return grouped

    def checkpoint_tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """Every state tensor.

        Args:
            names: Names of the trainable parameters, per group.
        """
        tensors = []
        for (_, _, param, _), name in zip(self._params(), chain.from_iterable(names), strict=True):
            state = self._optimizer.state.get(param, {})
            check_keys(state, type(self._optimizer).__name__)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or key != "step"):
                    tensors.append(StateTensor(f"{key}/{name}", tuple(param.shape), 0, value, True))
                elif value is not None:
                    kind = SCALAR if isinstance(value, Tensor) else NUMBER
                    tensors.append(value_of_parameter(f"{kind}{key}/{name}", value, replicated=True))
        return tensors

    def wanted_tensors(
        self,
        names: Sequence[Sequence[str]],
        header: dict[str, Any],
        described: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> list[StateTensor]:
        """Room for what a checkpoint holds; taken over by :meth:`load_checkpoint_header`.

        Args:
            names: Names of the trainable parameters, per group.
            header: The checkpoint's header.
            described: dtype and shape of each tensor of the checkpoint.

        Raises:
            ValueError: If the shape of one is not that of its parameter, or if it is a master copy.
        """
        of_parameter: dict[str, list[str]] = {}
        for full in described:
            key, _, name = full.partition("/")
            of_parameter.setdefault(name, []).append(key)
        self._read, wanted = [], []
        # what has a say of its own at a load may refuse it, when the state must be as it was
        in_place = type(self._optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        in_place = in_place and not self._optimizer._optimizer_load_state_dict_pre_hooks
        for (number, _, param, _), name in zip(self._params(), chain.from_iterable(names), strict=True):
            for key in of_parameter.get(name, []):
                dtype, shape = described[f"{key}/{name}"]
                if key == MASTER:
                    raise ValueError(f"it has a master copy of {name}, and an optimizer without ZeRO no place for it")
                if shape != tuple(param.shape) and not key.startswith((SCALAR, NUMBER)):
                    raise ValueError(f"{key}/{name} has shape {list(shape)}, the parameter {list(param.shape)}")
                live = self._optimizer.state.get(param, {}).get(key) if in_place else None
                local = room_for(live, shape, dtype)
                self._read.append((number, key, local))
                wanted.append(StateTensor(f"{key}/{name}", shape, 0, local, True))
        return wanted

    def checkpoint_header(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors, for JSON: that of a ZeroOptimizer around it, of stage 0."""
        steps = [int(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        return {
            "class": f"ZeroOptimizer({type(self._optimizer).__name__})",
            "stage": 0,
            "step": max(steps, default=0),
            "skipped_steps": 0,
            "world_size": self.communicator.world_size,
            "loss_scale": [1.0, 0],
            "bytes_sent": 0,
            "param_groups": [plain_group(group) for group in self._optimizer.param_groups],
        }

    def check_checkpoint_header(self, header: dict[str, Any]) -> None:
        """Check that a checkpoint's header fits this optimizer.

        Raises:
            ValueError: If it does not; nothing has changed.
        """
        name, groups = type(self._optimizer).__name__, self._optimizer.param_groups
        if header.get("class") != f"ZeroOptimizer({name})":
            raise ValueError(
                f"the state is of {header.get('class', header.get('optimizer'))}, this optimizer is {name}"
            )
        check_count("world_size", header.get("world_size"))
        saved = header.get("param_groups")
        if not isinstance(saved, list) or len(saved) != len(groups):
            raise ValueError(f"the checkpoint has the param groups {saved!r}, this optimizer {len(groups)}")
        for number, (group, values) in enumerate(zip(groups, saved, strict=True)):
            check_plain(group, values, number)

    def load_checkpoint_header(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over a checkpoint: hyperparameters, and what :meth:`wanted_tensors` made room for."""
        packed = self._optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        for number, key, value in self._read:
            of_parameter = state.setdefault(number, {})
            if key.startswith(NUMBER):
                of_parameter[key.removeprefix(NUMBER)] = value.item()
            else:
                of_parameter[key.removeprefix(SCALAR)] = value
        self._read = []
        for mine, saved in zip(packed["param_groups"], header["param_groups"], strict=True):
            for key, value in group_from_plain(saved).items():
                if key in mine and key not in FUNCTIONAL:
                    mine[key] = torch.full_like(mine[key], value) if isinstance(mine[key], Tensor) else value
        self._optimizer.load_state_dict({**packed, "state": state})
