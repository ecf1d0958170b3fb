"""The agreement of the ranks of one optimizer: what must be alike, norms, faults, overflows; and its log lines."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import sqrt
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import DIGEST_BOUND, Communicator
from hf_compressopt.optim.gradients import GradientNoise, Grads, MeanNorm, StepGradients, measure
from hf_compressopt.optim.group import GroupState, by_communicator, has_own_groups
from hf_compressopt.optim.late import EarlyMessages
from hf_compressopt.optim.math import bit_sum
from hf_compressopt.optim.sharded import FreedGradients
from hf_compressopt.schedules import StepPlan

logger = logging.getLogger(__name__)


def write_log(logger: logging.Logger, level: int, message: str, *args: object) -> None:
    """Log a line; a handler that fails, such as one that writes to a closed stderr, does not stop the step.

    An error on one rank in the middle of a step would leave the other ranks waiting.
    """
    with suppress(Exception):
        logger.log(level, message, *args)


def report_switch(plan: StepPlan, states: Iterable[GroupState], world_size: int, sent: str, norm: str) -> None:
    """Log the end of the first stage, and warn of parameters that do not move after it."""
    message = "step %d: %s ends, the variance is frozen; "
    if world_size > 1:
        message += f"from here on gradients stay local, {sent} is sent as signs, and a reported grad_norm is {norm}"
    else:
        message += "with one rank nothing is sent, and so nothing is compressed"
    write_log(logger, logging.INFO, message, plan.step, plan.stage.value)
    names = [name for state in states for name, still in zip(state.labels, state.still, strict=True) if still]
    if names:
        write_log(
            logger,
            logging.WARNING,
            "%d parameter(s) have no variance after the warmup stage and are not updated any more, since their "
            "averaged gradients were 0 in all its steps: %s%s (for such parameters use a later freeze_step, or a group "
            "with non_freeze=True)",
            len(names),
            ", ".join(names[:8]),
            ", ..." if len(names) > 8 else "",
        )


_CHUNK = 1 << 20  # elements that are compared, or sent, at a time
_MOST = 0.01


def digest_of(value: Any) -> int:
    """Return a number below DIGEST_BOUND that stands for a value."""
    return crc32(repr(value).encode()) % DIGEST_BOUND


class Comparison:
    """The comparison of the ranks of one optimizer, before its first step and where a stage begins."""

    def __init__(self, states: Sequence[GroupState], communicator: Communicator) -> None:
        """Begin with nothing compared."""
        self._states, self._communicator = states, communicator
        self._checked = False
        self._compared_at = 0  # the step before which the ranks were compared last

    def check_anew(self) -> None:
        """Have the ranks compare everything before the next step."""
        self._checked = False

    def check(self, plan: StepPlan, before: StepPlan | None, alike: Callable[[], Sequence[Any]]) -> None:
        """Check, before the first step and before the first one of a stage, that the ranks are alike."""
        if not self._checked:
            own = [state.own_rank is not None for state in self._states]
            self._communicator.require_equal(
                "optimizer, step, options, or param groups with a process_group of their own", [*alike(), own]
            )
            self._require_equal("parameter sizes", lambda state: digest_of((state.compressed, state.layout.numels)))
            self.require_same_hyperparameters()
            if plan.agree:  # else each rank has parameters of its own
                self._require_equal("the bits of their parameters (are they alike at the start?)", _parameter_bits)
            self._checked, self._compared_at = True, plan.step
        elif self._compared_at != plan.step and before is not None and before.stage is not plan.stage:
            self.require_same_hyperparameters()
            self._align(plan.step)
            self._compared_at = plan.step

    def hyperparameters(self) -> list[list[Any]]:
        """Return the hyperparameters of the param groups that all ranks hold."""
        return [_plain_options(state.options) for state in self._states if state.own_rank is None]

    def require_same_hyperparameters(self) -> None:
        """Check that the ranks have the same hyperparameters, else they would drift apart unnoticed."""
        what = "the hyperparameters of their param groups (does each rank's scheduler see the same numbers?)"
        self._communicator.require_equal(what, self.hyperparameters())

    def _align(self, step: int) -> None:
        """Take rank 0's parameters on all ranks if they differ by no more than rounding."""
        error: Exception | None = None
        apart: list[tuple[Communicator, list[GroupState]]] = []
        with self._communicator.traffic.paused():
            for communicator, states in by_communicator(self._states):
                everyone = communicator.all_gather_object([_replicated_bits(state) for state in states])
                if any(bits != everyone[0] for bits in everyone):
                    apart.append((communicator, states))
                    if _largest_difference(states, step - 1, communicator) > 1:
                        error = ValueError(
                            "the parameters of the ranks differ by more than rounding at the end of the warmup stage: "
                            "average all gradients over the ranks while optimizer.plan.reduce_grads, and start all "
                            "ranks from the same parameters"
                        )
            self._raise_together(error)
            for communicator, states in apart:
                _take_first_ranks(states, communicator)
        if apart and self._communicator.rank == 0:
            message = (
                "step %d: the parameters of the ranks differ by rounding (unlike devices?): all take those of rank 0"
            )
            write_log(logger, logging.WARNING, message, step)

    def _require_equal(self, what: str, value: Callable[[GroupState], int]) -> None:
        """Check that a number of every param group is alike on all the ranks that hold it."""
        error: Exception | None = None
        for communicator, states in by_communicator(self._states):
            try:
                communicator.require_equal(what, [value(state) for state in states])
            except ValueError as found:
                error = found
        self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error; without groups of their own, all have it or none."""
        if has_own_groups(self._states):
            self._communicator.raise_together(error, ValueError)
        elif error is not None:
            raise error


def _parameter_bits(state: GroupState) -> int:
    """Return a sum of the bits of a group's parameters."""
    return int(sum(bit_sum(param) for param in state.params))


def _replicated_bits(state: GroupState) -> int:
    """Return a sum of the bits of what ranks hold alike after the warmup stage: parameters, moments, coefficients."""
    return int(sum(bit_sum(tensor) for tensor in _replicated(state)))


def _largest_difference(states: Sequence[GroupState], steps: int, communicator: Communicator) -> float:
    """Compare this rank's parameters, moments and coefficients with rank 0's. All ranks call."""
    worst = torch.zeros((), dtype=torch.float64, device=communicator.device)
    for tensor in (tensor for state in states for tensor in _replicated(state)):
        tolerance = min(_MOST, 8 * sqrt(steps) * torch.finfo(tensor.dtype).eps)
        difference = largest = torch.zeros((), dtype=torch.float64, device=tensor.device)
        for mine in torch.split(tensor.reshape(-1), _CHUNK):
            first = mine.clone()
            communicator.broadcast(first)
            difference = torch.maximum(difference, (mine.double() - first.double()).abs().max())
            largest = torch.maximum(largest, first.abs().max().double())
        share = torch.where(difference > 0, difference / (largest * tolerance), 0.0)
        worst = torch.maximum(worst, torch.nan_to_num(share, nan=torch.inf, posinf=torch.inf))
    communicator.all_reduce(worst, op="max").wait()
    return float(worst)


def _take_first_ranks(states: Sequence[GroupState], communicator: Communicator) -> None:
    """Replace parameters, moments and coefficients by rank 0's. All ranks call."""
    for state in states:
        for tensor in _replicated(state):
            flat = tensor.reshape(-1)  # a view, or a copy of what has other strides
            for chunk in torch.split(flat, _CHUNK):
                communicator.broadcast(chunk)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


def _replicated(state: GroupState) -> Iterator[Tensor]:
    held = (*state.params, state.exp_avg, state.exp_avg_sq, *state.extra.values())
    yield from (tensor.detach() for tensor in held if tensor.numel())


def _plain_options(group: dict[str, Any]) -> list[Any]:
    """The hyperparameters of a param group that all ranks must share, as JSON holds them."""
    return [
        *(float(group[name]) for name in ("lr", "eps", "weight_decay")),
        *map(float, group["betas"]),
        *(bool(group[name]) for name in ("bias_correction", "eps_inside_sqrt")),
    ]


class Consensus:
    """The small messages beside those of a step, and what the ranks know from them.

    Attributes:
        states: The param groups, a list that may grow.
        communicator: All ranks.
        clip: "sketch" to clip local gradients by the norm of their mean, "local" by the root of their mean square.
        early: The messages that leave during backward; the optimizer sets it.
        freed: The gradients that leave and are freed during backward, if the optimizer has such.
        comparison: What must be alike on all ranks.
        noise: The noise in the ranks' gradients.
        measured: The gradients of the coming step if their norm is known already, from clipping or a gradient scaler.
        at_sync: The gradients of a step of 0/1 Adam whose message follows at its end, as they were before clipping.
    """

    early: EarlyMessages
    freed: FreedGradients | None = None

    def __init__(self, states: Sequence[GroupState], communicator: Communicator, tensors: dict[str, Tensor]) -> None:
        """Begin with nothing known. ``tensors``: state that is alike on all ranks, for checkpoints."""
        self.states, self.communicator = states, communicator
        self.noise = GradientNoise(tensors)
        self.clip = "sketch"
        self.measured: StepGradients | None = None
        self.at_sync: MeanNorm | None = None
        self._common = math.nan  # what the coming step's gradients say about noise
        self._usual = math.nan  # the root of the mean square of the ranks' own norms in the coming step
        self._overflow = False  # a gradient scaler found an element that is not finite
        self._gradients_compared = False
        self.comparison = Comparison(states, communicator)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def asks(self, plan: StepPlan) -> bool:
        """Return whether a gradient that is not finite on one rank skips this step on all."""
        uncompressed = (state for state in self.states if not state.compressed)
        # of a group with a process group of its own, others may have parameters if this rank has none
        return plan.agree or any(state.params or state.own_rank is not None for state in uncompressed)

    def are_local(self, plan: StepPlan) -> bool:
        """Return whether some gradients of a step are this rank's own, so that ranks must agree on their norm."""
        return not plan.reduce_grads or has_own_groups(self.states)

    def final_gradients(
        self, plan: StepPlan, given: Iterable[Any] | None, max_grad_norm: float
    ) -> tuple[StepGradients, bool]:
        """Return the gradients of a step, clipped, and whether those of all ranks are finite.

        What the ranks have agreed on since the last step, while clipping or for a gradient scaler, is not asked again.
        """
        # given gradients may be averaged or not: a wrong number of them on one rank must fail on all
        ask = self.asks(plan) and (self.are_local(plan) or given is not None)
        if given is not None:
            self.early.drop()
            if self.freed is not None:
                self.freed.drop()
        gradients, measured = self._collect(given, ask=ask), self.measured
        same = gradients.reuse(measured)
        known = measured is not None and measured.ask and self.early.agreed
        if measured is not None and known and ask and given is None and not max_grad_norm:
            if measured.is_finite():
                if not same and not gradients.is_usable():
                    self._go_on_without(gradients, plan)
                return gradients, not self.early.not_finite
        if measured is not None and same and not ask and not max_grad_norm:
            return measured, measured.is_finite() and not self.early.not_finite
        self._agree(gradients, plan, sketched=max_grad_norm > 0)
        if max_grad_norm > 0:
            norm = gradients.clip_(max_grad_norm, in_place=given is None)
            self.early.note_norm(norm, max_grad_norm, self._usual, whole=True)
        return gradients, gradients.is_finite() and not self.early.not_finite

    def clip_(self, plan: StepPlan, max_norm: float, parameters: Iterable[Tensor] | None) -> float:
        """Clip the gradients of the coming step that are in no message yet. Returns the norm before."""
        gradients = self._collect(None, ask=self.asks(plan) and self.are_local(plan))
        gradients.reuse(self.measured)
        chosen = None if parameters is None else list(parameters)
        ids = {id(param) for param in chosen or ()}
        whole = chosen is None or all(id(param) in ids for state in self.states for param in state.params)
        if gradients.freed is not None and not whole:
            raise ValueError(
                f"clip all parameters of the optimizer together with zero_stage=2, got {len(ids)} of them: the norm of "
                "gradients that have left is known for all together only"
            )
        part = gradients if chosen is None else gradients.of(chosen, self.states)
        self._agree(gradients, plan, part, chosen, sketched=True)
        norm = part.clip_(max_norm, in_place=True)
        gradients.after_clipping(part)
        self.measured = gradients
        self.early.note_norm(norm, max_norm, self._usual, whole=whole)
        return norm

    def _collect(self, given: Iterable[Any] | None, *, ask: bool) -> StepGradients:
        freed = self.freed if given is None else None
        if freed is not None:
            freed.complete()
        gradients = StepGradients.collect(self.states, given, self.communicator, ask=ask)
        if freed is not None and freed.have_left:
            freed.put_into(gradients)
        gradients.left = self.early.left(gradients.groups)
        return gradients

    def note_overflow(self, overflow: bool) -> None:
        """Record what a gradient scaler found while it changed this rank's gradients."""
        self._overflow, self.measured = overflow, None

    def overflow_anywhere(self, plan: StepPlan) -> bool:
        """Return whether the gradients of any rank are not finite."""
        if self.measured is None or not self.measured.ask:
            gradients = self._collect(None, ask=True)
            self._agree(gradients, plan)
            self.measured = gradients
        return not self.measured.is_finite() or self.early.not_finite

    def end_step(self) -> None:
        """Keep what the gradients have said about noise, and forget the rest."""
        self.noise.add(self._common)
        if self.freed is not None:
            self.freed.end_step()
        self.measured, self.at_sync, self._overflow = None, None, False
        self._common = self._usual = math.nan

    def _agree(
        self,
        gradients: StepGradients,
        plan: StepPlan,
        part: StepGradients | None = None,
        chosen: Sequence[Tensor] | None = None,
        *,
        sketched: bool = False,
    ) -> None:
        """Exchange the one small message of a step, if the ranks must agree: norms, faults, what must be alike."""
        left = [*self.early.signature, *(() if self.freed is None else self.freed.signature)]
        digests = [digest_of([self.comparison.hyperparameters(), left])] if gradients.ask else []
        if not plan.reduce_grads and gradients.ask:
            # one in every step: a resumed run, which compares once more, sends the uninterrupted one's bytes
            digests += self.gradient_digest(gradients.groups) or [0]
        mean = self._measure(gradients, plan, part or gradients, chosen) if sketched else None
        local_step = self.clip == "sketch" and not plan.agree
        alike = gradients.agree(
            digests,
            overflow=self._overflow,
            part=part,
            mean=mean if gradients.ask else None,
            ratio=self.noise.square_ratio if local_step else None,
        )
        if mean is not None and gradients.ask:
            self._common, self._usual = mean.common, math.sqrt(mean.mean_square)
            if self.freed is not None and self.freed.is_exact:
                self._usual = math.nan  # the ranks' own norms are not measured
        elif mean is not None and self.at_sync is None:
            self.at_sync = mean
        if alike and not alike[0]:
            self.comparison.require_same_hyperparameters()
            if self.freed is not None:
                self.freed.require_same()
            self.early.agree()
            for each in (gradients, part or gradients):
                each.left = self.early.left(gradients.groups)
        self.early.agreed |= gradients.ask
        self.heed_gradients(digests[1:], alike[1:])

    def _measure(
        self, gradients: StepGradients, plan: StepPlan, part: StepGradients, chosen: Sequence[Tensor] | None
    ) -> MeanNorm | None:
        """Measure the gradients that are clipped for the norm of their mean; None if they are clipped by another one.

        The ranks decide alike: by the plan and by the param groups.
        """
        in_message = gradients.ask and self.are_local(plan)
        if self.clip != "sketch" or self.communicator.world_size == 1 or not (in_message or plan.is_local_sync):
            return None
        if gradients.freed is not None and not (self.freed and self.freed.knows_norm):
            return None
        groups = [] if gradients.fault is not None else gradients.groups
        mean = measure(self.states, groups, chosen, self.communicator, plan.step, averaged=plan.reduce_grads)
        if gradients.freed is not None and self.freed is not None:
            self.freed.contribute(mean)
        if gradients.fault is None:
            part.take_squares(mean.squares)
        return mean

    def compare_at_sync(self, written: Tensor, digests: Sequence[int]) -> tuple[bool, list[bool]]:
        """Compare what must be alike at a sync of 0/1 Adam; measure the noise of gradients clipped before it."""
        mean, self.at_sync = self.at_sync, None
        if mean is None:
            with self.communicator.traffic.paused():
                sums, alike = self.communicator.sum_and_compare([written], digests)
        else:
            means, sketch = mean.contributions()
            sums, alike = self.communicator.sum_and_compare([written, *means], digests, mean.dtype, sketch)
            mean.square(sums[1:])
            self._common = mean.common
        return sums[0] > 0, alike

    def gradient_digest(self, gradients: Grads | None) -> list[int]:
        """Return a digest of this rank's local gradients the first time, else nothing.

        The gradients of groups with a process group of their own are not in it.
        """
        if self._gradients_compared:
            return []
        if gradients is None:
            return [self.communicator.rank % DIGEST_BOUND]
        shared = [grads for grads, state in zip(gradients, self.states, strict=False) if state.own_rank is None]
        return [int(sum(bit_sum(grad) for grad in chain.from_iterable(shared) if grad is not None)) % DIGEST_BOUND]

    def heed_gradients(self, digests: Sequence[int], alike: Sequence[bool]) -> None:
        """Warn, once, if the local gradients of all ranks are identical, and not 0."""
        if not digests:
            return
        self._gradients_compared = True
        if alike[0] and digests[0] > 0 and self.communicator.rank == 0 and self.communicator.world_size > 1:
            write_log(
                logger,
                logging.WARNING,
                "the gradients of all ranks are identical in the first step whose gradients must stay local: they seem "
                "to be averaged already, in full precision, so that no traffic is saved. For a DistributedDataParallel "
                "model call hf_compressopt.attach_ddp(model, optimizer); with Trainer import hf_compressopt.auto; with "
                "Accelerate use CompressOptAccelerator; in a plain loop average gradients only if "
                "optimizer.plan.reduce_grads",
            )

    def _go_on_without(self, gradients: StepGradients, plan: StepPlan) -> None:
        """Drop this rank's gradients, which someone made unusable after all ranks had found them finite."""
        gradients.groups = [[None] * len(state.params) for state in self.states]
        message = "step %d: the gradients of rank %d were changed after clipping and cannot be used; they count as 0"
        write_log(logger, logging.WARNING, message, plan.step, self.communicator.rank)
