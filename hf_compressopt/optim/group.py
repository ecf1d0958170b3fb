"""One param group of a compressed optimizer: its options, its state in flat buffers, and the step of its buckets.

An algorithm is a generator per bucket (:data:`Exchange`), which is read from top to bottom: it yields what this rank
wants to send, and is sent the compressed average of what all ranks have sent. Whether the message leaves in the step or
during backward, alone or beside others, is decided by :func:`exchange_buckets`. What stands before the ``yield`` only
reads: it runs again where a message is made during backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import BucketErrors, Task, all_reduce
from hf_compressopt.collectives.feedback import ErrorFeedback
from hf_compressopt.flat import PIECES, Bucket, FlatLayout
from hf_compressopt.format.plan import Kind
from hf_compressopt.kernels import Average, Combination, Descent, Segment, SignFormat, Variance
from hf_compressopt.kernels.memory import dense_values
from hf_compressopt.kernels.messages import travels_beside_signs, travels_in_full
from hf_compressopt.optim.math import correct_bias_, floor_variance_
from hf_compressopt.optim.moments import MOMENTS, CompactMoments, Moments, MomentShards
from hf_compressopt.schedules import StepPlan

#: The compressed step of one bucket: yields a message once, and is sent its average, with the group's mask applied.
Exchange: TypeAlias = Generator[Combination, Average, None]


@dataclass(frozen=True)
class ExtraState:
    """A state tensor that an algorithm has beyond its moments, by its name in ``optimizer.state``."""

    name: str
    per: str  # "element" (float32, flat), "parameter" (float32) or "group" (float64, on the CPU)
    initial: float = 0.0
    always: bool = False  # groups that are never compressed have it too
    plain: str = ""  # name of its first value in a plain Adam's state, if not ``initial``


@dataclass(frozen=True)
class GroupForm:
    """The cut of buckets, the state and its form that all param groups of an optimizer have."""

    bucket_numel: int
    scale_block: int | None
    compact: bool
    shares_moments: bool  # whether the ranks share out the moments of the warmup stage
    has_variance: bool
    extra_state: Sequence[ExtraState]


class GroupState:
    """One param group: its options and the state of its trainable parameters, allocated at once, alike on all ranks."""

    def __init__(
        self,
        number: int,
        options: dict[str, Any],
        form: GroupForm,
        communicator: Communicator,
        own_rank: int | None,
    ) -> None:
        self.options, self.number = options, number
        by_place = [f"group{self.number}.{place}" for place in range(len(options["params"]))]
        names = options.get("param_names", by_place)
        named = {p: name for p, name in zip(options["params"], names, strict=True) if p.requires_grad}
        self.params, self.names = list(named), list(named.values())  # a tensor given twice counts once
        self.labels = list(self.names)  # for messages; names are for checkpoints
        if "param_names" not in options:
            self.labels = [f"{name} of shape {list(p.shape)}" for p, name in named.items()]
        self.compressed = compressed = not options["non_freeze"]  # ever, and so with errors and extras
        self.in_full = [travels_in_full(p) for p in self.params]  # beside messages of integers
        beside = [compressed and travels_beside_signs(p.shape, form.scale_block) for p in self.params]
        self.layout = FlatLayout.build([p.numel() for p in self.params], form.bucket_numel, beside)
        # among all ranks, if the param group has a process group of its own, so that others may hold other parameters
        self.communicator, self.own_rank = communicator, own_rank
        device = self.params[0].device if self.params else communicator.device
        compact = form.compact and compressed
        self.form = SignFormat(form.scale_block)
        together = compressed and own_rank is None and communicator.world_size > 1
        self.shared_out = form.shares_moments and together
        shards = self.new_shards(device)
        kind = CompactMoments if compact or self.shared_out else Moments
        self.moments = kind.zeros(self.layout, device, shards, has_variance=form.has_variance)
        layout = self.layout.in_messages
        self.errors = ErrorFeedback(layout, communicator, device, compact=compact, used=compressed)
        self.steps = torch.zeros(len(self.params), dtype=torch.float32, device="cpu")  # that each parameter has seen
        #: Which parameters do not move after the warmup stage; see :meth:`find_without_variance`.
        self.without_variance = [False] * len(self.params)
        self.extras = tuple(extra for extra in form.extra_state if compressed or extra.always)
        self.own_params: list[Tensor] | None = None  # this rank's, while others stand in their place
        self._mask: tuple[Tensor, tuple[int, torch.device], Tensor] | None = None  # see _mask_here()
        self.extra, self.group_extra = dict[str, Tensor](), dict[str, Tensor]()
        for extra in self.extras:
            if extra.per == "group":
                self.group_extra[extra.name] = torch.full((1,), extra.initial, dtype=torch.float64, device="cpu")
            else:
                size = self.layout.numel if extra.per == "element" else len(self.params)
                self.extra[extra.name] = torch.full((size,), extra.initial, dtype=torch.float32, device=device)

    def form_of(self, bucket: Bucket) -> SignFormat | None:
        """Return the form of a bucket's messages; None for one that travels in full."""
        return None if bucket.in_full else self.form

    @property
    def feedback(self) -> list[BucketErrors]:
        """The errors of each bucket; what travels in full has none."""
        return self._by_bucket(self.errors)

    @property
    def new_feedback(self) -> list[BucketErrors]:
        """The errors of each bucket that a pass writes: new ones, or, where none was begun, the same."""
        return self._by_bucket(self.errors.pending or self.errors)

    def _by_bucket(self, errors: ErrorFeedback) -> list[BucketErrors]:
        nothing = torch.empty(0, dtype=torch.float32, device=self.device)
        return [
            *errors.feedback,
            *[BucketErrors((nothing,), nothing)] * (len(self.layout.buckets) - len(errors.feedback)),
        ]

    @property
    def exp_avg(self) -> Tensor:
        return self.moments.exp_avg

    @property
    def exp_avg_sq(self) -> Tensor:
        return self.moments.exp_avg_sq

    def variance(self, bucket: Bucket) -> Variance:
        return self.moments.variance(bucket.start, bucket.stop)

    def take_moments(self, moments: Moments) -> None:
        """Go on from moments that were loaded."""
        self.moments = moments

    def new_shards(self, device: torch.device | None = None) -> MomentShards | None:
        """Return memory for this rank's part of the moments of the warmup stage; None if every rank has all of them."""
        if not self.shared_out:
            return None
        return MomentShards(self.layout, self.communicator, device or self.device, self.in_full)

    def end_compressed_step(self) -> None:
        """Drop what a compressed step has used up."""
        self.moments.free_float32()
        if self.communicator.world_size == 1 and self.errors.worker.numel():
            self.errors.take(self.errors.worker.new_empty(0), self.errors.server.new_empty(0))

    @property
    def device(self) -> torch.device:
        return self.moments.exp_avg.device

    def to(self, device: torch.device) -> None:
        """Move the buffers. Views that were handed out become stale."""
        self.moments.to(device)
        self.errors.to(device)
        self.extra = {name: tensor.to(device) for name, tensor in self.extra.items()}

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Return the part of a flat buffer that belongs to one parameter, in the shape of the parameter."""
        start = self.layout.starts[index]
        return flat[start : start + self.layout.numels[index]].view(self.params[index].shape)

    def moments_of(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return both moments of one parameter, views of the flat buffers, and its count of steps."""
        return self.view(self.exp_avg, index), self.view(self.exp_avg_sq, index), self.steps[index]

    def torch_state(self, index: int) -> MutableMapping[str, Any]:
        """Return the entry of ``optimizer.state[p]``: views of the flat buffers, or what decodes compact forms."""
        return self.moments.shown(partial(self.readers, index))

    def beside_moments(self, per: str) -> dict[str, Tensor]:
        """Return the state beside the moments, by name: per "element", flat, per "parameter", or per "group"."""
        values = self.group_extra if per == "group" else self.extra
        counts = {Kind.STEP: self.steps} if per == "parameter" else {}
        return counts | {extra.name: values[extra.name] for extra in self.extras if extra.per == per}

    def readers(self, index: int, moments: Moments | None = None) -> dict[str, Callable[[], Any]]:
        """Return functions that read each value of a parameter's state, by name; of shared moments this rank's pieces.

        ``moments``: those that a load fills, in the place of the group's.
        """
        moments = moments or self.moments
        shape = self.params[index].shape
        readers: dict[str, Callable[[], Any]] = {Kind.STEP: partial(self.steps.__getitem__, index)}
        if moments.shards is not None:
            readers[PIECES] = partial(moments.shards.pieces, index)
        else:
            without_variance = self.without_variance[index]
            readers["exp_avg"] = lambda: moments.exp_avg_of(index, without_variance=without_variance).view(shape)
            if moments.has_variance:
                readers["exp_avg_sq"] = lambda: moments.exp_avg_sq_of(index).view(shape)
        for name, values in self.beside_moments("element").items():
            readers[name] = partial(self.view, values, index)
        for name, values in self.beside_moments("parameter").items():
            readers[name] = partial(values.__getitem__, index)
        return readers

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each value of the state of a parameter, as it is if every rank has all of it."""
        shape = tuple(self.params[index].shape)
        moments = MOMENTS if self.moments.has_variance else MOMENTS[:1]
        of_elements = dict.fromkeys((*moments, *self.beside_moments("element")), shape)
        return {**dict.fromkeys(self.beside_moments("parameter"), ()), **of_elements}

    def put_parameters_aside(self) -> None:
        """Keep this rank's parameters while others stand in their place."""
        self.own_params = [param.detach().clone() for param in self.params]

    def forget_own_parameters(self) -> None:
        """Let go of the parameters that were put aside: those in place are this rank's from now on."""
        self.own_params = None

    def put_parameters_back(self) -> None:
        """Put this rank's parameters in place again, if they were put aside."""
        if self.own_params is not None:
            for param, value in zip(self.params, self.own_params, strict=True):
                param.copy_(value)
        self.own_params = None

    def count_step(self, present: Sequence[bool] | None = None) -> None:
        """Count a step of the parameters that are ``present``, by default of all."""
        self.steps += 1 if present is None else torch.tensor(present, dtype=torch.float32, device="cpu")

    def label(self, names: Mapping[int, str]) -> None:
        """Use these names, by the parameters' ids, in messages, unless the group has names of its own."""
        if "param_names" not in self.options:
            self.labels = [names.get(id(p), label) for p, label in zip(self.params, self.labels, strict=True)]

    def let_all_move(self) -> None:
        """Let every parameter move, as in the warmup stage."""
        self.without_variance = [False] * len(self.params)

    def find_without_variance(self, largest: Sequence[float] | None = None) -> None:
        """Find the parameters that do not move after the warmup stage, since none of their elements has a variance."""
        varies = self.moments.with_variance(largest)
        self.without_variance = [
            self.compressed and numel > 0 and not each for numel, each in zip(self.layout.numels, varies, strict=True)
        ]

    def take_adam_step(self, grads: Sequence[Tensor | None], *, fused: bool) -> None:
        """Take a step of Adam of the parameters that have a gradient."""
        rows = [index for index, grad in enumerate(grads) if grad is not None]
        fused = fused and not self.options["eps_inside_sqrt"]
        operands = self.moments.adam_operands(rows, self.params, self.steps, fused=fused)
        operands.step_([grad for grad in grads if grad is not None], self.steps, self.options)

    def freeze_variance(self, first: Sequence[float], second: Sequence[float], floor: float) -> None:
        """Fold the bias corrections into the moments, and apply the variance floor, at the end of the warmup stage."""
        beta1, beta2 = self.options["betas"]
        for index, counts in enumerate(zip(first, second, strict=True)):
            exp_avg, exp_avg_sq, _ = self.moments_of(index)
            if self.options["bias_correction"]:
                correct_bias_(exp_avg, counts[0], beta1)
                correct_bias_(exp_avg_sq, counts[1], beta2)
            floor_variance_(exp_avg_sq, floor)
        self.find_without_variance()

    def descent(self, max_update: float | None = None) -> Descent:
        """Return the rule by which parameters follow a direction; None or 0 as ``max_update`` is no bound."""
        group = self.options
        lr, bound = float(group["lr"]), float(max_update or math.inf)
        return Descent(lr, 1 - lr * group["weight_decay"], group["eps"], group["eps_inside_sqrt"], bound)

    def masked(self, bucket: Bucket, average: Average) -> Average:
        """Return a bucket's average, times the group's mask if it has one."""
        mask: Tensor | None = self.options.get("exp_avg_mask")
        if mask is None:
            return average
        values = torch.empty(bucket.numel, dtype=torch.float32, device=self.device)
        kernels.on(values).decompress_(average, values)
        here = self._mask_here(mask)
        for piece in bucket.pieces:
            whole = here.expand(self.params[piece.index].shape).reshape(-1)
            values[piece.offset - bucket.start :][: piece.numel].mul_(whole[piece.start : piece.stop])
        return Average.of(values)

    def _mask_here(self, mask: Tensor) -> Tensor:
        """Return a mask on the device of the state: of one in host memory a copy, which the host waits for, is kept."""
        if mask.device == self.device:
            return mask.to(torch.float32)
        made_of = 0 if mask.is_inference() else mask._version, self.device
        if self._mask is None or self._mask[0] is not mask or self._mask[1] != made_of:
            self._mask = mask, made_of, mask.to(self.device, torch.float32)
        return self._mask[2]

    def gradient_segments(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> list[Segment]:
        """Return the parts of gradients (one or None per parameter) that lie in a bucket, for the kernels."""
        segments = []
        for piece in bucket.pieces:
            grad = grads[piece.index]
            tensor = None if grad is None else dense_values("the gradient", grad)
            segments.append(Segment(tensor, piece.start, piece.numel, piece.index, self.without_variance[piece.index]))
        return segments

    def parameter_segments(self, bucket: Bucket, moving: Container[int] | None = None) -> ParameterSegments:
        """Give the parts of (unfrozen, ``moving``) parameters in a bucket, to be changed in place inside a ``with``."""
        segments = ParameterSegments()
        for piece in bucket.pieces:
            index = piece.index
            param = self.params[index]
            values = None
            if param.requires_grad and (moving is None or index in moving):
                detached = param.detach()
                values = dense_values("the parameter", detached)
                if values is not detached:
                    segments.copies.append((param, values))
            segments.append(Segment(values, piece.start, piece.numel, index, self.without_variance[index]))
        return segments


class ParameterSegments(list[Segment]):
    """Parts of parameters, which are written back at the end if kernels cannot change them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> list[Segment]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for param, values in self.copies:
                param.copy_(values)


class ParamGroups(NamedTuple):
    """The param groups of one optimizer, as what acts on all of them takes them."""

    states: Sequence[GroupState]
    communicator: Communicator
    follow: Callable[[], None]


def by_communicator(states: Iterable[GroupState]) -> list[tuple[Communicator, list[GroupState]]]:
    """Return the states in order, those with the same communicator together."""
    groups: dict[int, tuple[Communicator, list[GroupState]]] = {}
    for state in states:
        _, together = groups.setdefault(id(state.communicator), (state.communicator, []))
        together.append(state)
    return list(groups.values())


def has_own_groups(states: Iterable[GroupState]) -> bool:
    """Return whether a param group has a process group of its own; alike on all ranks, as the first step checks."""
    return any(state.own_rank is not None for state in states)


def hyperparameters_of(states: Iterable[GroupState]) -> list[list[Any]]:
    """Return the hyperparameters of the param groups that all ranks hold, as JSON holds them."""
    rows: list[list[Any]] = []
    for group in (state.options for state in states if state.own_rank is None):
        numbers = [float(group.get(name, 0)) for name in ("lr", "eps", "weight_decay")]
        betas = [float(beta) for beta in group["betas"]]
        flags = [bool(group.get(name)) for name in ("bias_correction", "eps_inside_sqrt")]
        rows.append([*numbers, *betas, *flags])
    return rows


def trained_of(states: Iterable[GroupState]) -> list[str]:
    """Return for each param group that all ranks hold, and each parameter, "1" if it requires a gradient."""
    shared = (state for state in states if state.own_rank is None)
    return ["".join("01"[param.requires_grad] for param in state.params) for state in shared]


# -- a compressed step, bucket by bucket -------------------------------------------------------------------------------


@dataclass(slots=True)
class BucketStep:
    """One bucket of a param group in a compressed step, and what the buckets of the group share."""

    plan: StepPlan
    state: GroupState
    bucket: Bucket
    errors: BucketErrors
    #: This rank's gradients, one (or None) per parameter of the group; None if the message has left already.
    grads: Sequence[Tensor | None] | None
    #: The values that the algorithm's ``_begin_group`` has returned; to be read after the ``yield``.
    shared: Any = None

    @property
    def options(self) -> dict[str, Any]:
        return self.state.options

    @property
    def kernels(self) -> Any:
        return kernels.on(self.state.device)

    def drop_gradients(self) -> None:
        """Let go of the gradients of a bucket whose message has left."""
        self.grads = None

    # -- what is sent -------------------------------------------------------------------------------------------------

    def message(
        self, x: Tensor | Average | None, alpha: float = 1.0, beta: float = 1.0, factors: Tensor | None = None
    ) -> Combination:
        """Return (alpha x + beta g) * factors, with g this rank's gradient; the kernel that compresses it computes it.

        Args:
            x: [numel] float32, or an average; None leaves the term out.
            alpha: Its coefficient.
            beta: That of g; 0 leaves it out.
            factors: [parameters of the group] float32; None is 1.
        """
        grads = None if beta == 0 or self.grads is None else self.state.gradient_segments(self.bucket, self.grads)
        values, last = (x.values, x) if isinstance(x, Average) else (x, None)
        return Combination(self.bucket.numel, self.state.device, values, alpha, grads, beta, factors, last)

    # -- the state of the bucket --------------------------------------------------------------------------------------

    def part(self, flat: Tensor) -> Tensor:
        """Return the bucket's elements of a flat buffer of the group, [numel]."""
        return flat[self.bucket.start : self.bucket.stop]

    def extra(self, name: str) -> Tensor:
        """Return the bucket's elements of a state tensor that the algorithm declares, [numel] float32."""
        return self.part(self.state.extra[name])

    @property
    def exp_avg(self) -> Tensor:
        """The momentum of an algorithm that keeps it in float32, [numel]."""
        return self.part(self.state.exp_avg)

    @property
    def momentum(self) -> Average:
        """The momentum in the form that it has: values, or the messages of the last average."""
        return self.state.moments.momentum(self.bucket)

    @property
    def variance(self) -> Variance:
        """The second moment in the form that it has: [numel] float32, or codes of a frozen one."""
        return self.state.variance(self.bucket)

    def store_momentum(self, average: Average) -> Tensor | None:
        """Make an average the momentum. Returns memory for the kernel to store its values in, [numel] float32.

        None if the average takes the momentum's place as it came, in messages.
        """
        masked = self.options.get("exp_avg_mask") is not None
        alone = self.state.communicator.world_size == 1
        return self.state.moments.store(self.bucket, average, masked=masked, alone=alone)

    def parameters(self, moving: Container[int] | None = None) -> ParameterSegments:
        """Give the parts of parameters in the bucket, to be changed in place inside a ``with``."""
        return self.state.parameter_segments(self.bucket, moving)


class SendsAverages(Protocol):
    """The sender of messages that leave during backward."""

    def take_average(self, state: GroupState, bucket: Bucket) -> Average | None: ...


def exchange_buckets(
    run: Sequence[BucketStep], algorithm: Callable[[BucketStep], Exchange], sent: SendsAverages | None
) -> Task[None]:
    """Take the compressed step of buckets of the same form, whose messages travel together.

    ``sent``: the sender of messages during backward, which has the averages of some of them perhaps.
    """
    waiting: list[tuple[BucketStep, Exchange]] = []
    messages: list[Combination] = []
    for step in run:
        average = None if sent is None else sent.take_average(step.state, step.bucket)
        if average is not None:
            step.drop_gradients()  # its message needs none any more
        exchange = algorithm(step)
        message = next(exchange)
        if average is None:
            waiting.append((step, exchange))
            messages.append(message)
        else:
            finish(exchange, step.state.masked(step.bucket, average))
    if not waiting:
        return
    first, _ = waiting[0]
    errors = [step.errors for step, _ in waiting]
    task = all_reduce(messages, errors, first.state.form_of(first.bucket), first.state.communicator)
    del messages, message  # gradients may be freed while their messages travel
    for (step, exchange), average in zip(waiting, (yield from task), strict=True):
        finish(exchange, step.state.masked(step.bucket, average))


def message_of(exchange: Exchange) -> Combination:
    """Return the message of an exchange whose average another one will take."""
    message = next(exchange)
    exchange.close()
    return message


def finish(exchange: Exchange, average: Average) -> None:
    """Send an exchange its average, after which it ends."""
    try:
        exchange.send(average)
    except StopIteration:
        return
    raise RuntimeError("an algorithm yields one message per bucket and step; this one has yielded a second one")
