"""The state of an optimizer in flat buffers: param groups and state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.owners import take_over
from hf_compressopt.collectives.topology import FLAT, TopologyOptions
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.collectives.two_levels import with_topology
from hf_compressopt.optim.compact import follow_moments
from hf_compressopt.optim.consensus import Consensus
from hf_compressopt.optim.group_state import ExtraState, GroupState
from hf_compressopt.optim.options import check_last_group, check_names, in_lists
from hf_compressopt.optim.shard_stub import STATE_KEY, load_with_hooks, make_stub, switched
from hf_compressopt.optim.state_dict import load_full, own_state
from hf_compressopt.optim.warmup_gradients import WarmupGradients
from hf_compressopt.schedules import Schedule, Stage, StepPlan, Warmup


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lies in one flat buffer per param group and is allocated at construction.

    ``state[p]`` holds torch's names (``step``, ``exp_avg``, ``exp_avg_sq``) as views of the buffers, shaped like p.

    Attributes:
        communicator: The ranks.
        traffic: What was sent.
    """

    schedule: Schedule
    lr_warmup: Warmup
    warmup_gradients: WarmupGradients
    step_was_skipped: bool = False
    skipped_steps: int = 0
    rounds: int = 0
    zero_stage: int = 0
    #: State tensors beyond Adam's moments.
    extra_state: tuple[ExtraState, ...] = ()
    #: For a stage, the state tensors that are each rank's own beside the errors; "param" stands for the parameters.
    own_tensors: ClassVar[Mapping[Stage, Sequence[str]]] = {}

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        bucket_numel: int,
        scale_block: int | None,
        compact: bool = False,
        communicator: str | Communicator | None,
        process_group: dist.ProcessGroup | None,
        cuda_aware: bool = False,
        topology: TopologyOptions | None = None,
    ) -> None:
        """Check the param groups, choose the communicator, allocate the state."""
        self.bucket_numel, self.scale_block, self.compact = bucket_numel, scale_block, compact
        self.traffic = Traffic()
        self._step = 0
        self._in_shards = False
        self._states: list[GroupState] = []
        self._tensors: dict[str, Tensor] = {}  # state that belongs to no group, on the CPU, alike on all ranks
        self._chosen: dict[str, Any] = {"name": communicator, "cuda_aware": cuda_aware, "traffic": self.traffic}
        params, device = in_lists(params)
        flat = make_communicator(process_group=process_group, device=device, **self._chosen)
        self.communicator = with_topology(flat, topology or TopologyOptions(FLAT), scale_block)
        self._consensus = Consensus(self._states, self.communicator, self._tensors)
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
        take_over(group["params"], type(self).__name__)
        device = group["params"][0].device if group["params"] else self.communicator.device
        state = GroupState(
            group,
            len(self._states),
            bucket_numel=self.bucket_numel,
            scale_block=self.scale_block,
            compact=self.compact,
            communicator=communicator_of(own, device, self.communicator, self._states, self._chosen),
            extras=self.extra_state,
            own_rank=None if own is None else self.communicator.rank,
            shared_out=self.zero_stage > 0,
        )
        self._states.append(state)
        self.state.update(state.torch_states())
        self._consensus.comparison.check_anew()

    def _before_load(self) -> None:
        """Put everything where a checkpoint is read to; this class has it there."""

    def _state_loaded(self) -> None:
        """Update everything that is derived from the state."""
        self._consensus.comparison.check_anew()
        follow_moments(self.state.values())

    def _follow_parameters(self) -> None:
        """Move the buffers to where the parameters are, if a model was moved after its optimizer was made."""
        for state in self._states:
            if state.params and state.params[0].device != state.device:
                state.to(state.params[0].device)
                self.communicator.device = state.communicator.device = state.device
                self.state.update(state.torch_states())
                self._consensus.comparison.check_anew()

    @property
    def trainable_parameters(self) -> list[Tensor]:
        """The parameters that have state, group by group."""
        return list(chain.from_iterable(state.params for state in self._states))

    def own_parameters(self) -> list[Tensor]:
        """Return the parameters of the groups with a process group of their own."""
        return list(chain.from_iterable(state.params for state in self._states if state.own_rank is not None))

    # -- state dict ---------------------------------------------------------------------------------------------------

    @contextmanager
    def state_in_shards(self) -> Iterator[None]:
        """Inside, ``state_dict()`` is a small stub and ``load_state_dict()`` does nothing: the state is in shards."""
        with switched(self, "_in_shards", True):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's full local state, errors included, in tensors and primitives. No collective call."""
        self._follow_parameters()
        packed = super().state_dict()
        if self._in_shards:
            for group in packed["param_groups"]:
                group.pop("exp_avg_mask", None)
            return make_stub(packed, self._step)
        packed["state"] = {number: dict(entry) for number, entry in packed["state"].items()}
        packed[STATE_KEY] = own_state(self)
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict into the buffers: one of this class and rank, or a plain one of torch's Adam or AdamW.

        Raises:
            ValueError: If it does not fit; nothing has changed then.
        """
        self._follow_parameters()
        load_with_hooks(self, state_dict, partial(load_full, self), in_shards=self._in_shards)

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

    def label_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Use names such as those of ``model.named_parameters()`` in messages; checkpoints keep their own."""
        names = {id(param): name for name, param in named}
        for state in self._states:
            if "param_names" not in state.options:
                state.labels = [names.get(id(p), label) for p, label in zip(state.params, state.labels, strict=True)]

    @property
    def last_plan(self) -> StepPlan:
        """Plan of the last step; before the first one its own."""
        raise NotImplementedError("abstract")


def communicator_of(
    own: dist.ProcessGroup | None,
    device: torch.device,
    everyone: Communicator,
    states: Sequence[GroupState],
    chosen: dict[str, Any],
) -> Communicator:
    """Return the communicator of a param group.

    Args:
        own: The group's own process group, or None.
        device: Device of its parameters.
        everyone: The optimizer's communicator.
        states: The param groups so far: groups with the same process group share a communicator.
        chosen: Options of :func:`make_communicator`.
    """
    if own is None:
        return everyone
    for state in states:
        if state.communicator.process_group is own and state.device == device:
            return state.communicator
    return make_communicator(process_group=own, device=device, **chosen)
