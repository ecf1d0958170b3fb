"""The state of an optimizer in flat buffers: param groups and state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.optim.consensus import Consensus
from hf_compressopt.optim.group_state import ExtraState, GroupState
from hf_compressopt.optim.options import (
    check_group,
    check_last_group,
    check_names,
    in_lists,
    loadable_group,
)
from hf_compressopt.schedules import Stage, StepPlan

#: Key of a state dict for all that torch's own state dicts have no place for.
STATE_KEY = "compressopt"
#: The text of a stub in the place of an optimizer's state.
STUB_NOTE = "a stub: the state is in compressopt.index.json and the safetensors files beside this one"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lies in one flat buffer per param group and is allocated at construction.

    ``state[p]`` holds torch's names (``step``, ``exp_avg``, ``exp_avg_sq``) as views of the buffers, shaped like p.

    Attributes:
        communicator: The ranks.
        traffic: What was sent.
    """

    #: State tensors beyond Adam's moments.
    extra_state: tuple[ExtraState, ...] = ()

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        bucket_numel: int,
        scale_block: int | None,
        communicator: str | Communicator | None,
        process_group: dist.ProcessGroup | None,
        cuda_aware: bool = False,
    ) -> None:
        """Check the param groups, choose the communicator, allocate the state."""
        self.bucket_numel, self.scale_block = bucket_numel, scale_block
        self.traffic = Traffic()
        self._step = 0
        self._in_shards = False
        self._states: list[GroupState] = []
        self._tensors: dict[str, Tensor] = {}  # state that belongs to no group, on the CPU, alike on all ranks
        self._chosen: dict[str, Any] = {"name": communicator, "cuda_aware": cuda_aware, "traffic": self.traffic}
        params, device = in_lists(params)
        self.communicator = make_communicator(process_group=process_group, device=device, **self._chosen)
        self._consensus = Consensus(self._states, self.communicator)
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything: copies share the process group, and views stay views of the copied buffers.

        A ``step`` in the instance is left out: schedulers and Accelerate put one there that steps the original.
        """
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    # -- param groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its state is allocated at once.

        A ``process_group`` is removed from the group: it can be neither copied nor saved.

        Raises:
            ValueError: For an option outside its range.
            TypeError: For a parameter of another dtype than float32, bfloat16 or float16.
        """
        own = param_group.pop("process_group", None)  # the dict itself stays: schedulers may hold it
        if own is not None and isinstance(self._chosen["name"], Communicator):
            raise ValueError("a param group with a process_group of its own needs a communicator that is given by name")
        super().add_param_group(param_group)
        check_last_group(self.param_groups, one_device=True)
        group = self.param_groups[-1]
        device = group["params"][0].device if group["params"] else self.communicator.device
        state = GroupState(
            group,
            len(self._states),
            bucket_numel=self.bucket_numel,
            scale_block=self.scale_block,
            communicator=self._communicator_of(own, device),
            extras=self.extra_state,
            own_rank=None if own is None else self.communicator.rank,
        )
        self._states.append(state)
        self._link(state)

    def _communicator_of(self, own: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        """Return the optimizer's communicator, or the one of param groups with this process group."""
        if own is None:
            return self.communicator
        for state in self._states:
            if state.communicator.process_group is own and state.device == device:
                return state.communicator
        return make_communicator(process_group=own, device=device, **self._chosen)

    def _link(self, state: GroupState) -> None:
        """Give ``optimizer.state`` the views of a group's buffers."""
        for index, param in enumerate(state.params):
            self.state[param] = state.torch_state(index)
        self._consensus.check_anew()

    def _before_load(self) -> None:
        """Put everything where a checkpoint is read to; this class has it there."""

    def _state_loaded(self) -> None:
        """Find anew what follows from the state."""
        self._consensus.check_anew()

    def _follow_parameters(self) -> None:
        """Move the buffers to where the parameters are, if a model was moved after its optimizer was made."""
        for state in self._states:
            if state.params and state.params[0].device != state.device:
                state.to(state.params[0].device)
                self.communicator.device = state.communicator.device = state.device
                self._link(state)

    @property
    def trainable_parameters(self) -> list[Tensor]:
        """The parameters that have state, group by group."""
        return list(chain.from_iterable(state.params for state in self._states))

    def own_parameters(self) -> list[Tensor]:
        """Return the parameters of the groups with a process group of their own."""
        return list(chain.from_iterable(state.params for state in self._states if state.own_rank is not None))

    # -- what an optimizer adds to its state dict ---------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        """Numbers and strings that belong to the state, for JSON."""
        raise NotImplementedError("abstract")

    def _check_header(self, header: dict[str, Any]) -> None:
        """Raise ValueError if a header does not fit this optimizer; change nothing."""
        raise NotImplementedError("abstract")

    def _load_header(self, header: dict[str, Any]) -> None:
        """Take over a header that was checked."""
        raise NotImplementedError("abstract")

    def _plain_header(self, step: int) -> dict[str, Any]:
        """The header that a plain Adam state dict at this step stands for."""
        raise NotImplementedError("abstract")

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
        """Return this rank's full local state, errors included, in tensors and primitives. No collective call."""
        self._follow_parameters()
        packed = super().state_dict()
        if self._in_shards:
            packed["state"] = {}
            for group in packed["param_groups"]:
                group.pop("exp_avg_mask", None)
            # torch's own optimizers refuse one group too many; they would take an empty state for a fresh one
            packed["param_groups"].append({"params": [], STATE_KEY: STUB_NOTE})
            packed[STATE_KEY] = {"stub": True, "step": self._step}
            return packed
        packed[STATE_KEY] = {
            **self._header(),
            "rank": self.communicator.rank,
            "worker_error": [state.worker_error for state in self._states],
            "server_error": [state.server_error for state in self._states],
            "group_tensors": [state.group_tensors() for state in self._states],
            "tensors": dict(self._tensors),
        }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict into the buffers: one of this class and rank, or a plain one of torch's Adam or AdamW.

        Raises:
            ValueError: If it does not fit; nothing has changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self._follow_parameters()
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
        rows = self._matching_rows(state_dict)
        if own is None:
            steps = [int(row["step"]) for _, _, row in rows if row]
            header = self._plain_header(max(steps, default=0))
        else:
            header = own
            self._check_errors(own)
        self._check_header(header)
        saved_groups = [loadable_group(group) for group in state_dict["param_groups"]]
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            check_group({**group, **saved}, number)
        for state, index, row in rows:
            initial = {extra.name: row.get(extra.plain, extra.initial) for extra in state.extras}
            for name, target in state.torch_state(index).items():
                _assign(target, row[name] if name in row else initial.get(name, 0.0))
        for number, state in enumerate(self._states):
            for extra in state.extras:
                if extra.per == "group":
                    value = extra.initial if own is None else own["group_tensors"][number][extra.name]
                    _assign(state.extra[extra.name], value)
        self._load_errors(own)
        if own is not None:
            self._tensors = {name: tensor.clone() for name, tensor in own["tensors"].items()}
        for tensor in self._tensors.values() if own is None else ():
            tensor.zero_()
        self._load_groups(saved_groups)
        self._load_header(header)
        self._state_loaded()

    def _matching_rows(self, state_dict: dict[str, Any]) -> list[tuple[GroupState, int, dict[str, Any]]]:
        """Return each trainable parameter with its saved state; {} if a plain state dict has none for it."""
        saved_groups = state_dict["param_groups"]
        sizes, saved = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved_groups]
        if sizes != saved:
            raise ValueError(f"the state dict has param groups of {saved} parameters, this optimizer of {sizes}")
        rows = []
        for group, saved_group, state in zip(self.param_groups, saved_groups, self._states, strict=True):
            key = dict(zip(group["params"], saved_group["params"], strict=True))
            for index, param in enumerate(state.params):
                row = state_dict["state"].get(key[param], {})
                for name, mine in state.torch_state(index).items() if row else ():
                    if STATE_KEY not in state_dict and name not in ("step", *_MOMENTS):
                        continue  # a plain Adam has none of these
                    found = tuple(getattr(row[name], "shape", ())) if name in row else "nothing"
                    if found != tuple(mine.shape):
                        raise ValueError(
                            f"{name} of parameter {key[param]} must have shape {tuple(mine.shape)}, the state dict has "
                            f"{found}"
                        )
                rows.append((state, index, row))
        return rows

    def _check_errors(self, own: dict[str, Any]) -> None:
        if own["world_size"] != self.communicator.world_size:
            raise ValueError(
                f"the state dict is of a run of {own['world_size']} rank(s), this one has "
                f"{self.communicator.world_size}: resume on as many ranks as the run had, or save and load with "
                "hf_compressopt.save_state and load_state, which take any number"
            )
        in_use = any(bool(error.any()) for error in [*own["worker_error"], *own["server_error"]])
        if own["rank"] != self.communicator.rank and in_use:
            raise ValueError(
                f"the state dict is rank {own['rank']}'s, whose errors are not those of rank {self.communicator.rank}: "
                "save and load with hf_compressopt.save_state and load_state, which keep every rank's own"
            )
        for name in ("worker_error", "server_error"):
            saved = [error.numel() for error in own[name]]
            sizes = [getattr(state, name).numel() for state in self._states]
            if self.communicator.world_size == 1:  # it may have taken over those of more ranks, or not
                sizes = [state.layout.numel if size else 0 for state, size in zip(self._states, saved, strict=True)]
            if own["rank"] == self.communicator.rank and sizes != saved:
                raise ValueError(f"{name} must have {sizes} elements per param group, the state dict has {saved}")

    def _load_errors(self, own: dict[str, Any] | None) -> None:
        """Take over the errors of a state dict that was checked; zeros if it has none, or is another rank's."""
        mine = own is not None and own["rank"] == self.communicator.rank
        for number, state in enumerate(self._states):
            saved = [own[name][number] for name in ("worker_error", "server_error")] if own is not None and mine else []
            if self.communicator.world_size == 1:
                state.take_errors(*(error.clone() for error in saved or [_NOTHING] * 2))
                continue
            for index, error in enumerate((state.worker_error, state.server_error)):
                error.copy_(saved[index]) if saved else error.zero_()

    def _load_groups(self, saved: Sequence[dict[str, Any]]) -> None:
        """Take over hyperparameters, in place: schedulers keep hold of the groups."""
        for group, values in zip(self.param_groups, saved, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor) and key == "lr":
                    group[key].fill_(float(value))
                else:
                    group[key] = value

    # -- for checkpoints ----------------------------------------------------------------------------------------------

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Names of the trainable parameters, per group: ``names`` in the order of all of them, or torch's param_names.

        Raises:
            ValueError: If their number is not that of the trainable parameters, or one occurs twice.
        """
        counts = [len(state.params) for state in self._states]
        if names is None:
            names = [name for state in self._states for name in state.names]
        check_names(names, sum(counts))
        rest = iter(names)
        return [[next(rest) for _ in range(count)] for count in counts]

    def _check_tensors(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Check dtype and shape of the optimizer-wide tensors that a checkpoint brings; this class has none.

        Raises:
            ValueError: If one is not what this optimizer could have saved.
        """
        if tensors:
            raise ValueError(f"{sorted(tensors)[0]!r} is no tensor of {type(self).__name__}")

    @property
    def last_plan(self) -> StepPlan:
        """Plan of the last step; before the first one its own."""
        raise NotImplementedError("abstract")

    def _own_tensors(self, stage: Stage) -> Sequence[str]:
        """State tensors that are each rank's own in this stage, beside the errors; "param" for the parameters."""
        return ()


def _assign(target: Tensor, value: Any) -> None:
    """Write a tensor or a number into a tensor of any dtype, on any device."""
    target.copy_(value) if isinstance(value, Tensor) else target.fill_(float(value))
