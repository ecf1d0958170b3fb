"""The averaged gradients of the warmup stage: the form of their messages, and the errors of that form.

A message of integers keeps what it misses in the errors of the compressed stage, which are not in use yet. They change
in a step that takes the averages (:mod:`~hf_compressopt.collectives.feedback`):

    u = g_r + worker_error;  messages <- Q(u);  worker_error <- u - Q(u)                        (1)
    a = mean_r Q(u_r) + server_error;  g <- Q(a);  server_error <- a - Q(a)                     (2)

At the end of the stage, times 1 - b1, they become errors of the momentum. Parameters of one dimension and small ones
travel in full precision beside them: larger neighbours in a block would round their gradients to 0. Sources: LoCo
(arXiv 2407.04480).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.announce import write_log
from hf_compressopt.collectives.feedback import HandedOut, Members
from hf_compressopt.collectives.gradients import (
    GradientBucket,
    GradientRounds,
    begin_pass,
    low_bit_buckets,
    plain_buckets,
)
from hf_compressopt.kernels import INTEGER_BITS
from hf_compressopt.optim.group import GroupState, ParamGroups
from hf_compressopt.optim.math import floor_variance_
from hf_compressopt.schedules import Stage, StepPlan

logger = logging.getLogger(__name__)

#: Name of the tensor that holds the loss scale that the coming gradients are taken to carry, once a scaler has told it.
LOSS_SCALE = "warmup_loss_scale"
#: Name of the tensor that holds by how much the last averages were clipped, and whether the errors are, too.
ERROR_CLIP = "error_clip"
#: Legal values of ``warmup_bits``.
WARMUP_BITS = (*INTEGER_BITS, 16, 32)


def check_warmup_bits(bits: Any, communicator: Any) -> None:
    if isinstance(bits, bool) or bits not in WARMUP_BITS:
        raise ValueError(f"warmup_bits must be one of {list(WARMUP_BITS)}, got {bits!r}")
    if bits == 16 and (communicator == "mpi" or getattr(communicator, "name", "") == "mpi"):
        raise ValueError("warmup_bits=16 is not supported with MPI, which cannot sum bfloat16: give 4, 8 or 32")


def _members(states: Sequence[GroupState]) -> list[Members]:
    return [Members(state.errors, state.params) for state in states if state.own_rank is None]


class WarmupGradients:
    """The form of one optimizer's averaged gradients: integers of 4 or 8 bits, bfloat16 (16), or as they are (32)."""

    def __init__(self, bits: int, groups: ParamGroups, tensors: dict[str, Tensor]) -> None:
        self.bits = bits
        self.rounds = GradientRounds()
        self._tensors = tensors
        self.in_use = self.ever_in_use = False  # the last step's gradients had fewer bits than 32; any step's (state)
        self._states, self._communicator, self._follow = groups
        self._assumed_scale = 1.0
        self.travelled = False  # the gradients of the step under way have
        self._clipped: tuple[float | Tensor, float] | None = None  # norm and limit by which all of these were clipped
        self._told = self._told_of_parts = False
        self._known: tuple[list[Any], list[Any], list[GradientBucket]] = ([], [], [])  # what buckets were made of
        self._handed_out = HandedOut(partial(_members, self._states), watches_steps=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but buckets, which a copy makes of its own parameters."""
        return self.__dict__ | {"rounds": GradientRounds(), "_known": ([], [], []), "_handed_out": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handed_out = HandedOut(partial(_members, self._states), watches_steps=False)

    @property
    def in_messages(self) -> bool:
        """True if the gradients of the step under way have travelled as integers."""
        return self.travelled and self.bits in INTEGER_BITS

    @property
    def _loss_scale(self) -> float:
        told = float(self._tensors[LOSS_SCALE]) if LOSS_SCALE in self._tensors else 1.0
        return told if told > 0 else 1.0

    def buckets(
        self, loss_scale: float | None = None, *, owner: int = 0, present: Sequence[Tensor] | None = None
    ) -> list[GradientBucket]:
        """Return the buckets in which the gradients of a round travel; those of own process groups stay local.

        A group travels as integers if it is ever compressed and whole in the round, its small parameters beside them.
        """
        self._follow()
        self._clip_errors(False)
        self.forget_clipping()
        self.ever_in_use = True
        self.travelled, self._assumed_scale = True, self._loss_scale if loss_scale is None else loss_scale
        held = [present, *(state.errors for state in self._states)]
        trained = [[p.requires_grad for p in state.params] for state in self._states]
        made_of = [owner, *map(id, held), *trained]
        if made_of != self._known[0]:
            self._known = made_of, held, self._make_buckets(owner, present)
        begin_pass(self._known[2], self._handed_out, self._assumed_scale)
        return list(self._known[2])

    def _make_buckets(self, owner: int, present: Sequence[Tensor] | None) -> list[GradientBucket]:
        here = None if present is None else set(present)
        buckets: list[GradientBucket] = []
        for state in self._states:
            if state.own_rank is not None:
                continue
            whole = here is None or here.issuperset(state.params)
            in_part = here is not None and not whole and not here.isdisjoint(state.params)
            if self.bits in INTEGER_BITS and state.compressed and in_part:
                self._tell_of_parts(state)
            dtype = torch.bfloat16 if self.bits == 16 and state.compressed else None
            if state.communicator.name == "mpi":  # it sums no 16-bit numbers
                dtype = torch.float32
            if self.bits in INTEGER_BITS and state.compressed and whole:
                of = state.errors, state.layout.in_messages, state.params, state.communicator, owner, self.bits
                buckets += low_bit_buckets(*of, dtype=dtype)
            else:
                params = [p for p in state.params if p.requires_grad and (here is None or p in here)]
                numel = state.layout.bucket_numel
                buckets += plain_buckets(params, state.communicator, owner, bucket_numel=numel, dtype=dtype)
        return buckets

    def _tell_of_parts(self, state: GroupState) -> None:
        """Warn once that a group is in several models: each has a part, and messages of integers need all of it."""
        if self._communicator.rank == 0 and not self._told_of_parts:
            self._told_of_parts = True
            message = (
                "param group %d has parameters of several DistributedDataParallel models: in the warmup stage their "
                "gradients travel in full precision, and not in %d bits. Give each model param groups of its own"
            )
            write_log(logger, logging.WARNING, message, state.number, self.bits)

    @contextmanager
    def signs(self, plan: StepPlan, variance_floor: float, read: Sequence[float]) -> Iterator[None]:
        """Inside, a step takes signs as its gradients, and may be between steps whose gradients were integers.

        Integers round small gradients to 0, and a sign would move an element without a variance without bound. So the
        variance floor applies before the step, and a parameter without variance does not move. ``read``: what
        :meth:`largest_variances` returns in this step, if it is known.
        """
        guarded, largest = self._guarded(plan), iter(read)
        if guarded:
            self._clip_errors(True)
        for state in guarded:
            for index in range(len(state.params)):
                floor_variance_(state.view(state.exp_avg_sq, index), variance_floor)
            state.find_without_variance([next(largest) for numel in state.layout.numels if numel] if read else None)
        yield
        for state in guarded:
            state.let_all_move()

    def _guarded(self, plan: StepPlan) -> list[GroupState]:
        integers = self.bits in INTEGER_BITS and self.ever_in_use and plan.stage is Stage.VARIANCE
        signs = integers and plan.synchronize and not plan.update_variance
        return [state for state in self._states if signs and state.compressed and state.own_rank is None]

    def largest_variances(self, plan: StepPlan) -> Tensor | None:
        """Return the numbers that :meth:`signs` needs, [parameters] on the device; None if it needs none."""
        largest = [state.moments.largest_variances() for state in self._guarded(plan)]
        return torch.cat([each.to(self._communicator.device, torch.float64) for each in largest]) if largest else None

    def note_clipping(self, norm: float | Tensor, max_norm: float) -> None:
        """Record that all averages of the coming step were clipped by their norm."""
        self._clipped = norm, max_norm

    def forget_clipping(self) -> None:
        """Forget by how much averages were clipped: others follow, or they were not all clipped."""
        self._clipped = None

    def clip_coefficient(self) -> float:
        """Return the factor by which all averages of the step under way were clipped; 1 if they were not."""
        if self._clipped is None:
            return 1.0
        norm, max_norm = float(self._clipped[0]), self._clipped[1]
        return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def give_errors_the_clipping(self) -> None:
        """Keep by how much the averages of a step were clipped, after which a step sends signs.

        Integers are sent before gradients are clipped, signs afterwards: between the two, errors change their unit.
        """
        coefficient = self.clip_coefficient()
        self._tensors.pop(ERROR_CLIP, None)
        if coefficient != 1:
            self._tensors[ERROR_CLIP] = torch.tensor([coefficient, 0.0], dtype=torch.float64, device="cpu")

    def _clip_errors(self, clipped: bool) -> None:
        """Give the errors the unit of clipped gradients, or of gradients before they are clipped."""
        coefficient, now = self._tensors[ERROR_CLIP].tolist() if ERROR_CLIP in self._tensors else (1.0, 0.0)
        if coefficient == 1 or coefficient <= 0 or bool(now) is clipped:
            return
        for state in self._states:
            if state.compressed and state.own_rank is None:
                state.errors.scale_([coefficient if clipped else 1 / coefficient] * len(state.params))
        self._tensors[ERROR_CLIP][1] = float(clipped)

    def hand_out(self, before: Mapping[Tensor, int] | None = None) -> None:
        """Note the gradients that a pass has averaged: see :meth:`HandedOut.hand_out`."""
        if self.in_messages:
            self._handed_out.hand_out(before)

    def commit(self, *, taken: bool, given: bool = False) -> None:
        """Commit the errors of gradients that a step has taken, by default those in p.grad, and drop the others."""
        if self.in_messages:
            self._handed_out.close(taken=taken, checked=not given)

    def end_stage(self) -> None:
        """Watch no gradient any more, until gradients are averaged again."""
        self._handed_out.stop_watching()

    def resume(self, *, ever_in_use: bool) -> None:
        """Go on in a run whose gradients have travelled as ``bits`` say, or have not yet."""
        self.ever_in_use = ever_in_use

    def state_loaded(self) -> None:
        """Drop what is on its way to a step."""
        self.commit(taken=False)
        self.travelled = False

    def note_loss_scale(self, scale: float) -> None:
        """Take over the factor that a scaler's gradients carried; errors of another one are divided by it."""
        if self.travelled and scale != self._assumed_scale:
            for state in self._states:
                state.errors.rescale(self._assumed_scale / scale)
            self._assumed_scale = scale
            self._tensors[LOSS_SCALE] = torch.tensor([scale], dtype=torch.float64, device="cpu")

    def end_step(self, plan: StepPlan) -> None:
        """Close a step. Warn once if the gradients were averaged in another way, and so in full precision."""
        self.forget_clipping()
        self.in_use, self.travelled = self.travelled and self.bits < 32, False
        several = self._communicator.world_size > 1 and self._communicator.rank == 0
        if several and self.bits < 32 and plan.reduce_grads and not self.in_use and not self._told:
            self._told = True
            message = (
                "warmup_bits=%d is not in use: the gradients were averaged in another way, in full precision. Call "
                "hf_compressopt.register() before Trainer or Accelerate prepare the model, "
                "hf_compressopt.attach_ddp(model, optimizer) for a DistributedDataParallel model, or "
                "hf_compressopt.average_gradients(optimizer) before step(); or give warmup_bits=32"
            )
            write_log(logger, logging.WARNING, message, self.bits)
