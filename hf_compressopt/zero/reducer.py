"""ZeRO's messages: gradients to their owners while backward runs, and updated parameters back to all ranks.

Hooks fill slices, and full slices are sent in one order that all ranks share. In a pass every rank sends every slice
once, in the same order. Late gradients stay in p.grad: a parameter's gradient may come in several portions, as under
reentrant checkpointing. They are sent before the step, after the ranks have agreed that some rank has any.

In messages of 4 or 8 bits gradients go up in one phase with error feedback (LoCo, arXiv 2407.04480). Rank r sends, and
the owner averages in float32, in rank order:

    u_r = g_r + worker_error;  message <- Q(u_r);  worker_error <- u_r - Q(u_r);  g = mean_r Q(u_r)     (1)

The errors change in the step; those of parameters without a gradient on any rank stay, since nobody takes their part of
the messages.

Parameters come down as differences (SDP4Bit, arXiv 2410.15526). The owner has float32 masters, and all ranks have alike
replicas, the parameters that the model computes with:

    message <- Q(master - replica);  replica <- replica + Q(master - replica) on all ranks              (2)

What a message misses is still there in the next difference, so that (2) needs no error feedback of its own.

In the hierarchical topology the ranks of a node first average what they have for the owners at each place, at full
precision. Then (1) is among the peers: r and W are nodes, and each rank has the errors of the parts that it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.backward import BackwardPasses
from hf_compressopt.collectives.communicator import Communicator, digest_of
from hf_compressopt.collectives.exchange import (
    Task,
    all_gather,
    gather_messages,
    in_place_order,
    own_message,
    reduce_scatter,
    scatter_sums,
    summed,
)
from hf_compressopt.collectives.feedback import MessageErrors
from hf_compressopt.flat import FLOAT_BYTES, Partition, Span
from hf_compressopt.kernels import Combination, CompactErrors, IntegerFormat, Segment, sum_of_squares
from hf_compressopt.kernels.memory import fetch_later, flat_view, in_float32, in_memory, is_direct, numbers_on
from hf_compressopt.zero.config import ZeroConfig
from hf_compressopt.zero.parts import Part, TrainedParameter, UpdateBucket, write_span


class LossScale:
    """The factor of the loss before backward, which keeps small float16 gradients from becoming zero."""

    def __init__(self, config: ZeroConfig) -> None:
        self._window = config.loss_scale_window if config.loss_scale == "dynamic" else None
        self.value = float(config.loss_scale if self._window is None else config.initial_loss_scale)
        self.good_steps = 0  # without an overflow since the factor changed
        self.of_scaler = 1.0  # the factor of a GradScaler, which comes on top

    def resume(self, value: float, good_steps: int, of_scaler: float) -> None:
        """Go on from the factors of a saved state."""
        self.value = value
        self.good_steps = good_steps
        self.of_scaler = of_scaler

    def update(self, overflow: bool) -> None:
        """Count a step: a dynamic factor halves after an overflow, and doubles after so many good steps."""
        if self._window is not None:
            self.good_steps = 0 if overflow else self.good_steps + 1
            if overflow:
                self.value = max(self.value / 2, 1.0)
            elif self.good_steps == self._window:
                self.value, self.good_steps = self.value * 2, 0


@dataclass
class SliceGradients:
    """The gradients of one slice on their way to their owners."""

    cut: Partition
    communicator: Communicator
    sent_dtype: torch.dtype  # on the wire
    kept_dtype: torch.dtype  # of the average
    device: torch.device
    offload: bool
    grad_form: IntegerFormat | None  # of the messages of gradients; None is full precision
    param_form: IntegerFormat | None  # of the messages of parameters
    feedback: MessageErrors | None = None  # of this rank's messages of gradients, in the unit without a loss scale
    average: Tensor | None = None  # [chunk_numel] this rank's part, summed over the passes; None before the first
    coming: Callable[[], Tensor] | None = None  # that of the last pass, on its way to host memory; see land()
    buffer: Tensor | None = None  # [cut.numel], to be sent
    filled: set[int] = field(default_factory=set)  # the parameters whose gradients are in it
    sent: bool = False

    def __post_init__(self) -> None:
        if self.grad_form is not None:
            self.make_errors()

    def make_errors(self) -> None:
        """Take errors of 0, in the sizes of the topology of now."""
        nodes = self.communicator.topology.nodes  # as many as ranks, if the topology is flat
        errors = CompactErrors.zeros(nodes * self.cut.chunk_numel, nodes, self.device)
        spans = [span for spans in self.error_spans.values() for span in spans]
        places = [(span.offset, span.offset + span.numel, span.index) for span in spans]
        self.feedback = MessageErrors(errors, places)

    @property
    def errors(self) -> CompactErrors | None:
        return None if self.feedback is None else self.feedback.errors

    def use_up(self, present: Sequence[bool]) -> None:
        """Drop the average, which the step has used, and take over the errors of what is ``present`` on some rank."""
        self.average = None
        if self.feedback is not None:
            self.feedback.commit(present)

    def drop_of(self, kept: Sequence[bool]) -> None:
        """Drop the averages of some parameters, and the errors of these since the last step; ``kept`` are the others.

        Of the others nothing changes.
        """
        self.land()
        if self.average is not None:
            for span in self.cut.chunks[self.communicator.rank]:
                if not kept[span.index]:
                    self.average_of(span).zero_()
        if self.feedback is not None and self.feedback.pending is not None:
            self.feedback.begin(kept)

    def drop_errors(self) -> None:
        """Drop the errors since the last step."""
        if self.feedback is not None:
            self.feedback.drop()

    def begin(self) -> None:
        self.buffer, self.sent, self.filled = None, False, set()

    def _room(self) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty(self.cut.numel, dtype=self.sent_dtype, device=self.device)
        return self.buffer

    def put(self, number: int, grad: Tensor, scale: float | None) -> None:
        """Copy a parameter's flat gradient to its places in the buffer, or add it to an earlier portion."""
        buffer, add = self._room(), number in self.filled
        for span in self.cut.spans[number]:
            place, part = buffer[span.offset : span.offset + span.numel], grad[span.start : span.stop]
            if add:
                place.add_(part.to(place.dtype) if scale is None else part.to(place.dtype) * scale)
            elif scale is None:
                place.copy_(part)
            elif part.dtype == place.dtype:
                torch.mul(part, scale, out=place)
            else:
                place.copy_(part).mul_(scale)
        self.filled.add(number)

    def close(self) -> Tensor:
        """Return the buffer as it is sent, with zeros for padding and for gradients that have not arrived."""
        buffer, self.buffer, self.sent = self._room(), None, True
        for start, stop in self.cut.gaps:
            buffer[start:stop] = 0
        for number, spans in self.cut.spans.items():
            if number in self.filled:
                continue
            for span in spans:
                buffer[span.offset : span.offset + span.numel] = 0
        return buffer

    def land(self) -> None:
        """Add to the average what is on its way to host memory."""
        if self.coming is not None:
            part, self.coming = self.coming(), None
            self.average = part if self.average is None else self.average.add_(part)

    def average_of(self, span: Span) -> Tensor:
        """Return the average of a span, sharing memory; it begins as zeros if there is none."""
        self.land()
        if self.average is None:
            self.average = torch.zeros(self.cut.chunk_numel, dtype=self.kept_dtype, device=self.device)
        return self.average[span.offset : span.offset + span.numel]

    @property
    def error_spans(self) -> dict[int, list[Span]]:
        """The spans of each parameter that have errors on this rank, at offsets in the errors."""
        place = self.communicator.topology
        return self.cut.spans_in(range(place.place, place.world_size, place.node_size))

    @property
    def nbytes(self) -> int:
        return self.cut.numel * self.sent_dtype.itemsize


class KnownParameters(Protocol):
    """Which ranks have which parameters, and what they must have alike in a step."""

    model_parallel: Communicator | None  # the ranks that share one copy of the model

    def communicators(self) -> list[Communicator]: ...
    def options_of_step(
        self, communicator: Communicator, groups: Sequence[dict[str, Any]], max_norm: float | None
    ) -> list[str]: ...
    def unfrozen(self, groups: Sequence[dict[str, Any]]) -> list[int]: ...  # numbers of param groups
    def add(self, groups: Sequence[dict[str, Any]], numbers: Iterable[int]) -> None: ...


class GradientReducer:
    """Sender of gradients to their owners, and keeper of this rank's averages; ``factor`` unscales and clips them."""

    def __init__(self, communicator: Communicator, config: ZeroConfig, loss_scale: LossScale) -> None:
        self.slices: list[SliceGradients] = []
        self.present: list[bool] = []
        self.fault: Exception | None = None
        self._unscaling = self._clipping = 1.0  # the parts of the factor
        self._square: float | None = None  # of the norm of the averages; None before the first one of a step
        self._is_measured = False  # it is that of the averages as they are
        self._max_norm: float | None = None  # to which clip_grad_norm_ has clipped last
        self._communicator, self._checked = communicator, False
        self._config, self._loss_scale = config, loss_scale
        self.known: list[TrainedParameter] = []
        limit = 2 * FLOAT_BYTES * config.reduce_numel
        self.backward = BackwardPasses(self, "ZeroOptimizer", communicator, limit=limit)

    def add(self, params: Sequence[Tensor], slices: Sequence[SliceGradients]) -> None:
        """Take the gradients of parameters that have become known, in these slices."""
        self.present += [False] * len(params)
        self.backward.add(params, [gradients.cut.spans for gradients in slices])
        self.slices += slices
        self._checked = False

    def numbers_of(self, communicator: Communicator) -> list[int]:
        """List the numbers of the parameters of which the ranks of a communicator hold copies."""
        return [number for number, known in enumerate(self.known) if known.communicator is communicator]

    def check_layout(self) -> None:
        """Check once that all ranks have the same options, parameters and slices. All ranks call."""
        if self._checked:
            return
        self._communicator.require_equal_rows("their options of ZeRO", self._config.rows())
        # parameters of other ranks have names of their own, but take the same place in the order of messages
        sizes = [f"a slice of {len(g.cut.chunks)} parts of {g.cut.chunk_numel}" for g in self.slices]
        self._communicator.require_equal_rows(
            "their trainable parameters, or the sizes and dtypes of these",
            [*self._layout_of(self._communicator), *sizes],
        )
        others = dict.fromkeys(g.communicator for g in self.slices if g.communicator is not self._communicator)
        if others:
            self._communicator.raise_together(self._first_difference(others), ValueError)
        self._checked = True

    def _first_difference(self, others: Iterable[Communicator]) -> ValueError | None:
        """Compare the param groups that have a process group of their own; return the first error."""
        errors = []
        for communicator in others:
            try:
                what = "the trainable parameters of a param group with a process_group"
                communicator.require_equal_rows(what, self._layout_of(communicator))
            except ValueError as error:
                errors.append(error)
        return errors[0] if errors else None

    def _layout_of(self, communicator: Communicator) -> list[str]:
        """Return lines for the parameters that a communicator's ranks hold, and for the slices that they send."""
        names = {number: self.known[number].name for number in self.numbers_of(communicator)}
        rows = []
        for number, name in names.items():
            tensor = self.known[number].tensor
            rows.append(f"{name} {list(tensor.shape)} {tensor.dtype}")
        for gradients in self.slices:
            if gradients.communicator is communicator:
                dtypes = gradients.sent_dtype, gradients.kept_dtype, gradients.grad_form, gradients.param_form
                parts = [[(names[s.index], s.start, s.stop, s.offset) for s in part] for part in gradients.cut.chunks]
                rows.append(f"a slice of {gradients.cut.chunk_numel} elements per rank, {dtypes}, {parts}")
        return rows

    def holds_gradients(self) -> bool:
        return any(self.present)

    def follow(self) -> None:
        """Follow the parameters to the devices to which a model was moved after its optimizer was made."""
        for gradients in self.slices:
            device = self.known[next(iter(gradients.cut.spans))].tensor.device
            gradients.device = device
            if gradients.communicator.device != device:
                gradients.communicator.follow(device)
            if gradients.feedback is not None:
                gradients.feedback.to(device)
        if self.known:
            self._communicator.follow(self.known[0].tensor.device)

    @property
    def factor(self) -> float:
        """The factor of the averages where they are used."""
        return self._unscaling * self._clipping

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> bool:
        self.check_layout()
        self._clip_averages()
        return True

    def _clip_averages(self) -> None:
        """Clip the averages themselves, as was asked for, before gradients that are not clipped are added to them."""
        if self._clipping == 1.0:
            return
        for gradients in self.slices:
            gradients.land()
            if gradients.average is not None:
                gradients.average.mul_(self._clipping)
        self._clipping = 1.0

    def take(self, number: int) -> bool:
        """See :class:`~hf_compressopt.collectives.backward.Client`: after its slice a gradient stays in p.grad."""
        mine = self.backward.buckets_of.get(number, ())
        if self.known[number].tensor.grad is None or any(self.slices[index].sent for index in mine):
            return False
        self._fill(number)
        return True

    def _fill(self, number: int) -> None:
        """Move a gradient from p.grad to all of its slices."""
        param = self.known[number].tensor
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.layout != torch.strided or not grad.is_floating_point():
            self.fault = TypeError(
                f"the gradient of {self.known[number].name} is {grad.dtype}, {grad.layout}; only dense real gradients "
                "are supported: make an embedding with sparse=False"
            )
            return
        self.present[number] = True
        flat = grad.detach().reshape(-1)
        for index in self.backward.buckets_of.get(number, ()):
            self.slices[index].put(number, flat, self._scale_of(self.slices[index]))

    def _scale_of(self, gradients: SliceGradients) -> float | None:
        """Return the factor before gradients are sent; None is 1."""
        if self._config.postscale_gradients:
            factor = self._config.gradient_predivide_factor
            return None if factor == 1.0 else 1.0 / factor
        world_size = gradients.communicator.world_size
        return None if world_size == 1 or gradients.grad_form is not None else 1.0 / world_size

    def send(self, index: int) -> None:
        gradients, tasks = self.slices[index], self.backward.tasks
        tasks.room_for(2 * gradients.nbytes)
        for number in gradients.cut.spans:
            if number not in gradients.filled:
                self._fill(number)
        tasks.keep([gradients.buffer])
        tasks.add(self._average(gradients), 2 * gradients.nbytes)
        if not self._config.overlap_comm:
            tasks.drain()

    def _average(self, gradients: SliceGradients) -> Task[None]:
        """Average a slice over its ranks, and add this rank's part to its average.

        The owner sums in float32, in an order that depends on the topology alone: the bits depend neither on the
        backend nor on the number of messages. gloo's own reduce-scatter moves twice the bytes.
        """
        ranks = gradients.communicator
        if gradients.grad_form is not None:
            scale = self._loss_scale.value * self._loss_scale.of_scaler
            average = yield from send_gradients(gradients.close(), gradients, gradients.grad_form, scale)
        else:
            average = gradients.close()
            if ranks.world_size > 1:
                average = yield from scatter_sums(average, ranks)
            if self._config.postscale_gradients:
                average = average * (self._config.gradient_predivide_factor / ranks.world_size)
        part = average.to(gradients.kept_dtype)
        if gradients.offload:
            gradients.land()  # the part of an earlier pass
            gradients.coming = fetch_later(part, beside=True)
            return
        gradients.average = part if gradients.average is None else gradients.average.add_(part)

    def end_pass(self) -> None:
        self._is_measured = False
        self._empty_slices()

    def interrupted(self) -> None:
        self.backward.flush()

    def _empty_slices(self) -> None:
        for gradients in self.slices:
            gradients.begin()

    # -- after backward -----------------------------------------------------------------------------------------------

    def _leftovers(self) -> list[bool]:
        """Tell for each slice whether p.grad holds gradients for it that no pass has sent."""
        left = [False] * len(self.slices)
        for number, known in enumerate(self.known):
            if known.tensor.grad is not None:
                mine = self.backward.buckets_of.get(number, ())
                if not mine:
                    known.tensor.grad = None  # no element
                for index in mine:
                    left[index] = True
        return left

    def copy_averages(self, other: GradientReducer) -> None:
        """Take copies of the averages and errors of a reducer of the same layout, and what is known of them."""
        for mine, theirs in zip(self.slices, other.slices, strict=True):
            theirs.land()
            mine.coming = None
            for name in ("average", "feedback"):
                setattr(mine, name, deepcopy(getattr(theirs, name)))
        self.present = list(other.present)
        self._square, self._is_measured = other._square, other._is_measured
        self._unscaling, self._clipping = other._unscaling, other._clipping

    def clear(self) -> None:
        """Drop all gradients, and the errors of their messages. All ranks call if a pass is open."""
        self.backward.flush()
        self.backward.passes.drop()
        self._empty_slices()  # of a pass that has raised before its end
        for gradients in self.slices:
            gradients.average = gradients.coming = None
            gradients.drop_errors()
        for number, known in enumerate(self.known):
            self.present[number] = False
            known.tensor.grad = None
        self.fault, self._square = None, None
        self._unscaling = self._clipping = 1.0

    def drop_of(self, numbers: Collection[int]) -> None:
        """See :class:`~hf_compressopt.collectives.backward.Client`."""
        chosen = set(numbers)
        if len(chosen) == len(self.known):
            self.clear()
            return
        self.backward.flush()
        self.backward.passes.drop()
        kept = [number not in chosen for number in range(len(self.known))]
        for gradients in self.slices:
            gradients.drop_of(kept)
        self.present = [here and stays for here, stays in zip(self.present, kept, strict=True)]
        self._is_measured = False

    # -- the averages of a step, between backward and the update ------------------------------------------------------

    @torch.no_grad()
    def finish(self, parameters: KnownParameters, groups: Sequence[dict[str, Any]]) -> float:
        """Send the rest, and agree on the squared norm of the average times ``factor``. All ranks call."""
        self.backward.flush()
        has_accumulated = self.backward.note_accumulated_seen()
        if self._square is None or not self._is_measured or has_accumulated:
            square = self._agree(parameters, groups)
            if self._square is None:
                self._unscaling /= self._loss_scale.value
            self._square, self._is_measured = square, True
        return self._square * self.factor**2

    def note_max_norm(self, max_norm: float) -> None:
        """Note to which norm the coming step is clipped, for the ranks to compare."""
        self._max_norm = max_norm

    def clip(self, norm: float, max_norm: float) -> None:
        """Clip averages of this norm to another one when they are used."""
        factor = _clip_factor(norm, max_norm)
        if math.isfinite(factor) and factor < 1.0:
            self._clipping *= factor

    def unscale(self, inverse_scale: float) -> None:
        """Take a gradient scaler's factor out of the averages when they are used, and its part in the errors now."""
        self._unscaling *= inverse_scale
        self.note_scaler(1.0 / inverse_scale)

    def note_scaler(self, scale: float) -> None:
        """Note a gradient scaler's factor, of these gradients or of the coming ones."""
        before, self._loss_scale.of_scaler = self._loss_scale.of_scaler, scale
        for gradients in self.slices:
            if before != scale and gradients.feedback is not None:
                gradients.feedback.rescale(before / scale)

    def was_set(self, number: int) -> None:
        """Note that a user has set a parameter's average, so that the norm is another one."""
        self.present[number] = True
        self._is_measured = False

    def give_to(self, bucket: UpdateBucket) -> None:
        """Give the parts of a bucket their gradients, unscaled and clipped; None if no rank had a gradient."""
        for part in bucket.parts:
            gradients = self.slices[part.slice]
            if gradients.average is None or not self.present[part.param]:
                part.tensor.grad = None
                continue
            average = gradients.average_of(part.span)
            wide = average if average.dtype in (torch.float32, torch.float64) else average.float()
            if self.factor != 1.0:
                wide = wide.mul_(self.factor)
            part.tensor.grad = wide.to(part.tensor)

    def _agree(self, parameters: KnownParameters, groups: Sequence[dict[str, Any]]) -> float:
        """Exchange norms, faults, missing gradients, gradients that were not sent, and parameters newly unfrozen."""
        while True:
            left, unfrozen = self._leftovers(), self._unfrozen(parameters, groups)
            everyone, *others = parameters.communicators()
            for communicator in others:
                options = parameters.options_of_step(communicator, groups, self._max_norm)
                sums = self._sum_flags(left, communicator, _squared(digest_of(options)))
                try:
                    _require_alike(communicator, options, *sums)
                except ValueError as error:  # the other ranks learn of it with everyone
                    self.fault = error
            own = [float(self.fault is not None), float(any(left)), float(bool(unfrozen))]
            options = parameters.options_of_step(everyone, groups, self._max_norm)
            numbers = [*_squared(digest_of(options)), *own]
            digests, digest_squares, *sums = self._sum_flags(left, everyone, numbers, self._squares())
            _require_alike(everyone, options, digests, digest_squares)
            faults, any_left, any_unfrozen, *squares = sums
            if faults > 0:
                fault, self.fault = self.fault, None
                raise fault or RuntimeError(
                    f"{int(faults)} other rank(s) had gradients or hyperparameters that cannot be used"
                )
            if any_unfrozen > 0:
                parameters.add(groups, unfrozen)
                self.check_layout()
            elif any_left > 0:
                self._clip_averages()
                self.backward.send_chosen(left)
                self._empty_slices()
            else:
                break
        return _sum_over_model(parameters.model_parallel, *squares)

    def _unfrozen(self, parameters: KnownParameters, groups: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return parameters.unfrozen(groups)
        except (TypeError, ValueError) as error:
            self.fault = error
            return []

    def _sum_flags(
        self, left: list[bool], communicator: Communicator, numbers: Sequence[float] = (), squares: Tensor | None = None
    ) -> list[float]:
        """Agree with the ranks of a communicator on which parameters had gradients, and which slices have more.

        Returns the sums of the numbers and squares, which travel along.
        """
        params = self.numbers_of(communicator)
        slices = [index for index, gradients in enumerate(self.slices) if gradients.communicator is communicator]
        flags = [float(self.present[number]) for number in params] + [float(left[index]) for index in slices]
        message = numbers_on(communicator.device, [*flags, *numbers], torch.float64)
        message = message if squares is None else torch.cat([message, squares])
        communicator.all_reduce(message).wait()
        sums: list[float] = message.tolist()
        for number, met in zip(params, sums, strict=False):
            self.present[number] = met > 0
        for index, more in zip(slices, sums[len(params) :], strict=False):
            left[index] = more > 0
        return sums[len(flags) :]

    def _squares(self) -> Tensor:
        """Sum the squares of this rank's averages: [2] float64, of parameters that are not, and are, model-parallel."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._communicator.device)
        found: dict[tuple[int, torch.device], list[Tensor]] = {}
        for gradients in self.slices:
            gradients.land()
            if gradients.average is None:
                continue
            for span in gradients.cut.chunks[gradients.communicator.rank]:
                average, kind = gradients.average_of(span), int(self.known[span.index].model_parallel)
                found.setdefault((kind, average.device), []).append(average)
        for (kind, device), tensors in found.items():
            square = sum_of_squares(tensors, device)
            if square.device != squares.device:
                square = numbers_on(squares.device, [square.item()], torch.float64)[0]
            squares[kind] += square
        return squares


def _clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that makes this norm, a float32, at most ``max_norm``, in the bits that torch computes."""
    return min(1.0, in_float32(in_float32(1 / in_float32(norm + in_float32(1e-6))) * in_float32(max_norm)))


def _squared(digest: int) -> list[float]:
    """Return a number and its square: by their sums the ranks see whether all of them have the same number."""
    return [float(digest), float(digest**2)]


def _require_alike(communicator: Communicator, options: Sequence[str], digests: float, squares: float) -> None:
    """Raise a ValueError on all ranks if digests with these sums differ, with the first option that does."""
    if communicator.world_size * int(squares) != int(digests) ** 2:
        what = "max_norm or the hyperparameters of a step (does each rank's scheduler see the same numbers?)"
        communicator.require_equal_rows(what, options)


def _sum_over_model(model: Communicator | None, replicated: float, split: float) -> float:
    """Sum squares over the ranks that share a model; parameters that each of them has whole count once."""
    if model is None:
        return replicated + split
    mine = split + replicated if model.rank == 0 else split + 0 * replicated
    total = numbers_on(model.device, [mine], torch.float64)
    model.all_reduce(total).wait()
    return float(total)


# -- messages ---------------------------------------------------------------------------------------------------------


def send_gradients(buffer: Tensor, gradients: SliceGradients, form: IntegerFormat, loss_scale: float) -> Task[Tensor]:
    """Average every rank's part of a slice, [chunk_numel] float32, as (1) says; the new errors are pending."""
    peers = gradients.communicator
    if (levels := peers.levels) is not None:
        buffer, node, peers = in_place_order(buffer, peers), levels.node, levels.peers
        sizes = [buffer.numel() // node.world_size] * node.world_size
        buffer = yield from summed(buffer, sizes, node, 1.0 / node.world_size)
    z = Combination(buffer.numel(), buffer.device, grads=[Segment(buffer, 0, buffer.numel(), 0)], beta=1.0 / loss_scale)
    assert gradients.feedback is not None  # it was made with the form
    before, new = gradients.feedback.begin([True])  # averages of earlier passes stay
    # parts are the chunks, since ALIGN is a multiple of 8
    task = reduce_scatter(z, [before.errors], [new.errors], form, peers, loss_scale, last=True)
    del buffer, z
    return (yield from task)


def send_differences(
    params: Sequence[Tensor], parts: Sequence[Part], cut: Partition, communicator: Communicator, form: IntegerFormat
) -> Task[None]:
    """Bring all replicas nearer to the masters, as (2) says."""
    device = params[next(iter(cut.spans))].device
    ahead = torch.zeros(cut.chunk_numel, dtype=torch.float32, device=device)
    for part in parts:
        place = ahead[part.span.offset : part.span.offset + part.span.numel]
        torch.sub(part.tensor.to(device, non_blocking=True), part.replica, out=place)
    together, message = own_message(cut.numel, form, communicator, device)
    kernels.on(message).compress_(form, Combination(cut.chunk_numel, device), ahead, message, 1)
    del ahead
    differences = yield from gather_messages(cut.numel, together, form, communicator, last=True)
    flats = {number: flat_view(in_memory("a parameter", params[number])) for number in cut.spans}
    replicas = [
        Segment(None, 0, numel, 0) if span is None else Segment(flats[span.index], span.start, numel, span.index)
        for numel, span in cut.gathered
    ]
    kernels.on(together).add_(differences, replicas, decay=1.0)
    for number, flat in flats.items():
        if not is_direct(params[number]):  # flat is a copy
            params[number].detach().copy_(flat.view(params[number].shape))
    for part in parts:
        part.expect(part.replica)


def gather_parameters(params: Sequence[Tensor], cut: Partition, communicator: Communicator) -> Task[None]:
    """Give all ranks the elements that this rank has updated, at full precision."""
    rank = communicator.rank
    example = params[next(iter(cut.spans))]
    gathered = torch.empty(cut.numel, dtype=example.dtype, device=example.device)  # padding is sent as it is
    part = gathered[cut.starts[rank] :][: cut.chunk_numel]
    for span in cut.chunks[rank]:
        part[span.offset : span.offset + span.numel] = params[span.index].detach().reshape(-1)[span.start : span.stop]
    yield from all_gather(gathered, communicator)
    for owner, spans in enumerate(cut.chunks):
        if owner == rank:
            continue
        for span in spans:
            begin = cut.starts[owner] + span.offset
            write_span(params[span.index], span.start, span.stop, gathered[begin : begin + span.numel])
