"""One bucket of a compressed step, as an algorithm sees it.

An algorithm is a generator per bucket, which is read from top to bottom: it yields what this rank wants to send, and is
sent the compressed average of what all ranks have sent. Whether the message leaves in the step or during backward,
alone or beside others, is decided by :func:`exchange_buckets`. What stands before the ``yield`` only reads: it runs
again where a message is made during backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.exchange import BucketErrors, Task, all_reduce
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import Average, Combination, Variance
from hf_compressopt.optim.group import GroupState, ParameterSegments
from hf_compressopt.schedules import StepPlan

#: The compressed step of one bucket: yields a message once, and is sent its average, with the group's mask applied.
Exchange: TypeAlias = Generator[Combination, Average, None]


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
        return self.state.store_momentum(self.bucket, average)

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
