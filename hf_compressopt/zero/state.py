"""The state of a ZeroOptimizer as a checkpoint sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import StateTensor
from hf_compressopt.optim.flat_optimizer import SCALAR
from hf_compressopt.optim.options import check_plain, check_ranks, group_from_plain, plain_group
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import Part, UpdateBucket, element_state
from hf_compressopt.zero.state_dict import check_header, header_of, load_groups, load_header, set_state

if TYPE_CHECKING:
    from hf_compressopt.zero.optimizer import ZeroOptimizer

#: Start of the name of what has one value per parameter and is a number of Python's.
NUMBER = "number:"
#: Before the name of a parameter: its master copy.
MASTER = "master"


class CheckpointView:
    """Methods of a ZeroOptimizer by which checkpoints are saved and loaded."""

    communicator: Communicator
    partition: PartitionedParameters
    optimizer_class: type[torch.optim.Optimizer]
    param_groups: list[dict[str, Any]]
    staged: Sequence[tuple[UpdateBucket, Part, str, Tensor]] = ()  # read from a checkpoint, not yet in use

    @property
    def _optimizer(self) -> ZeroOptimizer:
        return cast("ZeroOptimizer", self)

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Names of the trainable parameters, per group: ``names`` in the order of all of them, or torch's param_names.

        Raises:
            ValueError: If their number is not that of the trainable parameters, or one occurs twice.
        """
        order = self.partition.in_order()
        names = [self.partition.known[number].name for number in order] if names is None else names
        if len(names) != len(self.partition.known) or len(set(names)) != len(names):
            raise ValueError(
                f"there must be a different name for each of the {len(self.partition.known)} trainable parameters, got "
                f"{len(names)} names, {len(set(names))} different ones: give names=..."
            )
        grouped: list[list[str]] = [[] for _ in self.param_groups]
        for name, number in zip(names, order, strict=True):
            grouped[self.partition.known[number].group].append(name)
        return grouped

    def shared_parameters(self) -> list[list[Tensor]]:
        """Those of each param group that all ranks hold: none where it has a process group of its own."""
        grouped: list[list[Tensor]] = [[] for _ in self.param_groups]
        for number in self.partition.in_order():
            group = self.partition.known[number].group
            if self.partition.known[number].owner is None:
                grouped[group].append(self.partition.tensors[number])
        return grouped

    def checkpoint_tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """Every state tensor that this rank holds a part of; element-wise ones share memory with the optimizer.

        Args:
            names: Names of the trainable parameters, per group.
        """
        flat = self._qualified(names)
        tensors: list[StateTensor] = []
        singles: dict[str, str] = {}
        for bucket, part in self.partition.parts():
            state = bucket.state_of(part)
            shape, name = tuple(self.partition.tensors[part.param].shape), flat[part.param]
            whole = {key: state[key] for key in element_state(state, part)}
            check_keys(state, self.optimizer_class.__name__)
            if not part.direct:
                whole[MASTER] = part.tensor
            for key, value in whole.items():
                tensors.append(StateTensor(f"{key}/{name}", shape, part.span.start, value, False))
            for key, value in state.items():  # what has one value per parameter is beside every part of it
                if key not in whole and value is not None:
                    tensors.append(self._single(key, name, value))
                    same = singles.setdefault(tensors[-1].name, repr(tensors[-1].local.item()))
                    if same != repr(tensors[-1].local.item()):
                        raise ValueError(not_alike(tensors[-1].name))
        return tensors

    def _single(self, key: str, name: str, value: Any) -> StateTensor:
        kind = SCALAR if isinstance(value, Tensor) else NUMBER
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"the state {key!r} of {self.optimizer_class.__name__} has the shape {list(value.shape)} for a part of "
                f"{name}: it is neither one value for each element nor one number, so that a checkpoint cannot cut it "
                "into other parts; use this optimizer without ZeRO, or save optimizer.state_dict() on every rank"
            )
        return value_of_parameter(f"{kind}{key}/{name}", value)

    def wanted_tensors(
        self,
        names: Sequence[Sequence[str]],
        header: dict[str, Any],
        described: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> list[StateTensor]:
        """Room for what a checkpoint holds of this rank's parts; taken over by :meth:`load_checkpoint_header`.

        Args:
            names: Names of the trainable parameters, per group.
            header: The checkpoint's header.
            described: dtype and shape of each tensor of the checkpoint.

        Raises:
            ValueError: If the shape of one is not that of its parameter.
        """
        of_parameter: dict[str, list[str]] = {}
        for full in described:
            key, _, name = full.partition("/")
            of_parameter.setdefault(name, []).append(key)
        self.staged, wanted = [], []
        flat = self._qualified(names)
        for bucket, part in self.partition.parts():
            name, numel = flat[part.param], part.span.numel
            keys = of_parameter.get(name, [])
            wider = part.tensor.dtype != self.partition.tensors[part.param].dtype
            if wider and MASTER not in keys and header.get("stage") != 0:
                keys = [*keys, MASTER]  # its absence is an error; an ordinary optimizer has none to save
            for key in keys:
                whole = tuple(self.partition.tensors[part.param].shape)
                dtype, shape = described.get(f"{key}/{name}", (part.tensor.dtype, whole))
                single = key.startswith((SCALAR, NUMBER))
                if (
                    shape != whole
                    and not single
                    or key.startswith(NUMBER)
                    and shape != ()
                    or single
                    and prod(shape) != 1
                ):
                    raise ValueError(f"{key}/{name} has shape {list(shape)}, the parameter {list(whole)}")
                live = None if single else part.tensor if key == MASTER else bucket.state_of(part).get(key)
                local = room_for(live, shape if single else (numel,), dtype)
                self.staged.append((bucket, part, key, local))
                start = 0 if single else part.span.start
                wanted.append(StateTensor(f"{key}/{name}", shape, start, local, False))
        return wanted

    def _qualified(self, names: Sequence[Sequence[str]]) -> list[str]:
        """One name per parameter; where only some ranks hold copies of it, with the first of them."""
        rest = [iter(group) for group in names]
        result = [""] * len(self.partition.known)
        for number in self.partition.in_order():
            group = self.partition.known[number].group
            owner = self.partition.known[number].owner
            prefix = "" if owner is None else f"from{owner}."
            result[number] = prefix + next(rest[group])
        return result

    def checkpoint_header(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors, for JSON: the header, and each group's hyperparameters."""
        return {**header_of(self._optimizer), "param_groups": [plain_group(group) for group in self.param_groups]}

    def check_checkpoint_header(self, header: dict[str, Any]) -> None:
        """Check that a checkpoint's header fits this optimizer.

        Raises:
            ValueError: If it does not; nothing has changed.
        """
        check_header(self._optimizer, header)
        own = [number for number, group in enumerate(self.param_groups) if group.get("process_group") is not None]
        check_ranks(header["world_size"], self.communicator.world_size, own)
        saved = header.get("param_groups")
        if not isinstance(saved, list) or len(saved) != len(self.param_groups):
            raise ValueError(f"the checkpoint has the param groups {saved!r}, this optimizer {len(self.param_groups)}")
        for number, (group, values) in enumerate(zip(self.param_groups, saved, strict=True)):
            check_plain(group, values, number)

    def load_checkpoint_header(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over a checkpoint: the header, and what :meth:`wanted_tensors` made room for."""
        found: dict[int, tuple[UpdateBucket, Part, dict[str, Any]]] = {
            id(part): (bucket, part, {}) for bucket, part in self.partition.parts()
        }
        with_master = {id(part) for _, part, key, _ in self.staged if key == MASTER}
        for _, part in self.partition.parts():
            if id(part) not in with_master:
                part.read_from(self.partition.tensors[part.param])
        for _, part, key, local in self.staged:
            if key == MASTER:
                part.tensor.copy_(local)
            elif key.startswith(NUMBER):
                found[id(part)][2][key.removeprefix(NUMBER)] = local.item()
            else:
                whole = not key.startswith(SCALAR)
                if whole and not part.direct and header.get("stage") == 0:
                    local = local.to(part.tensor.dtype)  # moments of a 16-bit parameter's, here a master copy's
                found[id(part)][2][key.removeprefix(SCALAR)] = local
        self.staged = []
        for bucket, part, state in found.values():
            set_state(self._optimizer, bucket, part, state)
        load_groups(self.param_groups, [group_from_plain(group) for group in header["param_groups"]])
        load_header(self._optimizer, header)


def room_for(live: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Where a tensor of a checkpoint is read to: the state's own memory if it is such a tensor, or else new memory."""
    if isinstance(live, Tensor) and live.shape == tuple(shape) and live.dtype == dtype and live.is_contiguous():
        return live
    return torch.empty(tuple(shape), dtype=dtype)


def value_of_parameter(name: str, value: Any, *, replicated: bool = False) -> StateTensor:
    """What an optimizer has once per parameter, a tensor or a number of Python's, as a checkpoint sees it.

    Raises:
        ValueError: For what is neither.
    """
    if not isinstance(value, Tensor):
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}.get(type(value))
        if dtype is None:
            raise ValueError(f"{name} must be a tensor, a number or a boolean to be saved, got {value!r}")
        value = torch.tensor(value, dtype=dtype)
    return StateTensor(name, tuple(value.shape), 0, value, replicated)


def check_keys(state: Mapping[Any, Any], optimizer: str) -> None:
    """Check that a checkpoint can name what an optimizer has for a parameter.

    Raises:
        ValueError: For a key that would be read as something else.
    """
    for key in state:
        if not isinstance(key, str) or "/" in key or key == MASTER or key.startswith((SCALAR, NUMBER)):
            raise ValueError(
                f"the state {key!r} of {optimizer} cannot be saved by this name: a key must be a string without '/', "
                f"other than {MASTER!r}, that does not begin with {SCALAR!r} or {NUMBER!r}; rename it in the optimizer"
            )


def not_alike(name: str) -> str:
    """The error for a number of a parameter that differs between the parts of it."""
    return (
        f"{name} is not the same for all parts of the parameter, so that a checkpoint cannot hold it as one number: "
        "the optimizer is not element-wise; use it without ZeRO, or save optimizer.state_dict() on every rank"
    )


ZeroState = CheckpointView
