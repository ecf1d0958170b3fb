"""0/1 Adam (Lu et al. 2022, arXiv 2202.06009).

Variance stage, t <= freeze_step; in a variance step g is averaged in warmup_bits, in any other by
    g = compressed_all_reduce(g_r), times the mask if there is one                          (1)
    m = b1 m + (1 - b1) g;  in a variance step v = b2 v + (1 - b2) g^2                      (2)
    p <- p (1 - lr wd) - lr m^ / (sqrt(v^) + eps), in other steps bounded                   (3)
With warmup_bits of 4 or 8 the variance floor applies before each (1) too, and a tensor without variance does not move.
At the end of step freeze_step: bias corrections and variance floor as in 1-bit Adam, errors set to zero.
Local-step stage: each rank alone, in every step,
    m_r = b1 m_r + (1 - b1) g_r;  p_r <- p_r (1 - lr wd) - lr bounded(m_r / (sqrt(v) + eps))  (4)
    u_r <- u_r + lr m_r;  lrs <- lrs + lr;  decay <- decay (1 - lr wd)                      (5)
and in a sync, all together,
    y = compressed_all_reduce(u_r), times the mask;  m <- y / lrs                           (6)
    p <- decay anchor - bounded(y / (sqrt(v) + eps));  anchor <- p;  u, lrs <- 0;  decay <- 1  (7)
where bounded(d) cuts every element of d to +-max_update, in (7) to +-max_update lrs. Beyond the
paper, in every variance_interval-th sync v learns from the ranks' gradients (:mod:`~hf_compressopt.optim.refresh`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.announce import write_log
from hf_compressopt.collectives.communicator import Traffic
from hf_compressopt.kernels import AdamUpdate, Average, Descent, LocalUpdate, ParameterSync
from hf_compressopt.kernels.memory import numbers_on
from hf_compressopt.optim.compressed_adam import CompressedAdam
from hf_compressopt.optim.gradients import Grads
from hf_compressopt.optim.group import BucketStep, Exchange, ExtraState, GroupState
from hf_compressopt.optim.math import advance_all_, bit_sum
from hf_compressopt.schedules import Stage, StepPlan, ZeroOneSchedule

logger = logging.getLogger(__name__)


class LocalInterval:
    """Averages over the ranks' parameters, and a watch for parameters that someone else has written.

    At a sync the parameters follow from the anchor, the parameters at the sync before. Values that others write in
    between (a loaded model, clamped weights) would be lost. A sync after such a write averages the parameters
    themselves. Writes are seen by torch's version counters, on the host alone. Writes through ``.data``, which torch
    does not count, are seen beside syncs and saves, where sums of the parameters' bits are compared; elsewhere
    :meth:`ZeroOneAdam.parameters_replaced` tells of them.
    """

    def __init__(self, states: Sequence[GroupState], traffic: Traffic) -> None:
        self.states, self._traffic = states, traffic
        self._mark: Tensor | None = None  # [parameters] int64, the sums of bits that are expected; None: any
        self._versions: dict[int, int] = {}  # that are expected where there is no mark; by id, so that copies have none
        self._written: Tensor | None = None  # [] bool
        self._alike = False  # the mean is in the place of the ranks' own parameters until the next step
        self._since_sync: dict[int, tuple[float, float]] = {}  # what the groups' lr_sum and decay are, for the host
        self._settled: dict[Tensor, bool] = {}  # parameters that were averaged after they had been frozen

    @property
    def _compressed(self) -> list[GroupState]:
        return [state for state in self.states if state.compressed]

    # -- learning rates -----------------------------------------------------------------------------------------------

    def since_sync(self, state: GroupState) -> tuple[float, float]:
        """Return the sum of learning rates and the decay of a group since the last sync."""
        return self._since_sync.get(state.number, (0.0, 1.0))

    def advance(self, state: GroupState, lr_sum: float, decay: float) -> None:
        self._since_sync[state.number] = lr_sum, decay
        state.group_extra["lr_sum"].fill_(lr_sum)
        state.group_extra["decay"].fill_(decay)

    def state_loaded(self, *, written: bool) -> None:
        """Begin from a state that was loaded; ``written``: others wrote parameters before it was saved."""
        self.expect_anything()
        self._written = torch.tensor(True) if written else None
        for state in self._compressed:
            self._since_sync[state.number] = float(state.group_extra["lr_sum"]), float(state.group_extra["decay"])

    # -- values that others write -------------------------------------------------------------------------------------

    def expect(self, *, bits: bool = True) -> None:
        """Expect the present parameters at the next look: in their bits, which a GPU sums, or in their versions."""
        self._mark = self._fingerprint() if bits else None
        self._versions = self._present_versions()

    def expect_anything(self) -> None:
        """Accept any parameters at the next step, as after a load, and forget earlier writes."""
        self._mark = self._written = None
        self._versions = {}
        self._alike = False
        for state in self.states:
            state.forget_own_parameters()

    def look(self) -> None:
        """Compare the parameters with the expected ones. No host synchronisation."""
        if self._mark is None:
            versions = self._present_versions()
            if versions != self._versions and versions.keys() == self._versions.keys():
                self._written = torch.ones((), dtype=torch.bool, device="cpu")
            return
        now = self._fingerprint()
        if now.shape == self._mark.shape:
            written = (now != self._mark.to(now.device)).any()
            self._written = written if self._written is None else self._written.to(now.device) | written

    def written(self, device: torch.device) -> Tensor:
        """Return 1 if others have written parameters of this rank since the last sync, else 0, [] float64."""
        if self._written is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        return self._written.to(device, torch.float64)

    def was_written(self) -> bool:
        """Return :meth:`written` as a bool for the host, after another look."""
        self.look()
        return self._written is not None and bool(self._written)

    def _present_versions(self) -> dict[int, int]:
        return {id(param): param._version for state in self._compressed for param in state.params}

    def _fingerprint(self) -> Tensor:
        sums = [bit_sum(param) for state in self._compressed for param in state.params]
        return torch.stack(sums or [torch.zeros((), dtype=torch.int64, device="cpu")])

    # -- one set of parameters ----------------------------------------------------------------------------------------

    def is_apart(self) -> bool:
        """Return whether each rank has its own parameters in place. No collective call; alike on all ranks."""
        inside = any(self.since_sync(state)[0] != 0 and state.own_params is None for state in self._compressed)
        return inside and not self._alike and any(state.communicator.world_size > 1 for state in self._compressed)

    def begin_step(self) -> None:
        self.put_back()
        self.look()
        self._alike = False

    @torch.no_grad()
    def settle(self) -> None:
        """Replace each rank's parameters by the mean over ranks; the next step starts from it."""
        if not self.is_apart():
            return
        self.look()
        for state in self._compressed:
            self.average(state)
        self._alike = True
        self.expect()

    @contextmanager
    def stand_in(self, fill: Callable[[GroupState], None]) -> Iterator[bool]:
        """Inside, other parameters, written by ``fill``, are in the place of this rank's own."""
        if not self.is_apart():
            yield False
            return
        self.look()
        with torch.no_grad():
            for state in self._compressed:
                state.put_parameters_aside()
                fill(state)
        self.expect()
        try:
            yield True
        finally:
            self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Put this rank's own parameters back, unless someone has written others meanwhile, which stay."""
        if all(state.own_params is None for state in self.states):
            return
        before, self._written = self._written, None
        self.look()
        replaced = self._written is not None and bool(self._written)
        for state in self.states:
            if replaced:
                state.forget_own_parameters()
            else:
                state.put_parameters_back()
        self._written = self._written if replaced else before
        self.expect()

    @staticmethod
    @torch.no_grad()
    def fill_with_anchor(state: GroupState) -> None:
        """Put the parameters at the last sync in place, which are alike on all ranks. No collective call."""
        for index, param in enumerate(state.params):
            param.copy_(state.view(state.extra["anchor"], index))

    def average(self, state: GroupState) -> None:
        """Put the mean over ranks in the place of the parameters of a group that may move. All ranks call."""
        for bucket in state.layout.buckets:
            with state.parameter_segments(bucket) as params, self._traffic.paused():
                moving = [segment for segment in params if segment.tensor is not None]
                parts = [segment.part.float() for segment in moving]
                mean = torch.cat(parts or [torch.empty(0, dtype=torch.float32, device=state.device)])
                _average_(mean, state)
                kernels.on(mean).add_(Average.of(mean), moving)

    # -- syncs that do not follow from the anchor ---------------------------------------------------------------------

    @torch.no_grad()
    def start_anew(self, state: GroupState) -> None:
        """Begin an interval with the present parameters."""
        for index, param in enumerate(state.params):
            state.view(state.extra["anchor"], index).copy_(param)
        state.extra["local_update"].zero_()
        self.advance(state, 0.0, 1.0)

    def sync_by_average(self) -> None:
        """Average parameters and momentum in full precision, and begin an interval. All ranks call."""
        for state in self._compressed:
            self.average(state)
            for bucket in state.layout.buckets:
                _average_(state.exp_avg[bucket.start : bucket.stop], state)
            self.start_anew(state)
        self._written = None

    @torch.no_grad()
    def average_frozen(self) -> None:
        """Average, once each, the parameters that were frozen inside an interval: no message brings them together.

        The mean is taken of the distances from the anchor, so that a parameter that has not moved keeps its bits. All
        call.
        """
        for state in self._compressed:
            for index, param in enumerate(state.params):
                if not param.requires_grad and not self._settled.get(param):
                    anchor = state.view(state.extra["anchor"], index)
                    distance = param.detach().to(torch.float32) - anchor
                    _average_(distance, state)
                    param.copy_(anchor + distance)
                    anchor.copy_(param)
                self._settled[param] = not param.requires_grad


def _average_(tensor: Tensor, state: GroupState) -> None:
    tensor.mul_(1 / state.communicator.world_size)
    state.communicator.all_reduce(tensor).wait()


@dataclass
class _Shared:
    """Numbers of a param group that its buckets need in a compressed step."""

    descent: Descent
    corrections: Tensor | None = None  # in the variance stage; see AdamUpdate
    lr_sum: float = 0.0  # in a sync: the sum of learning rates since the last one


class ZeroOneAdam(CompressedAdam):
    """Adam that updates its variance less and less often, and then lets the ranks step alone between 1-bit syncs.

    Source: arXiv 2202.06009, Algorithm 1. Use it as :class:`~hf_compressopt.optim.onebit_adam.OnebitAdam`; evaluate::

        with optimizer.averaged_parameters():  # on all ranks
            evaluate(model)

    Inside a local interval the ranks' parameters differ. :meth:`averaged_parameters` puts their mean in place, for an
    evaluation or a save by all ranks; :meth:`synced_parameters` those of the last sync, for a rank alone. A rank whose
    gradient is not finite takes its steps with its momentum. Parameters that others write inside an interval (a
    loaded model, clamped weights) are averaged in full precision at the next sync, and so are parameters that are
    frozen inside it. Call :meth:`parameters_replaced` after writes through ``.data``.

    Args:
        params: As for OnebitAdam.
        lr: Learning rate, >= 0.
        var_freeze_step: DeepSpeed's name of ``freeze_step``: last step of the variance stage, >= 1, or "auto".
        var_update_scaler: Variance steps after which the interval between them doubles (kappa), >= 1. None is 16, or
            the run's length once it is known.
        local_step_scaler: Steps after which the interval between syncs doubles, >= 1. None is 32,678, or a tenth of the
            run.
        local_step_clipper: Longest interval between syncs (H), >= 1. None is 16, or 0.25 % of shorter runs.
        **options: See :class:`~hf_compressopt.optim.compressed_adam.CompressedAdam`.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
    """

    extra_state = (
        ExtraState("anchor", "element"),
        ExtraState("local_update", "element"),
        ExtraState("variance_steps", "parameter", plain="step"),
        ExtraState("lr_sum", "group"),
        ExtraState("decay", "group", 1.0),
    )
    compact = True
    schedule_class = ZeroOneSchedule
    own_tensors: ClassVar[Mapping[Stage, Sequence[str]]] = {Stage.LOCAL_STEP: ("exp_avg", "local_update", "param")}
    _after_the_switch = ("the sum of each rank's updates", "each rank's own")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        var_freeze_step: int | str | None = None,
        var_update_scaler: int | None = None,
        local_step_scaler: int | None = None,
        local_step_clipper: int | None = None,
        **options: Any,
    ) -> None:
        if var_freeze_step is not None:
            if "freeze_step" in options:
                raise ValueError(
                    f"freeze_step={options['freeze_step']!r} and var_freeze_step={var_freeze_step!r} are two names of "
                    "one option: give one"
                )
            options["freeze_step"] = var_freeze_step
        self._intervals = {
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        super().__init__(params, lr, **options)
        self._interval = LocalInterval(self._states, self.traffic)

    # -- variance stage -----------------------------------------------------------------------------------------------

    def _warmup_step(self, state: GroupState, grads: Sequence[Tensor | None]) -> None:
        if not state.compressed:
            return state.take_adam_step(grads, fused=self._fused_warmup)
        with_grad = {index: grad for index, grad in enumerate(grads) if grad is not None}
        advance_all_([*with_grad.values()], [state.moments_of(index) for index in with_grad], state.options)  # (2)
        learnt = [float(index in with_grad) for index in range(len(grads))]
        state.extra["variance_steps"] += numbers_on(state.device, learnt)
        corrections, how = _corrections(state, counted=True), state.descent()
        for bucket in state.layout.buckets:
            exp_avg, variance = state.exp_avg[bucket.start : bucket.stop], state.variance(bucket)
            with state.parameter_segments(bucket, with_grad) as params:
                update = AdamUpdate(Average.of(exp_avg), exp_avg, variance, params, how, 1.0, corrections)
                kernels.on(state.device).apply_adam_(update)  # (3)

    def _take_step(self, plan: StepPlan, gradients: Grads | None) -> None:
        super()._take_step(plan, gradients)
        following = self.plan_at(plan.step + 1)
        signs_follow = following.stage is Stage.VARIANCE and not following.update_variance
        if plan.update_variance and signs_follow and self.warmup_gradients.in_messages:
            self.warmup_gradients.give_errors_the_clipping()

    def _bias_counts(self, state: GroupState) -> tuple[list[float], list[float]]:
        return state.steps.tolist(), state.extra["variance_steps"].tolist()

    def _end_warmup(self, plan: StepPlan) -> None:
        super()._end_warmup(plan)
        for state in self._states:
            if state.compressed:
                state.errors.zero_()
                self._interval.start_anew(state)
        self._interval.expect()

    # -- messages: a gradient in the variance stage, the sum of updates in the local-step stage -----------------------

    def _begin_group(self, plan: StepPlan, state: GroupState) -> _Shared:
        if plan.stage is not Stage.LOCAL_STEP:
            return _Shared(state.descent(self.max_update), _corrections(state, counted=False))
        lr_sum, decay = self._interval.since_sync(state)
        bound = (self.max_update or math.inf) * lr_sum
        return _Shared(replace(state.descent(), decay=decay, bound=bound), lr_sum=lr_sum)

    def _compressed(self, step: BucketStep) -> Exchange:
        return self._sync_of(step) if step.plan.stage is Stage.LOCAL_STEP else self._step_by_signs(step)

    def _step_by_signs(self, step: BucketStep) -> Exchange:
        average = yield step.message(None)  # (1)
        shared, beta1 = step.shared, step.options["betas"][0]
        with step.parameters() as params:
            update = AdamUpdate(
                average, step.exp_avg, step.variance, params, shared.descent, 1 - beta1, shared.corrections
            )
            step.kernels.apply_adam_(update)  # (2), (3)

    def _sync_of(self, step: BucketStep) -> Exchange:
        u = step.extra("local_update")
        average = yield step.message(u, beta=0)  # (6)
        shared, anchor = step.shared, step.extra("anchor")
        with step.parameters() as params:
            update = ParameterSync(
                average, step.exp_avg, anchor, step.variance, u, params, shared.lr_sum, shared.descent
            )
            step.kernels.sync_parameters_(update)  # (6), (7)

    def _compressed_step(self, plan: StepPlan, states: Sequence[GroupState], gradients: Grads | None) -> None:
        with self.warmup_gradients.signs(plan, self.variance_floor, self._agreement.coming.variances):
            super()._compressed_step(plan, states, gradients)

    # -- local-step stage ---------------------------------------------------------------------------------------------

    def _local_steps(self, plan: StepPlan, states: Sequence[GroupState], gradients: Grads | None) -> None:
        self._interval.begin_step()
        written, usable = self._parameters_were_written(plan, gradients) if plan.synchronize else (False, True)
        gradients = gradients if usable else None
        if gradients is None and not self._agreement.holds_fault:
            message = "step %d: a gradient of rank %d is not finite; the rank steps with its momentum"
            write_log(logger, logging.WARNING, message, plan.step, self.communicator.rank)
        for state in states:
            self._local_step(state, None if gradients is None else gradients[state.number])
        if plan.synchronize:
            self._sync(plan, states, written)
        if plan.refresh_steps:
            self._refresh_variance(plan, gradients)
        beside_sync = plan.synchronize or self.plan_at(plan.step + 1).synchronize
        self._interval.expect(bits=beside_sync)

    def _local_step(self, state: GroupState, grads: Sequence[Tensor | None] | None) -> None:
        """Take (4) and (5) of one group."""
        descent = state.descent(self.max_update)
        beta1, _ = state.options["betas"]
        for bucket in state.layout.buckets:
            flat = slice(bucket.start, bucket.stop)
            gradients = None if grads is None else state.gradient_segments(bucket, grads)
            moments = state.exp_avg[flat], state.variance(bucket), state.extra["local_update"][flat]
            with state.parameter_segments(bucket) as params:
                update = LocalUpdate(*moments, gradients, params, beta1, descent)
                kernels.on(state.device).local_step_(update)  # (4), (5)
        lr_sum, decay = self._interval.since_sync(state)
        self._interval.advance(state, lr_sum + descent.lr, decay * descent.decay)
        state.count_step()

    def _sync(self, plan: StepPlan, states: Sequence[GroupState], written: bool) -> None:
        """Take (6) and (7), or plain averages if someone else has written parameters since the last sync."""
        self._interval.average_frozen()
        if written:
            return self._interval.sync_by_average()
        # a learning rate that was 0 throughout has moved nothing: there is nothing to send
        moved = [state for state in states if self._interval.since_sync(state)[0] != 0]
        self._compressed_step(plan, moved, None)
        for state in moved:
            self._interval.advance(state, 0.0, 1.0)

    def _parameters_were_written(self, plan: StepPlan, gradients: Grads | None) -> tuple[bool, bool]:
        """Return whether parameters were written on any rank, and whether this rank's gradients are finite."""
        states = [state for state in self._states if state.compressed and state.own_rank is None]
        so_far = [self._interval.since_sync(state) for state in states]
        written = self._interval.written(self.communicator.device)
        return self._agreement.compare_at_sync(plan, gradients, written, so_far)

    # -- one set of parameters ----------------------------------------------------------------------------------------

    @property
    def ranks_are_apart(self) -> bool:
        return self._interval.is_apart()

    def own_parameters_restorer(self) -> Callable[[], None]:
        states = [state for state in self._states if state.compressed and self.last_plan.stage is Stage.LOCAL_STEP]
        kept = [(param, param.detach().clone()) for state in states for param in state.params]

        @torch.no_grad()
        def restore() -> None:
            for param, value in kept:
                param.copy_(value)

        return restore

    def settle_parameters(self) -> None:
        """Put the mean over ranks in the place of each rank's parameters; the next step starts from it. All ranks call.

        The next sync is what it would have been, since it follows from the parameters at the last one.
        """
        self._interval.settle()

    def averaged_parameters(self) -> AbstractContextManager[object]:
        """Inside, the parameters are the mean over ranks; at the end each rank has its own again. All ranks call."""
        return self._interval.stand_in(self._interval.average)

    def synced_parameters(self) -> AbstractContextManager[bool]:
        """Inside, the parameters are those of the last sync, alike on all ranks; at the end this rank's own again."""
        return self._interval.stand_in(self._interval.fill_with_anchor)

    def parameters_replaced(self) -> None:
        """Continue from the present parameters, such as those of a model that was loaded. All ranks call; no messages.

        They must be alike on all ranks.

        Without this call the next sync averages the parameters, with one message in full precision, if torch has
        counted the writes; those through ``.data`` in the middle of an interval are lost.
        """
        if self.last_plan.stage is Stage.LOCAL_STEP:
            self._interval.expect_anything()
            for state in self._states:
                if state.compressed:
                    self._interval.start_anew(state)
            self._interval.expect()

    def _state_loaded(self) -> None:
        super()._state_loaded()
        self._interval.state_loaded(written=self._written_before_load)

    def _parameters_were_replaced(self) -> bool:
        return self.last_plan.stage is Stage.LOCAL_STEP and self._interval.was_written()

    def _before_load(self) -> None:
        """Put each rank's own parameters back: what is loaded goes into these."""
        super()._before_load()
        self._interval.put_back()


def _corrections(state: GroupState, counted: bool) -> Tensor:
    """Return the divisors of m and v of each parameter; infinity for m if there is no variance yet."""
    beta1, beta2 = state.options["betas"]
    # counted: whether the step under way is in state.steps already
    updates = state.extra["variance_steps"].double()
    first, second = torch.ones_like(updates), torch.ones_like(updates)
    if state.options["bias_correction"]:
        steps = numbers_on(state.device, state.steps.tolist(), torch.float64)  # which lie in host memory
        first = 1 - beta1 ** (steps + (not counted))
        second = 1 - beta2 ** updates.clamp(min=1)
    first = torch.where(updates > 0, first, torch.inf)  # without a variance it does not move
    return torch.stack([first, second], dim=1).float()
