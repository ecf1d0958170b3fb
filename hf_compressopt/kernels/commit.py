"""The operands of a commit, which writes the errors of a step once all ranks know that it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from hf_compressopt.kernels.errors import Errors
from hf_compressopt.kernels.integer_messages import IntegerAverage
from hf_compressopt.kernels.operands import Average, Combination, Segment

#: The average of a bucket, in the messages of a format.
AnyAverage = TypeVar("AnyAverage", Average, IntegerAverage)


@dataclass(frozen=True)
class Commit(Generic[AnyAverage]):
    """Operands of :meth:`~hf_compressopt.kernels.formats.MessageFormat.commit_`.

    Attributes:
        z: As it was given to ``compress_``, n elements, read.
        error: n elements, updated in place.
        own: The messages that ``compress_`` wrote, for ``y.world_size`` chunks in the form of ``y``, read.
        y: The average that came back, n elements, read.
        outputs: Segments that cover the bucket, each written in its own dtype. Segments without a tensor are left
            alone. They may be the gradients of ``z``, at the same places. If ``z`` has segments, the outputs' segments
            must have the same lengths and indices. Signs write no outputs, and take none.
        output_scale: Factor of the average, such as the loss scale that ``z.beta`` divides out.
    """

    z: Combination
    error: Errors
    own: Tensor
    y: AnyAverage
    outputs: Sequence[Segment] = ()
    output_scale: float = 1.0
