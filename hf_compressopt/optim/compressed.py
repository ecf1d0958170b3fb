"""The template of the optimizers that compress what they send."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, overload
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import ErrorFeedback, Pipeline, Task, compressed_all_reduce
from hf_compressopt.flat import Bucket
from hf_compressopt.grad_sync import average_gradients
from hf_compressopt.kernels import Average, Combination
from hf_compressopt.optim.functional import (
    adam_options,
    adam_step_,
    bit_sum,
    correct_bias_,
    floor_variance_,
)
from hf_compressopt.optim.gradients import Grads, StepGradients
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.optim.logs import write_log
from hf_compressopt.optim.options import check_at_least, check_scale_block, resolve_communicator
from hf_compressopt.optim.scheduled import BYTES_PER_MB, FLOAT_BYTES, ScheduledOptimizer
from hf_compressopt.stages import StepPlan

logger = logging.getLogger(__name__)


class CompressedOptimizer(ScheduledOptimizer):
    """What the compressed optimizers share: stages, flat buffers, the pipeline, skips, clipping, metrics, state.

    An algorithm subclasses it with a schedule (:meth:`plan_at`), the local mathematics that makes a bucket's message
    (:meth:`_prepare`), and what is done with the message that comes back (:meth:`_apply`).

    In the stages in which ``plan.reduce_grads`` is True the caller averages the gradients over the ranks before
    :meth:`step` (Trainer and Accelerate do, through DDP); otherwise gradients must stay local.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer. A param group may carry its
            own lr, betas, eps, weight_decay, bias_correction and eps_inside_sqrt; ``non_freeze`` (True keeps it in
            the warmup stage for good); ``exp_avg_mask`` (a tensor that broadcasts to each of its parameters); and
            ``process_group`` (the ranks that hold these parameters, for expert or model parallelism: gradients of such
            a group stay local in every stage, step() averages them over it. All ranks have the same param groups;
            only those with a process group of their own may differ in their parameters).
        lr: Learning rate, >= 0.
        bias_correction: Whether Adam's bias corrections apply.
        betas: Coefficients of the running averages, each in [0, 1).
        eps: Added to the denominator, >= 0.
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
        weight_decay: Decoupled weight decay, >= 0.
        max_grad_norm: Gradients are clipped to this norm in :meth:`step`; 0 is off. (Trainer clips by itself.)
        scale_block: Elements that share a scale in a message, a positive multiple of 8; None is the original's one
            scale per message.
        variance_floor: At the end of the warmup stage the second moment of every element is raised to this share of
            its tensor's mean, >= 0; 0 is off.
        bucket_cap_mb: MiB of float32 values that are sent together, > 0.
        process_group: The ranks; None is the default group.
        communicator: "auto", the name of a torch.distributed backend, "mpi" (by mpi4py), or a Communicator.
        comm_backend_name: DeepSpeed's spelling of ``communicator``.
        cuda_aware: For communicator="mpi": hand CUDA tensors to the MPI library as they are.
        amsgrad: Not supported, as nowhere in this family: must be False.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
        RuntimeError: If a launcher announces several ranks but torch.distributed is not initialized.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        scale_block: int | None = 4096,
        variance_floor: float = 0.01,
        bucket_cap_mb: float = 25.0,
        process_group: dist.ProcessGroup | None = None,
        communicator: str | Communicator | None = None,
        comm_backend_name: str | None = None,
        cuda_aware: bool = False,
        amsgrad: bool = False,
    ) -> None:
        """See the class."""
        check_at_least("max_grad_norm", max_grad_norm, 0)
        check_at_least("variance_floor", variance_floor, 0)
        check_scale_block(scale_block)
        if amsgrad:
            raise ValueError("amsgrad must be False, got True: its running maximum has no meaning once v is frozen")
        communicator = resolve_communicator(communicator, comm_backend_name, cuda_aware)
        check_at_least("bucket_cap_mb", bucket_cap_mb, 0)
        bucket_numel = math.floor(bucket_cap_mb * BYTES_PER_MB / FLOAT_BYTES)
        if bucket_numel < 1:
            raise ValueError(f"bucket_cap_mb must be > 0 and hold at least one float32 value, got {bucket_cap_mb}")
        self.max_grad_norm, self.variance_floor = max_grad_norm, variance_floor
        self._clipped: StepGradients | None = None  # gradients whose norm is known already
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "non_freeze": False,
        }
        super().__init__(
            params,
            defaults,
            bucket_numel=bucket_numel,
            scale_block=scale_block,
            communicator=communicator,
            process_group=process_group,
            cuda_aware=cuda_aware,
        )

    _fused_warmup = False
    #: What is sent after the switch, and what clipping reports then, for the log.
    _after_the_switch = ("the momentum", "sqrt(mean of the ranks' squared norms), up to sqrt(world size) larger")

    # -- what an algorithm defines ------------------------------------------------------------------------------------

    def _prepare(
        self, group: dict[str, Any], state: GroupState, bucket: Bucket, grads: list[Tensor | None]
    ) -> Combination:
        """What this rank wants to send of one bucket; it is read at once."""
        raise NotImplementedError("abstract")

    def _apply(self, group: dict[str, Any], state: GroupState, bucket: Bucket, average: Average) -> None:
        """Update the parameters from the compressed mean of one bucket, which is masked already."""
        raise NotImplementedError("abstract")

    def _alike(self) -> list[Any]:
        """What else must be alike on all ranks, for them to keep the same parameters."""
        return []

    def _stage_ends(self, plan: StepPlan) -> bool:
        """Whether the step that was taken by this plan is the last one of its stage."""
        return plan.ends_stage

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its state is allocated at once.

        Raises:
            ValueError: For an option outside its range; for parameters on another device; and after the first stage,
                in which a new parameter would have no variance, for a group without ``non_freeze=True``.
            TypeError: For a parameter of another dtype than float32, bfloat16 or float16.
        """
        if self._ready and self.plan.stage.number and not param_group.get("non_freeze"):
            raise ValueError(
                f"a group added in the {self.plan.stage.value} stage has no variance to divide by: add it before, or "
                "with non_freeze=True, which keeps it in full precision"
            )
        super().add_param_group(param_group)

    # -- the step -----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, grads: Iterable[Any] | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], grads: Iterable[Any] | None = None) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, grads: Iterable[Any] | None = None) -> float | None:
        """Take one step, on all ranks together.

        Where a gradient is not finite on any rank the step is skipped on all: nothing changes, and
        ``step_was_skipped`` is True until the next step.

        Args:
            closure: Evaluates the model again and returns the loss.
            grads: One gradient (or None) per parameter, flat or per group, left as they are; ``p.grad`` of each where
                not given.

        Returns:
            What the closure returned.

        Raises:
            TypeError: For sparse or complex gradients.
            ValueError: For gradients of a wrong shape, device or number. Where gradients are local, or given, both are
                raised on all ranks together (a RuntimeError where the fault is another's).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_parameters()
        self._check_ranks_agree()
        plan = self.plan
        if self._step > 0 and self.plan_at(self._step).stage is not plan.stage:
            self._compare_parameters()
        gradients = self._collect(grads, self._ranks_agree_on(plan))
        gradients.reuse(self._clipped)
        self._clipped = None
        if self.max_grad_norm > 0:
            gradients.clip_(self.max_grad_norm, in_place=grads is None)
        finite = math.isfinite(float(gradients.square_norm()))
        if finite or not self._ranks_agree_on(plan):
            self._take_step(plan, gradients.groups if finite else None)
            self._step = plan.step
            self.rounds += plan.reduce_grads or plan.synchronize
            self.step_was_skipped = False
            self.traffic.end_step()
        else:
            self.skip_step()
        return loss

    def skip_step(self) -> None:
        """Close a step that is not taken, because a gradient is not finite: also for a gradient scaler to call."""
        self.step_was_skipped = True
        self.skipped_steps += 1
        self._clipped = None
        self.traffic.end_step()
        if self.communicator.rank == 0:
            write_log(logger, logging.WARNING, "step %d skipped: a gradient is not finite", self._step + 1)

    def _ranks_agree_on(self, plan: StepPlan) -> bool:
        """Whether a gradient that is not finite on one rank skips this step on all."""
        uncompressed = (state for state in self._states if not state.compressed)
        # of a group with a process group of its own, others may have parameters if this rank has none
        return plan.agree or any(state.params or state.own_rank is not None for state in uncompressed)

    def _take_step(self, plan: StepPlan, gradients: Grads | None) -> None:
        """Take the step; ``gradients`` is None where this rank's are not finite and it goes on without."""
        if gradients is None:
            groups = [index for index, state in enumerate(self._states) if state.compressed]
            return self._local_steps(plan, groups, None)
        compressed: list[int] = []
        for index, (group, state) in enumerate(zip(self.param_groups, self._states, strict=True)):
            if state.compressed and not plan.update_variance:
                compressed.append(index)
                continue
            if not state.params and state.own_rank is None:
                continue  # no rank has anything to average; one that goes on without its gradients does not come here
            grads = gradients[index]
            if not plan.reduce_grads or state.own_rank is not None:
                shapes = [p.shape for p in state.params]
                grads = average_gradients(grads, state.layout, shapes, state.communicator)
            self._uncompressed_step(group, state, grads)
        if not plan.agree:
            self._local_steps(plan, compressed, gradients)
        elif plan.synchronize:
            self._compressed_step(compressed, gradients)
            for index in compressed:
                self._states[index].steps += 1
        if self._stage_ends(plan):
            self._end_warmup(plan)

    def _uncompressed_step(self, group: dict[str, Any], state: GroupState, grads: list[Tensor | None]) -> None:
        rows = [index for index, grad in enumerate(grads) if grad is not None]
        adam_step_(
            [state.params[index] for index in rows],
            [grad for grad in grads if grad is not None],
            [state.view(state.exp_avg, index) for index in rows],
            [state.view(state.exp_avg_sq, index) for index in rows],
            [state.steps[index] for index in rows],
            adam_options(group),
            fused=self._fused_warmup,
        )

    def _local_steps(self, plan: StepPlan, groups: Sequence[int], gradients: Grads | None) -> None:
        """The steps that each rank takes alone, for algorithms whose plans have ``agree=False``."""
        raise NotImplementedError("abstract")

    def _compressed_step(self, groups: Sequence[int], gradients: Grads) -> None:
        index_of = {self._states[index]: index for index in groups}
        for _, states in self._by_communicator(index_of):
            pipeline = Pipeline()
            for state in states:
                group, grads = self.param_groups[index_of[state]], gradients[index_of[state]]
                for bucket, feedback in zip(state.layout.buckets, state.feedback, strict=True):
                    pipeline.add(self._step_of_bucket(group, state, bucket, feedback, grads))
            pipeline.drain()
        for state in index_of:
            state.drop_spent_errors()

    def _step_of_bucket(
        self,
        group: dict[str, Any],
        state: GroupState,
        bucket: Bucket,
        feedback: ErrorFeedback,
        grads: list[Tensor | None],
    ) -> Task[None]:
        """The compressed step of one bucket: make its message, exchange it, update the parameters."""
        message = self._prepare(group, state, bucket, grads)
        average = yield from compressed_all_reduce(message, feedback, state.communicator)
        self._apply(group, state, bucket, state.masked(bucket, average, group.get("exp_avg_mask")))

    def _end_warmup(self, plan: StepPlan) -> None:
        """Fold the bias corrections into the moments, and apply the variance floor, once."""
        for group, state in zip(self.param_groups, self._states, strict=True):
            if not state.compressed:
                continue
            beta1, beta2 = group["betas"]
            for index, counts in enumerate(zip(*self._bias_counts(state), strict=True)):
                exp_avg, exp_avg_sq = state.view(state.exp_avg, index), state.view(state.exp_avg_sq, index)
                if group["bias_correction"]:
                    correct_bias_(exp_avg, counts[0], beta1)
                    correct_bias_(exp_avg_sq, counts[1], beta2)
                floor_variance_(exp_avg_sq, self.variance_floor)
            state.find_still()
        if self.communicator.rank == 0:
            self._report_switch(plan)

    def _state_loaded(self) -> None:
        """As the base class, and which parameters keep still: in the warmup stage none, whatever their variance."""
        super()._state_loaded()
        for state in self._states:
            if self.plan.stage.number:
                state.find_still()
            else:
                state.still = [False] * len(state.params)

    def _bias_counts(self, state: GroupState) -> tuple[list[float], list[float]]:
        """For each parameter, how often its first and its second moment have been updated."""
        return state.steps.tolist(), state.steps.tolist()

    def _report_switch(self, plan: StepPlan) -> None:
        message, sent, norm = "step %d: %s ends, the variance is frozen; ", *self._after_the_switch
        if self.communicator.world_size > 1:
            message += f"from here on gradients stay local, {sent} is sent as signs, and a reported grad_norm is {norm}"
        else:
            message += "with one rank nothing is sent, and so nothing is compressed"
        write_log(logger, logging.INFO, message, plan.step, plan.stage.value)
        flags = chain.from_iterable(state.still for state in self._states)
        names = [name for name, flag in zip(chain.from_iterable(self._names), flags, strict=True) if flag]
        if names:
            write_log(
                logger,
                logging.WARNING,
                "%d parameter(s) had no gradient in the warmup stage, so they have no variance and keep still from "
                "here on: %s%s (for such parameters use a later freeze_step, or a group with non_freeze=True)",
                len(names),
                ", ".join(names[:8]),
                ", ..." if len(names) > 8 else "",
            )

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def local_gradients(self) -> bool:
        """Whether some gradients of the coming step are this rank's own, so that ranks must agree on their norm."""
        return not self.plan.reduce_grads or self._has_own_groups

    def _collect(
        self, given: Iterable[Any] | None = None, agree: bool = True, averaged: bool | None = None
    ) -> StepGradients:
        """The gradients, and whether their norm is found without asking the others: they are averaged, or nobody asks.

        Those handed to step() are not: a wrong number of them on one rank must fail on all.
        """
        averaged = not self.local_gradients and given is None if averaged is None else averaged
        return StepGradients.collect(
            [group["params"] for group in self.param_groups],
            [state.params for state in self._states],
            self._names,
            given,
            self.communicator,
            [1 / state.communicator.world_size for state in self._states],
            ask=agree and not averaged,
        )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Clip the gradients of the coming step, by the same factor on every rank. All ranks call.

        Averaged gradients are clipped by their norm. Local ones by sqrt(mean over ranks of their squared norms), an
        upper bound of the norm of their average that is at most sqrt(W) larger.

        Args:
            max_norm: The norm to clip to; ``math.inf`` only measures.
            parameters: Clip these, which may be any; all parameters of the optimizer where None.

        Returns:
            [] float32, the norm before clipping.

        Raises:
            ValueError: If ``max_norm`` is not positive, and if the ranks differ in what must be alike.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm}")
        self._follow_parameters()
        self._check_ranks_agree()
        gradients = self._collect(None, self._ranks_agree_on(self.plan))
        if parameters is not None:
            gradients = gradients.of(parameters, self._states)
        norm = gradients.clip_(max_norm, in_place=True).float()
        self._clipped = gradients
        return norm

    def agree_on_overflow(self, overflow: bool) -> bool:
        """Whether any rank met an overflow in its local gradients. One small all-reduce; all ranks call.

        Args:
            overflow: Whether this rank met one, as a gradient scaler finds it.

        Raises:
            TypeError: For gradients that cannot be used, on all ranks.
            ValueError: Likewise.
        """
        return not math.isfinite(float(self._collect(agree=True, averaged=False).square_norm(overflow)))

    def _check_ranks_agree(self) -> None:
        """Once before the first step: all ranks must hold the same layout, options and step.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        if self._ranks_checked:
            return
        own = [state.own_rank is not None for state in self._states]
        options = [self.bucket_numel, self.scale_block, self.variance_floor, self._schedule_options(), *self._alike()]
        self.communicator.require_equal(
            "optimizer, step, options, or param groups with a process_group of their own",
            [type(self).__name__, self._step, repr(options), own],
        )
        self._require_equal(
            "parameter sizes", lambda state: crc32(repr((state.compressed, state.layout.numels)).encode())
        )
        if self.plan.agree:  # else each rank has parameters of its own
            self._compare_parameters()
        self._ranks_checked = True

    def _compare_parameters(self) -> None:
        """Check that all ranks hold the same parameter bits: nothing after the warmup stage would mend a difference.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        what = "the bits of their parameters (are they alike at the start, and all gradients averaged in warmup?)"
        self._require_equal(what, lambda state: int(sum(bit_sum(param) for param in state.params)))

    def _require_equal(self, what: str, value: Callable[[GroupState], int]) -> None:
        """Check that a number of every param group is alike on all the ranks that hold it. All ranks call.

        Raises:
            ValueError: If one is not, on all ranks.
        """
        error: Exception | None = None
        for communicator, states in self._by_communicator(self._states):
            try:
                communicator.require_equal(what, [value(state) for state in states])
            except ValueError as found:
                error = found
        if self._has_own_groups:
            self.communicator.raise_together(error, ValueError)
        elif error is not None:
            raise error
