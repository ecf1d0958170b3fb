"""Bytes of the state of the compressed optimizers, in each of its forms."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from hf_compressopt.flat import FLOAT_BYTES, chunk_numel
from hf_compressopt.kernels.errors import ERROR_BITS
from hf_compressopt.kernels.integer_messages import integer_message_nbytes
from hf_compressopt.kernels.messages import message_nbytes
from hf_compressopt.optim.base import CompressedOptimizer

#: The forms of a state: "float32", and the two stages of "compact".
FLOAT32, COMPACT_FIRST, COMPACT_THEN = "float32", "compact, first stage", "compact, then"
#: The first stage of "compact" with ``zero_stage=1``.
ZERO_FIRST = "zero_stage=1, first stage"
#: Both stages of "compact" with ``zero_stage=2``, from the backward pass to the step.
ZERO_FREED_FIRST, ZERO_FREED_THEN = "zero_stage=2, first stage", "zero_stage=2, then"
_MOMENTS = 2
_SCALE_BLOCK = signature(CompressedOptimizer).parameters["scale_block"].default


def error_bytes(params: int, world_size: int, node_size: int = 1) -> int:
    """Bytes of the errors of a rank, as float32 values; one rank alone has none.

    Args:
        params: Trainable parameters.
        world_size: Number of ranks.
        node_size: Ranks of a node in two levels, which share the worker errors; 1 if the exchange is flat.
    """
    return FLOAT_BYTES * (-(-params // node_size) + -(-params // world_size)) if world_size > 1 else 0


def compressed_states(
    optimizer_class: type[CompressedOptimizer], params: int, world_size: int, bucket_numel: int, node_size: int = 1
) -> dict[str, int]:
    """Bytes of the state of a compressed optimizer on each rank, by the form of the state.

    These are moments, both errors, and the algorithm's own values. In the first step with a frozen variance, a compact
    state holds some of its moments in both forms for a moment: that is 1/8 byte per element more than in the first
    stage, or 1 byte if the momentum stays float32. These are left out. What ranks have shared out needs no more, up to
    four ranks; beyond them the second stage has more than the first, from the switch on.

    Args:
        optimizer_class: One of the compressed optimizers.
        params: Trainable parameters.
        world_size: Number of ranks.
        bucket_numel: Elements that are sent together.
        node_size: See :func:`error_bytes`.
    """
    own = FLOAT_BYTES * params * sum(state.per == "element" for state in optimizer_class.extra_state)
    errors, momentum = compact_error_bytes(params, world_size, bucket_numel, node_size), FLOAT_BYTES * params
    if optimizer_class.momentum_is_message and world_size > 1:
        momentum = _messages(params, world_size, bucket_numel)
    moments = FLOAT_BYTES * params * _MOMENTS
    part = FLOAT_BYTES * _MOMENTS * _own_elements(params, world_size, bucket_numel)
    worker = _worker_error_bytes(params, world_size, bucket_numel, node_size)
    then = own + momentum + params + errors  # a byte for the variance
    zero = {
        ZERO_FIRST: own + part + errors,
        ZERO_FREED_FIRST: own + part + errors + worker,  # new errors wait for the step
        ZERO_FREED_THEN: then + errors + momentum,  # and so do the new messages
    }
    return {
        FLOAT32: own + moments + error_bytes(params, world_size, node_size),
        COMPACT_FIRST: own + moments + errors,
        COMPACT_THEN: then,
        **(zero if 1 in optimizer_class.zero_stages and world_size > 1 else {}),
    }


def compact_error_bytes(params: int, world_size: int, bucket_numel: int, node_size: int = 1) -> int:
    """Bytes of the errors of a rank in 8 bits, of the one that serves the longest chunks; one rank alone has none.

    Args:
        params: Trainable parameters.
        world_size: Number of ranks.
        bucket_numel: Elements that are sent together.
        node_size: See :func:`error_bytes`.
    """

    def of_server(numel: int) -> int:
        return integer_message_nbytes(min(chunk_numel(numel, world_size), numel), ERROR_BITS)

    worker = _worker_error_bytes(params, world_size, bucket_numel, node_size)
    return worker + _of_buckets(of_server, params, bucket_numel) if world_size > 1 else 0


def _worker_error_bytes(params: int, world_size: int, bucket_numel: int, node_size: int) -> int:
    def of_bucket(numel: int) -> int:
        chunk = min(chunk_numel(numel, world_size), numel)
        if not chunk:
            return 0
        whole, rest = divmod(min(world_size // node_size * chunk, numel), chunk)  # those of the first shard
        return whole * integer_message_nbytes(chunk, ERROR_BITS) + integer_message_nbytes(rest, ERROR_BITS)

    return _of_buckets(of_bucket, params, bucket_numel) if world_size > 1 else 0


def freed_gradient_bytes(form: str, params: int, world_size: int, bucket_numel: int) -> int | None:
    """Bytes of the gradients of a rank that frees them; None for a form that holds them whole.

    Args:
        form: The form of the state.
        params: Trainable parameters.
        world_size: Number of ranks.
        bucket_numel: Elements that are sent together.
    """
    means = FLOAT_BYTES * _own_elements(params, world_size, bucket_numel)
    return {ZERO_FREED_FIRST: means, ZERO_FREED_THEN: 0}.get(form)


def _own_elements(params: int, world_size: int, bucket_numel: int) -> int:
    """Elements of the chunks that the rank with the longest ones serves."""
    return _of_buckets(lambda numel: min(chunk_numel(numel, world_size), numel), params, bucket_numel)


def _messages(params: int, world_size: int, bucket_numel: int) -> int:
    """Bytes of the servers' messages, which lie as far apart as the longest one is."""

    def of_bucket(numel: int) -> int:
        return world_size * message_nbytes(min(chunk_numel(numel, world_size), numel), _SCALE_BLOCK)

    return _of_buckets(of_bucket, params, bucket_numel)


def _of_buckets(of_bucket: Callable[[int], int], params: int, bucket_numel: int) -> int:
    whole, rest = divmod(params, bucket_numel)
    return whole * of_bucket(bucket_numel) + of_bucket(rest)
