"""Kernels: the hot loops of the optimizers, of message formats and of norms.

:func:`on` returns the kernels of a device: native code if the library for that device works, else
:mod:`hf_compressopt.kernels.reference`, pure PyTorch, which states the contract of each kernel and is the oracle of all
tests. :class:`MessageFormat` is what the collectives know of a message format: :class:`SignFormat`,
:class:`IntegerFormat`.
"""

from __future__ import annotations

from hf_compressopt.flat import chunk_numel
from hf_compressopt.kernels import adam, library, native, reference, sketch  # they add their kernels to the self-check
from hf_compressopt.kernels.codec import (
    IntegerFormat,
    MessageFormat,
    SignFormat,
    all_finite,
    any_nan,
    copy_,
    implementation,
    on,
    sum_of_squares,
)
from hf_compressopt.kernels.compact import (
    ERROR_BITS,
    CompactErrors,
    Errors,
    LogVariance,
    Variance,
    like_errors,
    tensor_of,
    values_of_errors,
)
from hf_compressopt.kernels.messages import (
    INTEGER_BITS,
    MESSAGE_ALIGNMENT,
    integer_message_nbytes,
    message_nbytes,
)
from hf_compressopt.kernels.operands import (
    AdamUpdate,
    AnyAverage,
    Average,
    Combination,
    Descent,
    IntegerAverage,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
)
