"""ZeRO's messages: gradients to their owners while backward runs, and updated parameters back to all ranks.

Hooks fill slices, and full slices are sent in one order that all ranks share. In a pass every rank sends every slice
once, in the same order. Late gradients stay in p.grad: a parameter's gradient may come in several portions, as under
reentrant checkpointing. They are sent before the step, after the ranks have agreed that some rank has any.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from hf_compressopt.collectives.backward import BackwardPasses
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import Pipeline, Task, all_gather, scatter_sums
from hf_compressopt.flat import FLOAT_BYTES, Span
from hf_compressopt.kernels import IntegerFormat, sum_of_squares
from hf_compressopt.kernels.memory import numbers_on
from hf_compressopt.optim.math import known_clip_factor
from hf_compressopt.zero.config import ZeroConfig
from hf_compressopt.zero.low_bit import SliceErrors, send_gradients
from hf_compressopt.zero.parts import Part, Slice, UpdateBucket, in_host_memory, write_span

if TYPE_CHECKING:
    from hf_compressopt.zero.parameters import PartitionedParameters


@dataclass
class LossScale:
    """The factor of the loss before backward, which keeps small float16 gradients from becoming zero."""

    value: float = 1.0
    growth_interval: int = 0  #: Steps without an overflow after which the factor doubles; 0 keeps it fixed.
    good_steps: int = 0  #: Steps without an overflow since the factor changed.
    of_scaler: float = 1.0  #: The factor of a GradScaler, which comes on top.

    @classmethod
    def of(cls, config: ZeroConfig) -> LossScale:
        if config.loss_scale == "dynamic":
            return cls(float(config.initial_loss_scale), config.loss_scale_window)
        return cls(float(config.loss_scale))

    @property
    def of_gradients(self) -> float:
        """The factor that the gradients of the coming backward carry."""
        return self.value * self.of_scaler

    def update(self, overflow: bool) -> None:
        """Count a step: halve the factor after an overflow, double it after ``growth_interval`` good steps."""
        if self.growth_interval == 0:
            return
        if overflow:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0


@dataclass
class SliceGradients:
    """The gradients of one slice on their way to their owners."""

    cut: Slice
    communicator: Communicator
    sent_dtype: torch.dtype  # on the wire
    kept_dtype: torch.dtype  # of the average
    device: torch.device
    offload: bool = False
    param_form: IntegerFormat | None = None  # of the messages of parameters; None is full precision
    errors: SliceErrors | None = None  # and the form of the messages of gradients; None is full precision
    average: Tensor | None = None  # [part_numel] this rank's part, summed over the passes; None before the first
    buffer: Tensor | None = None  # [cut.numel], to be sent
    filled: set[int] = field(default_factory=set)  # the parameters whose gradients are in it
    sent: bool = False

    def make_errors(self, form: IntegerFormat) -> None:
        """Take errors of 0, in the sizes of the topology of now."""
        nodes = self.communicator.topology.nodes  # as many as ranks, if the topology is flat
        self.errors = SliceErrors(form, nodes * self.cut.part_numel, nodes, self.device)

    def begin(self) -> None:
        self.buffer, self.sent, self.filled = None, False, set()

    def room(self) -> Tensor:
        """Return the buffer; it is allocated when the first gradient arrives."""
        if self.buffer is None:
            self.buffer = torch.empty(self.cut.numel, dtype=self.sent_dtype, device=self.device)
        return self.buffer

    def close(self) -> Tensor:
        """Return the buffer as it is sent, with zeros for padding and for gradients that have not arrived."""
        buffer, self.buffer, self.sent = self.room(), None, True
        for start, stop in self.cut.gaps:
            buffer[start:stop] = 0
        for number, rows in self.cut.places.items():
            for begin, span in rows if number not in self.filled else ():
                buffer[begin : begin + span.numel] = 0
        return buffer

    def settable_average_of(self, span: Span) -> Tensor:
        """Return the average of a span, sharing memory; it begins as zeros if there is none."""
        if self.average is None:
            self.average = torch.zeros(self.cut.part_numel, dtype=self.kept_dtype, device=self.device)
        return self.average[span.offset : span.offset + span.numel]

    @property
    def error_places(self) -> dict[int, list[tuple[int, Span]]]:
        """The spans of each parameter that have errors on this rank, with their places in the errors."""
        place = self.communicator.topology
        return self.cut.places_in(range(place.place, place.world_size, place.node_size))

    @property
    def forms(self) -> tuple[IntegerFormat | None, IntegerFormat | None]:
        """Forms of the messages of gradients and of parameters; None is full precision."""
        return None if self.errors is None else self.errors.form, self.param_form

    @property
    def nbytes(self) -> int:
        return self.cut.numel * self.sent_dtype.itemsize


class GradientReducer:
    """Sender of gradients to their owners, and keeper of this rank's averages; ``factor`` unscales and clips them."""

    def __init__(self, communicator: Communicator, config: ZeroConfig, loss_scale: LossScale) -> None:
        self.slices: list[SliceGradients] = []
        self.present: list[bool] = []
        self.fault: Exception | None = None
        self.passes = 0
        self.factor, self.were_clipped = 1.0, False
        self._square: float | None = None  # of the norm of the averages as they are; None if it is not known
        self._norm_of_pass = 0
        self._communicator, self._checked = communicator, False
        self._config, self._loss_scale = config, loss_scale
        self._pipeline = Pipeline(2 * FLOAT_BYTES * config.reduce_numel)
        self._params: list[tuple[Tensor, str]] = []
        self.backward = BackwardPasses(self, "ZeroOptimizer", communicator)
        self._announce: weakref.WeakMethod[Callable[[], Any]] | None = None

    @property
    def bytes_under_way(self) -> int:
        return self._pipeline.nbytes

    def add(self, params: Sequence[tuple[Tensor, str]], slices: Sequence[SliceGradients]) -> None:
        self._params += params
        self.present += [False] * len(params)
        self.backward.add([param for param, _ in params], [gradients.cut.places for gradients in slices])
        for gradients in slices:
            gradients.begin()
            self.slices.append(gradients)
        self._checked = False

    def check_layout(self) -> None:
        """Check once that all ranks have the same slices. All ranks call."""
        if not self._checked:
            layout = [(g.cut.part_numel, len(g.cut.parts), g.sent_dtype, g.kept_dtype, *g.forms) for g in self.slices]
            self._communicator.require_equal(
                "trainable parameters, their sizes or dtypes, bucket size or compression",
                [len(layout), crc32(repr(layout).encode())],
            )
            self._checked = True

    def holds_gradients(self) -> bool:
        return any(self.present)

    def announce_passes(self, announce: Callable[[], Any]) -> None:
        """Call a method before each pass, without keeping its object alive."""
        self._announce = weakref.WeakMethod(announce)

    def follow_parameters(self) -> None:
        """Follow the parameters to the devices to which a model was moved after its optimizer was made."""
        for gradients in self.slices:
            device = self._params[next(iter(gradients.cut.places))][0].device
            gradients.device = gradients.communicator.device = device
            if gradients.errors is not None:
                gradients.errors.to(device)
        if self._params:
            self._communicator.device = self._params[0][0].device

    @torch.no_grad()
    def empty_pass(self) -> None:
        """Take part in a pass of the other ranks without gradients of this rank."""
        announce, self._announce = self._announce, None  # the pass of the others
        self.backward.empty_pass()
        self._announce = announce

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> bool:
        self.follow_parameters()
        if (announce := self._announce and self._announce()) is not None:
            announce()
        self.check_layout()
        return True

    def take(self, number: int) -> bool:
        """See :class:`~hf_compressopt.collectives.backward.Sender`: after its slice a gradient stays in p.grad."""
        mine = self.backward.order.of.get(number, ())
        if self._params[number][0].grad is None or any(self.slices[index].sent for index in mine):
            return False
        if self._config.contiguous_gradients:
            self._fill(number)
        return True

    def _fill(self, number: int) -> None:
        """Move a gradient from p.grad to all of its slices."""
        param, name = self._params[number]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.layout != torch.strided or not grad.is_floating_point():
            self.fault = TypeError(
                f"the gradient of {name} is {grad.dtype}, {grad.layout}; only dense real gradients are "
                "supported: make an embedding with sparse=False"
            )
            return
        self.present[number] = True
        for index in self.backward.order.of.get(number, ()):
            gradients = self.slices[index]
            precision, world_size = self._config.precision, gradients.communicator.world_size
            scale = precision.before
            if scale is None and precision.after is None and world_size > 1 and gradients.errors is None:
                scale = 1.0 / world_size
            pack(gradients.room(), gradients.cut, number, grad, scale, add=number in gradients.filled)
            gradients.filled.add(number)

    def send(self, index: int) -> None:
        gradients = self.slices[index]
        self._pipeline.room_for(2 * gradients.nbytes)
        for number in gradients.cut.places:
            if number not in gradients.filled:
                self._fill(number)
        self._pipeline.add(self._average(gradients), 2 * gradients.nbytes)
        if not self._config.overlap_comm:
            self._pipeline.drain()

    def _average(self, gradients: SliceGradients) -> Task[None]:
        """Average a slice over its ranks, and add this rank's part to its average.

        The owner sums in float32, in an order that depends on the topology alone: the bits depend neither on the
        backend nor on the number of messages. gloo's own reduce-scatter moves twice the bytes.
        """
        ranks, kept, after = gradients.communicator, gradients.kept_dtype, self._config.precision.after
        if gradients.errors is not None:
            scale = self._loss_scale.of_gradients
            average = yield from send_gradients(gradients.close(), ranks, gradients.errors, scale)
        else:
            summed = gradients.close()
            if ranks.world_size > 1:
                summed = yield from scatter_sums(summed, ranks)
            average = summed if after is None else summed * (after / ranks.world_size)
        part = average.to(kept)
        part = in_host_memory(part) if gradients.offload else part
        gradients.average = part if gradients.average is None else gradients.average.add_(part)

    def end_pass(self) -> None:
        self._finish(range(len(self.slices)))
        self.passes += 1

    def interrupted(self) -> None:
        self.backward.flush()

    # -- after backward -----------------------------------------------------------------------------------------------

    def leftovers(self) -> list[bool]:
        """Tell for each slice whether p.grad holds gradients for it that no pass has sent."""
        left = [False] * len(self.slices)
        for number, (param, _) in enumerate(self._params):
            if param.grad is not None:
                mine = self.backward.order.of.get(number, ())
                if not mine:
                    param.grad = None  # no element
                for index in mine:
                    left[index] = True
        return left

    @torch.no_grad()
    def send_leftovers(self, chosen: Sequence[bool]) -> None:
        """Send the slices for which any rank has leftovers. All ranks call, with the same choice."""
        indices = self.backward.order.chosen(chosen)
        for index in indices:
            self.send(index)
        self._finish(indices)

    def _finish(self, indices: Sequence[int]) -> None:
        self._pipeline.drain()
        for index in indices:
            self.slices[index].begin()

    def copy_averages(self, other: GradientReducer) -> None:
        """Take copies of the averages and errors of a reducer of the same layout."""
        for mine, theirs in zip(self.slices, other.slices, strict=True):
            mine.average = None if theirs.average is None else theirs.average.clone()
            if mine.errors is not None and theirs.errors is not None:
                mine.errors.copy_from(theirs.errors)
        self.present = list(other.present)

    def clear(self) -> None:
        """Drop all gradients, and the errors of their messages. All ranks call if a pass is open."""
        self.backward.flush()
        for gradients in self.slices:
            gradients.average = None
            if gradients.errors is not None:
                gradients.errors.drop()
        for number, (param, _) in enumerate(self._params):
            self.present[number] = False
            param.grad = None
        self.fault, self._square, self.factor = None, None, 1.0

    # -- the averages of a step, between backward and the update ------------------------------------------------------

    def finish(self, partition: PartitionedParameters, groups: Sequence[dict[str, Any]]) -> float:
        """Send the rest, and agree on the squared norm of the average times ``factor``. All ranks call."""
        self.backward.flush()
        if self._square is None or self._norm_of_pass != self.passes:
            if self._square is None:
                self.factor /= self._loss_scale.value
            self._square, self._norm_of_pass = self._agree(partition, groups), self.passes
        return self._square * self.factor**2

    def clip(self, norm: float, max_norm: float) -> None:
        """Clip averages of this norm to another one when they are used."""
        self.were_clipped = True
        factor = known_clip_factor(norm, max_norm)
        if math.isfinite(factor) and factor < 1.0:
            self.factor *= factor

    def unscale(self, inverse_scale: float) -> None:
        """Take a gradient scaler's factor out of the averages when they are used, and its part in the errors now."""
        self.factor *= inverse_scale
        self.note_scaler(1.0 / inverse_scale)

    def note_scaler(self, scale: float) -> None:
        """Note a gradient scaler's factor, of these gradients or of the coming ones."""
        before, self._loss_scale.of_scaler = self._loss_scale.of_scaler, scale
        for gradients in self.slices:
            if gradients.errors is not None and before != scale:
                gradients.errors.rescale(before / scale)  # they were made with the other factor

    def was_set(self, number: int) -> None:
        """Note that a user has set a parameter's average, so that the norm is another one."""
        self.present[number] = True
        self._norm_of_pass = -1

    def give_to(self, bucket: UpdateBucket) -> None:
        """Give the parts of a bucket their gradients, unscaled and clipped; None if no rank had a gradient."""
        for part in bucket.parts:
            average = self._of(part)
            if average is None or not self.present[part.param]:
                part.tensor.grad = None
                continue
            wide = average if average.dtype in (torch.float32, torch.float64) else average.float()
            if self.factor != 1.0:
                wide = wide.mul_(self.factor)
            part.tensor.grad = wide.to(part.tensor)

    def _of(self, part: Part) -> Tensor | None:
        """Return the average of a part, sharing memory; None before the first pass."""
        average, span = self.slices[part.slice].average, part.span
        return None if average is None else average[span.offset : span.offset + span.numel]

    def _agree(self, partition: PartitionedParameters, groups: Sequence[dict[str, Any]]) -> float:
        """Exchange norms, faults, missing gradients, gradients that were not sent, and parameters newly unfrozen."""
        while True:
            left, unfrozen = self.leftovers(), self._unfrozen(partition, groups)
            own = [float(self.fault is not None), float(any(left)), float(bool(unfrozen))]
            everyone, *others = partition.communicators()
            tail = numbers_on(everyone.device, own + self._flags(partition, left, everyone), torch.float64)
            message = torch.cat([self._squares(partition), tail])
            everyone.all_reduce(message).wait()
            *squares, faults, any_left, any_unfrozen = (numbers := message.tolist())[:5]
            chosen, present = self._read_flags(partition, numbers[5:], everyone)
            for communicator in others:
                flags = numbers_on(communicator.device, self._flags(partition, left, communicator), torch.float64)
                communicator.all_reduce(flags).wait()
                more_chosen, more_present = self._read_flags(partition, flags.tolist(), communicator)
                chosen = [a or b for a, b in zip(chosen, more_chosen, strict=True)]
                present = [a or b for a, b in zip(present, more_present, strict=True)]
            if faults > 0:
                fault, self.fault = self.fault, None
                raise fault or RuntimeError(f"{int(faults)} other rank(s) had gradients that cannot be used")
            if any_unfrozen > 0:
                partition.add(groups, unfrozen)
                self.check_layout()
            elif any_left > 0:
                self.send_leftovers(chosen)
            else:
                break
        self.present = present
        self._check_unused(partition)
        return self._sum_over_model(partition, squares)

    def _unfrozen(self, partition: PartitionedParameters, groups: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return partition.unfrozen(groups)
        except (TypeError, ValueError) as error:
            self.fault = error
            return []

    def _flags(self, partition: PartitionedParameters, left: list[bool], communicator: Communicator) -> list[float]:
        """Tell the ranks of a communicator which of their parameters had gradients here, and which slices have more."""
        met = [float(self.present[number]) for number in partition.of_communicator(communicator)]
        return met + [float(f) for f, g in zip(left, self.slices, strict=True) if g.communicator is communicator]

    def _read_flags(
        self, partition: PartitionedParameters, flags: Sequence[float], communicator: Communicator
    ) -> tuple[list[bool], list[bool]]:
        """Tell for each slice whether any rank has leftovers, and for each parameter whether any had a gradient."""
        rest = (flag > 0 for flag in flags)
        present = [known.communicator is communicator and next(rest) for known in partition.known]
        chosen = [g.communicator is communicator and next(rest) for g in self.slices]
        return chosen, present

    def _check_unused(self, partition: PartitionedParameters) -> None:
        if partition.config.ignore_unused_parameters or all(self.present):
            return
        known = partition.known
        unused = [entry.name for entry, met in zip(known, self.present, strict=True) if not met]
        raise RuntimeError(
            f"parameters without a gradient on any rank: {', '.join(unused[:8])}; ignore_unused_parameters=True "
            "accepts them, or set requires_grad=False before making the optimizer"
        )

    def _squares(self, partition: PartitionedParameters) -> Tensor:
        """Sum the squares of this rank's averages: [2] float64, of parameters that are not, and are, model-parallel."""
        squares = torch.zeros(2, dtype=torch.float64, device=partition.communicator.device)
        found: dict[tuple[int, torch.device], list[Tensor]] = {}
        for _, part in partition.parts():
            average = self._of(part)
            if average is not None:
                kind = int(partition.known[part.param].model_parallel)
                found.setdefault((kind, average.device), []).append(average)
        for (kind, device), tensors in found.items():
            squares[kind] += sum_of_squares(tensors, device).to(squares.device)
        return squares

    @staticmethod
    def _sum_over_model(partition: PartitionedParameters, squares: Sequence[float]) -> float:
        """Sum squares over the ranks that share a model; parameters that each of them has whole count once."""
        (replicated, split), model = squares, partition.model_parallel
        if model is None:
            return replicated + split
        mine = split + replicated if model.rank == 0 else split + 0 * replicated
        total = numbers_on(model.device, [mine], torch.float64)
        model.all_reduce(total).wait()
        return float(total)


# -- messages ---------------------------------------------------------------------------------------------------------


def pack(buffer: Tensor, cut: Slice, param: int, values: Tensor, scale: float | None, *, add: bool) -> None:
    """Copy a parameter's gradient to its places in a slice."""
    flat = values.detach().reshape(-1)
    for begin, span in cut.places[param]:
        place, part = buffer[begin : begin + span.numel], flat[span.start : span.stop]
        if add:
            place.add_(part.to(place.dtype) if scale is None else part.to(place.dtype) * scale)
        elif scale is None:
            place.copy_(part)
        elif part.dtype == place.dtype:
            torch.mul(part, scale, out=place)
        else:
            place.copy_(part).mul_(scale)


def gather_parameters(params: Sequence[Tensor], cut: Slice, communicator: Communicator, pipeline: Pipeline) -> None:
    """Start giving all ranks what this rank has updated; all is there when ``pipeline`` is drained."""
    nbytes = cut.numel * params[next(iter(cut.places))].element_size()
    pipeline.add(_gather(params, cut, communicator), nbytes)


def _gather(params: Sequence[Tensor], cut: Slice, communicator: Communicator) -> Task[None]:
    rank, place_of = communicator.rank, communicator.topology.chunk_of
    example = params[next(iter(cut.places))]
    gathered = torch.empty(cut.numel, dtype=example.dtype, device=example.device)  # padding is sent as it is
    part = gathered[place_of(rank) * cut.part_numel :][: cut.part_numel]
    for span in cut.parts[rank]:
        part[span.offset : span.offset + span.numel] = params[span.index].detach().reshape(-1)[span.start : span.stop]
    yield from all_gather(gathered, communicator)
    for owner, spans in enumerate(cut.parts):
        for span in spans if owner != rank else ():
            begin = place_of(owner) * cut.part_numel + span.offset
            write_span(params[span.index], span.start, span.stop, gathered[begin : begin + span.numel])
