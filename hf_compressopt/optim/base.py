"""The base of the compressed optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from operator import is_not
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.announce import Announcement, write_log
from hf_compressopt.collectives.backward import take_over, watch_clipping
from hf_compressopt.collectives.communicator import Communicator, Traffic, all_reduce_bytes
from hf_compressopt.collectives.exchange import BucketErrors, in_runs, run_tasks
from hf_compressopt.collectives.gradients import average_group
from hf_compressopt.collectives.sender import StepPasses, require_sent
from hf_compressopt.collectives.topology import AUTO as AUTO_TOPOLOGY
from hf_compressopt.collectives.topology import TopologyOptions, with_topology
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.flat import FLOAT_BYTES, Bucket, bucket_numel_of
from hf_compressopt.format.foreign import refuse_torch_checkpoint
from hf_compressopt.kernels import Combination, IntegerFormat
from hf_compressopt.kernels.memory import in_float32
from hf_compressopt.optim import options
from hf_compressopt.optim.agreement import CLIPS, ESTIMATE, RankAgreement
from hf_compressopt.optim.gradients import Grads
from hf_compressopt.optim.group import (
    BucketStep,
    Exchange,
    ExtraState,
    GroupForm,
    GroupState,
    ParamGroups,
    by_communicator,
    exchange_buckets,
    hyperparameters_of,
    message_of,
)
from hf_compressopt.optim.math import evaluate
from hf_compressopt.optim.overlap import LATE_CLIP, OverlapSender
from hf_compressopt.optim.sharded import ShardedOverlap
from hf_compressopt.optim.state import STATE_KEY, Progress, load_full, load_with_hooks, make_stub, own_state, switched
from hf_compressopt.optim.warmup import WarmupGradients, check_warmup_bits
from hf_compressopt.schedules import AUTO, RunSchedule, Schedule, Stage, StepPlan, Warmup
from hf_compressopt.weak import WeakCall

logger = logging.getLogger(__name__)

#: Ratio of the bytes of gradients in full precision to those in 4 bits.
FOUR_BITS_RATIO = 4096 * FLOAT_BYTES / IntegerFormat(4).nbytes(4096)


class CompressedOptimizer(torch.optim.Optimizer):
    """The base of the compressed optimizers: stages, flat buffers, the pipeline, skips, clipping, metrics, state.

    An algorithm subclasses it with a schedule (``schedule_class``), the step by averaged gradients
    (:meth:`_warmup_step`), and a generator that takes the compressed step of one bucket (:meth:`_compressed`).

    In the stages in which ``plan.reduce_grads`` is True the caller averages the gradients over the ranks before
    :meth:`step` (Trainer and Accelerate do, through DDP; :func:`~hf_compressopt.average_gradients` does in a loop of
    your own), in the form that ``warmup_gradients`` says; otherwise gradients must stay local.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer. A param group may carry its
            own hyperparameters, such as lr, betas and weight_decay; ``non_freeze`` (True keeps it in the warmup stage
            for good); ``exp_avg_mask`` (a tensor that broadcasts to each of its parameters); and
            ``process_group`` (the ranks that hold these parameters, for expert or model parallelism: gradients of such
            a group stay local in every stage, step() averages them over it. All ranks have the same param groups;
            only those with a process group of their own may differ in their parameters).
        lr: Learning rate, >= 0.
        freeze_step: Last step of the warmup stage, >= 1; "auto" ends it when the variance, if there is one, is stable.
        total_steps: Optimizer steps of the run, >= 1, to which the schedule is fitted; Trainer and
            Accelerate know them.
        max_freeze_step: Last step that "auto" may choose, >= 1, unless ``min_freeze_step`` is later. None is a share of
            the run, or 100,000 while its length is unknown.
        min_freeze_step: First step that "auto" may choose, >= 1; it also waits for the learning rate's warmup. None is
            100, or fewer in a short run.
        warmup_bits: Bits per element of gradients in the warmup stage: 4 or 8 (integers with error feedback), 16
            (bfloat16), or 32 (bitwise torch's AdamW).
        betas: Coefficients of the running averages, each in [0, 1).
        weight_decay: Decoupled weight decay, >= 0.
        max_grad_norm: Norm to which :meth:`step` clips gradients; 0 is off. (Trainer clips by itself.)
        clip: Norm by which local gradients are clipped. "sketch": an estimate of the norm of their mean, with a
            standard deviation of 1.1 %, alike on all ranks. "local": the root of the mean of the ranks' squared norms,
            up to sqrt(world size) larger. "late", of OnebitAdam: the "sketch" of the step before, so that messages are
            sent during backward. In a local step of 0/1 Adam each rank clips by its own norm, with "sketch" scaled by a
            ratio that syncs measure.
        scale_block: Elements per scale in a message, a positive multiple of 8. Vectors of fewer than two blocks, and
            other tensors of fewer than 256 elements, travel in full precision beside. None is the papers' one scale
            per message, for small tensors too.
        bucket_cap_mb: MiB of float32 values that are sent together, > 0; None is 100 on CUDA devices, else 25.
        topology: "flat"; "hierarchical": the ranks of a node average in full precision and send one message; "auto":
            "hierarchical" if the launcher has started several nodes of several ranks each.
        node_size: Consecutive ranks per node; None takes them from the launcher and the host names.
        node_bits: Bits per element inside a node: 32, or 16 for bfloat16.
        process_group: The ranks; None is the default group.
        communicator: "auto", the name of a torch.distributed backend, "mpi" (by mpi4py), or a Communicator.
        comm_backend_name: DeepSpeed's spelling of ``communicator``.
        cuda_aware: For communicator="mpi": hand CUDA tensors to the MPI library as they are.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
        RuntimeError: If a launcher announces several ranks but torch.distributed is not initialized.
    """

    #: The schedule's class, whose fields are options of the optimizer.
    schedule_class: type[Schedule] = Schedule
    #: Options of the schedule beyond those that all have; None where they are not given.
    _intervals: Mapping[str, int | None] = {}
    #: True if there is a variance beside the momentum.
    has_variance: ClassVar[bool] = False
    #: Messages from one refresh of the frozen variance to the next where none are given; 0 is no refresh.
    default_variance_interval: ClassVar[int] = 0
    #: State tensors beyond the moments.
    extra_state: tuple[ExtraState, ...] = ()
    #: For a stage, the state tensors that are each rank's own beside the errors; "param" stands for the parameters.
    own_tensors: ClassVar[Mapping[Stage, Sequence[str]]] = {}
    #: True if errors lie in 8 bits, and a frozen variance too, on a logarithmic scale; else all state is in float32.
    compact: ClassVar[bool] = False
    #: True if the servers' last message is the momentum, and takes its place in the compact state.
    momentum_is_message = False
    #: Legal values of ``clip``.
    _clips: tuple[str, ...] = CLIPS[:2]
    #: The ZeRO stage, of an algorithm that shares out its moments, and those that it may have.
    zero_stage: int = 0
    zero_stages: tuple[int, ...] = (0,)
    #: The values that are sent after the switch, and the norm that clipping reports then, in words for the log.
    _after_the_switch = ("the momentum", "sqrt(mean of the ranks' squared norms), up to sqrt(world size) larger")

    lr_warmup: Warmup = Warmup()
    #: The sender of the compressed stage's messages during backward; None if they leave in the step.
    overlap: OverlapSender | None = None
    step_was_skipped: bool = False
    skipped_steps: int = 0
    rounds: int = 0
    _written_before_load: bool = False  # others had written parameters when the state that was loaded last was saved
    _bytes_compared = False
    _options_compared = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        freeze_step: int | str = AUTO,
        total_steps: int | None = None,
        max_freeze_step: int | None = None,
        min_freeze_step: int | None = None,
        warmup_bits: int = 4,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        clip: str = "sketch",
        scale_block: int | None = 4096,
        bucket_cap_mb: float | None = None,
        topology: str = AUTO_TOPOLOGY,
        node_size: int | None = None,
        node_bits: int = 32,
        process_group: dist.ProcessGroup | None = None,
        communicator: str | Communicator | None = None,
        comm_backend_name: str | None = None,
        cuda_aware: bool = False,
    ) -> None:
        bounds = {"max_freeze_step": max_freeze_step, "min_freeze_step": min_freeze_step, **self._intervals}
        explicit = {name: value for name, value in bounds.items() if value is not None}
        schedule = self.schedule_class(freeze_step=freeze_step, **explicit)
        if total_steps is not None:
            options.check_count("total_steps", total_steps)
        options.check_at_least("max_grad_norm", max_grad_norm, 0)
        options.check_scale_block(scale_block)
        if clip not in self._clips:
            only = ", which only OnebitAdam has" if clip == "late" else ""
            raise ValueError(f"clip must be one of {list(self._clips)}, got {clip!r}{only}")
        self.warmup_bits = warmup_bits
        self._clip = clip
        self._check_options()
        communicator = options.resolve_communicator(communicator, comm_backend_name, cuda_aware)
        check_warmup_bits(warmup_bits, communicator)
        self.max_grad_norm = max_grad_norm
        # an end of the warmup stage that is given stays; what else the run's length decides is open
        kept = list(explicit) if freeze_step == AUTO else ["freeze_step", *explicit]
        self._run = RunSchedule(schedule, kept, low_bit=warmup_bits < 32)
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, **self._group_options}
        defaults |= {"non_freeze": False}
        self.traffic = Traffic()
        self._step, self._in_shards = 0, False
        self._announcement = Announcement()
        self._states: list[GroupState] = []
        self._tensors: dict[str, Tensor] = {}  # state that belongs to no group, on the CPU, alike on all ranks
        self._chosen: dict[str, Any] = {"name": communicator, "cuda_aware": cuda_aware, "traffic": self.traffic}
        params, device = options.in_lists(params)
        self.bucket_numel, self.scale_block = bucket_numel_of(bucket_cap_mb, device.type), scale_block
        flat = make_communicator(process_group=process_group, device=device, **self._chosen)
        self.communicator = with_topology(flat, TopologyOptions(topology, node_size, node_bits), scale_block)
        norm = "sketch" if clip == "late" else clip
        self._agreement = RankAgreement(self._states, self.communicator, self._tensors, norm)
        super().__init__(params, defaults)
        groups = ParamGroups(self._states, self.communicator, WeakCall(self._follow_parameters))
        self.warmup_gradients = WarmupGradients(warmup_bits, groups, self._tensors)
        self.overlap = self._make_overlap(groups)
        self._agreement.listen_to(self.overlap, self.warmup_gradients)
        self._schedule_replaced()
        watch_clipping(self)
        if total_steps is not None:
            self.fit_schedule(total_steps)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was pickled, and show the state that lies in the buffers: a pickle holds copies of views."""
        super().__setstate__(state)
        watch_clipping(self)
        for group in self._states:
            for index, param in enumerate(group.params):
                shown = group.torch_state(index)
                shown.update({name: value for name, value in self.state[param].items() if name not in shown})
                self.state[param] = shown

    # -- what an algorithm defines -------------------------------------------------------------------------------------

    #: Hyperparameters of param groups beyond lr, betas and weight_decay, and their defaults.
    _group_options: Mapping[str, Any] = {}

    def _check_options(self) -> None:
        """Raise a ValueError for options that do not fit together, before anything is made."""

    def _warmup_step(self, state: GroupState, grads: Sequence[Tensor | None]) -> None:
        """Take a step of one param group by averaged gradients."""
        raise NotImplementedError("abstract")

    def _compressed(self, step: BucketStep) -> Exchange:
        """Take the compressed step of one bucket: yield its message, and update the parameters by the average."""
        raise NotImplementedError("abstract")

    def _share_of_gradient(self, state: GroupState) -> float:
        """Return the factor of this rank's gradient in what is sent after the switch, and so of its errors."""
        return float(1 - state.options["betas"][0])

    def _begin_group(self, plan: StepPlan, state: GroupState) -> Any:
        """Return values that the buckets of a param group share in a compressed step: ``BucketStep.shared``."""

    def _end_group(self, plan: StepPlan, state: GroupState, shared: Any) -> None:
        """Do what needs whole tensors, after the last bucket of a param group."""

    def _local_steps(self, plan: StepPlan, states: Sequence[GroupState], gradients: Grads | None) -> None:
        """Take the steps that each rank takes alone, for algorithms whose plans have ``agree=False``."""
        raise NotImplementedError("abstract")

    def _freeze(self) -> None:
        """Freeze, at the end of the warmup stage, what does not learn any more."""

    def _take_step_of_shards(self, states: Sequence[GroupState], gradients: Grads) -> None:
        """Take a step of param groups whose moments the ranks have shared out."""
        raise NotImplementedError("abstract")

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, grads: Iterable[Any] | None = None
    ) -> float | None:
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
        loss = None if closure is None else evaluate(closure)
        if closure is not None and grads is None and not self.sends_gradients:
            require_sent(self)
        plan = self._begin_step()
        gradients, finite = self._agreement.final_gradients(plan, grads, self.max_grad_norm)
        if not finite and self._agreement.asks(plan):
            self.skip_step()
            return loss
        if self.warmup_gradients.travelled:
            self.warmup_gradients.commit(taken=True, given=grads is not None)
        self._take_step(plan, gradients.groups if finite else None)
        self._step = plan.step
        self.rounds += plan.reduce_grads or plan.synchronize
        self._end_step(plan, taken=True)
        return loss

    def _begin_step(self) -> StepPlan:
        """Follow the parameters, compare the ranks if it is time, and return the plan of the coming step."""
        self._require_own_groups()
        self._follow_parameters()
        plan, before = self.plan, self.last_plan if self._step > 0 else None
        if self._announcement.is_open:
            self._announcement.begin(self, self._describe_start)
        self._compare_passes()
        self._agreement.check(plan, before, self.must_be_alike)
        return plan

    def _compare_passes(self) -> None:
        """Compare the passes of all ranks if the next message may meet one of another pass."""
        plan = self.plan
        measures_variance = self.freeze_step == AUTO and plan.reduce_grads and not plan.stage.number
        self._agreement.compare_passes(plan, self.last_plan, measures_variance=measures_variance)

    def require_same_options(self) -> None:
        """Raise on all ranks, before the first message, if they differ in class, step or options. All ranks call."""
        if not self._options_compared:
            self.communicator.require_equal("the optimizer, its step or its options", self.must_be_alike())
            self._options_compared = True

    def must_be_alike(self) -> list[Any]:
        """Return class, step and options, as JSON holds them, which the ranks compare before the first step."""
        chosen = [self.bucket_numel, self.scale_block, self.schedule.options(), self._clip, self.max_grad_norm]
        return [type(self).__name__, self._step, repr([*chosen, self.warmup_bits, *self._alike()])]

    def _alike(self) -> list[Any]:
        """Return further options that must be alike on all ranks, for them to keep the same parameters."""
        return []

    def _take_step(self, plan: StepPlan, gradients: Grads | None) -> None:
        """Take the step; ``gradients`` is None if this rank's are not finite and it steps without them."""
        compressed = [state for state in self._states if state.compressed and not plan.update_variance]
        shared_out = [state for state in self._states if state.moments.shards is not None]
        if plan.stage.number:
            for state in compressed:
                state.moments.freeze()
        if gradients is None:
            return self._local_steps(plan, compressed, None)
        for state, grads in zip(self._states, gradients, strict=True):
            if state in compressed or state in shared_out or (not state.params and state.own_rank is None):
                continue  # an empty group of all ranks has nothing to average
            if not plan.reduce_grads or state.own_rank is not None:
                grads = average_group(grads, state.layout, [p.shape for p in state.params], state.communicator)
            self._warmup_step(state, grads)
        if shared_out:
            self._take_step_of_shards(shared_out, gradients)
        if not plan.agree:
            self._local_steps(plan, compressed, gradients)
        elif plan.synchronize:
            self._compressed_step(plan, compressed, gradients)
            for state in compressed:
                state.count_step()
        if not plan.stage.number and self._ends_warmup_stage(plan):
            self._end_warmup(plan)

    def _compressed_step(self, plan: StepPlan, states: Sequence[GroupState], gradients: Grads | None) -> None:
        """Take the compressed step of some param groups: several buckets are on their way at the same time."""
        if self.overlap is not None:
            self.overlap.commit(states)
        shared = {state.number: self._begin_group(plan, state) for state in states}
        for communicator, together in by_communicator(states):
            steps: list[BucketStep] = []
            for state in together:
                grads = gradients[state.number] if gradients else None
                for bucket, errors in zip(state.layout.buckets, state.feedback, strict=True):
                    steps.append(BucketStep(plan, state, bucket, errors, grads, shared[state.number]))
            kinds = [[each for each in steps if each.bucket.in_full is in_full] for in_full in (False, True)]
            runs = (in_runs(kind, lambda each: each.bucket.numel, communicator) for kind in kinds)
            run_tasks(exchange_buckets(run, self._compressed, self.overlap) for run in chain.from_iterable(runs))
        for state in states:
            state.end_compressed_step()
            self._end_group(plan, state, shared[state.number])

    def _message_of(
        self, plan: StepPlan, state: GroupState, bucket: Bucket, errors: BucketErrors, grads: Sequence[Tensor | None]
    ) -> Combination:
        """Return the message of a bucket that leaves during backward; step() takes its average."""
        return message_of(self._compressed(BucketStep(plan, state, bucket, errors, grads)))

    def _end_warmup(self, plan: StepPlan) -> None:
        """Switch to the compressed stage: errors of gradients become errors of the momentum that they are part of."""
        for state in self._states:
            if state.compressed:
                factor = self._share_of_gradient(state) * self._clip_of_errors()
                state.errors.scale_([factor] * len(state.params))
        self.warmup_gradients.end_stage()
        self._freeze()
        sent, norm = self._after_the_switch
        norm = ESTIMATE if self._agreement.clip == "sketch" else norm
        told = "with one rank nothing is sent, and so nothing is compressed"
        if self.communicator.world_size > 1:
            told = f"from here on gradients stay local, {sent} is sent as signs, and a reported grad_norm is {norm}"
        interval = self.schedule.variance_interval
        frozen = ", the variance is frozen" if self.has_variance else ""
        frozen += f" but for one message in {interval}" if interval else ""
        self._log(logging.INFO, "step %d: the %s stage ends%s; %s", plan.step, plan.stage.value, frozen, told)

    def _clip_of_errors(self) -> float:
        """Return the clip coefficient of the gradients whose errors the warmup stage leaves."""
        return self.warmup_gradients.clip_coefficient() if self.warmup_gradients.in_messages else 1.0

    def _end_step(self, plan: StepPlan, *, taken: bool) -> None:
        """Close a step, which was taken or skipped."""
        self.step_was_skipped = not taken
        self._agreement.end_step(compared=plan.agree or plan.synchronize)
        if self.overlap is not None:
            self.overlap.end_step(taken=taken)
        elif taken:
            self._tensors.pop(LATE_CLIP, None)  # of a run that was another one before
        if self.warmup_gradients.travelled:
            self.warmup_gradients.commit(taken=False)  # of what no step has taken
        if plan.reduce_grads or self.warmup_gradients.in_use or self.warmup_gradients.travelled:
            self.warmup_gradients.end_step(plan)
        self.traffic.end_step(local=not plan.agree)
        if taken:
            if self._announcement.is_open:
                self._announcement.end(self)
            self._compare_bytes(plan)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @property
    def local_gradients(self) -> bool:
        """True if some gradients of the coming step are this rank's own, so that ranks must agree on their norm."""
        return self._agreement.are_local(self.plan)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Clip the gradients of the coming step, by the same factor on every rank. All ranks call.

        Averaged gradients are clipped by their norm. Local ones by an estimate of the norm of their average; with
        clip="local" by sqrt(mean over ranks of their squared norms), an upper bound of that norm, at most sqrt(W)
        larger. Gradients whose messages have left during backward (clip="late") are only measured.

        Args:
            max_norm: The norm to clip to; ``math.inf`` only measures.
            parameters: Clip these, which may be any; all parameters of the optimizer if None.

        Returns:
            [] float32, the norm before clipping.

        Raises:
            ValueError: If ``max_norm`` is not positive, and if the ranks differ in what must be alike.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm}")
        norm = self._agreement.clip_(self._begin_step(), max_norm, parameters)
        if isinstance(norm, Tensor):
            return norm.float()
        return torch.full((), in_float32(norm), dtype=torch.float32, device=self.communicator.device)

    @property
    def passes(self) -> StepPasses:
        """The backward passes for the coming step that average_gradients or DistributedDataParallel's hook knows."""
        return self._agreement.passes

    def note_clipping(self, norm: float | Tensor, max_norm: float) -> None:
        """Record that another function has clipped the averaged gradients of the coming step by their norm."""
        self.warmup_gradients.note_clipping(norm, max_norm)

    def skip_step(self) -> None:
        """Close a step that is not taken, because a gradient is not finite: also for a gradient scaler to call."""
        self.skipped_steps += 1
        self._end_step(self.plan, taken=False)
        message = "step %d skipped: a gradient is not finite, or the norm of all is too large"
        self._log(logging.WARNING, message, self.plan.step)

    def join_hook(self, **_: Any) -> Any:
        """Refuse torch's Join context, in which ranks that run out of inputs leave steps to the others."""
        options.refuse_uneven_inputs(self)

    def _make_overlap(self, groups: ParamGroups) -> OverlapSender | None:
        if self._clip != "late":
            return None
        return OverlapSender(groups, self._tensors, WeakCall(self._message_of))

    @property
    def sharded_overlap(self) -> ShardedOverlap | None:
        """The sender of gradients that are released during backward, with ``zero_stage=2``."""
        return self.overlap if isinstance(self.overlap, ShardedOverlap) else None

    # -- a gradient scaler ---------------------------------------------------------------------------------------------

    def expect_loss_scale(self, scale: float) -> None:
        """Take over the factor that the gradients of the coming backward pass carry."""
        if self.overlap is not None:
            self.overlap.expect_loss_scale(scale)

    def note_loss_scale(self, scale: float) -> None:
        """Take over the factor that the gradients of the coming step carry, which a scaler divides out now."""
        if self.overlap is not None:
            self.overlap.note_loss_scale(scale)
        if self.plan.reduce_grads and self.warmup_bits < 16:
            self.warmup_gradients.note_loss_scale(scale)

    def note_unscaled(self, overflow: bool) -> None:
        """Record that a scaler has divided the factor out, and whether it found a value that is not finite."""
        if self.overlap is not None:
            self.overlap.note_unscaled()
        if self.local_gradients:
            self._agreement.note_overflow(overflow)

    def overflow_anywhere(self) -> bool:
        """Return whether the gradients of the coming step are not finite on any rank. All ranks call."""
        self._compare_passes()
        return self._agreement.overflow_anywhere(self.plan)

    # -- the schedule --------------------------------------------------------------------------------------------------

    def plan_at(self, step: int) -> StepPlan:
        """Return the plan of step ``step``. With ``zero_stage`` step() averages the gradients of the warmup stage."""
        return _plan_of(self._run.schedule, step, shared_out=self.zero_stage > 0 and self.communicator.world_size > 1)

    @property
    def plan(self) -> StepPlan:
        return self.plan_at(self._step + 1)

    @property
    def sends_gradients(self) -> bool:
        """True if the coming step sends what it needs of local gradients: nobody has to average them before."""
        return not self.plan.reduce_grads

    @property
    def last_plan(self) -> StepPlan:
        return self.plan_at(max(self._step, 1))

    @property
    def schedule(self) -> Schedule:
        """The schedule in force, which the run's length, or freeze_step="auto", may still change."""
        return self._run.schedule

    @property
    def freeze_step(self) -> int | str:
        return self.schedule.freeze_step

    @freeze_step.setter
    def freeze_step(self, step: int | str) -> None:
        self._run.freeze_at(step)

    def scale_schedule(self, max_steps: int, given: Iterable[str]) -> str:
        """Fit the schedule to a run of ``max_steps`` steps; the options named in ``given`` keep their values.

        Returns a description of the choice, for the log. Raises a RuntimeError after the warmup stage.
        """
        choice = self._run.scale(max_steps, list(given), next_step=self._step + 1, window=self._memory_of_variance)
        self._schedule_replaced()
        return choice

    def defer_schedule(self, given: Iterable[str]) -> None:
        """Leave the schedule open until :meth:`fit_schedule`, but for the options named in ``given``."""
        self._run.defer(list(given))

    def fit_schedule(self, max_steps: int) -> str:
        """Fit an open schedule to a run of ``max_steps`` steps; one that was given, or resumed, stays as it is.

        Whoever knows the run's length calls it before the first step, and may call it again with another length while
        the warmup stage lasts. It warns, on rank 0, if a ``freeze_step`` that was given is beyond the end of the run.

        Returns:
            A description of the choice, for the log; "" if nothing has changed.
        """
        if self.plan.stage.number or self._run.steps == max_steps:
            return ""
        choice = self._run.fit(max_steps, next_step=self._step + 1, window=self._memory_of_variance)
        self._schedule_replaced()
        freeze_step = self.freeze_step
        if isinstance(freeze_step, int) and freeze_step > max_steps:
            message = "freeze_step=%d is beyond the end of the run, which has %d steps: all of them belong to the "
            message += "%s stage. Give a smaller freeze_step, or 'auto'"
            self._log(logging.WARNING, message, freeze_step, max_steps, self.plan.stage.value)
        return choice

    def forget_length(self) -> None:
        """Take back the run's length that :meth:`fit_schedule` was told, if the warmup stage still lasts."""
        if self._run.steps is not None and not self.plan.stage.number:
            self._run.forget_length()
            self._schedule_replaced()

    def _schedule_replaced(self) -> None:
        """Allocate what the schedule needs."""

    def _describe_start(self) -> str:
        """Say how the schedule was chosen, and with which step the next stage begins; warn of what may surprise."""
        low = next((p for p in self.trainable_parameters if p.dtype != torch.float32), None)
        if low is not None:
            dtype, share = str(low.dtype).removeprefix("torch."), round(4 / torch.finfo(low.dtype).eps)
            self._log(
                logging.WARNING,
                "%s keeps no float32 copy of %s weights: a step that moves a weight by less than 1/%d of itself is "
                "lost, and so are most steps at small learning rates. Load the model in float32 (dtype=torch.float32) "
                "and compute in bfloat16 (bf16=True), or use AdamW with zero_stage=1 or 2 (--optim zero2_adamw), which "
                "keeps float32 weights",
                type(self).__name__,
                dtype,
                share,
            )
        steps, last = self._run.steps, self.schedule.last_warmup_step
        if steps is None and self._step == 0 and self.freeze_step == AUTO:
            self._log(
                logging.WARNING,
                "freeze_step='auto' does not know the length of the run: give total_steps=... to %s, or to "
                "CompressOptPlugin, or prepare a learning-rate scheduler of transformers or OneCycleLR too; otherwise "
                "the variance alone decides, and a short run may compress nothing",
                type(self).__name__,
            )
        latest = "" if isinstance(self.freeze_step, int) else " at the latest"
        begins = "" if steps is not None and last >= steps else f"compressed from step {last + 1}{latest}"
        return "; ".join(filter(None, [self._run.choice, begins]))

    @property
    def _memory_of_variance(self) -> int:
        """The steps that the variance remembers."""
        _, beta2 = self.param_groups[0]["betas"]
        return round(1 / (1 - float(beta2)))

    def _follow_lr_warmup(self, step: int) -> bool:
        """Take up the learning rate of a step, and return whether its warmup is over, and long enough ago."""
        self.lr_warmup = self.lr_warmup.after(step, float(self.param_groups[0]["lr"]))
        return self.lr_warmup.is_over(step, self._memory_of_variance)

    def _ends_warmup_stage(self, plan: StepPlan) -> bool:
        """Return whether the step of the warmup stage that was taken by this plan is the last one."""
        warmup_is_over = self._follow_lr_warmup(plan.step)
        if self.schedule.freeze_step != AUTO:
            return plan.ends_stage
        if plan.step < self.schedule.min_freeze_step or not warmup_is_over:
            return False
        self._end_at(plan.step, "the learning rate's warmup, or min_freeze_step, is over")
        return True

    def _end_at(self, step: int, why: str) -> None:
        """Take a step as the end of the warmup stage, which freeze_step="auto" has found."""
        self._run.freeze_at(step)
        self._log(logging.INFO, "freeze_step=auto: found %d (%s)", step, why)

    def tensors_of_all_groups(self) -> dict[str, Tensor]:
        """Return the tensors that belong to no group, by name, as they are saved."""
        self._fetch_norms()
        return self._tensors

    def _fetch_norms(self) -> None:
        """Write the norms that the host has not waited for into the state."""

    def _log(self, level: int, message: str, *args: object) -> None:
        """Log a line on rank 0."""
        if self.communicator.rank == 0:
            write_log(logger, level, message, *args)

    # -- param groups --------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its state is allocated at once.

        Parameters that were frozen when they were added have no state: trainable now, they may be added again, and
        leave the group in which they were.

        Raises:
            ValueError: For an option outside its range; for parameters on another device; and after the warmup stage,
                in which a new parameter would have no variance, for a group without ``non_freeze=True``.
            TypeError: For a parameter of another dtype than float32, bfloat16 or float16.
        """
        if self.plan.stage.number and not param_group.get("non_freeze"):
            raise ValueError(
                f"a group added in the {self.plan.stage.value} stage has no variance to divide by: add it before, or "
                "with non_freeze=True, which keeps it in full precision"
            )
        process_group = param_group.pop("process_group", None)  # the dict itself stays: schedulers may hold it
        if process_group is not None and isinstance(self._chosen["name"], Communicator):
            raise ValueError("a param group with a process_group of its own needs a communicator that is given by name")
        with options.without_state_moved(self.param_groups, self.trainable_parameters, param_group):
            super().add_param_group(param_group)
            options.check_last_group(self.param_groups, one_device=True)
        group = self.param_groups[-1]
        take_over(group["params"], type(self).__name__)
        device = group["params"][0].device if group["params"] else self.communicator.device
        ranks, own_rank = self.communicator, None
        if process_group is not None:  # param groups with the same process group share a communicator
            own_rank = self.communicator.rank
            known = (state.communicator for state in self._states if state.device == device)
            same = next((each for each in known if each.process_group is process_group), None)
            ranks = same or make_communicator(process_group=process_group, device=device, **self._chosen)
        form = GroupForm(
            self.bucket_numel,
            self.scale_block,
            self.compact,
            shares_moments=self.zero_stage > 0,
            has_variance=self.has_variance,
            extra_state=self.extra_state,
        )
        state = GroupState(len(self._states), group, form, ranks, own_rank)
        self._states.append(state)
        self._show_moments(state)
        # ranks that have taken steps meet at the next small message: only one of them may have called this
        self._agreement.startup.groups_added()
        self.passes.note_members(len(self.shared_parameters()))

    def _require_own_groups(self) -> None:
        """Raise if param groups were removed or replaced: their state would go on moving the parameters."""
        groups = [state.options for state in self._states]
        if len(groups) != len(self.param_groups) or any(map(is_not, groups, self.param_groups)):
            raise ValueError(
                f"{type(self).__name__} has {len(groups)} param groups with a state, and param_groups are "
                f"{len(self.param_groups)} others: change the entries of a group in place, add one by "
                "add_param_group(), and leave parameters out by requires_grad_(False) on all ranks"
            )

    def _follow_parameters(self) -> None:
        """Move the buffers to where the parameters are, if a model was moved after its optimizer was made."""
        for state in self._states:
            if state.params and state.params[0].device != state.device:
                state.to(state.params[0].device)
                self.communicator.follow(state.device)
                state.communicator.follow(state.device)
                self._show_moments(state)
                self._agreement.startup.begin_anew()

    def _show_moments(self, state: GroupState) -> None:
        self.state.update({param: state.torch_state(index) for index, param in enumerate(state.params)})

    @property
    def trainable_parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(state.params for state in self._states))

    def own_parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(state.params for state in self._states if state.own_rank is not None))

    def shared_parameters(self) -> list[tuple[str, Tensor]]:
        """The trainable parameters, with their names, that all ranks hold: without those of own_parameters()."""
        shared = (state for state in self._states if state.own_rank is None)
        return list(chain.from_iterable(zip(state.labels, state.params, strict=True) for state in shared))

    def hyperparameters(self) -> list[Any]:
        """The hyperparameters that all ranks must have alike in the coming step, by param group, as JSON holds them."""
        return hyperparameters_of(self._states)

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Names of the trainable parameters, per group: ``names`` in the order of all of them, or torch's param_names.

        Raises a ValueError if their number is not that of the trainable parameters, or one occurs twice.
        """
        return options.names_by_group([state.names for state in self._states], names)

    def label_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Use names such as those of ``model.named_parameters()`` in messages; checkpoints keep their own."""
        names = {id(param): name for name, param in named}
        for state in self._states:
            state.label(names)

    # -- one set of parameters: alike on all ranks after each step, but for 0/1 Adam -----------------------------------

    def averaged_parameters(self) -> AbstractContextManager[object]:
        """Inside, all ranks hold the same parameters, as they always do here. All ranks call."""
        return nullcontext()

    def own_parameters_restorer(self) -> Callable[[], None]:
        """Return a function that puts this rank's parameters back as they are now: nothing to do here."""
        return lambda: None

    def synced_parameters(self) -> AbstractContextManager[bool]:
        """Inside, the parameters are alike on all ranks, as they always are here. No collective call. Yields False."""
        return nullcontext(False)

    @property
    def ranks_are_apart(self) -> bool:
        """True if each rank has its own parameters at this moment; always False in this class."""
        return False

    def settle_parameters(self) -> None:
        """Make all ranks hold the same parameters until the next step, as they always do here. All ranks call."""

    def parameters_replaced(self) -> None:
        """Continue from the present parameters, such as those of a model that was loaded. All ranks call."""

    # -- state ---------------------------------------------------------------------------------------------------------

    def _parameters_were_replaced(self) -> bool:
        """Return whether others have written parameters of this rank since its last message."""
        return False

    def _before_load(self) -> None:
        """Put everything where a checkpoint is read to."""
        self._fetch_norms()

    def state_in_shards(self) -> AbstractContextManager[None]:
        """Inside, ``state_dict()`` is a small stub and ``load_state_dict()`` does nothing: the state is in shards."""
        return switched(self, "_in_shards", True)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's full local state, errors included, in tensors and primitives. No collective call.

        Raises a RuntimeError inside torch.distributed.checkpoint, which would drop the errors, or keep one rank's.
        """
        if not self._in_shards:
            refuse_torch_checkpoint(self)
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

        Raises a ValueError if it does not fit; nothing has changed then.
        """
        self._follow_parameters()
        self._fetch_norms()
        load_with_hooks(self, state_dict, partial(load_full, self), in_shards=self._in_shards)

    def _resume(self, progress: Progress, schedule: Schedule) -> None:
        """Take over how far the run of a loaded state had come, and its schedule."""
        self._step = progress.step
        self._run.resume(schedule, next_step=progress.step + 1)
        self._schedule_replaced()
        self.lr_warmup = progress.lr_warmup
        self.rounds = progress.rounds
        self.skipped_steps = progress.skipped_steps
        self.step_was_skipped = False
        self.traffic.restore(progress.bytes_sent)
        self.warmup_gradients.resume(ever_in_use=progress.gradients_travelled)
        self._written_before_load = progress.parameters_written

    def _state_loaded(self) -> None:
        """Update everything that is derived from the state. In the warmup stage every parameter moves."""
        self._agreement.state_loaded()
        if self.overlap is not None:
            self.overlap.state_loaded()
        self.warmup_gradients.state_loaded()
        for state in self._states:
            state.let_all_move()
            if self.plan.stage.number:
                state.find_without_variance()

    # -- numbers and words ---------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step and of the run so far, of this rank.

        Returns:
            ``stage`` (0.0 is the warmup stage), ``step``, ``skipped_steps``, ``rounds`` (steps with an average or a
            message); ``bytes_sent_step`` and ``bytes_sent`` by this rank, if hierarchical to other nodes, with
            ``bytes_sent_in_node`` and ``node_size``; ``compression_ratio`` (bytes that DDP would send for gradients of
            these dtypes over those of the last step, on the link of a node); ``bytes_uncompressed`` and
            ``bytes_on_link``, both sums for all steps of this process; seconds that the host was blocked,
            ``seconds_all_to_all``, ``seconds_all_gather`` and ``seconds_communication``; ``gradient_noise_scale`` in
            batches of one rank, once local gradients were clipped by clip="sketch". Of 0/1 Adam's local steps bytes are
            means since the last call that had a sync to report.
        """
        return self._metrics(self.traffic.mean_bytes())

    def _metrics(self, sent: float) -> dict[str, float]:
        full = sum(all_reduce_bytes(state.params, state.communicator.world_size) for state in self._states)
        # all ranks of the node send
        node_size = max((state.communicator.topology.node_size for state in self._states), default=1)
        numbers = {"stage": self.last_plan.stage.number, **self.traffic.metrics(full, sent, node_size)}
        if self.last_plan.reduce_grads and not self.warmup_gradients.in_use:
            numbers["compression_ratio"] = 1.0
        for name in ("all_to_all", "all_gather"):
            numbers[f"seconds_{name}"] = self.traffic.seconds[name]
        numbers["step"] = float(self._step)
        numbers["skipped_steps"] = float(self.skipped_steps)
        numbers["rounds"] = float(self.rounds)
        noise = self._agreement.noise.scale
        if noise is not None:
            numbers["gradient_noise_scale"] = noise
        return numbers

    def _compare_bytes(self, plan: StepPlan) -> None:
        """Warn, once, if a step of the last stage sends more than gradients in 4 bits would."""
        message_alone = not plan.refresh_steps or self.schedule.variance_interval == 1
        told_already = self._bytes_compared or not (plan.stage.number and plan.synchronize)
        if told_already or not message_alone or self.communicator.rank != 0:
            return
        self._bytes_compared = True
        numbers = self._metrics(self.traffic.mean_bytes(peek=True))
        numel = sum(state.layout.numel for state in self._states)
        wide = sum(param.nbytes for state in self._states for param in state.params) / max(1, FLOAT_BYTES * numel)
        sent, ratio = numbers["bytes_sent_step"], numbers["compression_ratio"]
        in_four_bits = wide * FOUR_BITS_RATIO
        if sent > 0 and ratio < in_four_bits:
            small = f"scale_block={self.scale_block}"
            if plan.refresh_steps:
                small += f" or variance_interval={self.schedule.variance_interval}"
            message = (
                "a step sends %.0f bytes, DDP only %.1f times as many, and gradients in 4 bits %.1f times fewer than "
                "DDP: the model has too few parameters (%d) for what messages carry beside signs, or %s is too small. "
                "Use an ordinary optimizer with grad_compression='int4', or larger values"
            )
            self._log(logging.WARNING, message, sent, ratio, in_four_bits, numel, small)

    def describe(self) -> str:
        """Return one line for the log: class, size, schedule, ranks, kernels."""
        chosen = {**self.schedule.options(), "warmup_bits": self.warmup_bits}
        chosen |= {"zero_stage": self.zero_stage} if self.zero_stage else {}
        bounds = ("max_freeze_step", "min_freeze_step")
        listed = ", ".join(f"{name}={value}" for name, value in chosen.items() if name not in bounds)
        numel = sum(state.layout.numel for state in self._states)
        return (
            f"{type(self).__name__}, {numel:,} parameters, {listed}; {self.communicator}, "
            f"scale_block={self.scale_block}, kernels: {kernels.implementation(self.communicator.device)}"
        )


@lru_cache(maxsize=64)
def _plan_of(schedule: Schedule, step: int, *, shared_out: bool) -> StepPlan:
    """Return the plan of a step, for which every part of the step asks."""
    plan = schedule.plan(step)
    averages_itself = shared_out and plan.stage.number == 0
    return replace(plan, reduce_grads=False, synchronize=True) if averages_itself else plan
