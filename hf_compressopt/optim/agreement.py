"""The agreement of the ranks on the gradients of a step: the one small message, made by whoever comes first.

Up to the end of a step there is one record of it, :class:`ComingStep`. Clipping, a gradient scaler or the step itself,
whichever comes first, sends the small message, and writes down what it told: :class:`Agreed`. The others use that while
the gradients are the same tensors, to which nobody has written. A step, taken or skipped, ends with a new record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_compressopt.announce import write_log
from hf_compressopt.collectives.communicator import DIGEST_BOUND, Communicator, digest_of
from hf_compressopt.collectives.sender import StepPasses
from hf_compressopt.optim.gradients import GradientNoise, Gradients, Grads, MeanNorm
from hf_compressopt.optim.group import GroupState, has_own_groups, hyperparameters_of, trained_of
from hf_compressopt.optim.math import bit_sum
from hf_compressopt.optim.startup import StartupCheck, distance_from_first, rows_of
from hf_compressopt.schedules import Stage, StepPlan

logger = logging.getLogger(__name__)

#: Legal values of ``clip``; "late" clips by the last step's norm, which "sketch" finds.
CLIPS = ("sketch", "local", "late")
#: The norm that "sketch" reports, in words for the log.
ESTIMATE = "an estimate of that of the mean gradient, within some per cent"
_PRIME = 1_048_573  # just below DIGEST_BOUND
#: Every so many steps the small message of a compressed step, or of a sync, has a digest of the parameters.
DRIFT_INTERVAL = 256


class SentMessages(Protocol):
    """Messages of the compressed stage that leave during backward."""

    agreed: bool  # the ranks have agreed on the messages that count, or there are none
    a_hook_sends: bool  # DistributedDataParallel's

    @property
    def signature(self) -> list[tuple[int, int]]: ...  # the buckets whose messages count
    def due(self, plan: StepPlan, before: StepPlan) -> bool: ...  # whether backward sends; alike on all ranks
    def complete(self) -> None: ...
    def put_into(self, gradients: Gradients) -> None: ...
    def left(self, gradients: Sequence[Sequence[Tensor | None]]) -> frozenset[int]: ...  # ids of gradients
    def agree(self, *, differ: bool) -> None: ...  # if they differ, drop what another rank has dropped
    def discard(self) -> None: ...
    def overflow(self) -> Tensor | None: ...
    def note_norm(self, norm: float, max_norm: float, usual: float, *, whole: bool) -> None: ...


class AveragedGradients(Protocol):
    """The gradients of the warmup stage, which ask for the largest variances before a step by signs."""

    travelled: bool  # those of the step under way have

    def note_clipping(self, norm: float | Tensor, max_norm: float) -> None: ...
    def forget_clipping(self) -> None: ...
    def largest_variances(self, plan: StepPlan) -> Tensor | None: ...


@dataclass(eq=False)
class Agreed:
    """Gradients of the coming step, and their norm, on which the ranks have agreed if they hold it ``together``.

    ``square``: the squared norm of averaged gradients, of local ones the mean over ranks of their squared norms: alike
    on all ranks, and not finite if an element is not, or is too large for its square; [] float64 until the host reads
    it. Without ``together`` it is this rank's.
    """

    gradients: Gradients
    together: bool
    square: float | Tensor

    def is_finite(self) -> bool:
        self.square = float(self.square)
        return math.isfinite(self.square)

    def may_be_used(self) -> bool:
        """Return whether the gradients are finite, True while the norm is not read."""
        return isinstance(self.square, Tensor) or self.is_finite()


@dataclass(eq=False)
class ComingStep:
    """Facts about the coming step, which clipping, a gradient scaler and the step itself hand on."""

    agreed: Agreed | None = None  # by clipping or a gradient scaler
    square: float | Tensor = 0.0  # of the gradients that the step under way takes, as Agreed's
    limit: float | None = None  # to which gradients are clipped
    overflow: bool = False  # a gradient scaler found an element that is not finite on this rank
    common: float = math.nan  # what the gradients say about noise
    usual: float = math.nan  # the root of the mean square of the ranks' own norms
    #: Of gradients whose message follows at the end of the step (0/1 Adam), as they were before clipping.
    at_sync: MeanNorm | None = None
    variances: list[float] = field(default_factory=list)  # the largest ones, if the step asks for them


class RankAgreement:
    """Small messages by which the ranks agree, beside those of gradients, and the facts that all of them then know."""

    def __init__(
        self, states: Sequence[GroupState], communicator: Communicator, tensors: dict[str, Tensor], clip: str
    ) -> None:
        self.states, self.communicator = states, communicator
        self.clip = clip
        self.noise = GradientNoise(tensors)
        self.startup = StartupCheck(states, communicator)
        self.passes = StepPasses("average_gradients or DistributedDataParallel's hook")  # up to what compares them
        self.coming = ComingStep()
        self._held_fault: Exception | None = None  # in this rank's gradients since the last sync of 0/1 Adam
        self._gradients_compared = self._told_of_late_change = False
        self._layouts: tuple[list[Any], int] = ([], 0)  # what may change of the layouts, and their digest

    def listen_to(self, overlap: SentMessages | None, warmup: AveragedGradients) -> None:
        """Know from now on of the messages that leave during backward, and of those of the warmup stage."""
        self._overlap, self._warmup = overlap, warmup

    def state_loaded(self) -> None:
        """Begin anew with a state that was loaded."""
        self.startup.begin_anew()
        self._held_fault = None

    # -- before a step ------------------------------------------------------------------------------------------------

    def check(self, plan: StepPlan, before: StepPlan | None, alike: Callable[[], Sequence[Any]]) -> None:
        """Compare the ranks before the first step, and before the first one of a stage."""
        startup = self.startup
        begins = startup.compared_at != plan.step and before is not None and before.stage is not plan.stage
        if begins or not startup.checked:
            startup.check(plan, before, alike)

    def compare_passes(self, plan: StepPlan, before: StepPlan, *, measures_variance: bool) -> None:
        """Compare the passes of all ranks before the first message of a step that may meet those of another pass.

        So may one by messages that leave in backward, the first one after steps by averaged gradients, and one that
        measures how stable the variance is. The others compare passes in messages of the same form.
        """
        if self.passes.are_met or self.communicator.world_size == 1 or not self.passes.are_known:
            return
        is_first = plan.step > 1 and before.reduce_grads and not plan.reduce_grads
        if is_first or (self._overlap is not None and self._overlap.a_hook_sends and self._overlap.due(plan, before)):
            self.passes.meet(self.communicator)
        elif measures_variance:
            self.passes.meet(self.communicator, now=False)

    def asks(self, plan: StepPlan) -> bool:
        """Return whether a gradient that is not finite on one rank skips this step on all."""
        uncompressed = (state for state in self.states if not state.compressed)
        # of a group with a process group of its own, others may have parameters if this rank has none
        return plan.agree or any(state.params or state.own_rank is not None for state in uncompressed)

    def are_local(self, plan: StepPlan) -> bool:
        """Return whether some gradients of a step are this rank's own, so that ranks must agree on their norm."""
        return not plan.reduce_grads or has_own_groups(self.states)

    # -- the gradients of the coming step -----------------------------------------------------------------------------

    def final_gradients(
        self, plan: StepPlan, given: Iterable[Any] | None, max_grad_norm: float
    ) -> tuple[Gradients, bool]:
        """Return the gradients of a step, clipped, and whether those of all ranks are finite."""
        # given gradients may be averaged or not: a wrong number of them on one rank must fail on all
        together = self.asks(plan) and (self.are_local(plan) or given is not None)
        if given is not None and self._overlap is not None:
            self._overlap.discard()
        agreed, gradients = self.coming.agreed, self._collect(given)
        same = agreed is not None and gradients is agreed.gradients
        if agreed is not None and not max_grad_norm:
            known = agreed.together and together and given is None and (self._overlap is None or self._overlap.agreed)
            if known and agreed.is_finite():
                self.coming.square = agreed.square
                if not same and gradients.left:
                    self._tell_of_late_change(plan)
                if not same and not gradients.is_usable():
                    gradients.count_as_zero()
                    message = "step %d: rank %d's clipped gradients were changed and cannot be used; they count as 0"
                    write_log(logger, logging.WARNING, message, plan.step, self.communicator.rank)
                return gradients, True
            if same and not together:
                self.coming.square = agreed.square
                return gradients, agreed.may_be_used()
        # what was no finite norm in the message of a sketch, of float32, is none in another message either
        overflown = agreed is not None and agreed.together and not agreed.is_finite()
        agreed, _ = self._agree(gradients, plan, together=together, sketched=max_grad_norm > 0 or overflown)
        if max_grad_norm > 0:
            norm = _clip_(gradients, agreed, agreed.square, max_grad_norm, in_place=given is None)
            self._note_norm(norm, max_grad_norm, whole=True)
        self.coming.square = agreed.square
        return gradients, agreed.may_be_used()

    def _tell_of_late_change(self, plan: StepPlan) -> None:
        """Warn once of gradients of this rank that were changed where the ranks had agreed on messages made of them."""
        if not self._told_of_late_change:
            self._told_of_late_change = True
            message = (
                "step %d: gradients of rank %d were changed after they were clipped, and after their messages had left "
                "in backward: steps do not see such a change. Change gradients before clip_grad_norm_, or give "
                "clip='sketch', by which messages leave in the step"
            )
            write_log(logger, logging.WARNING, message, plan.step, self.communicator.rank)

    def clip_(self, plan: StepPlan, max_norm: float, parameters: Iterable[Tensor] | None) -> float | Tensor:
        """Clip the gradients of the coming step that are in no message yet. Returns the norm before."""
        self.coming.limit = float(max_norm)
        gradients = self._collect(None)
        chosen = None if parameters is None else list(parameters)
        ids = {id(param) for param in chosen or ()}
        whole = chosen is None or all(id(param) in ids for state in self.states for param in state.params)
        if gradients.sent is not None and not whole:
            raise ValueError(
                f"clip all parameters of the optimizer together with zero_stage=2, got {len(ids)} of them: the norm of "
                "gradients that have left is known for all together only"
            )
        part = gradients if chosen is None else gradients.of(chosen)
        together = self.asks(plan) and self.are_local(plan)
        agreed, square = self._agree(gradients, plan, part, together=together, sketched=True)
        self.coming.agreed = agreed
        norm = _clip_(part, agreed, square, max_norm, in_place=True)
        self._note_norm(norm, max_norm, whole=whole)
        return norm

    def _note_norm(self, norm: float | Tensor, max_norm: float, *, whole: bool) -> None:
        if self._warmup.travelled:
            if whole:
                self._warmup.note_clipping(norm, max_norm)
            else:
                self._warmup.forget_clipping()
        if self._overlap is not None:
            self._overlap.note_norm(float(norm), max_norm, self.coming.usual, whole=whole)

    def _collect(self, given: Iterable[Any] | None) -> Gradients:
        """Return the gradients as they are now: those on which the ranks have agreed, unless these were changed."""
        if given is None and self._overlap is not None:
            self._overlap.complete()
        agreed = self.coming.agreed
        holds = given is None and (self._overlap is None or self._overlap.agreed)
        if holds and agreed is not None and agreed.gradients.are_current():
            gradients = agreed.gradients
        else:
            gradients = Gradients.collect(self.states, given, self.communicator)
        if self._overlap is not None:
            self._overlap.put_into(gradients)
        return gradients

    def note_overflow(self, overflow: bool) -> None:
        """Record what a gradient scaler found while it changed this rank's gradients."""
        self.coming.overflow, self.coming.agreed = overflow, None

    def overflow_anywhere(self, plan: StepPlan) -> bool:
        """Return whether the gradients of any rank are not finite."""
        agreed = self.coming.agreed
        if agreed is None or not agreed.together:
            agreed, _ = self._agree(self._collect(None), plan, together=True)
            self.coming.agreed = agreed
        return not agreed.is_finite()

    def end_step(self, *, compared: bool = True) -> None:
        """Close a step; ``compared``: not between two syncs of 0/1 Adam."""
        if compared:
            self.passes.end_step()
        self.noise.add(self.coming.common)
        self.coming = ComingStep()

    def _agree(
        self,
        gradients: Gradients,
        plan: StepPlan,
        part: Gradients | None = None,
        *,
        together: bool,
        sketched: bool = False,
    ) -> tuple[Agreed, float | Tensor]:
        """Find the squared norms, of all gradients and of a part, and raise if a rank's cannot be used.

        Returns what is known, and the squared norm of the part. Who clips keeps it; after an error nothing is kept.
        """
        part = part or gradients
        alike: list[bool] = []
        coming = self.coming
        coming.agreed = None
        mean = self._measure(gradients, plan, part, together=together) if sketched else None
        sent = None if self._overlap is None else self._overlap.overflow()

        def weight(share: float) -> float:
            if together:
                return share  # so that a sum over the ranks is their mean
            return self.noise.square_ratio(share) if self.clip == "sketch" and not plan.agree else 1.0

        squares: list[Any] = []
        measured = [gradients] if part is gradients else [gradients, part]
        for each in measured:
            square = each.weighted_square(weight)
            if coming.overflow:
                square = torch.full_like(square, math.inf)
            squares.append(square if sent is None else square + sent)
        if together:
            squares, alike = self._exchange(gradients, plan, squares, mean)
        if gradients.fault is not None and (together or plan.agree or self.communicator.world_size == 1):
            raise gradients.fault
        if gradients.fault is not None:
            squares = [math.inf, math.inf]
            self._hold(gradients.fault, plan)
        elsewhere = gradients.fault is None and any(grad.device != self.communicator.device for grad in part.present())
        local = not together and gradients.fault is None
        if local and (elsewhere or not plan.is_local_sync):  # else the message of the sync brings them
            squares = torch.stack(squares).tolist()
        agreed = Agreed(gradients, together, squares[-1] if part is gradients else squares[0])
        if mean is not None and together:
            coming.common, coming.usual = mean.common, math.sqrt(mean.mean_square)
            if gradients.sent is not None and gradients.sent.is_exact:
                coming.usual = math.nan  # the ranks' own norms are not measured
        elif mean is not None and coming.at_sync is None:
            coming.at_sync = mean
        differ = bool(alike) and not alike[0]
        if differ:
            self.startup.require_same_snapshot()
            self.communicator.require_equal("the norm to which they clip (max_norm)", coming.limit)
            self.passes.compare(self.communicator, in_step=True)
        elif alike and self.startup.has_new_groups:
            self.startup.compare_new_groups(plan)
        if together and self._overlap is not None:
            self._overlap.agree(differ=differ)
            if differ:
                for each in (gradients, part):
                    each.note_left(self._overlap.left(gradients.groups))
        self.heed_second(plan, alike[1:])
        return agreed, squares[-1]

    def _hold(self, fault: Exception, plan: StepPlan) -> None:
        """Keep what is wrong with this rank's gradients in a local step until the next sync, where all ranks raise."""
        if self._held_fault is None:
            self._held_fault = fault
            message = (
                "step %d: rank %d cannot use its gradients; it steps with its momentum up to the next sync, where all "
                "ranks raise: %s"
            )
            write_log(logger, logging.ERROR, message, plan.step, self.communicator.rank, fault)

    @property
    def holds_fault(self) -> bool:
        """True if all ranks raise at the next sync, because of this rank's gradients."""
        return self._held_fault is not None

    def _exchange(
        self, gradients: Gradients, plan: StepPlan, squares: Sequence[Tensor], mean: MeanNorm | None
    ) -> tuple[list[float], list[bool]]:
        """Exchange the one small message of a step: norms, faults, what must be alike. Returns the squared norms."""
        messages = [] if self._overlap is None else self._overlap.signature
        digests: list[int | Tensor] = [digest_of([self._snapshot(), messages, self.coming.limit, self.passes.count])]
        if not plan.reduce_grads:
            # one in every step: a resumed run, which compares once more, sends the uninterrupted one's bytes
            digests.append(self.second_digest(plan, gradients.groups))
        faults = torch.full_like(squares[0], float(gradients.fault is not None))
        means, sketch = ([], None) if mean is None else mean.contributions()
        numbers = [faults, squares[0], squares[-1], *means]
        beside = self._warmup.largest_variances(plan) if plan.stage is Stage.VARIANCE else None
        beside = beside if beside is not None and beside.numel() else None
        sums, alike = self.communicator.sum_and_compare(numbers, digests, sketch, beside)
        if beside is not None:
            sums, self.coming.variances = sums[: -len(beside)], sums[-len(beside) :]
        if gradients.fault is None and sums[0] > 0:
            raise RuntimeError(f"{int(sums[0])} other rank(s) were given gradients that cannot be used")
        part = sums[2] if mean is None or not math.isfinite(sums[2]) else mean.square(sums[3:])
        return [sums[1], part], alike

    def _measure(self, gradients: Gradients, plan: StepPlan, part: Gradients, *, together: bool) -> MeanNorm | None:
        """Measure the gradients that are clipped, for the norm of their mean; None if another norm clips them."""
        in_message = together and self.are_local(plan)
        if self.clip != "sketch" or self.communicator.world_size == 1 or not (in_message or plan.is_local_sync):
            return None
        if gradients.sent is not None and not gradients.sent.is_measured:
            return None
        mean = MeanNorm(part, self.communicator, plan.step, averaged=plan.reduce_grads)
        if gradients.sent is not None:
            gradients.sent.contribute(mean)
        if gradients.fault is None:
            part.note_squares(mean.squares)
        return mean

    def compare_at_sync(
        self, plan: StepPlan, gradients: Grads | None, written: Tensor, rates: Sequence[Any]
    ) -> tuple[bool, bool]:
        """Compare what must be alike at a sync of 0/1 Adam; measure the noise of gradients clipped before it.

        ``written``: whether this rank's parameters were, [] float64. ``rates``: the learning rates since the last sync.
        Returns whether those of any rank were, and whether this rank's gradients may be used.
        """
        digest = digest_of((self._snapshot(), rates, self.passes.count))
        # two in every message that is counted: a resumed run, which compares once more, sends the same bytes
        digests = digest, self.second_digest(plan, gradients)
        coming, fault = self.coming, self._held_fault
        mean, coming.at_sync = coming.at_sync, None
        self._held_fault = None
        beside = coming.square if isinstance(coming.square, Tensor) else torch.zeros_like(written)
        means, sketch = ([], None) if mean is None else mean.contributions()
        faults = torch.full_like(written, float(fault is not None))
        # as checks are no part of the training's traffic
        with self.communicator.traffic.paused() if mean is None else nullcontext():
            sums, alike = self.communicator.sum_and_compare([written, faults, *means], digests, sketch, beside.view(1))
        if fault is not None:
            raise fault
        if sums[1] > 0:
            raise RuntimeError(
                f"{int(sums[1])} other rank(s) were given gradients that cannot be used since the last sync"
            )
        if mean is not None:
            mean.square(sums[2:-1])
            coming.common = mean.common
        if not alike[0]:
            self.startup.require_same_snapshot()
            self.communicator.require_equal("their learning rates since the last sync", rates)
            self.passes.compare(self.communicator, in_step=True)
        self.startup.compare_new_groups(plan)
        usable = math.isfinite(sums[-1])
        self.heed_second(plan, alike[1:], usable=usable)
        return sums[0] > 0, usable

    def _snapshot(self) -> list[Any]:
        """Return numbers that stand for options and flags of the param groups, which may change from step to step."""
        masks = [state.options.get("exp_avg_mask") for state in self.states]
        now = [(id(mask), 0 if mask is None or mask.is_inference() else mask._version) for mask in masks]
        if self._layouts[0] != now or not now:
            with_ranks = [state.own_rank is not None for state in self.states]
            rows = [rows_of(state) for state in self.states if state.own_rank is None]
            self._layouts = now, digest_of([with_ranks, rows])
        flags = trained_of(self.states), self.startup.has_new_groups
        return [hyperparameters_of(self.states), len(now), self._layouts[1], *flags]

    def second_digest(self, plan: StepPlan, gradients: Grads | None) -> int | Tensor:
        """Return a digest of this rank's gradients until they were compared, and later, now and then, of parameters."""
        if not self._gradients_compared:
            return self._gradient_digest(gradients)
        if plan.step % DRIFT_INTERVAL:
            return 0
        sums = [bit_sum(values) for _, values in self._alike_values(plan)]
        return sum(sums, torch.zeros((), dtype=torch.int64, device=self.communicator.device)) % _PRIME

    def heed_second(self, plan: StepPlan, alike: Sequence[bool], *, usable: bool = True) -> None:
        """Heed what the second digests told: gradients that are identical on all ranks, or parameters that are not.

        Gradients that are not ``usable``, since they are not finite, may well be identical.
        """
        if self._gradients_compared and alike and not alike[0]:
            self._heed_drift(plan)
        self.warn_if_identical([alike[0] and usable] if alike else [])

    def _alike_values(self, plan: StepPlan) -> Iterator[tuple[str, Tensor]]:
        """Yield what has the same bits on all ranks, by parameter: between syncs of 0/1 Adam those of the last one."""
        for state in self.states:
            apart = state.compressed and not plan.agree
            for index, param in enumerate(state.params if state.own_rank is None else ()):
                yield state.labels[index], state.view(state.extra["anchor"], index) if apart else param.detach()

    def _heed_drift(self, plan: StepPlan) -> None:
        """Take rank 0's parameters where the ranks differ by rounding; raise if they differ by more. All ranks call."""
        rows = list(self._alike_values(plan))
        with self.communicator.traffic.paused():
            everyone = self.communicator.all_gather_object([int(bit_sum(values)) for _, values in rows])
            columns = zip(*everyone, strict=True)
            apart = [row for row, column in zip(rows, columns, strict=True) if len(set(column)) > 1]
            by_rounding = distance_from_first([values for _, values in apart], plan.step - 1, self.communicator) <= 1
            if by_rounding:
                for _, values in apart:
                    self.communicator.broadcast(values)
        shown = ", ".join([*(name for name, _ in apart[:4]), *(["..."] if len(apart) > 4 else [])])
        if not by_rounding:
            raise ValueError(
                f"step {plan.step}: the parameters of the ranks have drifted apart: {len(apart)} of {len(rows)} differ "
                f"({shown}). Something changes them on each rank alone: code that reads p.grad after backward or "
                "step() (AdaLoRA, pruning by gradients), where gradients stay each rank's own after the warmup stage, "
                "or that draws random numbers of each rank's own. Let it run on one rank, and broadcast what it decides"
            )
        if self.communicator.rank == 0:
            message = (
                "step %d: parameters of the ranks differ by rounding (unlike devices?): all take those of rank 0: %s"
            )
            write_log(logger, logging.WARNING, message, plan.step, shown)

    def _gradient_digest(self, gradients: Grads | None) -> int | Tensor:
        """Return a digest of this rank's gradients, [] int64; the rank if they are all 0."""
        rank = self.communicator.rank % DIGEST_BOUND
        if gradients is None:
            return rank
        shared = [grads for grads, state in zip(gradients, self.states, strict=False) if state.own_rank is None]
        sums = [bit_sum(grad) for grad in chain.from_iterable(shared) if grad is not None]
        # a power of two would see the low bits alone, which are 0 after bfloat16
        digest = sum(sums, torch.zeros((), dtype=torch.int64, device=self.communicator.device)) % _PRIME
        return torch.where(digest == 0, rank, digest)

    def warn_if_identical(self, alike: Sequence[bool]) -> None:
        """Warn, once, if the local gradients of all ranks are identical, and not 0, by what their digests told."""
        if self._gradients_compared or not alike:
            return
        self._gradients_compared = True
        if alike[0] and self.communicator.rank == 0 and self.communicator.world_size > 1:
            write_log(
                logger,
                logging.WARNING,
                "the gradients of all ranks are identical in the first step whose gradients must stay local: they seem "
                "to be averaged already, in full precision, so that no traffic is saved. For a DistributedDataParallel "
                "model call hf_compressopt.attach_ddp(model, optimizer); with Trainer import hf_compressopt.auto; with "
                "Accelerate use CompressOptAccelerator; in a plain loop average gradients only if "
                "optimizer.plan.reduce_grads",
            )


def _clip_(
    part: Gradients, agreed: Agreed, square: float | Tensor, max_norm: float, *, in_place: bool
) -> float | Tensor:
    """Clip a part of the gradients, whose squared norm is given, to a norm, by the same factor on every rank.

    Returns the norm before: [] if it is not read.
    """
    norm: float | Tensor
    factor: float | Tensor
    if isinstance(square, Tensor):
        norm = square.sqrt()
        factor = torch.where(norm.isfinite(), torch.clamp(max_norm / (norm + 1e-6), max=1.0), 1.0)
    else:
        norm = math.sqrt(square) if square >= 0 else math.nan
        factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0  # as torch computes it
    if isinstance(factor, Tensor) or factor < 1.0:
        part.scale_(factor, in_place=in_place)
        if part is agreed.gradients and not part.left and not isinstance(agreed.square, Tensor):
            agreed.square *= float(factor) ** 2
    if part is not agreed.gradients:  # all of them are finite as before, but their norm is another one
        agreed.gradients.forget_values()
    return norm
