"""ZeRO in the first stage: each rank has 1/W of the moments, and sends what it has updated in a few bits.

For each bucket, with Q the messages of ``warmup_bits`` bits, chunk j the part that rank j serves, and g_r the clipped
gradient of rank r:

    u_r = g_r + worker_error;  messages <- Q(u_r);  worker_error <- u_r - Q(u_r)                        (1)
    rank j: g = mean_r Q(u_r);  m, v <- Adam's;  d = -lr m^ / (sqrt(v^) + eps) + server_error           (2)
    rank j: messages <- Q(d);  server_error <- d - Q(d)                                                 (3)
    all ranks: p <- p (1 - lr wd) + Q(d)                                                                (4)

All ranks apply the same messages, so that the parameters have the same bits everywhere, without masters. The server
error is in the unit of the parameters here. At the end of the stage every rank sends its part of the moments once:
the momentum as signs, the variance in 8 bits. What the signs miss becomes the server error of the next step, whose
momentum is b1 m + (1 - b1) g:

    messages <- Q(m);  server_error <- b1 (m - Q(m))                                                    (5)

Sources: ZeRO (arXiv 1910.02054), 1-bit Adam (arXiv 2102.02888), LoCo (arXiv 2407.04480).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import ErrorFeedback, run_tasks, server_numel
from hf_compressopt.collectives.group_errors import keep_
from hf_compressopt.collectives.phases import (
    Part,
    Task,
    WorkerErrors,
    from_servers,
    gathered,
    parts_to_send,
    received_by_server,
)
from hf_compressopt.collectives.settled_exchange import send_
from hf_compressopt.flat import Bucket, chunk_numel
from hf_compressopt.kernels import Combination, Errors, IntegerFormat
from hf_compressopt.kernels.variance import NO_TOP, encode_variance_, top_of_variance
from hf_compressopt.optim.gradients import Grads
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.math import adam_options, adam_step_, correct_bias_, sum_of
from hf_compressopt.optim.moment_shards import MomentShards, part_of

_Counts = tuple[Sequence[float], Sequence[float]]


def send_gradients(
    z: Combination,
    worker_error: WorkerErrors,
    form: IntegerFormat,
    communicator: Communicator,
    new_errors: Sequence[Errors] | None = None,
) -> Task[Tensor]:
    """Send the gradients of one bucket to their servers, (1). All ranks call, for the same buckets in one order.

    Nothing of ``z`` is kept after the first wait; in two levels, after the second one.

    Args:
        z: The gradients.
        worker_error: The worker error of the bucket.
        form: The form of the messages.
        communicator: The ranks.
        new_errors: See :func:`~hf_compressopt.collectives.settled_exchange.send_`.

    Returns:
        [n_own] float32, the mean of this rank's chunk. It is not finite if a gradient of any rank is not.
    """
    numel, device = z.numel, z.device
    parts = yield from parts_to_send(z, worker_error, form, communicator)
    sent = send_(parts, form, device, new_errors)
    del z, parts
    received = yield from received_by_server(numel, form, sent, communicator)
    peers = communicator.topology.nodes
    mean = torch.empty(server_numel(numel, communicator), dtype=torch.float32, device=device)
    form.mean_(received, mean, peers, 1.0 / peers)
    return mean


# -- a step -----------------------------------------------------------------------------------------------------------


class SentGradients(Protocol):
    """Gradients that have left before the step."""

    def present(self, state: GroupState) -> Sequence[bool] | None:
        """Return for each parameter of a group whether this rank had a gradient; None if none of the group's left."""
        ...

    def take_mean(self, state: GroupState, bucket: Bucket, feedback: ErrorFeedback) -> Tensor | None:
        """Return the mean of this rank's chunk, [n_own] float32, clipped, and write the worker error; None if none."""
        ...


def take_sharded_step(
    states: Sequence[GroupState], gradients: Grads, sent: SentGradients | None = None, *, bits: int, fused: bool
) -> None:
    """Take a step of the param groups whose moments are shared out. All ranks call.

    As in a step of AdamW, a parameter without a gradient on any rank does not move, except for what earlier messages
    have missed, and does not count the step.

    Args:
        states: The param groups, which all ranks hold.
        gradients: This rank's gradients, clipped, by the numbers of the groups; those of all ranks are finite.
        sent: Gradients that have left during backward, in the place of those of their groups.
        bits: Bits per element of a message, 4 or 8.
        fused: Whether one pass of a native kernel updates the moments.
    """
    present = _present(states, gradients, sent)
    run_tasks(
        _step_of_bucket(state, number, feedback, gradients[state.number], here, sent, bits=bits, fused=fused)
        for state, here in zip(states, present, strict=True)
        for number, feedback in enumerate(state.feedback)
    )
    for state, here in zip(states, present, strict=True):
        state.steps += torch.tensor(here, dtype=torch.float32, device="cpu")


def _present(states: Sequence[GroupState], gradients: Grads, sent: SentGradients | None) -> list[list[bool]]:
    """Return for each parameter of each group whether some rank has a gradient of it. All ranks call."""
    communicator = states[0].communicator
    mine: list[float] = []
    for state in states:
        left = None if sent is None else sent.present(state)
        mine += map(float, [grad is not None for grad in gradients[state.number]] if left is None else left)
    flags = torch.tensor(mine, dtype=torch.float32, device=communicator.device)
    communicator.all_reduce(flags, op="max").wait()
    rest = iter(flags.tolist())
    return [[next(rest) > 0 for _ in state.params] for state in states]


def _step_of_bucket(
    state: GroupState,
    number: int,
    feedback: ErrorFeedback,
    grads: Sequence[Tensor | None],
    present: Sequence[bool],
    sent: SentGradients | None,
    *,
    bits: int,
    fused: bool,
) -> Task[None]:
    """Take the step of one bucket: send the gradients, update this rank's chunk, apply what all ranks have updated."""
    bucket, form = state.layout.buckets[number], IntegerFormat(bits)
    mean = None if sent is None else sent.take_mean(state, bucket, feedback)
    if mean is None:
        z = Combination(bucket.numel, state.device, grads=state.gradient_segments(bucket, grads))
        mean = yield from send_gradients(z, feedback.worker_error, form, state.communicator)
    message = torch.empty(form.nbytes(mean.numel()), dtype=torch.uint8, device=state.device)
    if mean.numel():
        update = Combination.of(_update(state, number, mean, present, fused=fused))
        message = send_([Part(update, feedback.server_error, 1, message.numel())], form, state.device)  # (3)
    changes = yield from from_servers(bucket.numel, form, message, state.communicator)
    decay = 1 - float(state.options["lr"]) * state.options["weight_decay"]
    with state.parameter_segments(bucket) as params:  # (4)
        for here, factor in ((True, decay), (False, 1.0)):
            if any(present[segment.index] == here for segment in params):
                chosen = [s if present[s.index] == here else replace(s, tensor=None) for s in params]
                form.add_(changes, chosen, factor)


def _update(state: GroupState, number: int, mean: Tensor, present: Sequence[bool], *, fused: bool) -> Tensor:
    """Update this rank's moments of a bucket by the averaged gradient, [n_own], and return the parameters' change."""
    shards = _shards_of(state)
    spans = [span for span in shards.spans[number] if present[span.index]]
    change = torch.zeros_like(mean)
    wholes = change, mean, shards.exp_avg[number], shards.exp_avg_sq[number]
    changes, means, firsts, seconds = ([part_of(whole, span) for span in spans] for whole in wholes)
    steps = [state.steps[span.index].clone() for span in spans]
    # Adam's step of parameters that are 0 and do not decay is the change
    options = replace(adam_options(state.options), weight_decay=0.0)
    adam_step_(changes, means, firsts, seconds, steps, options, fused=fused)  # (2)
    return change


def _shards_of(state: GroupState) -> MomentShards:
    shards = state.moments.shards
    assert shards is not None
    return shards


# -- the end of the stage ---------------------------------------------------------------------------------------------


def end_first_stage(
    states: Iterable[GroupState], counts: Callable[[GroupState], _Counts], floor: float, clipped: float = 1.0
) -> None:
    """Fold the bias corrections into the moments, apply the variance floor, and gather what ranks have shared out.

    All ranks call. The errors of the gradients' messages become errors of the momentum, b1 m + (1 - b1) g: times
    1 - b1.

    Args:
        states: The param groups; those that are never compressed stay as they are.
        counts: Returns how often the moments of a group's parameters have been updated.
        floor: See :meth:`GroupState.freeze_variance`.
        clipped: Factor by which gradients were clipped after they had left: the errors of those that are shared out
            are in the unit of before.
    """
    for state in states:
        if state.compressed:
            factor = (1 - state.options["betas"][0]) * (clipped if state.shared_out else 1.0)
            state.errors.scale_([factor] * len(state.params))
            freeze = GroupState.freeze_variance if state.moments.shards is None else _gather
            freeze(state, *counts(state), floor, factor)


def _gather(state: GroupState, first: Sequence[float], second: Sequence[float], floor: float, unit: float) -> None:
    """Do what :meth:`GroupState.freeze_variance` does, and bring the moments to all ranks, in their compact form."""
    shards, communicator = _shards_of(state), state.communicator
    beta1, beta2 = state.options["betas"]
    if state.options["bias_correction"]:
        for span, exp_avg, exp_avg_sq in shards.parts():
            correct_bias_(exp_avg, first[span.index], beta1)
            correct_bias_(exp_avg_sq, second[span.index], beta2)
    sums = torch.zeros(len(state.params), dtype=torch.float64, device=state.device)
    for span, _, exp_avg_sq in shards.parts():
        sums[span.index] += sum_of(exp_avg_sq)
    communicator.all_reduce(sums).wait()
    total = sums.tolist()
    for span, _, exp_avg_sq in shards.parts():
        if floor > 0:
            exp_avg_sq.clamp_(min=floor * total[span.index] / state.layout.numels[span.index])
    points = _tops(state)
    missing = [index for index, top in enumerate(points) if top <= NO_TOP]
    others = state.layout.numel - sum(state.layout.numels[index] for index in missing)
    unsent = state.unsent_variance(missing, first, second, unit, floor * sum(total) / max(others, 1))
    if missing:
        for span, _, exp_avg_sq in shards.parts():
            exp_avg_sq.clamp_(min=unsent.get(span.index, 0.0))
        points = _tops(state)
    still = [top <= NO_TOP for top in points]
    rows = enumerate(state.feedback)
    run_tasks(_gather_momentum(state, number, feedback, still) for number, feedback in rows)
    state.moments.make_codes(points)  # in the memory that the momentum has left, on up to four ranks
    run_tasks(_gather_variance(state, number, points) for number in range(len(state.layout.buckets)))
    state.moments.shards = None
    state.find_still()


def _tops(state: GroupState) -> list[int]:
    """Return the point of the largest variance of each parameter on any rank. All ranks call."""
    found = [float(NO_TOP)] * len(state.params)
    for span, _, exp_avg_sq in _shards_of(state).parts():
        found[span.index] = max(found[span.index], top_of_variance(exp_avg_sq))
    tops = torch.tensor(found, dtype=torch.float64, device=state.device)
    state.communicator.all_reduce(tops, op="max").wait()
    return [int(top) for top in tops.tolist()]


def _gather_momentum(state: GroupState, number: int, feedback: ErrorFeedback, still: Sequence[bool]) -> Task[None]:
    """Make the momentum of a bucket a message of signs on all ranks, as (5) says. That of ``still`` has no error."""
    shards, communicator, bucket = _shards_of(state), state.communicator, state.layout.buckets[number]
    form, exp_avg = feedback.format, shards.exp_avg[number]
    stride, numel = form.chunk_nbytes(bucket.numel, communicator.world_size)[0], exp_avg.numel()
    padded = torch.zeros(stride, dtype=torch.uint8, device=state.device)
    if numel:
        message = padded[: form.nbytes(numel)]
        form.compress_(Combination.of(exp_avg), torch.zeros_like(exp_avg), message, 1)
        missed = torch.empty_like(exp_avg)
        form.decompress_(form.average(numel, message, 1, stride), missed)
        missed.neg_().add_(exp_avg).mul_(state.options["betas"][0])
        for span in shards.spans[number]:
            if still[span.index]:
                part_of(missed, span).zero_()
        keep_(feedback.server_error, missed)
    shards.exp_avg[number] = exp_avg.new_empty(0)
    del exp_avg
    messages = yield from gathered(padded, communicator)
    state.moments.keep(bucket, form.average(bucket.numel, messages, communicator.world_size, stride))


def _gather_variance(state: GroupState, number: int, tops: Sequence[int]) -> Task[None]:
    """Make the variance of a bucket codes of 8 bits on all ranks."""
    shards, communicator, bucket = _shards_of(state), state.communicator, state.layout.buckets[number]
    codes = torch.zeros(chunk_numel(bucket.numel, communicator.world_size), dtype=torch.uint8, device=state.device)
    for span in shards.spans[number]:
        encode_variance_(part_of(shards.exp_avg_sq[number], span), part_of(codes, span), tops[span.index])
    shards.exp_avg_sq[number] = shards.exp_avg_sq[number].new_empty(0)
    whole = yield from gathered(codes, communicator)
    state.moments.codes[bucket.start : bucket.stop] = whole[: bucket.numel]
