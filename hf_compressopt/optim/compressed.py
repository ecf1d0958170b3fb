"""The base of the optimizers that compress what they send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.averaging import average_group
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import ErrorFeedback, compressed_all_reduce, run_tasks
from hf_compressopt.collectives.phases import Task
from hf_compressopt.collectives.topology import AUTO as AUTO_TOPOLOGY
from hf_compressopt.collectives.topology import TopologyOptions
from hf_compressopt.flat import Bucket, bucket_numel_of
from hf_compressopt.kernels import Average, Combination
from hf_compressopt.optim.common import evaluate
from hf_compressopt.optim.compact import STATE, follow_moments
from hf_compressopt.optim.early_messages import EarlyMessages
from hf_compressopt.optim.family_options import check_family_options, check_zero_stage
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.optim.freed_gradients import FreedGradients
from hf_compressopt.optim.functional import adam_options, adam_step_
from hf_compressopt.optim.gradients import Grads
from hf_compressopt.optim.group_state import GroupState, ParamGroups, by_communicator, mean_variance_norm
from hf_compressopt.optim.interval import AlikeParameters
from hf_compressopt.optim.local_gradients import LocalGradients, end_step
from hf_compressopt.optim.logs import report_switch
from hf_compressopt.optim.metrics import Measured
from hf_compressopt.optim.options import check_count, resolve_communicator
from hf_compressopt.optim.scheduled import Scheduled, ends_first_stage, room_for_history
from hf_compressopt.optim.sharded_stage import end_first_stage, take_sharded_step
from hf_compressopt.optim.sketched_norm import CLIPS, ESTIMATE
from hf_compressopt.optim.warmup_gradients import WarmupGradients, check_warmup_bits
from hf_compressopt.schedules import AUTO, StepPlan


class CompressedOptimizer(Scheduled, Measured, LocalGradients, AlikeParameters, FlatOptimizer):
    """The base of the compressed optimizers: stages, flat buffers, the pipeline, skips, clipping, metrics, state.

    An algorithm subclasses it with a schedule (``schedule_class``), the local mathematics that makes a bucket's message
    (:meth:`_prepare`), and the update by the message that comes back (:meth:`_apply`).

    With ``freeze_step="auto"`` the variance decides when the first stage ends (1-bit Adam, arXiv 2102.02888, section
    4.3; :class:`~hf_compressopt.schedules.FreezeDetector`), at the latest at ``max_freeze_step``. Ranks decide alike.

    In the stages in which ``plan.reduce_grads`` is True the caller averages the gradients over the ranks before
    :meth:`step` (Trainer and Accelerate do, through DDP; :func:`~hf_compressopt.average_gradients` does in a loop of
    your own), in the form that ``warmup_gradients`` says; otherwise gradients must stay local.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer. A param group may carry its
            own lr, betas, eps, weight_decay, bias_correction and eps_inside_sqrt; ``non_freeze`` (True keeps it in
            the warmup stage for good); ``exp_avg_mask`` (a tensor that broadcasts to each of its parameters); and
            ``process_group`` (the ranks that hold these parameters, for expert or model parallelism: gradients of such
            a group stay local in every stage, step() averages them over it. All ranks have the same param groups;
            only those with a process group of their own may differ in their parameters).
        lr: Learning rate, >= 0.
        freeze_step: Last step of the warmup stage, >= 1, or "auto": the variance finds it. Trainer and Accelerate then
            fit the schedule to the length of the run; a loop of your own gives it as ``total_steps``.
        total_steps: Optimizer steps of the run, >= 1, if the schedule is to be fitted to them at once.
        freeze_threshold: How stable the variance must be for "auto", in (0, 1].
        max_freeze_step: Bound on what "auto" finds, >= 1; the later one of it and ``min_freeze_step`` counts. None is a
            share of the run, or 100,000 while its length is unknown.
        min_freeze_step: The first step that "auto" may find, >= 1; it also waits for the learning rate's warmup. None
            is 100, or fewer in a short run.
        warmup_bits: Bits per element of the averaged gradients of the first stage: 4 or 8 send integers with error
            feedback, 16 sends bfloat16, 32 the gradients as they are, which gives the bits of torch's AdamW.
        bias_correction: Whether Adam's bias corrections apply.
        betas: Coefficients of the running averages, each in [0, 1).
        eps: Added to the denominator, >= 0.
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
        weight_decay: Decoupled weight decay, >= 0.
        max_grad_norm: Gradients are clipped to this norm in :meth:`step`; 0 is off. (Trainer clips by itself.)
        clip: Norm by which local gradients are clipped: "sketch" is an estimate of the norm of their mean with a
            standard deviation of 1.1 %, alike on all ranks; "local" is the root of the mean of the ranks' squared
            norms, up to sqrt(world size) larger. In a local step of 0/1 Adam each rank clips by its own norm: with
            "sketch" divided by the usual ratio of such norms to that of the mean, which syncs measure. "late", of
            OnebitAdam, clips by the "sketch" of the step before, so that messages may leave during backward.
        zero_stage: 1, of OnebitAdam: the ranks share out the moments of the first stage; 2: gradients leave and are
            freed while backward runs, too, with clip="late" after the first stage; 0 is off.
        scale_block: Elements that share a scale in a message, a positive multiple of 8; None is one per message.
        variance_floor: At the end of the warmup stage the second moment of every element is raised to this share of
            its tensor's mean, >= 0; 0 is off.
        bucket_cap_mb: MiB of float32 values that are sent together, > 0.
        state: "compact" keeps errors in 8 bits, and after the first stage the variance too, on a logarithmic scale.
            "float32" keeps everything in float32.
        topology: The way of messages: "flat"; "hierarchical" (the ranks of a node average at full precision, and send
            one message of the node); "auto" is "hierarchical" if the launcher has started several nodes of several
            ranks each.
        node_size: Consecutive ranks per node; None takes them from the launcher and the host names.
        node_bits: Bits per element of what the ranks of a node average: 32, or 16 for bfloat16.
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
        freeze_step: int | str = AUTO,
        total_steps: int | None = None,
        freeze_threshold: float = 0.96,
        max_freeze_step: int | None = None,
        min_freeze_step: int | None = None,
        warmup_bits: int = 4,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        clip: str = "sketch",
        zero_stage: int = 0,
        scale_block: int | None = 4096,
        variance_floor: float = 0.01,
        bucket_cap_mb: float = 25.0,
        state: str = STATE,
        topology: str = AUTO_TOPOLOGY,
        node_size: int | None = None,
        node_bits: int = 32,
        process_group: dist.ProcessGroup | None = None,
        communicator: str | Communicator | None = None,
        comm_backend_name: str | None = None,
        cuda_aware: bool = False,
        amsgrad: bool = False,
    ) -> None:
        """See the class."""
        chosen = {"max_freeze_step": max_freeze_step, "min_freeze_step": min_freeze_step, **self._intervals}
        given = {name: value for name, value in chosen.items() if value is not None}
        schedule = self.schedule_class(**{"freeze_step": freeze_step, **given})
        if total_steps is not None:
            check_count("total_steps", total_steps)
        if freeze_step == AUTO or total_steps is not None:
            self._open = set(given) if freeze_step == AUTO else {"freeze_step", *given}
        check_family_options(
            max_grad_norm=max_grad_norm,
            variance_floor=variance_floor,
            freeze_threshold=freeze_threshold,
            scale_block=scale_block,
            state=state,
            clip=clip,
            clips=self._clips,
            amsgrad=amsgrad,
        )
        check_zero_stage(zero_stage, type(self).__name__, self.zero_stages, warmup_bits, state, clip)
        self.zero_stage = zero_stage
        communicator = resolve_communicator(communicator, comm_backend_name, cuda_aware)
        check_warmup_bits(warmup_bits, communicator)
        self.max_grad_norm, self.variance_floor = max_grad_norm, variance_floor
        self.schedule, self.freeze_threshold = schedule, freeze_threshold
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
            bucket_numel=bucket_numel_of(bucket_cap_mb),
            scale_block=scale_block,
            compact=state == "compact",
            communicator=communicator,
            process_group=process_group,
            cuda_aware=cuda_aware,
            topology=TopologyOptions(topology, node_size, node_bits),
        )
        groups = ParamGroups(self._states, self.communicator, self._follow_parameters)
        self._fused_warmup = warmup_bits < 32
        self.warmup_bits, self.warmup_gradients = warmup_bits, WarmupGradients(warmup_bits, groups)
        self.early_messages = EarlyMessages(clip == "late", groups, self._tensors, self._prepare)
        self._consensus.early = self.early_messages
        self._clip, self._consensus.clip = clip, "sketch" if clip == "late" else clip
        self._tensors |= room_for_history(self.schedule, self.param_groups[0]["betas"][1])
        if total_steps is not None:
            self.fit_schedule(total_steps)

    # -- what an algorithm defines ------------------------------------------------------------------------------------

    #: Options of the schedule beyond those that all have; None where they are not given.
    _intervals: Mapping[str, int | None] = {}
    #: Whether the servers' last message is the momentum, and takes its place in the compact state.
    momentum_is_message = False
    #: The gradients that leave and are freed while backward runs, with ``zero_stage=2``.
    freed: FreedGradients | None = None
    #: Legal values of ``clip``.
    _clips: tuple[str, ...] = CLIPS[:2]
    #: Legal values of ``zero_stage``.
    zero_stages: tuple[int, ...] = (0,)
    #: What else must be alike on all ranks, for them to keep the same parameters.
    _alike: tuple[str, ...] = ()
    #: What is sent after the switch, and what clipping reports then, for the log.
    _after_the_switch = ("the momentum", "sqrt(mean of the ranks' squared norms), up to sqrt(world size) larger")

    def _prepare(
        self, plan: StepPlan, state: GroupState, bucket: Bucket, grads: Sequence[Tensor | None]
    ) -> Combination:
        """Return what this rank wants to send of one bucket; it is read at once."""
        raise NotImplementedError("abstract")

    def _apply(self, plan: StepPlan, state: GroupState, bucket: Bucket, average: Average) -> None:
        """Update the parameters from the compressed mean of one bucket, which is masked already."""
        raise NotImplementedError("abstract")

    def _uncompressed_step(self, state: GroupState, grads: Sequence[Tensor | None]) -> None:
        """Take a step of one param group by averaged gradients."""
        rows = [index for index, grad in enumerate(grads) if grad is not None]
        adam_step_(
            [state.params[index] for index in rows],
            [grad for grad in grads if grad is not None],
            [state.view(state.exp_avg, index) for index in rows],
            [state.view(state.exp_avg_sq, index) for index in rows],
            [state.steps[index] for index in rows],
            adam_options(state.options),
            fused=self._fused_warmup,
        )

    def _local_steps(self, plan: StepPlan, states: Sequence[GroupState], gradients: Grads | None) -> None:
        """Take the steps that each rank takes alone, for algorithms whose plans have ``agree=False``."""
        raise NotImplementedError("abstract")

    def _bias_counts(self, state: GroupState) -> tuple[list[float], list[float]]:
        """Return for each parameter how often its first and its second moment have been updated."""
        return state.steps.tolist(), state.steps.tolist()

    # -- the step -----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, grads: Iterable[Any] | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], grads: Iterable[Any] | None = None) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, grads: Iterable[Any] | None = None) -> float | None:
        """Take one step, on all ranks together.

        If a gradient is not finite on any rank the step is skipped on all: nothing changes, and ``step_was_skipped``
        is True until the next step.

        Args:
            closure: Evaluates the model again and returns the loss.
            grads: One gradient (or None) per parameter, flat or per group, not changed; ``p.grad`` of each if not
                given.

        Returns:
            What the closure returned.

        Raises:
            TypeError: For sparse or complex gradients.
            ValueError: For gradients of a wrong shape, device or number, and for hyperparameters that differ between
                the ranks. If gradients are local, or given, errors are raised on all ranks together (a RuntimeError on
                ranks whose own gradients are valid).
        """
        loss = evaluate(closure)
        plan = self._begin_step()
        gradients, finite = self._consensus.final_gradients(plan, grads, self.max_grad_norm)
        if not finite and self._consensus.asks(plan):
            self.skip_step()
            return loss
        self._take_step(plan, gradients.groups if finite else None)
        self._step = plan.step
        self.rounds += plan.reduce_grads or plan.synchronize
        end_step(self, plan, taken=True)
        return loss

    def _begin_step(self) -> StepPlan:
        """Follow the parameters, compare the ranks if it is time, and return the plan of the coming step."""
        self._follow_parameters()
        plan, before = self.plan, self.last_plan if self._step > 0 else None
        options = [self.bucket_numel, self.scale_block, self.variance_floor, self.schedule.options(), *self._alike]
        options += [self._clip, self.max_grad_norm, self.warmup_bits, self._fused_warmup, self.compact]
        options += [self.zero_stage]
        self._consensus.comparison.check(plan, before, [type(self).__name__, self._step, repr(options)])
        return plan

    def _take_step(self, plan: StepPlan, gradients: Grads | None) -> None:
        """Take the step; ``gradients`` is None if this rank's are not finite and it steps without them."""
        compressed = [state for state in self._states if state.compressed and not plan.update_variance]
        shared_out = [state for state in self._states if state.moments.shards is not None]
        for state in compressed:
            state.begin_step(plan)
        if gradients is None:
            return self._local_steps(plan, compressed, None)
        for state, grads in zip(self._states, gradients, strict=True):
            if state in compressed or state in shared_out or (not state.params and state.own_rank is None):
                continue  # an empty group of all ranks has nothing to average
            if not plan.reduce_grads or state.own_rank is not None:
                grads = average_group(grads, state.layout, [p.shape for p in state.params], state.communicator)
            self._uncompressed_step(state, grads)
        if shared_out:
            take_sharded_step(shared_out, gradients, self.freed, bits=self.warmup_bits, fused=self._fused_warmup)
        if not plan.agree:
            self._local_steps(plan, compressed, gradients)
        elif plan.synchronize:
            self._compressed_step(plan, compressed, gradients)
            for state in compressed:
                state.steps += 1
        if ends_first_stage(self, plan, lambda: mean_variance_norm(self._states, self._bias_counts, self.communicator)):
            self._end_warmup(plan)

    def _compressed_step(self, plan: StepPlan, states: Sequence[GroupState], gradients: Grads | None) -> None:
        """Take the compressed step of some param groups: several buckets are on their way at the same time."""
        for _, together in by_communicator(states):
            run_tasks(
                self._step_of_bucket(plan, state, bucket, feedback, gradients[state.number] if gradients else [])
                for state in together
                for bucket, feedback in zip(state.layout.buckets, state.feedback, strict=True)
            )
        for state in states:
            state.end_compressed_step()

    def _step_of_bucket(
        self,
        plan: StepPlan,
        state: GroupState,
        bucket: Bucket,
        feedback: ErrorFeedback,
        grads: Sequence[Tensor | None],
    ) -> Task[None]:
        """Take the compressed step of one bucket: make its message, exchange it, update the parameters."""
        message = self._prepare(plan, state, bucket, grads)
        average = self.early_messages.take(state, bucket, message, feedback)
        if average is None:  # the message has not left during backward
            average = yield from compressed_all_reduce(message, feedback, state.communicator)
        self._apply(plan, state, bucket, state.masked(bucket, average))

    def _end_warmup(self, plan: StepPlan) -> None:
        clipped = 1.0 if self.freed is None else self.freed.clipped
        end_first_stage(self._states, self._bias_counts, self.variance_floor, clipped)
        follow_moments(self.state.values())
        if self.communicator.rank == 0:
            sent, norm = self._after_the_switch
            norm = ESTIMATE if self._consensus.clip == "sketch" else norm
            report_switch(plan, self._states, self.communicator.world_size, sent, norm)

    def _state_loaded(self) -> None:
        """Update everything that is derived from the state. In the first stage every parameter moves."""
        super()._state_loaded()
        self.early_messages.state_loaded()
        for state in self._states:
            if self.plan.stage.number:
                state.find_still()
            else:
                state.still = [False] * len(state.params)
