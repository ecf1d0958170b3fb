"""What has left of one backward pass, and is freed; see ``freed_gradients``."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_compressopt.collectives.exchange import ErrorFeedback, Pipeline
from hf_compressopt.collectives.settled_exchange import PendingErrors
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import Average
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.sign_slots import Key


@dataclass
class LeftMean:
    """The mean of this rank's chunk of a bucket, [n_own] float32, and the worker error of its message."""

    values: Tensor
    errors: PendingErrors


@dataclass(frozen=True)
class LeftBucket:
    """A bucket, its param group and its errors."""

    state: GroupState
    bucket: Bucket
    feedback: ErrorFeedback

    @property
    def key(self) -> Key:
        """The number of the param group, and the first element of the bucket."""
        return self.state.number, self.bucket.start


@dataclass
class LeftGradients:
    """What has left in one backward pass.

    Attributes:
        means: Of the first stage, by bucket.
        returned: Of the compressed stage: the clip coefficient of a bucket, the average, and the errors.
        present: For each param group, for which of its parameters this rank had a gradient.
        tasks: The exchanges that are on their way.
        sketch: The sketch of the gradients with their loss scale, [4096] float32, and the sum of their squares, []
            float64; None if it is not taken.
        waiting: Sketches of single buckets, by number, before their turn to be added.
        turn: Number of the bucket whose sketch is added next: the order in which buckets leave changes no bit.
        fault: The error in a gradient of this rank.
        clipped: Factor by which the means were clipped.
    """

    means: dict[Key, LeftMean] = field(default_factory=dict)
    returned: list[tuple[Key, float, Average, PendingErrors]] = field(default_factory=list)
    present: dict[int, list[bool]] = field(default_factory=dict)
    tasks: Pipeline = field(default_factory=Pipeline)
    sketch: tuple[Tensor, Tensor] | None = None
    waiting: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    turn: int = 0
    fault: Exception | None = None
    clipped: float = 1.0
