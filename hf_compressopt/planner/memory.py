"""Memory on each rank, by optimizer: bytes of parameters, gradients, states and buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature

import torch

from hf_compressopt.collectives.topology import AUTO
from hf_compressopt.flat import FLOAT_BYTES, bucket_numel_of, chunk_numel
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.kernels import CompactErrors, SignFormat
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.zero.memory import MemoryEstimate, estimate_zero_memory

#: The parts of a row.
MEMORY = ("parameters", "gradients", "states", "buckets", "total")
#: ZeRO with gradients and parameters in 4 bits, and FSDP2 without replicas.
ZERO_INT4 = {stage: f"zero{stage}_adamw, int4" for stage in (1, 2)}
FSDP2 = ("FSDP2", "FSDP2, int4 gradients", "FSDP2, exact parameters")
#: When a compressed optimizer's state has a size: always, if it is in float32, or in the two stages if it is compact.
#: With ``zero_stage=2`` they are what is held from the backward pass to the step.
ALWAYS = ""
FIRST = ", warmup stage"
THEN = ", then"
ZERO1_FIRST = ", zero_stage=1, warmup stage"
ZERO2_FIRST = ", zero_stage=2, warmup stage"
ZERO2_THEN = ", zero_stage=2, then"
_HALF_BYTES = 2
_SIGNS = SignFormat(signature(CompressedOptimizer).parameters["scale_block"].default)


@dataclass(frozen=True)
class Buckets:
    """Bytes of a compressed optimizer's buffers on the rank that serves the longest chunks."""

    params: int
    world_size: int
    bucket_numel: int
    node_size: int = 1

    def _sum(self, of_bucket: Callable[[int, int], int]) -> int:
        """Sum over all buckets what their elements, and those of their longest chunk, take."""
        whole, rest = divmod(self.params, self.bucket_numel)
        counts = ((whole, self.bucket_numel), (int(rest > 0), rest))
        return sum(n * of_bucket(numel, min(chunk_numel(numel, self.world_size), numel)) for n, numel in counts if n)

    @property
    def own_elements(self) -> int:
        """Elements of the chunks that the rank serves."""
        return self._sum(lambda numel, chunk: chunk)

    @property
    def messages(self) -> int:
        """Bytes of the servers' sign messages, which lie as far apart as the longest one is."""
        return self._sum(lambda numel, chunk: self.world_size * _SIGNS.nbytes(chunk))

    @property
    def worker_errors(self) -> int:
        """Bytes of the worker errors in 8 bits, of the chunks that ranks of a node share; one rank alone has none."""
        shards = self.world_size // self.node_size
        held = self._sum(lambda numel, chunk: CompactErrors.nbytes(min(shards * chunk, numel), shards))
        return held if self.world_size > 1 else 0

    @property
    def errors(self) -> int:
        """Bytes of all errors in 8 bits."""
        server = self._sum(lambda numel, chunk: CompactErrors.nbytes(chunk))
        return self.worker_errors + server if self.world_size > 1 else 0

    def states(self, optimizer_class: type[CompressedOptimizer]) -> dict[str, int]:
        """Bytes of a compressed optimizer's state by stage; in the first compressed step moments lie in both forms."""
        several = self.world_size > 1
        extra = FLOAT_BYTES * self.params * sum(state.per == "element" for state in optimizer_class.extra_state)
        momentum = FLOAT_BYTES * self.params
        if optimizer_class.momentum_is_message and several:
            momentum = self.messages
        count = 1 + optimizer_class.has_variance
        moments, shard = (FLOAT_BYTES * count * numel for numel in (self.params, self.own_elements))
        if not optimizer_class.compact:
            errors = FLOAT_BYTES * (-(-self.params // self.node_size) + -(-self.params // self.world_size)) * several
            return {ALWAYS: extra + moments + errors}
        variance = self.params * optimizer_class.has_variance  # a byte per element
        then = extra + momentum + variance + self.errors
        stages = {FIRST: extra + moments + self.errors, THEN: then}
        if 1 in optimizer_class.zero_stages and several:
            stages[ZERO1_FIRST] = extra + shard + self.errors
            stages[ZERO2_FIRST] = extra + shard + self.errors + self.worker_errors  # new errors wait for the step
            stages[ZERO2_THEN] = then + self.errors + momentum  # and so do the new messages
        return stages


def memory_rows(
    params: int,
    world_size: int,
    dtype: torch.dtype,
    states: int,
    bucket_cap_mb: float,
    node_size: int = 1,
    *,
    ddp_bucket_cap_mb: float | None = None,
    accumulates: bool = False,
) -> dict[str, dict[str, int]]:
    """Bytes on each rank, by optimizer and by content, with a row for each stage of a compact state.

    A compressed optimizer with ``zero_stage=2`` holds whole gradients while it ``accumulates`` micro-batches. DDP, also
    with grad_compression, has buckets of ``ddp_bucket_cap_mb``, by default as the others.

    Messages in flight are left out: 1/32 of the buckets' bytes. FSDP2 has no replicas here: each rank has a shard of
    all, and with gradients in 4 bits errors for all, old and new ones, with exact parameters what was gathered last.
    """
    estimate = partial(
        estimate_zero_memory, params, world_size, dtype=dtype, states_per_parameter=states, bucket_cap_mb=bucket_cap_mb
    )
    bucket_numel, full = bucket_numel_of(bucket_cap_mb), params * dtype.itemsize
    buckets = Buckets(params, world_size, bucket_numel, node_size)
    in_ddp = ddp_bucket_cap_mb or bucket_cap_mb
    estimates = {"no ZeRO": estimate(0, bucket_cap_mb=in_ddp)}
    estimates |= {f"ZeRO-{stage}": estimate(stage) for stage in (1, 2)}
    if world_size > 1:
        parameters = AUTO if dtype.itemsize < FLOAT_BYTES else "int4"
        for stage, name in ZERO_INT4.items():
            small = estimate(stage, grad_compression="int4", param_compression=parameters, node_size=node_size)
            estimates[name] = replace(small, states=small.states + small.errors, errors=0)
        plain = estimates["no ZeRO"]
        errors = Buckets(params, world_size, bucket_numel_of(in_ddp), node_size).errors
        estimates["grad_compression"] = replace(plain, states=plain.states + errors)
        shard = [-(-value // world_size) for value in (full, full, plain.states)]
        errors = 2 * Buckets(params, world_size, bucket_numel).worker_errors
        for name, held in zip(FSDP2, (0, errors, params * _HALF_BYTES), strict=True):
            estimates[name] = MemoryEstimate(shard[0], shard[1], shard[2] + held, plain.buckets)
    gradients = {ZERO2_FIRST: FLOAT_BYTES * buckets.own_elements, ZERO2_THEN: 0}
    if accumulates:
        gradients = {when: full + held for when, held in gradients.items()}
    for cls in ALGORITHMS.values():
        for when, held in buckets.states(cls).items():
            waiting = bucket_numel * dtype.itemsize if when in gradients else 0
            estimates[f"{cls.__name__}{when}"] = MemoryEstimate(full, gradients.get(when, full), held, waiting)
    return {name: {part: getattr(memory, part) for part in MEMORY} for name, memory in estimates.items()}
