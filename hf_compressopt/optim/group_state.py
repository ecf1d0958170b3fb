"""The flat buffers of one param group: moments, steps, and the errors of error feedback."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import ErrorFeedback, server_numel
from hf_compressopt.flat import Bucket, FlatLayout, Span, chunk_range
from hf_compressopt.kernels import Average, Segment, SignFormat
from hf_compressopt.kernels.memory import dense_values
from hf_compressopt.optim.functional import correct_bias_, floor_variance_, is_zero, variance_norm


@dataclass(frozen=True)
class ExtraState:
    """A state tensor that an algorithm has beyond Adam's two moments.

    Attributes:
        name: Its name in ``optimizer.state`` and in checkpoints.
        per: "element" (one float32 per element, flat), "parameter" (float32) or "group" (float64).
        initial: The value that it starts with.
        always: Whether groups that are never compressed have it too.
        plain: Name of its first value in the state of a plain Adam that is loaded, if that is not ``initial``.
    """

    name: str
    per: str
    initial: float = 0.0
    always: bool = False
    plain: str = ""


class GroupState:
    """One param group: its options, and the state of its trainable parameters, allocated at once, alike on every rank.

    Attributes:
        options: The param group itself, as torch's optimizers have it.
        number: Its number among the param groups.
        params: The parameters that required a gradient when the group was added, in the group's order.
        names: Their names.
        layout: The place of each in the flat buffers.
        exp_avg: [numel] float32, first moment.
        exp_avg_sq: [numel] float32, second moment.
        steps: [len(params)] float32 on the CPU, steps that each parameter has seen.
        extra: The algorithm's own state tensors, by name.
        compressed: Whether the group is ever compressed, and so needs errors and extras.
        worker_error: [numel] float32, or [0] if nothing is ever compressed. A single rank has none either, except
            between the load of a checkpoint of more ranks and its first compressed step.
        server_error: [elements whose server this rank is] float32, or [0], likewise.
        feedback: One per bucket, views of the two errors.
        communicator: The ranks that hold these parameters.
        own_rank: This rank's number among all ranks if the param group has a process group of its own, since other
            ranks may hold other parameters. Else None.
        own_params: This rank's own parameters, while others stand in their place.
        still: For each parameter, whether it does not move after the warmup stage; see :meth:`find_still`.
    """

    def __init__(
        self,
        options: dict[str, Any],
        number: int,
        *,
        bucket_numel: int,
        scale_block: int | None,
        communicator: Communicator,
        extras: Sequence[ExtraState] = (),
        own_rank: int | None = None,
    ) -> None:
        """Allocate the state."""
        self.options, self.number = options, number
        given = options.get("param_names", [f"group{number}.{i}" for i in range(len(options["params"]))])
        named = {p: name for p, name in zip(options["params"], given, strict=True) if p.requires_grad}
        self.params, self.names = list(named), list(named.values())  # a tensor given twice counts once
        self.compressed = compressed = not options["non_freeze"]
        self.layout = FlatLayout.build([p.numel() for p in self.params], bucket_numel)
        self._format = SignFormat(scale_block)
        self.communicator, self.own_rank = communicator, own_rank
        has_errors = compressed and communicator.world_size > 1
        owned = [server_numel(bucket.numel, communicator) for bucket in self.layout.buckets] if has_errors else []
        device = self.params[0].device if self.params else communicator.device
        like: dict[str, Any] = {"dtype": torch.float32, "device": device}  # whatever torch's defaults are
        self.exp_avg = torch.zeros(self.layout.numel, **like)
        self.exp_avg_sq = torch.zeros(self.layout.numel, **like)
        self.worker_error = torch.zeros(self.layout.numel if has_errors else 0, **like)
        self.server_error = torch.zeros(sum(owned), **like)
        self.steps = torch.zeros(len(self.params), dtype=torch.float32, device="cpu")
        self.still = [False] * len(self.params)
        self.extras = tuple(extra for extra in extras if compressed or extra.always)
        self.own_params: list[Tensor] | None = None
        sizes = {"element": self.layout.numel, "parameter": len(self.params), "group": 1}
        self.extra = {
            e.name: torch.full(
                (sizes[e.per],), e.initial, dtype=torch.float64 if e.per == "group" else torch.float32, device=device
            )
            for e in self.extras
        }
        self._make_feedback()

    def _make_feedback(self) -> None:
        self.feedback: list[ErrorFeedback] = []
        offset = 0
        for bucket in self.layout.buckets:
            own = server_numel(bucket.numel, self.communicator) if self.worker_error.numel() else 0
            worker = self.worker_error[bucket.start : bucket.stop]
            self.feedback.append(ErrorFeedback(worker, self.server_error[offset : offset + own], self._format))
            offset += own

    def take_errors(self, worker_error: Tensor, server_error: Tensor) -> None:
        """Set the errors that a single rank sends next, [numel] float32 both, or [0] for none."""
        self.worker_error, self.server_error = worker_error.to(self.device), server_error.to(self.device)
        self._make_feedback()

    def drop_spent_errors(self) -> None:
        """Drop the errors that a single rank was loaded with and has sent in a compressed step; it makes none."""
        if self.communicator.world_size == 1 and self.worker_error.numel():
            self.take_errors(self.worker_error.new_empty(0), self.server_error.new_empty(0))

    def scale_errors(self, factors: Sequence[float]) -> None:
        """Multiply the errors of each parameter by its factor."""
        for bucket, feedback in zip(self.layout.buckets, self.feedback, strict=True):
            if feedback.worker_error.numel():
                first, stop = chunk_range(bucket.numel, self.communicator.world_size, self.communicator.rank)
                for piece in bucket.pieces:
                    start, factor = piece.offset - bucket.start, factors[piece.index]
                    end = start + piece.numel
                    feedback.worker_error[start:end].mul_(factor)
                    feedback.server_error[max(start - first, 0) : max(min(end, stop) - first, 0)].mul_(factor)

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.exp_avg.device

    def to(self, device: torch.device) -> None:
        """Move the buffers. Views that were handed out become stale."""
        for name in ("exp_avg", "exp_avg_sq", "worker_error", "server_error"):
            setattr(self, name, getattr(self, name).to(device))
        self.extra = {name: tensor.to(device) for name, tensor in self.extra.items()}
        self._make_feedback()

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Return the part of a flat buffer that belongs to one parameter, in the shape of the parameter."""
        start = self.layout.starts[index]
        return flat[start : start + self.layout.numels[index]].view(self.params[index].shape)

    def torch_state(self, index: int) -> dict[str, Tensor]:
        """Return the entry of ``optimizer.state[p]``: torch's names, as views of the flat buffers."""
        state = {
            "step": self.steps[index],
            "exp_avg": self.view(self.exp_avg, index),
            "exp_avg_sq": self.view(self.exp_avg_sq, index),
        }
        for extra in self.extras:
            if extra.per == "element":
                state[extra.name] = self.view(self.extra[extra.name], index)
            elif extra.per == "parameter":
                state[extra.name] = self.extra[extra.name][index]
        return state

    def torch_states(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the entries of ``optimizer.state`` of all parameters."""
        return {param: self.torch_state(index) for index, param in enumerate(self.params)}

    def group_tensors(self) -> dict[str, Tensor]:
        """Return the extra state tensors that belong to no parameter."""
        return {extra.name: self.extra[extra.name] for extra in self.extras if extra.per == "group"}

    def find_still(self) -> None:
        """Find the parameters that do not move after the warmup stage, since none of their elements has a variance."""
        views = (self.view(self.exp_avg_sq, index) for index in range(len(self.params)))
        self.still = [self.compressed and view.numel() > 0 and is_zero(view) for view in views]

    def freeze_variance(self, first: Sequence[float], second: Sequence[float], floor: float) -> None:
        """Fold the bias corrections into the moments, and apply the variance floor, at the end of the first stage.

        Args:
            first: For each parameter, how often its first moment has been updated.
            second: For each parameter, how often its second moment has been updated.
            floor: Share of a tensor's mean that is the least variance of an element.
        """
        beta1, beta2 = self.options["betas"]
        for index, counts in enumerate(zip(first, second, strict=True)):
            exp_avg, exp_avg_sq = self.view(self.exp_avg, index), self.view(self.exp_avg_sq, index)
            if self.options["bias_correction"]:
                correct_bias_(exp_avg, counts[0], beta1)
                correct_bias_(exp_avg_sq, counts[1], beta2)
            floor_variance_(exp_avg_sq, floor)
        self.find_still()

    def masked(self, bucket: Bucket, average: Average) -> Average:
        """Return a bucket's average, times the group's mask if it has one."""
        mask: Tensor | None = self.options.get("exp_avg_mask")
        if mask is None:
            return average
        values = torch.empty(bucket.numel, dtype=torch.float32, device=self.device)
        kernels.on(values).decompress_(average, values)
        for piece in bucket.pieces:
            whole = mask.to(values).expand(self.params[piece.index].shape).reshape(-1)
            values[piece.offset - bucket.start :][: piece.numel].mul_(whole[piece.start : piece.stop])
        return Average.of(values)

    def gradient_segments(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> list[Segment]:
        """Return the parts of gradients (one or None per parameter) that lie in a bucket, for the kernels."""

        def segment(piece: Span) -> Segment:
            grad = grads[piece.index]
            tensor = None if grad is None else dense_values("the gradient", grad)
            return Segment(tensor, piece.start, piece.numel, piece.index)

        return [segment(piece) for piece in bucket.pieces]

    @contextmanager
    def parameter_segments(self, bucket: Bucket, moving: Container[int] | None = None) -> Iterator[list[Segment]]:
        """Give the parts of parameters that lie in a bucket, to be changed in place inside.

        A parameter that was frozen after it was added does not change. If ``moving`` is given, only the parameters in
        it change.
        """
        found: dict[int, Tensor | None] = {}
        copies: dict[int, Tensor] = {}
        for index in {piece.index for piece in bucket.pieces}:
            param = self.params[index].detach()
            if not self.params[index].requires_grad or (moving is not None and index not in moving):
                found[index] = None
                continue
            found[index] = values = dense_values("the parameter", param)
            if values is not param:
                copies[index] = values
        yield [Segment(found[p.index], p.start, p.numel, p.index, self.still[p.index]) for p in bucket.pieces]
        for index, values in copies.items():
            self.params[index].copy_(values)


def by_communicator(states: Iterable[GroupState]) -> list[tuple[Communicator, list[GroupState]]]:
    """Return the states in order, those with the same communicator together."""
    found: dict[int, tuple[Communicator, list[GroupState]]] = {}
    for state in states:
        found.setdefault(id(state.communicator), (state.communicator, []))[1].append(state)
    return list(found.values())


def has_own_groups(states: Iterable[GroupState]) -> bool:
    """Return whether a param group has a process group of its own; alike on all ranks, as the first step checks."""
    return any(state.own_rank is not None for state in states)


def mean_variance_norm(
    states: Iterable[GroupState],
    counts: Callable[[GroupState], tuple[list[float], list[float]]],
    everyone: Communicator,
) -> float:
    """Return the 1-norm of the bias-corrected second moments, averaged over the ranks so that all know it.

    Args:
        states: The param groups; those that are never compressed do not count.
        counts: Returns how often the moments of a group's parameters have been updated.
        everyone: All ranks.
    """
    norm = torch.zeros((), dtype=torch.float64, device=everyone.device)
    for state in states:
        count = max(counts(state)[1], default=0.0) if state.compressed else 0.0
        norm += variance_norm(state.exp_avg_sq, count, state.options)
    norm /= everyone.world_size
    everyone.all_reduce(norm).wait()
    return float(norm)
