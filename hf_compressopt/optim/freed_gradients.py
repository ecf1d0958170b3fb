"""zero_stage=2: gradients that leave while backward runs, and are freed bucket by bucket.

In the first stage a bucket leaves as (1) of :mod:`~hf_compressopt.optim.sharded_stage`, with a gradient that is not
clipped yet. Each server keeps the mean of its chunk, 4/W bytes per parameter, until ``step()``. There the norm is that
of these means: one sum over the ranks of their squares tells it exactly, and the servers clip:

    u_r = g_r + worker_error;  messages <- Q(u_r);  rank j: g = c mean_r Q(u_r),  c = min(1, max_norm / norm)   (1)

In the compressed stage a bucket leaves as with clip="late" (:mod:`~hf_compressopt.optim.early_messages`), by the clip
coefficient of the step before. In both stages the new errors wait, in their own form, until all ranks know that the
step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.backward_pass import BackwardPass
from hf_compressopt.collectives.exchange import ErrorFeedback
from hf_compressopt.collectives.group_errors import scale_
from hf_compressopt.collectives.phases import Task
from hf_compressopt.collectives.settled_exchange import PendingErrors, settled_all_reduce
from hf_compressopt.collectives.torch_clipping import warn_unguarded
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import Average, Combination, IntegerFormat, all_finite, sum_of_squares
from hf_compressopt.kernels.sketch import SKETCH_NUMEL, sketch_
from hf_compressopt.optim.early_messages import EarlyMessages
from hf_compressopt.optim.gradients import MeanNorm, StepGradients, find_fault
from hf_compressopt.optim.group import GroupState, ParamGroups
from hf_compressopt.optim.left_gradients import LeftBucket, LeftGradients, LeftMean
from hf_compressopt.optim.sharded_stage import send_gradients
from hf_compressopt.optim.sign_slots import Early, Key, Prepare, Settled
from hf_compressopt.schedules import StepPlan


class FreedGradients:
    """The gradients of one optimizer that leave while backward runs, of the param groups whose state is shared out.

    Attributes:
        loss_scale: Returns the factor that the gradients of the coming backward pass carry; None for the one that a
            gradient scaler has told.
    """

    def __init__(
        self,
        groups: ParamGroups,
        early: EarlyMessages,
        begin: Callable[[], StepPlan],
        prepare: Prepare,
        *,
        bits: int,
        clips: bool,
    ) -> None:
        """Hook the parameters.

        Args:
            groups: The param groups of the optimizer.
            early: Its messages of the compressed stage.
            begin: Makes the checks before a step, together on all ranks, and returns the plan of the coming step.
            prepare: See :class:`~hf_compressopt.optim.sign_slots.SignSlot`.
            bits: Bits per element of the messages of the first stage.
            clips: Whether step() clips by itself.
        """
        self._states, self._communicator, self._follow = groups
        self._early, self._begin, self._prepare = early, begin, prepare
        self._form, self._clips = IntegerFormat(bits), clips
        self.loss_scale: Callable[[], float] | None = None
        self._pass: BackwardPass | None = None
        self._left, self._hooked = LeftGradients(), 0
        self.attach()
        if not clips:
            warn_unguarded()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but hooks and messages: a copy hooks its parameters in its first step."""
        return self.__dict__ | {"_pass": None, "loss_scale": None, "_left": LeftGradients()}

    # -- hooks --------------------------------------------------------------------------------------------------------

    @property
    def states(self) -> list[GroupState]:
        """The param groups whose gradients leave; alike on all ranks."""
        return [state for state in self._states if state.shared_out]

    def attach(self) -> BackwardPass:
        """Hook the parameters, if there are new ones."""
        params = [param for state in self.states for param in state.params]
        if self._pass is None or self._hooked != len(params):
            numbers = {param: number for number, param in enumerate(params)}
            members = [{numbers[row.state.params[p.index]] for p in row.bucket.pieces} for row in self._make_rows()]
            if self._pass is not None:
                self._pass.hooks.require_attached()
                self._pass.hooks.detach()
            self._pass = BackwardPass(params, members, self._communicator, self, "compressed optimizer (zero_stage=2)")
            self._hooked = len(params)
        return self._pass

    def _make_rows(self) -> list[LeftBucket]:
        """Return the buckets, the last ones of all groups first: backward goes through each group to its beginning."""
        rows = [
            LeftBucket(state, bucket, feedback)
            for state in self.states
            for bucket, feedback in zip(state.layout.buckets, state.feedback, strict=True)
        ]
        return sorted(rows, key=lambda row: row.bucket.start / row.state.layout.numel, reverse=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in ``p.grad`` inside; the next pass outside sends them with its own."""
        return self.attach().no_sync()

    @property
    def have_left(self) -> bool:
        """True if the gradients of the coming step have left; alike on all ranks."""
        return self._pass is not None and self._pass.done

    def complete(self) -> None:
        """Let the gradients of the coming step leave, if they have not. All ranks call.

        Raises:
            RuntimeError: If another optimizer has taken over some of the parameters.
        """
        current = self.attach()
        current.hooks.require_attached()
        current.complete()

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> bool:
        """See :class:`~hf_compressopt.collectives.backward_pass.TakesBuckets`.

        Gradients stay whole in a compressed step of which it is not known by which norm to clip: the first one after
        the load of a checkpoint of a run that clipped otherwise.
        """
        plan = self._begin()
        self._left = LeftGradients()
        if not self.states or (plan.stage.number and not self._early.knows_norm):
            return False
        scale = None if self.loss_scale is None else float(self.loss_scale())
        self._plan, self._backward = plan, self._early.begin(scale)
        self._rows = self._make_rows()
        self._left.present = {state.number: [False] * len(state.params) for state in self.states}
        self._starts = self._starts_in_sketch()
        if plan.stage.number and (self._clips or self._early.measures):
            self._left.sketch = _empty_sketch(self._communicator.device)
        return True

    def _starts_in_sketch(self) -> dict[int, int]:
        """Return the place of each group's first element in the sketch of all ranks' gradients."""
        starts, start = {}, 0
        for state in self._states:
            if state.communicator is self._communicator:
                starts[state.number] = start
                start += state.layout.numel
        return starts

    def leave(self, number: int) -> None:
        """See :class:`~hf_compressopt.collectives.backward_pass.TakesBuckets`."""
        row = self._rows[number]
        state, bucket, scale = row.state, row.bucket, self._backward.loss_scale
        grads: list[Tensor | None] = [None] * len(state.params)
        for piece in bucket.pieces:
            param = state.params[piece.index]
            fault = find_fault([param], [param.grad], [state.names[piece.index]])
            self._left.fault = self._left.fault or fault
            if param.grad is not None and fault is None:
                grads[piece.index] = param.grad
                self._left.present[state.number][piece.index] = True
        segments = state.gradient_segments(bucket, grads)
        if not self._plan.stage.number:
            z = Combination(bucket.numel, state.device, grads=segments, beta=1 / scale)
            errors = PendingErrors.like(row.feedback.worker_error)
            sent = send_gradients(z, row.feedback.worker_error, self._form, state.communicator, errors.worker)
            self._left.tasks.add(self._keep_mean(row.key, sent, errors))
            return
        coefficient = self._backward.coefficient(segments, state.device)
        if self._left.sketch is not None:
            self._left.waiting[number] = own = _empty_sketch(state.device)
            sketch_(segments, self._starts[state.number] + bucket.start, self._plan.step, *own)
            while self._left.turn in self._left.waiting:
                for total, part in zip(self._left.sketch, self._left.waiting.pop(self._left.turn), strict=True):
                    total += part
                self._left.turn += 1
        z = self._prepare(self._plan, state, bucket, grads)
        z = replace(z, beta=z.beta * coefficient / scale)
        returned = settled_all_reduce(
            z, row.feedback.worker_error, row.feedback.server_error, row.feedback.format, state.communicator
        )
        self._early.keep(row.key, None)
        self._left.tasks.add(self._keep_average(row.key, coefficient, returned))

    def _keep_mean(self, key: Key, sent: Task[Tensor], errors: PendingErrors) -> Task[None]:
        values = yield from sent
        self._left.means[key] = LeftMean(values, errors)

    def _keep_average(self, key: Key, coefficient: float, returned: Task[tuple[Average, PendingErrors]]) -> Task[None]:
        average, errors = yield from returned
        self._left.returned.append((key, coefficient, average, errors))

    def end_pass(self) -> None:
        """See :class:`~hf_compressopt.collectives.backward_pass.TakesBuckets`."""
        self._left.tasks.drain()
        returned, self._left.returned = self._left.returned, []
        found = [all_finite(average) for _, _, average, _ in returned]
        finite = torch.stack(found).tolist() if found else []
        for (key, coefficient, average, errors), is_finite in zip(returned, finite, strict=True):
            self._early.keep(key, Early(Settled(average, errors), coefficient, is_finite))
        self._early.note_gradients()

    def drop(self) -> None:
        """Drop the gradients that have left, and keep the errors. All ranks call."""
        if self._pass is not None:
            self._pass.flush()
        if self.have_left:
            self._early.drop()
        self.end_step()

    def end_step(self) -> None:
        """Forget the gradients that have left: those of another step come next."""
        self._left = LeftGradients()
        if self._pass is not None:
            self._pass.forget()

    # -- the step -----------------------------------------------------------------------------------------------------

    def put_into(self, gradients: StepGradients) -> None:
        """Make the gradients that have left a part of those of the step under way."""
        gradients.freed = self
        gradients.fault = gradients.fault or self._left.fault
        current = self.attach()
        for state in self.states:
            late = [name for p, name in zip(state.params, state.names, strict=True) if p.grad is not None]
            gradients.groups[state.number] = [None] * len(state.params)
            if late or current.late:
                gradients.fault = gradients.fault or ValueError(
                    f"{late[0] if late else 'a parameter'} got a gradient after its gradient had left (zero_stage=2): "
                    "run all backward passes but the last one of a step inside optimizer.no_sync(), wrap the model in "
                    "no DistributedDataParallel, checkpoint activations with use_reentrant=False, and call "
                    "optimizer.zero_grad(), which drops what has left, after a backward pass that raised"
                )

    @property
    def signature(self) -> list[Key]:
        """The buckets of the first stage that have left, for ranks to compare."""
        return sorted(self._left.means)

    def require_same(self) -> None:
        """Check that the same gradients have left on all ranks.

        Raises:
            ValueError: If they have not, on all ranks: those that were freed cannot leave once more.
        """
        what = "what has left in backward (did all of them call zero_grad() and backward() alike?)"
        keys = [*self.signature, *self._early.signature] if self.have_left else []
        self._communicator.require_equal(what, [list(key) for key in keys])

    @property
    def is_exact(self) -> bool:
        """True if the norm of the mean gradient of these groups is known from their means; alike on all ranks."""
        return self.have_left and not self._plan.stage.number

    def squares(self) -> dict[float, Tensor]:
        """Return sums of squares, [] float64, by the factor that makes their sum over the ranks a squared norm.

        In the first stage that is the norm of the mean gradient, later the mean square of the ranks' norms.
        """
        device = self._communicator.device
        if self.is_exact:
            return {1.0: sum_of_squares([self._left.means[key].values for key in self.signature], device)}
        square = torch.tensor(self._backward.square, dtype=torch.float64, device=device)
        return {1 / self._communicator.world_size: square}

    def contribute(self, mean: MeanNorm) -> None:
        """Make the gradients that have left a part of what is measured for the norm of the mean."""
        for share, square in self.squares().items():
            mean.squares[share] = mean.squares.get(share, 0) + square
        number = next(i for i, sketch in enumerate(mean.sketches) if sketch.communicator is self._communicator)
        if self.is_exact:
            mean.averaged = mean.averaged + mean.squares[1.0]
            others = (state for state in self._states if state.communicator is self._communicator)
            if all(state.shared_out or not state.params for state in others):
                del mean.sketches[number]  # of nothing
        elif self._left.sketch is not None:
            sketch, (mine, own) = mean.sketches[number], self._left.sketch
            scale = self._backward.loss_scale
            mean.sketches[number] = sketch._replace(y=sketch.y + mine / scale, square=sketch.square + own / scale**2)

    @property
    def knows_norm(self) -> bool:
        """True if the norm of the mean gradient can be measured; alike on all ranks."""
        return self.is_exact or self._left.sketch is not None

    @property
    def clipped(self) -> float:
        """Factor by which the means of this step were clipped."""
        return self._left.clipped

    def scale_(self, factor: float) -> None:
        """Clip the means that have come; messages of the compressed stage have left with a factor already."""
        self._left.clipped *= factor
        for mean in self._left.means.values():
            mean.values.mul_(factor)

    def present(self, state: GroupState) -> Sequence[bool] | None:
        """See :class:`~hf_compressopt.optim.sharded_stage.SentGradients`."""
        return self._left.present.get(state.number) if self.have_left else None

    def take_mean(self, state: GroupState, bucket: Bucket, feedback: ErrorFeedback) -> Tensor | None:
        """See :class:`~hf_compressopt.optim.sharded_stage.SentGradients`."""
        mean = self._left.means.pop((state.number, bucket.start), None)
        if mean is None:
            return None
        mean.errors.commit(feedback.worker_error, feedback.server_error)
        return mean.values

    def note_loss_scale(self, scale: float) -> None:
        """Take over the factor that the gradients of the step under way carried, as a gradient scaler knows it.

        In the first stage it is divided out of what has left under another factor, as in a scaler's first step.

        Raises:
            ValueError: If gradients have left under another factor in the compressed stage. They are dropped.
        """
        self.complete()
        if not self.have_left or scale == self._backward.loss_scale:
            return
        before = self._backward.loss_scale
        if not self.is_exact:
            self.drop()
            self._early.expect_loss_scale(scale)
            raise ValueError(
                f"gradients have left with a loss scale of {before}, and the scaler used {scale}: do not change the "
                "scale of a hf_compressopt.GradScaler between its update() and backward(). The next step takes it"
            )
        self._early.expect_loss_scale(scale)
        self._backward.loss_scale = scale
        for mean in self._left.means.values():
            mean.values.mul_(before / scale)
            scale_(mean.errors.worker, before / scale)


def _empty_sketch(device: torch.device) -> tuple[Tensor, Tensor]:
    y = torch.zeros(SKETCH_NUMEL, dtype=torch.float32, device=device)
    return y, torch.zeros((), dtype=torch.float64, device=device)
