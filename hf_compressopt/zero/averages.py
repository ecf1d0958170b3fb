"""The averages of one step: all ranks send them, measure them and agree on them before anything is updated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels import sum_of_squares
from hf_compressopt.optim.math import clip_factor
from hf_compressopt.zero.config import LossScale
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import Part, UpdateBucket


class GradientAverages:
    """This rank's average gradients between backward and the update.

    Attributes:
        factor: Factor of the averages when they are used: the loss scale taken out, and clipping.
        were_clipped: Whether :meth:`clip` was ever called.
    """

    def __init__(self, partition: PartitionedParameters, loss_scale: LossScale) -> None:
        """Start without gradients.

        Args:
            partition: The parameters.
            loss_scale: Factor of the loss, to be taken out of the averages.
        """
        self.factor, self.were_clipped = 1.0, False
        self._partition, self._reducer, self._loss_scale = partition, partition.reducer, loss_scale
        self._norm: Tensor | None = None  # [] float64, of the averages as they are; None if it is not known
        self._norm_of_pass = 0

    def clear(self) -> None:
        """Drop all gradients and the norm. All ranks call if a pass is open."""
        self._reducer.clear()
        self._norm, self.factor = None, 1.0

    def finish(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """Send the rest of the gradients, and agree on the norm. All ranks call.

        Args:
            groups: All param groups.

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
        reducer = self._reducer
        while True:
            left, unfrozen = reducer.leftovers(), self._unfrozen(groups)
            own = [float(reducer.fault is not None), float(any(left)), float(bool(unfrozen))]
            everyone, *others = self._partition.communicators()
            tail = torch.tensor(own + self._flags(left, everyone), dtype=torch.float64, device=everyone.device)
            message = torch.cat([self._squares(), tail])
            everyone.all_reduce(message).wait()
            squares, (faults, any_left, any_unfrozen), flags = message[:2], message[2:5].tolist(), message[5:]
            chosen, present = self._read_flags(flags, everyone)
            for communicator in others:
                flags = torch.tensor(self._flags(left, communicator), dtype=torch.float64, device=communicator.device)
                communicator.all_reduce(flags).wait()
                more_chosen, more_present = self._read_flags(flags, communicator)
                chosen = [a or b for a, b in zip(chosen, more_chosen, strict=True)]
                present = [a or b for a, b in zip(present, more_present, strict=True)]
            if faults > 0:
                self._raise_fault(int(faults))
            if any_unfrozen > 0:
                self._partition.add(groups, unfrozen)
                reducer.check_layout()
            elif any_left > 0:
                reducer.send_leftovers(chosen)
            else:
                break
        reducer.present = present
        self._check_unused()
        return self._sum_over_model(squares)

    def _unfrozen(self, groups: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return self._partition.unfrozen(groups)
        except (TypeError, ValueError) as error:
            self._reducer.fault = error
            return []

    def _flags(self, left: list[bool], communicator: Communicator) -> list[float]:
        """Tell the ranks of a communicator which of their parameters had gradients here, and which slices have more."""
        reducer = self._reducer
        met = [float(reducer.present[number]) for number in self._partition.of_communicator(communicator)]
        return met + [float(f) for f, g in zip(left, reducer.slices, strict=True) if g.communicator is communicator]

    def _read_flags(self, flags: Tensor, communicator: Communicator) -> tuple[list[bool], list[bool]]:
        """Tell for each slice whether any rank has leftovers, and for each parameter whether any had a gradient."""
        rest = iter((flags > 0).tolist())
        present = [known.communicator is communicator and next(rest) for known in self._partition.known]
        chosen = [g.communicator is communicator and next(rest) for g in self._reducer.slices]
        return chosen, present

    def _check_unused(self) -> None:
        """Raise an error if a parameter had no gradient on any rank and that is not accepted."""
        if self._partition.config.ignore_unused_parameters or all(self._reducer.present):
            return
        known = self._partition.known
        unused = [entry.name for entry, met in zip(known, self._reducer.present, strict=True) if not met]
        raise RuntimeError(
            f"parameters without a gradient on any rank: {', '.join(unused[:8])}; ignore_unused_parameters=True "
            "accepts them, or set requires_grad=False before making the optimizer"
        )

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
        mine = split + replicated if model.rank == 0 else split + 0 * replicated
        total: Tensor = mine.reshape(1)
        model.all_reduce(total).wait()
        return total.sum()

    def _raise_fault(self, count: int) -> None:
        fault, self._reducer.fault = self._reducer.fault, None
        if fault is not None:
            raise fault
        raise RuntimeError(f"{count} other rank(s) had gradients that cannot be used")
