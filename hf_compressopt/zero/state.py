"""The state of a partitioned optimizer as state dicts and checkpoints see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.flat import StateTensor
from hf_compressopt.optim.flat_optimizer import SCALAR, STATE_KEY, STUB_NOTE
from hf_compressopt.optim.options import check_count, check_plain, check_ranks, group_from_plain, plain_group
from hf_compressopt.zero.gradients import ZeroGradients
from hf_compressopt.zero.shards import OWN_KEYS, Piece, UpdateBucket, element_state

#: Start of the name of what has one value per parameter and is a number of Python's.
NUMBER = "number:"
#: Before the name of a parameter: its master copy.
MASTER = "master"
_NOT_SAVED = ("process_group",)
#: Hyperparameters that say how to compute, and not what: those of a checkpoint are left alone.
FUNCTIONAL = ("foreach", "fused", "capturable", "differentiable")

PieceState = dict[str, Any]


class ZeroState(ZeroGradients):
    """Saving and loading of this rank's part of the state."""

    stage: int

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class."""
        self._in_shards = False
        self._states_are_away = False
        self._staged: list[tuple[UpdateBucket, Piece, str, Tensor]] = []  # read from a checkpoint, not yet in use
        super().__init__(*args, **options)

    # -- state dict ---------------------------------------------------------------------------------------------------

    @contextmanager
    def state_in_shards(self) -> Iterator[None]:
        """Inside, ``state_dict()`` is a small stub and ``load_state_dict()`` does nothing: the state is in shards."""
        before, self._in_shards = self._in_shards, True
        try:
            yield
        finally:
            self._in_shards = before

    def state_dict(self) -> dict[str, Any]:
        """This rank's local state, in tensors and primitives; makes no collective call.

        ``state[i]["pieces"]`` lists this rank's pieces of parameter i: where each starts, its master copy where there
        is one, and the wrapped optimizer's state of it.
        """
        packed = super().state_dict()
        for group in packed["param_groups"]:
            for key in _NOT_SAVED:
                group.pop(key, None)
        if self._in_shards:
            packed["state"] = {}
            # one group too many: torch's own optimizers refuse it, where they would take an empty state for a fresh one
            packed["param_groups"].append({"params": [], STATE_KEY: STUB_NOTE})
            packed[STATE_KEY] = {"stub": True, "step": self.steps}
            return packed
        keys = self._packed_keys()
        for bucket, piece in self.pieces():
            row: PieceState = {"start": piece.span.start, "stop": piece.span.stop, "state": bucket.state_of(piece)}
            if not piece.direct:
                row["master"] = piece.tensor
            packed["state"].setdefault(keys[piece.param], {"pieces": []})["pieces"].append(row)
        packed[STATE_KEY] = {**self._header(), "rank": self.communicator.rank}
        return packed

    def _packed_keys(self) -> list[int]:
        """For each partitioned parameter the number that torch's state dicts have for it."""
        order = {id(p): number for number, p in enumerate(dict.fromkeys(self._all_params()))}
        return [order[id(param)] for param in self._params]

    def _all_params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict: one of this class, rank and layout, or a whole one of the wrapped optimizer's.

        Raises:
            ValueError: If it does not fit; nothing has changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        own = state_dict.get(STATE_KEY)
        if own is not None and own.get("stub"):
            if not self._in_shards:
                raise ValueError(
                    "this state dict is a stub: the state itself lies beside it, in compressopt.index.json and its "
                    "safetensors files; load it with hf_compressopt.load_state(optimizer, directory), or through "
                    "Trainer or Accelerate with hf_compressopt registered"
                )
        elif not self._in_shards:
            self._load_full(state_dict, own)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_full(self, state_dict: dict[str, Any], own: dict[str, Any] | None) -> None:
        saved_groups = state_dict["param_groups"]
        sizes, saved = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved_groups]
        if sizes != saved:
            raise ValueError(f"the state dict has param groups of {saved} parameters, this optimizer of {sizes}")
        if own is not None:
            self._check_header(own)
            if own["world_size"] != self.communicator.world_size:
                raise ValueError(
                    f"the state is of world_size {own['world_size']}, this optimizer of "
                    f"{self.communicator.world_size}: save and load with hf_compressopt.save_state and load_state, "
                    "which take any number of ranks"
                )
            if own["rank"] != self.communicator.rank:
                raise ValueError(
                    f"the state dict is rank {own['rank']}'s, this is rank {self.communicator.rank}: each rank has "
                    "state of its own; save and load with hf_compressopt.save_state and load_state"
                )
        numbers = dict(zip(self._all_params(), chain.from_iterable(g["params"] for g in saved_groups), strict=True))
        rows = []
        for bucket, piece in self.pieces():
            param = self._params[piece.param]
            row = state_dict["state"].get(numbers[param], {})
            found = _whole_state(row, piece, param) if own is None else _own_state(row, piece)
            rows.append((bucket, piece, found))
        for bucket, piece, found in rows:
            if "master" in found:
                piece.tensor.copy_(found["master"].reshape(-1))
            else:
                self._master_from_parameter(piece)
            copies = {key: v.clone() if isinstance(v, Tensor) else v for key, v in found.get("state", {}).items()}
            self._set_state(bucket, piece, copies)
        self._load_groups(saved_groups)
        if own is not None:
            self._load_header(own)
        else:
            steps = [int(row["step"]) for row in state_dict["state"].values() if "step" in row]
            self.steps = max(steps, default=0)

    def _master_from_parameter(self, piece: Piece) -> None:
        if not piece.direct:
            piece.tensor.copy_(self._params[piece.param].detach().reshape(-1)[piece.span.start : piece.span.stop])

    def _set_state(self, bucket: UpdateBucket, piece: Piece, state: dict[str, Any]) -> None:
        """Take over a piece's state, element-wise state in the dtype in which it is kept."""
        if bucket.inner is None:
            return
        for name in element_state(state, piece):
            state[name] = state[name].to(piece.tensor.device, self._dtype_of_state(state[name], piece))
        if state:
            bucket.inner.state[piece.tensor] = state
        else:
            bucket.inner.state.pop(piece.tensor, None)

    def _dtype_of_state(self, value: Tensor, piece: Piece) -> torch.dtype:
        """Where none was chosen: of torch's optimizers the weight's, as torch loads them; of others at least that."""
        if self._layout.state_dtype is not None or not value.is_floating_point():
            return self._layout.state_dtype or value.dtype
        if self.optimizer_class.__module__.startswith("torch.optim."):
            return piece.tensor.dtype
        return torch.promote_types(value.dtype, piece.tensor.dtype)

    def _load_groups(self, saved: Sequence[dict[str, Any]]) -> None:
        """Take over hyperparameters, in place: schedulers keep hold of the groups."""
        for group, values in zip(self.param_groups, saved, strict=True):
            for key, value in values.items():
                if key in OWN_KEYS or key in FUNCTIONAL:
                    continue
                if isinstance(group.get(key), Tensor) and key == "lr":
                    group[key].fill_(float(value))
                else:
                    group[key] = value

    def _header(self) -> dict[str, Any]:
        return {
            "class": f"ZeroOptimizer({self.optimizer_class.__name__})",
            "stage": self.stage,
            "step": self.steps,
            "skipped_steps": self.skipped_steps,
            "world_size": self.communicator.world_size,
            "loss_scale": [self.loss_scale.value, self.loss_scale.good_steps],
            "bytes_sent": self.traffic.total_bytes,
        }

    def _check_header(self, header: dict[str, Any]) -> None:
        wanted = self._header()
        if header.get("class") != wanted["class"]:
            raise ValueError(f"the state is of class {header.get('class')!r}, this optimizer of {wanted['class']!r}")
        for name in ("step", "skipped_steps", "world_size", "bytes_sent"):
            check_count(name, header.get(name), low=0)
        scale = header.get("loss_scale")
        if not isinstance(scale, list) or len(scale) != 2 or not float(scale[0]) > 0 or int(scale[1]) < 0:
            raise ValueError(f"loss_scale in the state must be a number > 0 and a count, got {scale!r}")

    def _load_header(self, header: dict[str, Any]) -> None:
        self.steps, self.skipped_steps = int(header["step"]), int(header["skipped_steps"])
        self.loss_scale.value, self.loss_scale.good_steps = float(header["loss_scale"][0]), int(header["loss_scale"][1])
        self.traffic.restore(int(header["bytes_sent"]))
        self._ranks_checked = False

    # -- what a checkpoint sees ---------------------------------------------------------------------------------------

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Names of the trainable parameters, per group: ``names`` in the order of all of them, or torch's param_names.

        Raises:
            ValueError: If their number is not that of the trainable parameters, or one occurs twice.
        """
        order = self._in_order()
        names = [self._names[number] for number in order] if names is None else names
        if len(names) != len(self._params) or len(set(names)) != len(names):
            raise ValueError(
                f"there must be a different name for each of the {len(self._params)} trainable parameters, got "
                f"{len(names)} names, {len(set(names))} different ones: give names=..."
            )
        grouped: list[list[str]] = [[] for _ in self.param_groups]
        for name, number in zip(names, order, strict=True):
            grouped[self._group_of[number]].append(name)
        return grouped

    def shared_parameters(self) -> list[list[Tensor]]:
        """Those of each param group that all ranks hold: none where it has a process group of its own."""
        grouped: list[list[Tensor]] = [[] for _ in self.param_groups]
        for number in self._in_order():
            group = self._group_of[number]
            if self.param_groups[group].get("process_group") is None:
                grouped[group].append(self._params[number])
        return grouped

    def checkpoint_tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """Every state tensor that this rank holds a part of; element-wise ones share memory with the optimizer.

        Args:
            names: Names of the trainable parameters, per group.
        """
        flat = self._qualified(names)
        tensors: list[StateTensor] = []
        singles: dict[str, str] = {}
        for bucket, piece in self.pieces():
            state = bucket.state_of(piece)
            shape, name = tuple(self._params[piece.param].shape), flat[piece.param]
            whole = {key: state[key] for key in element_state(state, piece)}
            check_keys(state, self.optimizer_class.__name__)
            if not piece.direct:
                whole[MASTER] = piece.tensor
            for key, value in whole.items():
                tensors.append(StateTensor(f"{key}/{name}", shape, piece.span.start, value, False))
            for key, value in state.items():  # what has one value per parameter is beside every piece of it
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
        """Room for what a checkpoint holds of this rank's pieces; taken over by :meth:`load_checkpoint_header`.

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
        self._staged, wanted = [], []
        flat = self._qualified(names)
        for bucket, piece in self.pieces():
            name, numel = flat[piece.param], piece.span.numel
            keys = of_parameter.get(name, [])
            wider = piece.tensor.dtype != self._params[piece.param].dtype
            if wider and MASTER not in keys and header.get("stage") != 0:
                keys = [*keys, MASTER]  # its absence is an error; an ordinary optimizer has none to save
            for key in keys:
                whole = tuple(self._params[piece.param].shape)
                dtype, shape = described.get(f"{key}/{name}", (piece.tensor.dtype, whole))
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
                live = None if single else piece.tensor if key == MASTER else bucket.state_of(piece).get(key)
                local = room_for(live, shape if single else (numel,), dtype)
                self._staged.append((bucket, piece, key, local))
                start = 0 if single else piece.span.start
                wanted.append(StateTensor(f"{key}/{name}", shape, start, local, False))
        return wanted

    def _qualified(self, names: Sequence[Sequence[str]]) -> list[str]:
        """One name per parameter; where only some ranks hold copies of it, with the first of them."""
        rest = [iter(group) for group in names]
        result = [""] * len(self._params)
        for number in self._in_order():
            group = self._group_of[number]
            ranks = self.param_groups[group].get("process_group")
            prefix = "" if ranks is None else f"from{torch.distributed.get_process_group_ranks(ranks)[0]}."
            result[number] = prefix + next(rest[group])
        return result

    def checkpoint_header(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors, for JSON: the header, and each group's hyperparameters."""
        return {**self._header(), "param_groups": [plain_group(group) for group in self.param_groups]}

    def check_checkpoint_header(self, header: dict[str, Any]) -> None:
        """Check that a checkpoint's header fits this optimizer.

        Raises:
            ValueError: If it does not; nothing has changed.
        """
        self._check_header(header)
        own = [number for number, group in enumerate(self.param_groups) if group.get("process_group") is not None]
        check_ranks(header["world_size"], self.communicator.world_size, own)
        saved = header.get("param_groups")
        if not isinstance(saved, list) or len(saved) != len(self.param_groups):
            raise ValueError(f"the checkpoint has the param groups {saved!r}, this optimizer {len(self.param_groups)}")
        for number, (group, values) in enumerate(zip(self.param_groups, saved, strict=True)):
            check_plain(group, values, number)

    def load_checkpoint_header(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over a checkpoint: the header, and what :meth:`wanted_tensors` made room for."""
        found: dict[int, tuple[UpdateBucket, Piece, dict[str, Any]]] = {
            id(piece): (bucket, piece, {}) for bucket, piece in self.pieces()
        }
        with_master = {id(piece) for _, piece, key, _ in self._staged if key == MASTER}
        for _, piece in self.pieces():
            if id(piece) not in with_master:
                self._master_from_parameter(piece)
        for _, piece, key, local in self._staged:
            if key == MASTER:
                piece.tensor.copy_(local)
            elif key.startswith(NUMBER):
                found[id(piece)][2][key.removeprefix(NUMBER)] = local.item()
            else:
                whole = not key.startswith(SCALAR)
                if whole and not piece.direct and header.get("stage") == 0:
                    local = local.to(piece.tensor.dtype)  # moments of a 16-bit parameter's, here a master copy's
                found[id(piece)][2][key.removeprefix(SCALAR)] = local
        self._staged = []
        for bucket, piece, state in found.values():
            self._set_state(bucket, piece, state)
        self._load_groups([group_from_plain(group) for group in header["param_groups"]])
        self._load_header(header)


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


def _own_state(row: dict[str, Any], piece: Piece) -> PieceState:
    """The saved state of one piece, from a state dict of this class."""
    pieces: list[PieceState] = row.get("pieces", [])
    for saved in pieces:
        if (saved["start"], saved["stop"]) == (piece.span.start, piece.span.stop):
            return saved
    raise ValueError(
        f"the state dict has pieces {[(saved['start'], saved['stop']) for saved in pieces]} of a parameter of which "
        f"this rank has elements {piece.span.start} to {piece.span.stop}: make the "
        "optimizer with the bucket size that the saved one had, or load with hf_compressopt.load_state"
    )


def _whole_state(row: dict[str, Any], piece: Piece, param: Tensor) -> PieceState:
    """The state of one piece, cut out of the wrapped optimizer's own state of the whole parameter."""
    state = {}
    for name, value in row.items():
        if isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or name != "step"):
            value = value.reshape(-1)[piece.span.start : piece.span.stop].to(piece.tensor.dtype)
        elif isinstance(value, Tensor) and value.dim() > 0:
            raise ValueError(f"{name} of shape {tuple(value.shape)} does not fit a parameter of {tuple(param.shape)}")
        state[name] = value
    return {"state": state}
