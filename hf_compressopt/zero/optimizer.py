"""ZeRO stages 1 and 2 (Rajbhandari et al. 2020, arXiv 1910.02054): each rank keeps and updates its part of the state.

gradient -> slice -> reduce-scatter -> this rank's part -> ordinary optimizer -> all-gather -> parameters
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.announce import Announcement
from hf_compressopt.collectives.backward import is_taken
from hf_compressopt.collectives.communicator import Communicator, Traffic, all_reduce_bytes
from hf_compressopt.format.foreign import refuse_torch_checkpoint
from hf_compressopt.kernels.memory import in_float32
from hf_compressopt.optim.math import evaluate
from hf_compressopt.optim.options import check_last_group, refuse_uneven_inputs
from hf_compressopt.optim.state import load_with_hooks, switched
from hf_compressopt.quantities import with_unit
from hf_compressopt.zero import state_dict as state_dicts
from hf_compressopt.zero.config import (
    ZeroConfig,
    check_optimizer_class,
    check_parameters,
    require_accelerator,
    take_clipping,
)
from hf_compressopt.zero.memory import memory_report
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import Part, TrainedParameter, element_state, hyperparameters, in_host_memory
from hf_compressopt.zero.reducer import LossScale

logger = logging.getLogger(__name__)

#: What helps if a step sends more than that of DDP.
_STAGE_1 = "use grad_compression=int4 without ZeRO"
_STAGE_2 = (
    "stage 2 sends the gradients of every micro-batch; with gradient accumulation zero_stage=1 sends once a step, and "
    "grad_compression=int4 without ZeRO sends least"
)
_Values = tuple[TrainedParameter, list[tuple[Part, Any]]]  # of a parameter, by this rank's parts in their order


class _StateInParts(defaultdict[Tensor, Any]):
    """The state of an optimizer that has it elsewhere, in parts: without entries, and yet made.

    torch.distributed.checkpoint takes an optimizer whose state is false for a new one, and has it make a step.
    """

    def __bool__(self) -> bool:
        return True


class ZeroOptimizer(torch.optim.Optimizer):
    """An ordinary optimizer whose state, and in stage 2 whose gradients, are partitioned among the ranks.

    Source: ZeRO, arXiv 1910.02054, section 5. In a loop without DistributedDataParallel, which would average twice::

        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=2, lr=1e-3)
        loss.backward()  # sends the gradients
        optimizer.step()

    :meth:`step` updates this rank's part of every parameter and gathers the parameters. The results are those of the
    wrapped optimizer on averaged gradients, bit for bit, for any stage, bucket size and overlap.

    Every backward outside :meth:`no_sync` sends its gradients and frees them, and step() uses them up. So zero_grad()
    is needed only to throw gradients away. All ranks run the same number of such passes. The stages differ in how
    Trainer and Accelerate accumulate: in stage 1 they hold whole gradients over the micro-batches and send once. In
    stage 2 they send the gradients of each micro-batch, and whole gradients never exist.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer. A param group may also have
            ``process_group`` (the ranks that hold copies of its parameters, such as an expert's) and
            ``model_parallel`` (True: each rank of the model-parallel group has other elements of its parameters).
        optimizer_class: An element-wise optimizer class, or :class:`hf_compressopt.Lamb`.
        config: The options of :class:`ZeroConfig` as one object. Each of them is also a keyword argument.
        process_group: The ranks; None is the default group.
        model_parallel_group: Ranks that share one copy of the model. They agree on norm and overflow.
        **options: Options of ZeroConfig, such as stage, and of the wrapped optimizer, such as lr.

    Attributes:
        config: The options.
        optimizer_class: The wrapped optimizer's class.
        communicator: The communicator of all ranks.
        traffic: Counters of what was sent.
        partition: The parameters, and this rank's parts of them.
        loss_scale: Factor of the loss.
        clip_grad: Norm to which step() clips; 0 is off.
        steps: Steps taken.
        skipped_steps: Steps skipped because a gradient was not finite.
        step_was_skipped: Whether the last step was skipped.

    Raises:
        ValueError: For an option outside its range, or an optimizer that cannot be partitioned.
        TypeError: If ``optimizer_class`` is no optimizer class, or for parameters of a kind that is not supported.
        RuntimeError: If a launcher announces several ranks but torch.distributed is not initialized.
    """

    config_class = ZeroConfig  # its fields are keyword arguments of the constructor
    sends_gradients = True  # during backward, and what is left of them in step()

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        config: ZeroConfig | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        model_parallel_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.config, self._given = ZeroConfig.split(config, options)
        check_optimizer_class(optimizer_class, self._given)
        self._inner_options, self.clip_grad = take_clipping(optimizer_class, self._given, self.config.clip_grad)
        self.optimizer_class, self.stage = optimizer_class, self.config.stage
        self._process_groups = {"process_group": process_group, "model_parallel_group": model_parallel_group}
        template = optimizer_class([torch.zeros(1, requires_grad=True)], **self._inner_options)
        torch.optim.Optimizer.__init__(self, params, hyperparameters(template.param_groups[0]))
        devices = (param.device for group in self.param_groups for param in group["params"])
        self.config = self.config.on(next(devices, torch.device("cpu")))
        self.state = _StateInParts(dict)
        self._first_groups = len(self.param_groups)
        self.traffic = Traffic()
        self._announcement = Announcement(remedy=_STAGE_2 if self.stage == 2 else _STAGE_1)
        self.loss_scale = LossScale(self.config)
        self.steps, self.skipped_steps, self.step_was_skipped = 0, 0, False
        inner = optimizer_class, self._inner_options
        self.partition = PartitionedParameters(
            self.param_groups, self.config, self.traffic, inner, self.loss_scale, **self._process_groups
        )
        self.communicator = self.partition.communicator
        self._reducer = self.partition.reducer
        self._in_shards = self._states_are_away = False
        self._log_options_without_effect()

    def _log_options_without_effect(self) -> None:
        chosen = self.config.without_effect()
        if chosen and self.communicator.rank == 0:
            logger.info("no effect here: %s, options of DeepSpeed's ZeRO that are accepted", ", ".join(chosen))

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroOptimizer:
        """Copy the optimizer around copies of its parameters. Copies share the process groups."""
        groups = [
            {key: value if key == "process_group" else deepcopy(value, memo) for key, value in group.items()}
            for group in self.param_groups
        ]
        config = self.config
        if isinstance(config.communicator, Communicator) or self.communicator.levels is not None:
            config = replace(config, communicator=deepcopy(self.communicator, memo), comm_backend_name=None)
        copied = _remake(*self._made_by(groups, config), deepcopy(self.state_dict()))
        memo[id(self)] = copied
        copied.partition.reducer.copy_averages(self._reducer)
        return copied

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle parameters, options and state, but like torch no gradients; for the same rank of as many ranks.

        Raises:
            TypeError: If it has process groups or a communicator of its own, which no other process has.
        """
        groups = [*self._process_groups.values(), *(group.get("process_group") for group in self.param_groups)]
        if any(group is not None for group in groups) or isinstance(self.config.communicator, Communicator):
            raise TypeError(
                "a ZeroOptimizer with a process_group, model_parallel_group or Communicator of its own cannot be "
                "pickled: save its state_dict(), or call hf_compressopt.save_state(), and load into one made anew"
            )
        return _remake, (*self._made_by(self.param_groups, self.config), self.state_dict())

    def _made_by(
        self, groups: list[dict[str, Any]], config: ZeroConfig
    ) -> tuple[Callable[..., ZeroOptimizer], list[dict[str, Any]], list[dict[str, Any]]]:
        """Return a function that makes the optimizer anew, and the param groups that it had at first, and later."""
        first, options = self._first_groups, {**self._process_groups, **self._given, "config": config}
        make = partial(type(self), optimizer_class=self.optimizer_class, **options)
        return make, groups[:first], groups[first:]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. All ranks add it at the same point of the training.

        Raises:
            TypeError: For parameters of a kind that is not supported; a ValueError if elements share memory.
            RuntimeError: If the optimizer was detached.
        """
        made = hasattr(self, "partition")  # torch's constructor adds the first groups
        if made:
            self._reducer.backward.require_attached()
        super().add_param_group(param_group)
        check_last_group(self.param_groups, partial(check_parameters, config=self.config))
        if made:
            self.partition.add(self.param_groups, [len(self.param_groups) - 1])

    # -- the step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step, on all ranks together, and use the gradients up.

        If the average gradient is not finite, all ranks skip the step: nothing changes except a dynamic loss scale,
        and ``step_was_skipped`` is True until the next step.

        Args:
            closure: Evaluates the model again and returns the loss, which step() returns.

        Raises:
            TypeError: As :meth:`finish_gradients`; so is the RuntimeError.
        """
        loss = None if closure is None else evaluate(closure)
        if self._states_are_away:
            self.reload_states()
        self.partition.follow()
        if not math.isfinite(self._finish_gradients()):
            self.skip_step()
            return loss
        if self.clip_grad > 0:
            self.clip_grad_norm_(self.clip_grad)
        self.partition.update(self.param_groups)
        self.steps += 1
        self._end_step(skipped=False)
        return loss

    def skip_step(self) -> None:
        """End a step without an update because a gradient is not finite. A gradient scaler may call this, too."""
        self.skipped_steps += 1
        self._end_step(skipped=True)
        if self.communicator.rank == 0:
            logger.warning("step %d skipped: a gradient is not finite", self.steps + 1)

    def resume(self, steps: int, skipped_steps: int) -> None:
        """Take over the counts of a saved state."""
        self.steps = steps
        self.skipped_steps = skipped_steps

    def _end_step(self, *, skipped: bool) -> None:
        self.step_was_skipped = skipped
        self.loss_scale.update(skipped)
        self._reducer.clear()
        self._reducer.backward.passes.end_step()
        self.traffic.end_step()
        if self._announcement.is_open:
            self._announcement.end(self, self._describe_memory)
        self._reducer.backward.agree_on_order(self.communicator)

    def join_hook(self, **_: Any) -> Any:
        """Refuse torch's Join context, in which ranks that run out of inputs leave steps to the others."""
        refuse_uneven_inputs(self)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave whole gradients in p.grad inside the block; the next pass outside, or step(), sends them too."""
        return self._reducer.backward.no_sync()

    def detach(self) -> None:
        """Take no more gradients, as another optimizer does from now on: they stay in p.grad, and step() raises."""
        self._reducer.backward.detach()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale."""
        return loss * self.loss_scale.value

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward on the scaled loss; step() takes the scale out again."""
        torch.autograd.backward(self.scale_loss(loss), **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw all gradients away, also averaged ones. All ranks call; p.grad is None afterwards."""
        self._reducer.clear()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @torch.no_grad()
    def finish_gradients(self) -> Tensor:
        """Send the rest of the gradients, and agree on the norm. All ranks call; each method that needs averages does.

        Returns:
            [] float64, the square of the norm of the average gradient, with the loss scale taken out and clipping
            applied; not finite if an element of it is not.

        Raises:
            TypeError: For a gradient that cannot be used; a RuntimeError on the other ranks.
            RuntimeError: If the optimizer was detached.
            ValueError: If the ranks differ in their parameters or options, on all ranks.
        """
        return torch.full((), self._finish_gradients(), dtype=torch.float64, device=self.communicator.device)

    def _finish_gradients(self) -> float:
        self._reducer.backward.require_attached()
        self._reducer.backward.meet()
        if self._announcement.is_open:
            self._announcement.begin(self)
        options = [self.optimizer_class.__name__, f"clip_grad {self.clip_grad}", f"loss scale {vars(self.loss_scale)}"]
        self.partition.check_ranks_agree(self.steps, options, self.param_groups)
        return self._reducer.finish(self.partition, self.param_groups)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Clip the average gradient of the coming step. All ranks call.

        Args:
            max_norm: The norm to clip to; ``math.inf`` only measures.
            parameters: All parameters of this optimizer, or more, for callers that name them: gradients of others,
                which are averaged, are clipped together with those of this optimizer.

        Returns:
            [] float32, the norm before clipping.

        Raises:
            ValueError: If ``max_norm`` is not positive, or ``parameters`` leaves out some of the optimizer's. If ranks
                give another ``max_norm``, on all ranks; if the norm was known already, in the next step.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm}")
        chosen = {} if parameters is None else {id(param): param for param in parameters}
        if parameters is not None and not set(map(id, self.partition.tensors)) <= chosen.keys():
            raise ValueError("parameters must hold all trainable parameters of the optimizer, some are missing")
        self._reducer.note_max_norm(float(max_norm))
        square = self._finish_gradients()  # which takes in parameters that have become trainable
        others = [param for param in chosen.values() if param.requires_grad and not is_taken(param)]
        if others:
            square += self._mean_square_of(others)
        norm = in_float32(math.sqrt(square)) if square >= 0 else math.nan
        self._reducer.clip(norm, max_norm)
        found = torch.full((), norm, dtype=torch.float32, device=self.communicator.device)
        if others and math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(others, max_norm, found)
        return found

    def _mean_square_of(self, params: Iterable[Tensor]) -> float:
        """Return the mean over the ranks of the squared norm of gradients in p.grad, which is alike on all of them."""
        mean = torch.zeros(1, dtype=torch.float64, device=self.communicator.device)
        for grad in (param.grad for param in params if param.grad is not None):
            mean += torch.linalg.vector_norm(grad, dtype=torch.float64).square().to(mean.device)
        with self.communicator.traffic.paused():
            self.communicator.all_reduce(mean).wait()
        return float(mean) / self.communicator.world_size

    def unscale_(self, inverse_scale: float) -> bool:
        """Take a gradient scaler's factor out of the averages. All ranks call.

        Returns:
            True if an element of the averages is not finite; the same on all ranks.
        """
        square = self._finish_gradients()
        self._reducer.unscale(inverse_scale)
        return not math.isfinite(square)

    # -- single parameters --------------------------------------------------------------------------------------------
    #
    # By the parameter itself or its name. All ranks that hold copies of the parameter call, with the same values. These
    # methods raise a KeyError for what is no trainable parameter of this optimizer.

    def parameter_names(self) -> list[list[str]]:
        """List the names of the trainable parameters, per group: torch's param_names, or places as "group0.3"."""
        known = [self.partition.known[number] for number in self.partition.in_order()]
        return [[entry.name for entry in known if entry.group == number] for number in range(len(self.param_groups))]

    @property
    def trainable_parameters(self) -> list[Tensor]:
        """The parameters that are partitioned, in the order of the param groups."""
        return [self.partition.tensors[number] for number in self.partition.in_order()]

    @torch.no_grad()
    def get_full_param(self, which: Tensor | str) -> Tensor:
        """Return the parameter in full precision (its master copy if it has one), as a new tensor. All ranks call."""
        self.partition.follow()
        return _whole(*self._masters(which))

    @torch.no_grad()
    def set_full_param(self, which: Tensor | str, value: Any) -> None:
        """Set the parameter and its master copy; a ValueError for a value of another shape. All ranks call."""
        known, mine = self._masters(which)
        pieces = _pieces(known, mine, value)
        known.tensor.copy_(torch.as_tensor(value))
        for part, master, values in pieces:
            part.follow()
            master.copy_(values)

    def _masters(self, which: Tensor | str) -> _Values:
        _, known, mine = self.partition.find(which)
        return known, [(part, part.tensor) for part in mine]

    @torch.no_grad()
    def get_full_state(self, which: Tensor | str, name: str) -> Tensor:
        """Return a state tensor, such as "exp_avg", of the parameter's shape; or a count, []. All ranks call.

        Raises:
            KeyError: If there is no such state. The error lists the names that exist: none before the first step.
        """
        _, known, mine = self.partition.find(which)
        kinds: dict[str, bool] = {}
        for part in mine:
            elements, state = element_state(part.state, part), part.state
            kinds |= {key: key in elements for key, value in state.items() if value is not None}
        counts = [float(part.state[name]) for part in mine if kinds.get(name) is False]
        everyone = known.communicator.all_gather_object([kinds, counts[:1]])
        found = {key: kind for theirs, _ in everyone for key, kind in theirs.items()}
        if name not in found:
            raise KeyError(f"{known.name} has no state {name!r}; it has {sorted(found)}")
        if not found[name]:
            return torch.tensor(next(counts[0] for _, counts in everyone if counts))
        return _whole(known, [(part, part.state[name]) for part in mine])

    @torch.no_grad()
    def set_full_state(self, which: Tensor | str, name: str, value: Any) -> None:
        """Set a state tensor, or a count. All ranks call.

        Raises:
            KeyError: If this rank's part has no such state, as before the first step.
            ValueError: For a value of another shape.
        """
        known, mine = self._states(which, name)
        for part, own in mine:
            if name in element_state(part.state, part):
                ((_, _, values),) = _pieces(known, [(part, own)], value)
                own.copy_(values)
            elif isinstance(own, Tensor):
                own.copy_(torch.as_tensor(value))
            else:
                part.state[name] = type(own)(value)

    def _states(self, which: Tensor | str, name: str) -> _Values:
        _, known, mine = self.partition.find(which)
        for part in mine:
            if name not in part.state:
                raise KeyError(f"{known.name} has no state {name!r}; it has {sorted(part.state)}")
        return known, [(part, part.state[name]) for part in mine]

    @torch.no_grad()
    def get_full_grad(self, which: Tensor | str) -> Tensor | None:
        """Return the average gradient of the coming step, unscaled, and clipped if it has been. All ranks call.

        Returns:
            A new tensor of the parameter's shape; None if no rank had a gradient.
        """
        self.finish_gradients()
        if not self._reducer.present[self.partition.find(which)[0]]:
            return None
        return _whole(*self._gradients(which)).mul_(self._reducer.factor)

    @torch.no_grad()
    def set_full_grad(self, which: Tensor | str, value: Any) -> None:
        """Replace the average gradient of the parameter; a ValueError for another shape. All ranks call."""
        for _, average, values in _pieces(*self._gradients(which), value):
            average.copy_(values / self._reducer.factor)
        self._reducer.was_set(self.partition.find(which)[0])

    def _gradients(self, which: Tensor | str) -> _Values:
        self.finish_gradients()
        (_, known, mine), slices = self.partition.find(which), self._reducer.slices
        return known, [(part, slices[part.slice].average_of(part.span)) for part in mine]

    # -- all parameters and states ------------------------------------------------------------------------------------

    def masters_in_parameters(self) -> AbstractContextManager[None]:
        """Set the parameters, inside the block, to their rounded masters, as a saved model has them. All ranks call.

        With ``param_compression`` in 4 or 8 bits the parameters that a model computes with lag behind the masters by
        less than a step. At the end they are as before, bit for bit, whatever was written inside. They are copied for
        that time. Without such ``param_compression`` nothing happens.
        """
        return self.partition.masters_lent()

    def settle_parameters(self) -> None:
        """Make the parameters what their masters round to, for good: later code may run on one rank. All ranks call."""
        if self.partition.has_replicas:
            self.partition.follow()
            self.partition.share_masters()

    def offload_states(self) -> None:
        """Move state and master copies to page-locked host memory, until :meth:`reload_states` or the next step.

        Raises:
            ValueError: If there is no accelerator whose memory could be saved.
        """
        require_accelerator("offload_states")
        self._move_states(to_host=True)

    def reload_states(self) -> None:
        """Undo :meth:`offload_states`: each state returns to the device of its parameter."""
        if not self.config.offload:
            self._move_states(to_host=False)

    @torch.no_grad()
    def _move_states(self, *, to_host: bool) -> None:
        for part in self.partition.parts():
            move = in_host_memory if to_host else partial(Tensor.to, device=part.real.device)
            move = partial(move, non_blocking=True)
            if not part.direct:
                part.tensor.data = move(part.tensor)
            part.move_state(move)
        if to_host:
            for device in {part.real.device for part in self.partition.parts()}:
                torch.accelerator.synchronize(device)
        self._states_are_away = to_host

    # -- state dict ---------------------------------------------------------------------------------------------------

    def state_in_shards(self) -> AbstractContextManager[None]:
        """Make ``state_dict()`` a small stub, which ``load_state_dict()`` ignores: the state is in shards."""
        return switched(self, "_in_shards", True)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's local state, in tensors and primitives. Makes no collective call.

        Raises a RuntimeError inside torch.distributed.checkpoint, which does not know that each rank has its own.

        ``state[i]["pieces"]`` lists this rank's parts of parameter i: the range of its elements, its master copy if it
        has one, and the wrapped optimizer's state of it.
        """
        if not self._in_shards:
            refuse_torch_checkpoint(self)
        return state_dicts.pack(self, super().state_dict(), in_shards=self._in_shards)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict: one of this class, rank and layout, or a whole one of the wrapped optimizer's.

        Raises:
            ValueError: If it does not fit; nothing is changed then.
        """
        load_with_hooks(self, state_dict, partial(state_dicts.load, self), in_shards=self._in_shards)

    # -- for a log ----------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Describe the optimizer in one line for the log."""
        forms = {"gradients": self.config.grad_compression, "parameters": self.config.param_compression}
        if self.config.exact:
            forms["parameters"] = "their changes" if self.partition.sends_changes else "none"
        return (
            f"ZeRO stage {self.stage} around {self.optimizer_class.__name__}, {self.communicator}, "
            f"{len(self._reducer.slices)} slices"
        ) + "".join(f", {what} as {form}" for what, form in forms.items() if form != "none")

    def _describe_memory(self) -> str:
        """Compare the state on this rank with the whole."""
        found = memory_report(self)
        whole = (found.states + found.masters) * self.communicator.world_size
        held = found.states + found.masters + found.errors
        return f"{with_unit(held)} of state on this rank, not {with_unit(whole)}"

    def metrics(self) -> dict[str, float]:
        """Return numbers for a log, of this rank: stage, step, bytes sent, host seconds in communication, skips.

        ``compression_ratio`` is the bytes that DDP would send for gradients of these dtypes over those of the last
        step; ``bytes_uncompressed`` and ``bytes_on_link`` are both sums for all steps of this process. In the
        hierarchical topology bytes are those to other nodes, beside ``bytes_sent_in_node`` and ``node_size``.
        ``bits_per_parameter`` are those of the 16-bit parameters that the last step has sent as their changes, if there
        are any.
        """
        place = self.communicator.topology
        full = all_reduce_bytes(self.trainable_parameters, place.world_size)
        return {
            "zero_stage": float(self.stage),
            "step": float(self.steps),
            **self.traffic.metrics(full, self.traffic.step_bytes, place.node_size),
            **({} if (bits := self.partition.bits_per_parameter) is None else {"bits_per_parameter": bits}),
            "skipped_steps": float(self.skipped_steps),
            "loss_scale": self.loss_scale.value,
        }


def _remake(
    make: Callable[..., ZeroOptimizer], first: list[dict[str, Any]], later: list[dict[str, Any]], state: dict[str, Any]
) -> ZeroOptimizer:
    made = make(first)
    for group in later:
        made.add_param_group(group)
    made.load_state_dict(state)
    return made


def _whole(known: TrainedParameter, mine: list[tuple[Part, Any]]) -> Tensor:
    """Join the ranks' parts of a parameter: float32 or float64, of its shape."""
    param, communicator = known.tensor, known.communicator
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    flat = torch.zeros(param.numel(), dtype=dtype, device=param.device)
    for part, values in mine:
        flat[part.span.start : part.span.stop] = values
    bits = flat.view(torch.int32 if dtype == torch.float32 else torch.int64)  # a sum with zeros keeps these exactly
    with communicator.traffic.paused():
        communicator.all_reduce(bits).wait()
    return flat.view(param.shape)


def _pieces(known: TrainedParameter, mine: list[tuple[Part, Any]], value: Any) -> list[tuple[Part, Any, Tensor]]:
    """Cut a value for the whole parameter into values for this rank's parts."""
    whole = torch.as_tensor(value)
    if whole.shape != known.tensor.shape:
        expected = tuple(known.tensor.shape)
        raise ValueError(f"the value must have the parameter's shape {expected}, got {tuple(whole.shape)}")
    flat = whole.reshape(-1)
    return [(part, own, flat[part.span.start : part.span.stop]) for part, own in mine]
