"""The hot loops of the optimizers, behind documented wrappers.

Every optimizer and collective calls these wrappers, never an implementation. :mod:`hf_compressopt.kernels.reference`
is the pure-PyTorch implementation: the specification, the fallback on every device, and the oracle of native ones.
Every operation on an element is rounded on its own, in the order that the formulas say, so that all implementations
leave the same bits; but sums over many elements (scales, norms) are within 2 ulp of each other.

**Message of one chunk** of n elements (uint8, contiguous), n > 0:

======================  ==========================================================================================
bytes                   content
======================  ==========================================================================================
``4 * blocks``          float32 scales, little-endian, one per block; ``blocks = ceil(n / scale_block)``, or 1 where
                        ``scale_block`` is None
``ceil(n / 8)``         signs: element i is bit ``i % 8`` (least significant first) of byte ``i // 8``; 1 is
                        negative; zero, of either sign, counts as positive; bits beyond n are 0
up to 15                zeros up to a multiple of :data:`MESSAGE_ALIGNMENT`
======================  ==========================================================================================

A chunk of no elements has an empty message. Messages of several chunks stand one after another, in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_numel
from hf_compressopt.kernels import library, native, ops, reference
from hf_compressopt.kernels.memory import is_direct
from hf_compressopt.kernels.messages import MESSAGE_ALIGNMENT, chunk_message_nbytes, message_nbytes, num_blocks
from hf_compressopt.kernels.operands import Average, Combination, Descent, LambOptions, Segment

_CPU = torch.device("cpu")
_LARGE_COPY = 1 << 16  # elements


def implementation(device: torch.device) -> str:
    """What the wrappers use for tensors of a device: ``"native avx512"``, ``"reference"`` and the like."""
    return f"native {library.instruction_set(device.type)}" if library.available(device) else "reference"


def _for(tensor: Tensor) -> Any:
    return ops.implementation_for(tensor.device)


def compress_(z: Combination, error: Tensor, messages: Tensor, *, world_size: int, scale_block: int | None) -> None:
    """Compress a bucket with error feedback: u = z + error; messages <- Q(u); error <- u - Q(u).

    Q(u) is sign(u) times RMS(u) of the block; with ``scale_block=None`` all chunks share RMS(u) of the whole bucket.

    Args:
        z: What is to be sent, n elements, read.
        error: [n] float32, updated in place.
        messages: [sum(chunk_message_nbytes(n, world_size, scale_block))] uint8, written.
        world_size: Number of chunks.
        scale_block: Elements per scale, a positive multiple of 8, or None.
    """
    if ops.needed(error):
        torch.ops.compressopt.compress(reference.values_of(z), error, messages, world_size, scale_block)
    else:
        _for(error).compress_(z, error, messages, world_size, scale_block)


def average_compress_(
    messages: Tensor, error: Tensor, out: Tensor, *, world_size: int, scale_block: int | None
) -> None:
    """The server's part: a = mean of the decompressed messages + error; out <- Q(a); error <- a - Q(a).

    The sum is taken in float32: messages in groups of four, in rank order, and then the groups' sums, in order.

    Args:
        messages: [world_size * message_nbytes(n, scale_block)] uint8, one message of the same chunk per rank, read.
        error: [n] float32, updated in place.
        out: [message_nbytes(n, scale_block)] uint8, written.
        world_size: Number of messages.
        scale_block: As in :func:`compress_`.
    """
    if ops.needed(error):
        torch.ops.compressopt.average_compress(messages, error, out, world_size, scale_block)
    else:
        _for(error).average_compress_(messages, error, out, world_size, scale_block)


def decompress_(y: Average, out: Tensor) -> None:
    """Write the values of an average: out <- y.

    Args:
        y: n elements, read.
        out: [n] float32, written.
    """
    if ops.needed(out) and y.messages is not None:
        torch.ops.compressopt.decompress(y.messages, out, y.world_size, y.scale_block, y.stride)
    elif ops.needed(out):
        reference.decompress_(y, out)
    else:
        _for(out).decompress_(y, out)


def combine_(z: Combination, out: Tensor) -> None:
    """Write the values of a combination: out <- z.

    Args:
        z: n elements, read.
        out: [n] float32, written.
    """
    _for(out).combine_(z, out)


def apply_adam_(
    y: Average,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Segment],
    descent: Descent,
    *,
    beta: float = 1.0,
    corrections: Tensor | None = None,
) -> None:
    """Take the momentum from an average, and step: m <- y, or m + beta (y - m); p <- p decay - lr m^ / denominator(v^).

    Args:
        y: n elements, read. Its values may be ``exp_avg`` itself.
        exp_avg: [n] float32, m, written.
        exp_avg_sq: [n] float32, v, read.
        params: Segments that cover the bucket; those without a tensor are left alone, while m is written all the same.
        descent: How the parameters move.
        beta: 1.0 for m <- y, else m's rate.
        corrections: [tensors, 2] float32; m^ and v^ are m and v divided by a tensor's two; infinity as the first
            stands for a direction of 0. None: m and v themselves.
    """
    _for(exp_avg).apply_adam_(y, exp_avg, exp_avg_sq, params, descent, beta, corrections)


def local_step_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    local_update: Tensor,
    grads: Sequence[Segment] | None,
    params: Sequence[Segment],
    beta1: float,
    descent: Descent,
) -> None:
    """0/1 Adam, a step of one rank alone: m <- b1 m + (1-b1) g; p <- p decay - lr m/denominator; u <- u + lr m.

    Args:
        exp_avg: [n] float32, m, updated in place.
        exp_avg_sq: [n] float32, v, read.
        local_update: [n] float32, u, updated in place.
        grads: Segments that cover the bucket; None leaves m as it is.
        params: As in :func:`apply_adam_`.
        beta1: Coefficient of the momentum.
        descent: How the parameters move.
    """
    _for(exp_avg).local_step_(exp_avg, exp_avg_sq, local_update, grads, params, beta1, descent)


def sync_parameters_(
    y: Average,
    exp_avg: Tensor,
    anchor: Tensor,
    exp_avg_sq: Tensor,
    local_update: Tensor,
    params: Sequence[Segment],
    lr_sum: float,
    descent: Descent,
) -> None:
    """0/1 Adam, a sync: m <- y / lr_sum; anchor <- anchor decay - y / denominator(v); p <- anchor; u <- 0.

    Args:
        y: n elements, read. Its values may be ``local_update`` itself.
        exp_avg: [n] float32, m, written.
        anchor: [n] float32, the parameters at the last sync, updated in place.
        exp_avg_sq: [n] float32, v, read.
        local_update: [n] float32, u, set to 0.
        params: Segments that cover the bucket; those without a tensor keep anchor and parameter.
        lr_sum: Sum of the learning rates of the interval, not 0.
        descent: ``decay`` is the product over the interval; ``lr`` is not used.
    """
    _for(exp_avg).sync_parameters_(y, exp_avg, anchor, exp_avg_sq, local_update, params, lr_sum, descent)


def lamb_moments_(
    y: Average,
    exp_avg: Tensor,
    exp_avg_sq_fresh: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Segment],
    factors: Tensor,
    sums: Tensor,
    options: LambOptions,
) -> None:
    """1-bit LAMB, first pass over a bucket: momentum, fresh variance, and what each tensor's coefficient needs.

    m' = y / factor; g' = (m' - b1 m) / (1 - b1); v_fresh <- b2 v_fresh + (1-b2) g'^2; m <- m'. Added to a tensor's
    sums: [0] sum of (m'/denominator(v))^2, [1] sum of (m'/denominator(v) + wd p)^2; and [2] becomes the largest
    denominator(v)/denominator(v_fresh) met so far, where a tensor that keeps still counts as 1.

    Args:
        y: n elements, read.
        exp_avg: [n] float32, m, updated in place.
        exp_avg_sq_fresh: [n] float32, updated in place.
        exp_avg_sq: [n] float32, the frozen v, read.
        params: Segments that cover the bucket, read; one without a tensor counts as p = 0.
        factors: [tensors] float32.
        sums: [tensors, 3] float64, updated in place; 0 before a tensor's first segment.
        options: Hyperparameters.
    """
    _for(exp_avg).lamb_moments_(y, exp_avg, exp_avg_sq_fresh, exp_avg_sq, params, factors, sums, options)


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Tensor, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    """1-bit LAMB, second pass: p <- p - rate (m / denominator(v) + wd p).

    Args:
        exp_avg: [n] float32, m, read.
        exp_avg_sq: [n] float32, the frozen v, read.
        params: Segments that cover the n elements; those without a tensor are left alone.
        rates: [tensors] float32.
        options: Hyperparameters.
    """
    _for(exp_avg).lamb_apply_(exp_avg, exp_avg_sq, params, rates, options)


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements; not finite where one is not.

    Squares of float32 values are exact in float64, and sums of them have so many digits to spare that, rounded to
    float32, they do not show in what order they were taken: parts of a tensor may be summed on different ranks.

    Args:
        tensors: Any shapes; float32, bfloat16, float16 or float64; on ``device``.
        device: Where the sum is wanted.

    Returns:
        [] float64.
    """
    wider = any(tensor.dtype == torch.float64 for tensor in tensors)
    total: Tensor = (native if library.available(device) and not wider else reference).sum_of_squares(tensors, device)
    return total


def copy_(out: Tensor, source: Tensor) -> None:
    """Copy what nobody reads soon: of a CPU's float32 past its caches, which is a third less for memory to do.

    Args:
        out: Of the shape and dtype of ``source``, on any device, written.
        source: Any tensor, read.
    """
    alike = out.dtype == source.dtype == torch.float32 and out.device == source.device == _CPU
    large = source.numel() >= _LARGE_COPY and out.shape == source.shape
    if alike and large and is_direct(out) and is_direct(source) and library.available(_CPU):
        native.copy_(out, source)
    else:
        out.copy_(source, non_blocking=True)


__all__ = [
    "MESSAGE_ALIGNMENT",
    "Average",
    "Combination",
    "Descent",
    "LambOptions",
    "Segment",
    "apply_adam_",
    "average_compress_",
    "chunk_message_nbytes",
    "chunk_numel",
    "combine_",
    "copy_",
    "compress_",
    "decompress_",
    "implementation",
    "lamb_apply_",
    "lamb_moments_",
    "local_step_",
    "message_nbytes",
    "num_blocks",
    "sum_of_squares",
    "sync_parameters_",
]
