"""The averages of one step: sent, measured and agreed upon by all ranks before anything is updated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels import sum_of_squares
from hf_compressopt.optim.functional import bit_sum, clip_factor
from hf_compressopt.zero.loss_scale import LossScale
from hf_compressopt.zero.partitioned import PartitionedOptimizer


class ZeroGradients(PartitionedOptimizer):
    """A partitioned optimizer's dealings with gradients.

    Attributes:
        loss_scale: What the loss is multiplied with.
        clip_grad: Norm to which step() clips; 0 is off.
        steps: Steps taken.
        skipped_steps: Steps skipped because a gradient was not finite.
        step_was_skipped: Whether the last one was.
        ignore_unused_parameters: Whether parameters without gradient on any rank are accepted.
    """

    def __init__(
        self,
        *args: Any,
        loss_scale: LossScale,
        ignore_unused_parameters: bool,
        clip_grad: float,
        model_parallel_group: Any,
    ) -> None:
        """See the base class, and ZeroOptimizer for the options."""
        super().__init__(*args)
        self.loss_scale, self.ignore_unused_parameters = loss_scale, ignore_unused_parameters
        self.clip_grad = clip_grad
        self.steps, self.skipped_steps, self.step_was_skipped = 0, 0, False
        self._model_parallel: Communicator | None = None
        if model_parallel_group is not None:
            self._model_parallel = self._torch_communicator(model_parallel_group, self.communicator.device)
        self._norm: Tensor | None = None  # [] float64, of the averages as they are; None where it has to be found
        self._norm_of_pass = 0
        self._factor = 1.0  # what the averages are multiplied with when they are used

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward leaves gradients in p.grad; they are sent with those of the next pass outside, or by step().

        Whole gradients exist until then.
        """
        with self._reducer.no_sync():
            yield

    def detach(self) -> None:
        """Leave the parameters alone from now on: gradients stay where autograd puts them, and step() is over.

        For an optimizer that gives way to another one of the same parameters.
        """
        self._reducer.detach()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return loss * self.loss_scale.value

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward on the scaled loss; step() takes the scale out again."""
        torch.autograd.backward(self.scale_loss(loss), **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw all gradients away, also those that were averaged. All ranks call; p.grad is None afterwards."""
        self._reducer.clear()
        self._norm, self._factor = None, 1.0
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @torch.no_grad()
    def finish_gradients(self) -> Tensor:
        """Send what has not been sent, and agree on the norm. All ranks call; done by all that need averages.

        Returns:
            [] float64, the square of the norm of the average gradient, loss scale and clipping taken into account;
            not finite where an element of it is not.

        Raises:
            TypeError: For a gradient that cannot be used; a RuntimeError on the other ranks.
            RuntimeError: With ``ignore_unused_parameters=False``, if a parameter had no gradient on any rank; or if
                the optimizer was detached.
        """
        if self._reducer.detached:
            raise RuntimeError(
                "this ZeroOptimizer gets no gradients any more: it was detached, or a newer ZeroOptimizer was made "
                "with some of its parameters; use the newer one, and give each parameter to one optimizer only"
            )
        self._check_ranks_agree()
        self._reducer.flush()
        if self._norm is None or self._norm_of_pass != self._reducer.passes:
            if self._norm is None:
                self._factor /= self.loss_scale.value
            self._norm, self._norm_of_pass = self._agree(), self._reducer.passes
        return self._norm * self._factor**2

    def _agree(self) -> Tensor:
        """Tell each other of norms, faults, parameters without gradient, and of gradients that were not sent yet."""
        reducer = self._reducer
        while True:
            left, unfrozen = reducer.leftovers(), self._look_for_unfrozen()
            mine = [float(reducer.fault is not None), float(any(left)), float(bool(unfrozen))]
            mine += self._flags(reducer.present, left, self.communicator)
            tail = torch.tensor(mine, dtype=torch.float64, device=self.communicator.device)
            message = torch.cat([self._squares(), tail])
            self.communicator.all_reduce(message).wait()
            squares, (faults, any_left, any_unfrozen), flags = message[:2], message[2:5].tolist(), message[5:]
            chosen, present = self._read_flags(flags, self.communicator)
            for communicator in self._communicators()[1:]:
                flags = torch.tensor(self._flags(reducer.present, left, communicator), dtype=torch.float64)
                flags = flags.to(communicator.device)
                communicator.all_reduce(flags).wait()
                theirs = self._read_flags(flags, communicator)
                chosen = [a or b for a, b in zip(chosen, theirs[0], strict=True)]
                present = [a or b for a, b in zip(present, theirs[1], strict=True)]
            if faults > 0:
                self._raise_fault(int(faults))
            if any_unfrozen > 0:
                self._take_on(unfrozen)
                reducer.check_layout()
                continue
            if not any_left > 0:
                break
            reducer.send_leftovers(chosen)
        reducer.present = present
        if not self.ignore_unused_parameters and not all(present):
            unused = [name for name, met in zip(self._names, present, strict=True) if not met]
            raise RuntimeError(
                f"parameters without a gradient on any rank: {', '.join(unused[:8])}; ignore_unused_parameters=True "
                "accepts them, or set requires_grad=False before making the optimizer"
            )
        return self._sum_over_model(squares)

    def _look_for_unfrozen(self) -> list[int]:
        try:
            return self._unfrozen()
        except TypeError as error:
            self._reducer.fault = error
            return []

    def _flags(self, present: list[bool], left: list[bool], communicator: Communicator) -> list[float]:
        """What this rank has to say to the ranks of a communicator, about parameters and slices."""
        groups, slices = self._group_of, self._reducer.slices
        own = [float(met) for met, group in zip(present, groups, strict=True) if self._is_of(group, communicator)]
        return own + [float(flag) for flag, g in zip(left, slices, strict=True) if g.communicator is communicator]

    def _read_flags(self, flags: Tensor, communicator: Communicator) -> tuple[list[bool], list[bool]]:
        """For each slice whether anyone has leftovers, for each parameter whether anyone has met a gradient."""
        rest = iter((flags > 0).tolist())
        present = [self._is_of(group, communicator) and next(rest) for group in self._group_of]
        chosen = [g.communicator is communicator and next(rest) for g in self._reducer.slices]
        return chosen, present

    def _squares(self) -> Tensor:
        """Squares of this rank's averages: of parameters that are replicated over a model-parallel group, and not."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.communicator.device)
        parts: dict[tuple[int, torch.device], list[Tensor]] = {}
        for _, piece in self.pieces():
            average = self._reducer.slices[piece.slice].average
            if average is not None:
                kind = int(bool(self.param_groups[piece.group].get("model_parallel")))
                part = average[piece.span.offset : piece.span.offset + piece.span.numel]
                parts.setdefault((kind, part.device), []).append(part)
        for (kind, device), tensors in parts.items():
            squares[kind] += sum_of_squares(tensors, device).to(squares.device)
        return squares

    def _sum_over_model(self, squares: Tensor) -> Tensor:
        """The square of the norm over the whole model; replicated parameters count once."""
        if self._model_parallel is None:
            return squares.sum()
        replicated, split = squares
        mine = split + replicated if self._model_parallel.rank == 0 else split + 0 * replicated
        total: Tensor = mine.reshape(1)
        self._model_parallel.all_reduce(total).wait()
        return total.sum()

    def _raise_fault(self, count: int) -> None:
        fault, self._reducer.fault = self._reducer.fault, None
        if fault is not None:
            raise fault
        raise RuntimeError(f"{count} other rank(s) had gradients that cannot be used")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Clip the average gradient of the coming step. All ranks call.

        Args:
            max_norm: The norm to clip to; ``math.inf`` only measures.
            parameters: For the sake of callers that name them: all that this optimizer has, or more.

        Returns:
            [] float32, the norm before clipping.

        Raises:
            ValueError: If ``max_norm`` is not positive, or ``parameters`` leaves out some of the optimizer's.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm}")
        if parameters is not None:
            given = {id(param) for param in parameters}
            if any(id(param) not in given for param in self._params):
                raise ValueError("parameters must hold all trainable parameters of the optimizer, some are missing")
        norm = self.finish_gradients().sqrt().float()
        factor = float(clip_factor(norm, max_norm))
        if math.isfinite(factor) and factor < 1.0:
            self._factor *= factor
        return norm

    def unscale_(self, inverse_scale: float) -> bool:
        """Take a gradient scaler's factor out of the averages. All ranks call.

        Returns:
            Whether an element of them is not finite, alike on all ranks.
        """
        square = self.finish_gradients()
        self._factor *= inverse_scale
        return not math.isfinite(float(square))

    def _check_ranks_agree(self) -> None:
        """Once before the first step: all ranks must hold the same layout, options, step and parameters.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        self._reducer.check_layout()
        if self._ranks_checked:
            return
        options = [self.optimizer_class.__name__, self.steps, self.clip_grad, repr(self.loss_scale)]
        self.communicator.require_equal("optimizer, step or options", repr(options))
        alike = [p for p, g in zip(self._params, self._group_of, strict=True) if self._is_of(g, self.communicator)]
        digest = sum(int(bit_sum(param)) for param in alike)
        self.communicator.require_equal("the bits of their parameters (are they alike at the start?)", digest)
        self._ranks_checked = True
