"""One step: all ranks agree on their average gradients, and update bucket by bucket.

The averages are sent, measured and agreed on before anything is updated. Then the parameters of one bucket are sent
while the next one is updated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.exchange import Pipeline
from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.kernels import sum_of_squares
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.math import clip_factor, trust_ratio
from hf_compressopt.zero.config import LossScale
from hf_compressopt.zero.low_bit import send_differences
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import Part, UpdateBucket, hyperparameters
from hf_compressopt.zero.reducer import gather_parameters


class GradientAverages:
    """This rank's average gradients between backward and the update.

    Attributes:
        factor: Factor of the averages when they are used: the loss scale taken out, and clipping.
        were_clipped: Whether :meth:`clip` was ever called.
    """

    def __init__(self, partition: PartitionedParameters, loss_scale: LossScale) -> None:
        """Start without gradients; those to come carry the loss scale."""
        self.factor, self.were_clipped = 1.0, False
        self._partition, self._reducer, self._loss_scale = partition, partition.reducer, loss_scale
        self._norm: Tensor | None = None  # [] float64, of the averages as they are; None if it is not known
        self._norm_of_pass = 0

    def clear(self) -> None:
        """Drop all gradients and the norm. All ranks call if a pass is open."""
        self._reducer.clear()
        self._norm, self.factor = None, 1.0

    def finish(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """Send the rest of the gradients, and agree on the norm. All ranks call, with all param groups.

        Returns:
            [] float64, the square of the norm of the average gradient times ``factor``.
        """
        self._reducer.flush()
        if self._norm is None or self._norm_of_pass != self._reducer.passes:
            if self._norm is None:
                self.factor /= self._loss_scale.value
            self._norm, self._norm_of_pass = self._agree(groups), self._reducer.passes
        return self._norm * self.factor**2

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Clip averages of this norm, [], to another one when they are used."""
        self.were_clipped = True
        factor = float(clip_factor(norm, max_norm))
        if math.isfinite(factor) and factor < 1.0:
            self.factor *= factor

    def unscale(self, inverse_scale: float) -> None:
        """Take a gradient scaler's factor out of the averages when they are used, and its part in the errors now."""
        self.factor *= inverse_scale
        self.note_scaler(1.0 / inverse_scale)

    def note_scaler(self, scale: float) -> None:
        """Note a gradient scaler's factor, of these gradients or of the coming ones."""
        before, self._loss_scale.of_scaler = self._loss_scale.of_scaler, scale
        for gradients in self._reducer.slices:
            if gradients.errors is not None and before != scale:
                gradients.errors.rescale(before / scale)  # they were made with the other factor

    def was_set(self, number: int) -> None:
        """Note that a user has set a parameter's average, so that the norm is another one."""
        self._reducer.present[number] = True
        self._norm_of_pass = -1

    def give_to(self, bucket: UpdateBucket) -> None:
        """Give the parts of a bucket their gradients, unscaled and clipped; None if no rank had a gradient."""
        for part in bucket.parts:
            average = self._of(part)
            if average is None or not self._reducer.present[part.param]:
                part.tensor.grad = None
                continue
            wide = average if average.dtype in (torch.float32, torch.float64) else average.float()
            if self.factor != 1.0:
                wide = wide.mul_(self.factor)
            part.tensor.grad = wide.to(part.tensor)

    def _of(self, part: Part) -> Tensor | None:
        return self._reducer.slices[part.slice].average_of(part.span)

    def _agree(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """Exchange norms, faults, missing gradients, gradients that were not sent, and parameters newly unfrozen."""
        reducer, partition = self._reducer, self._partition
        while True:
            left, unfrozen = reducer.leftovers(), self._unfrozen(groups)
            own = [float(reducer.fault is not None), float(any(left)), float(bool(unfrozen))]
            head, present, chosen = Tensor(), [False] * len(reducer.present), [False] * len(left)
            for communicator in partition.communicators():
                first = communicator is partition.communicator
                numbers = partition.of_communicator(communicator)
                indices = [i for i, gradients in enumerate(reducer.slices) if gradients.communicator is communicator]
                flags = [float(reducer.present[n]) for n in numbers] + [float(left[index]) for index in indices]
                message = torch.tensor(own + flags if first else flags, dtype=torch.float64, device=communicator.device)
                message = torch.cat([self._squares(), message]) if first else message
                communicator.all_reduce(message).wait()
                if first:
                    head, message = message[:5], message[5:]
                met = iter((message > 0).tolist())
                for number in numbers:
                    present[number] = next(met)
                for index in indices:
                    chosen[index] = next(met)
            faults, any_left, any_unfrozen = head[2:].tolist()
            if faults > 0:
                fault, reducer.fault = reducer.fault, None
                raise fault or RuntimeError(f"{int(faults)} other rank(s) had gradients that cannot be used")
            if any_unfrozen > 0:
                partition.add(groups, unfrozen)
                reducer.check_layout()
            elif any_left > 0:
                reducer.send_leftovers(chosen)
            else:
                break
        reducer.present = present
        if not partition.config.ignore_unused_parameters and not all(present):
            unused = [known.name for known, met in zip(partition.known, present, strict=True) if not met]
            raise RuntimeError(
                f"parameters without a gradient on any rank: {', '.join(unused[:8])}; ignore_unused_parameters=True "
                "accepts them, or set requires_grad=False before making the optimizer"
            )
        return self._sum_over_model(head[:2])

    def _unfrozen(self, groups: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return self._partition.unfrozen(groups)
        except (TypeError, ValueError) as error:
            self._reducer.fault = error
            return []

    def _squares(self) -> Tensor:
        """Sum the squares of this rank's averages: [2] float64, of parameters that are not, and are, model-parallel."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._partition.communicator.device)
        found: dict[tuple[int, torch.device], list[Tensor]] = {}
        for _, part in self._partition.parts():
            average = self._of(part)
            if average is not None:
                kind = int(self._partition.known[part.param].model_parallel)
                found.setdefault((kind, average.device), []).append(average)
        for (kind, device), tensors in found.items():
            squares[kind] += sum_of_squares(tensors, device).to(squares.device)
        return squares

    def _sum_over_model(self, squares: Tensor) -> Tensor:
        """Sum squares over the ranks that share a model; parameters that each of them has whole count once."""
        model = self._partition.model_parallel
        if model is None:
            return squares.sum()
        replicated, split = squares
        mine: Tensor = split + replicated if model.rank == 0 else split + 0 * replicated
        total = mine.reshape(1)
        model.all_reduce(total).wait()
        return total.sum()


def update_parameters(
    partition: PartitionedParameters, averages: GradientAverages, groups: Sequence[dict[str, Any]]
) -> None:
    """Update this rank's parts with the averages, which are used up, and give all ranks the parameters.

    ``groups`` are the users' param groups, with the hyperparameters.
    """
    partition.require_replicas("step()")
    values = [hyperparameters(group) for group in groups]
    is_lamb = issubclass(partition.optimizer_class, Lamb)
    ratios = _trust_ratios(partition, averages, values) if is_lamb else {}
    pipeline = Pipeline(FLOAT_BYTES * partition.config.gather_numel)
    for bucket in partition.buckets:
        if is_lamb:
            bucket.apply(ratios)
        else:
            bucket.take_hyperparameters(values)
            averages.give_to(bucket)
            bucket.step()
        bucket.give_hyperparameters(groups, values)
        _send(bucket, partition, pipeline)
    pipeline.drain()


def _send(bucket: UpdateBucket, partition: PartitionedParameters, pipeline: Pipeline) -> None:
    """Write a bucket's parts back, drop their gradients, keep the errors, and start sending the parameters."""
    for part in bucket.parts:
        part.tensor.grad = None
        if not part.is_ahead:
            part.write_back(partition.tensors[part.param])
    for number, mine in bucket.slices.items():
        gradients = partition.reducer.slices[number]
        gradients.average = None
        if gradients.errors is not None:
            gradients.errors.keep()
        if gradients.param_form is not None:
            to = gradients.cut, gradients.communicator, gradients.param_form
            send_differences(partition.tensors, mine, *to, pipeline)
        elif gradients.communicator.world_size > 1:
            gather_parameters(partition.tensors, gradients.cut, gradients.communicator, pipeline)


@torch.no_grad()
def share_masters(partition: PartitionedParameters) -> None:
    """Make the parameters of all ranks what the masters round to. All ranks call."""
    for _, part in partition.parts():
        part.write_back(partition.tensors[part.param])
    share_parts(partition)


@torch.no_grad()
def share_parts(partition: PartitionedParameters) -> None:
    """Give all ranks this rank's elements of the parameters, at full precision. All ranks call."""
    pipeline = Pipeline(FLOAT_BYTES * partition.config.gather_numel)
    with partition.communicator.traffic.paused():
        for gradients in partition.reducer.slices:
            if gradients.communicator.world_size > 1:
                gather_parameters(partition.tensors, gradients.cut, gradients.communicator, pipeline)
        pipeline.drain()


def _trust_ratios(
    partition: PartitionedParameters, averages: GradientAverages, values: Sequence[Mapping[str, Any]]
) -> dict[int, Tensor]:
    """Run the first half of Lamb's step; one small all-reduce sums the norms of all tensors over the ranks."""
    squares = torch.zeros(len(partition.known), 2, dtype=torch.float64, device=partition.communicator.device)
    for bucket in partition.buckets:
        bucket.take_hyperparameters(values)
        averages.give_to(bucket)
        for part, square in bucket.measure():
            squares[part.param] += square.to(squares.device)
    for communicator in partition.communicators():
        rows = partition.of_communicator(communicator)
        mine = squares[rows]
        communicator.all_reduce(mine).wait()
        squares[rows] = mine
    options = partition.inner_options
    low, high = options.get("min_coeff", 0.01), options.get("max_coeff", 10.0)
    return {number: trust_ratio(row[0], row[1], low, high) for number, row in enumerate(squares)}
