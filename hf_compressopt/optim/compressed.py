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

from hf_compressopt.collectives.agreement import DIGEST_BOUND
from hf_compressopt.collectives.averaging import average_group
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import ErrorFeedback, Pipeline, Task, compressed_all_reduce
from hf_compressopt.flat import Bucket
from hf_compressopt.hosts import attach_to_hosts
from hf_compressopt.kernels import Average, Combination
from hf_compressopt.optim.alignment import largest_difference, parameter_bits, replicated_bits, take_first_ranks
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
from hf_compressopt.schedules import Schedule, StepPlan

logger = logging.getLogger(__name__)


class CompressedOptimizer(ScheduledOptimizer):
    """What the compressed optimizers share: stages, flat buffers, the pipeline, skips, clipping, metrics, state.

    An algorithm subclasses it with a schedule (``schedule_class``), the local mathematics that makes a bucket's message
    (:meth:`_prepare`), and what is done with the message that comes back (:meth:`_apply`).

    With ``freeze_step="auto"`` the variance decides when the first stage ends (1-bit Adam, arXiv 2102.02888, section
    4.3; :class:`~hf_compressopt.schedules.FreezeDetector`), at the latest at ``max_freeze_step``. Ranks decide alike.

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
        freeze_step: Last step of the warmup stage, >= 1, or "auto".
        freeze_threshold: How stable the variance must be for "auto", in (0, 1].
        max_freeze_step: Bound on what "auto" finds, >= 1.
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
        freeze_step: int | str = 100_000,
        freeze_threshold: float = 0.96,
        max_freeze_step: int = 100_000,
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
        attach_to_hosts()
        schedule = self._make_schedule(**{self.freeze_option: freeze_step, "max_freeze_step": max_freeze_step})
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
        self._measured: StepGradients | None = None  # gradients of the coming step whose norm is known already
        self._overflow = False  # a gradient scaler found an element that is not finite
        self._gradients_compared = False
        self._compared_at = 0  # the step before which the ranks were compared last
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
            schedule=schedule,
            freeze_threshold=freeze_threshold,
            bucket_numel=bucket_numel,
            scale_block=scale_block,
            communicator=communicator,
            process_group=process_group,
            cuda_aware=cuda_aware,
        )

    def _make_schedule(self, **options: Any) -> Schedule:
        """Make the schedule of these options."""
        return self.schedule_class(**options)

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
        gradients, finite = self._final_gradients(grads)
        if finite or not self._ranks_agree_on(plan):
            self._take_step(plan, gradients.groups if finite else None)
            self._step = plan.step
            self.rounds += plan.reduce_grads or plan.synchronize
            self.step_was_skipped = False
            self._measured, self._overflow = None, False
            self.traffic.end_step()
        else:
            self.skip_step()
        return loss

    def skip_step(self) -> None:
        """Close a step that is not taken, because a gradient is not finite: also for a gradient scaler to call."""
        self.step_was_skipped = True
        self.skipped_steps += 1
        self._measured, self._overflow = None, False
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
                grads = average_group(grads, state.layout, shapes, state.communicator)
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

    def join_hook(self, **_: Any) -> Any:
        """Refuse torch's Join context, in which ranks that run out of inputs leave steps to the others.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} does not support uneven inputs (torch's Join, Accelerate's join_uneven_inputs): "
            "all ranks take every step together. Give all as many batches: drop_last=True in the DataLoader, or "
            "even_batches=True in Accelerate"
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

    def _final_gradients(self, given: Iterable[Any] | None) -> tuple[StepGradients, bool]:
        """The gradients of this step, clipped, and whether those of all ranks are finite.

        What the ranks have agreed on since the last step, while clipping or for a gradient scaler, is not asked again.
        """
        gradients, measured = self._collect(given, self._ranks_agree_on(self.plan)), self._measured
        same = gradients.reuse(measured)
        agreed = measured is not None and measured.ask and gradients.ask and given is None
        if agreed and measured is not None and measured.is_finite() and not self.max_grad_norm:
            if not same and not gradients.is_usable():
                self._go_on_without(gradients)
            return gradients, True
        self._agree(gradients)
        if self.max_grad_norm > 0:
            gradients.clip_(self.max_grad_norm, in_place=given is None)
        return gradients, gradients.is_finite()

    def _go_on_without(self, gradients: StepGradients) -> None:
        """Drop this rank's gradients, which someone made unusable after all ranks had found them finite."""
        gradients.groups = [[None] * len(state.params) for state in self._states]
        message = "step %d: the gradients of rank %d were changed after clipping and cannot be used; they count as 0"
        write_log(logger, logging.WARNING, message, self._step + 1, self.communicator.rank)

    def _agree(self, gradients: StepGradients, part: StepGradients | None = None, *, overflow: bool = False) -> None:
        """Exchange the one small message of a step, if the ranks must agree: norms, faults, what must be alike.

        Raises:
            ValueError: If the ranks differ in their hyperparameters, on all ranks; nothing has changed.
            Exception: As :meth:`StepGradients.agree`.
        """
        plan = self.plan
        compares = not (self._gradients_compared or plan.reduce_grads) and gradients.ask
        bits = self._gradient_bits(gradients.groups) % DIGEST_BOUND if compares else 0
        # as many in every step, so that a resumed run, which compares once more, sends the uninterrupted one's bytes
        digests = [crc32(repr(self._hyperparameters()).encode()) % DIGEST_BOUND, bits]
        alike = gradients.agree(digests, overflow=overflow or self._overflow, part=part)
        if alike and not alike[0]:
            self._require_same_hyperparameters()
        if compares:
            self._heed_gradients(alike[1] and bits > 0)

    def _hyperparameters(self) -> list[list[Any]]:
        """The hyperparameters of the param groups that all ranks hold."""
        pairs = zip(self.param_groups, self._states, strict=False)
        return [_plain_options(group) for group, state in pairs if state.own_rank is None]

    def _gradient_bits(self, gradients: Grads) -> int:
        """A sum of the bits of this rank's gradients, of the param groups that all ranks hold."""
        shared = [grads for grads, state in zip(gradients, self._states, strict=False) if state.own_rank is None]
        return int(sum(bit_sum(grad) for grad in chain.from_iterable(shared) if grad is not None))

    def _heed_gradients(self, identical: bool) -> None:
        """Warn, once, if the local gradients of all ranks are identical."""
        if (
            not self._gradients_compared
            and identical
            and 0 == self.communicator.rank < self.communicator.world_size - 1
        ):
            write_log(
                logger,
                logging.WARNING,
                "the gradients of all ranks are identical in the first step whose gradients must stay local: they seem "
                "to be averaged already, in full precision, so that no traffic is saved. For a DistributedDataParallel "
                "model call hf_compressopt.attach_ddp(model, optimizer); with Trainer import hf_compressopt.auto; with "
                "Accelerate use CompressOptAccelerator; in a plain loop average gradients only if "
                "optimizer.plan.reduce_grads",
            )
        self._gradients_compared = True

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
        gradients.reuse(self._measured)
        part = gradients if parameters is None else gradients.of(parameters, self._states)
        self._agree(gradients, part)
        norm = part.clip_(max_norm, in_place=True).float()
        gradients.after_clipping(part)
        self._measured = gradients
        return norm

    def note_overflow(self, overflow: bool) -> None:
        """Take note that a gradient scaler has unscaled this rank's gradients; no collective call.

        Args:
            overflow: Whether an element of them is not finite.
        """
        self._overflow, self._measured = overflow, None

    def overflow_anywhere(self) -> bool:
        """Whether the gradients of any rank are not finite. All ranks call; at most one small all-reduce.

        Raises:
            TypeError: For gradients that cannot be used, on all ranks.
            ValueError: Likewise.
        """
        if self._measured is None or not self._measured.ask:
            gradients = self._collect(agree=True, averaged=False)
            self._agree(gradients)
            self._measured = gradients
        return not self._measured.is_finite()

    def agree_on_overflow(self, overflow: bool) -> bool:
        """Whether any rank met an overflow in its local gradients; :meth:`note_overflow`, then the answer.

        Args:
            overflow: Whether this rank met one, as a gradient scaler finds it.
        """
        self.note_overflow(overflow)
        return self.overflow_anywhere()

    def _check_ranks_agree(self) -> None:
        """Check, before the first step and before the first one of a stage, that the ranks are alike.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        plan = self.plan
        if self._ranks_checked:
            if self._compared_at != plan.step and self._step > 0 and self.plan_at(self._step).stage is not plan.stage:
                self._require_same_hyperparameters()
                self._align_parameters()
                self._compared_at = plan.step
            return
        own = [state.own_rank is not None for state in self._states]
        options = [self.bucket_numel, self.scale_block, self.variance_floor, self.schedule.options(), *self._alike()]
        self.communicator.require_equal(
            "optimizer, step, options, or param groups with a process_group of their own",
            [type(self).__name__, self._step, repr(options), own],
        )
        self._require_equal(
            "parameter sizes", lambda state: crc32(repr((state.compressed, state.layout.numels)).encode())
        )
        self._require_same_hyperparameters()
        if plan.agree:  # else each rank has parameters of its own
            self._compare_parameters()
        self._ranks_checked, self._compared_at = True, plan.step

    def _require_same_hyperparameters(self) -> None:
        """Check that the ranks have the same hyperparameters, else they would drift apart unnoticed.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        what = "the hyperparameters of their param groups (does each rank's scheduler see the same numbers?)"
        self.communicator.require_equal(what, self._hyperparameters())

    def _align_parameters(self) -> None:
        """Take rank 0's parameters on all ranks if they differ by no more than rounding. All ranks call.

        Raises:
            ValueError: If they differ by more, on all ranks; nothing has changed.
        """
        error: Exception | None = None
        apart: list[tuple[Communicator, list[GroupState]]] = []
        with self.traffic.paused():
            for communicator, states in self._by_communicator(self._states):
                everyone = communicator.all_gather_object([replicated_bits(state) for state in states])
                if any(bits != everyone[0] for bits in everyone):
                    apart.append((communicator, states))
                    if largest_difference(states, self._step, communicator) > 1:
                        error = ValueError(
                            "the parameters of the ranks differ by more than rounding at the end of the warmup stage: "
                            "average all gradients over the ranks while optimizer.plan.reduce_grads, and start all "
                            "ranks from the same parameters"
                        )
            self._raise_together(error)
            for communicator, states in apart:
                take_first_ranks(states, communicator)
        if apart and self.communicator.rank == 0:
            message = "step %d: the parameters of the ranks differ by rounding (unlike devices?): all take rank 0's"
            write_log(logger, logging.WARNING, message, self._step + 1)

    def _compare_parameters(self) -> None:
        """Check that all ranks hold the same parameter bits: nothing after the warmup stage would mend a difference.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        what = "the bits of their parameters (are they alike at the start, and all gradients averaged in warmup?)"
        self._require_equal(what, parameter_bits)

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
        self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error; without groups of their own, all have it or none."""
        if self._has_own_groups:
            self.communicator.raise_together(error, ValueError)
        elif error is not None:
            raise error


def _plain_options(group: dict[str, Any]) -> list[Any]:
    """The hyperparameters of a param group that all ranks must share, as JSON holds them."""
    return [
        *(float(group[name]) for name in ("lr", "eps", "weight_decay")),
        *map(float, group["betas"]),
        *(bool(group[name]) for name in ("bias_correction", "eps_inside_sqrt")),
    ]
