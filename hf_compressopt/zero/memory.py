"""The memory of ZeRO: estimates from sizes alone, and reports of what is allocated."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_compressopt.collectives.topology import AUTO
from hf_compressopt.flat import BYTES_PER_MB, DDP_BUCKET_MB, DEFAULT_BUCKET_MB_ON_CUDA, FLOAT_BYTES
from hf_compressopt.grad_compression import FORMATS
from hf_compressopt.kernels import CompactErrors
from hf_compressopt.zero.state_dict import Partitioned


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each rank."""

    parameters: int  #: Including frozen ones.
    gradients: int  #: The most at any time.
    states: int  #: The optimizer's state and master copies.
    buckets: int  #: Gradients that are being sent.
    host: int = 0  #: The share in host memory: all gradients and states under offload_optimizer, else 0.
    errors: int = 0  #: What compressed gradients have missed, of the last step and of the coming one.

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.states + self.buckets + self.errors


def estimate_zero_memory(
    model: nn.Module | int,
    world_size: int,
    stage: int,
    *,
    dtype: torch.dtype = torch.float32,
    states_per_parameter: int = 2,
    bucket_cap_mb: float | None = None,
    offload_optimizer: bool = False,
    grad_compression: str = "none",
    param_compression: str = AUTO,
    node_size: int = 1,
) -> MemoryEstimate:
    """Estimate the bytes that parameters, gradients and optimizer state take on each rank.

    docs/memory_and_zero.md has the formulas. Without ZeRO the state has the parameters' dtype, as torch's AdamW has it;
    with it the state is in float32, beside float32 copies of parameters in 16 bits. Stage 1 needs its bytes of
    gradients only while whole ones are held, as during accumulation. For example::

        estimate_zero_memory(7_000_000_000, world_size=32, stage=2, dtype=torch.bfloat16).total

    Args:
        model: The model, or its number of (trainable) parameters.
        world_size: Number of ranks.
        stage: 0 (no ZeRO: every rank has all), 1 or 2.
        dtype: dtype of the parameters if a number is given.
        states_per_parameter: State values of the optimizer per parameter: 2 for Adam, 1 for SGD with momentum.
        bucket_cap_mb: As of ZeroOptimizer; two buckets come on top. None is its 100 of CUDA devices, and without ZeRO
            the 25 of DistributedDataParallel.
        offload_optimizer: As of ZeroOptimizer.
        grad_compression: As of ZeroOptimizer.
        param_compression: As of ZeroOptimizer.
        node_size: Ranks of a node, which share the errors of compressed gradients; 1 if the topology is flat.

    Raises:
        ValueError: For a stage or number that is not legal.
    """
    if stage not in (0, 1, 2) or world_size < 1:
        raise ValueError(f"stage must be 0, 1 or 2 and world_size >= 1, got {stage} and {world_size}")
    if isinstance(model, nn.Module):
        sizes = [(p.numel(), p.dtype, p.requires_grad) for p in model.parameters()]
    elif isinstance(model, bool) or not isinstance(model, int) or model < 0:
        raise ValueError(f"model must be a module or a number of parameters >= 0, got {model!r}")
    else:
        sizes = [(model, dtype, True)]
    parameters = gradients = states = errors = trained = 0
    for numel, kind, trainable in sizes:
        parameters += numel * kind.itemsize
        if trainable:
            gradients, trained = gradients + numel * kind.itemsize, trained + numel
            is_ahead = param_compression in FORMATS and world_size > 1
            if stage == 0:  # torch's optimizer on the parameters themselves
                states += numel * states_per_parameter * kind.itemsize
                continue
            master = FLOAT_BYTES if kind.itemsize < FLOAT_BYTES or is_ahead else 0
            states += numel * (states_per_parameter * max(kind.itemsize, FLOAT_BYTES) + master)
    if bucket_cap_mb is None:
        bucket_cap_mb = DEFAULT_BUCKET_MB_ON_CUDA if stage else DDP_BUCKET_MB
    buckets = min(2 * int(bucket_cap_mb * BYTES_PER_MB), 2 * gradients) if world_size > 1 else 0
    if stage >= 1:
        states = -(-states // world_size)
    if stage == 2:
        gradients = -(-gradients // world_size)
    if grad_compression != "none" and stage > 0 and world_size > 1:
        errors = 2 * CompactErrors.nbytes(-(-trained // node_size), world_size // node_size)
    host = states + -(-gradients // (world_size if stage == 1 else 1)) if offload_optimizer and stage else 0
    return MemoryEstimate(parameters, gradients, states, buckets, host, errors)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that are allocated on one rank."""

    parameters: int  #: The optimizer's, including frozen ones.
    whole_gradients: int  #: In p.grad.
    buckets: int  #: Gradients that wait in slices, or are being sent.
    gradient_shards: int  #: Averages of this rank's part.
    states: int  #: The wrapped optimizer's.
    masters: int  #: Master copies.
    errors: int  #: What compressed gradients have missed, of the last step and of the coming one.
    resident: int  #: Resident memory of the process.
    device_allocated: int  #: By torch on the accelerator; 0 without one.


def memory_report(optimizer: Partitioned) -> MemoryReport:
    """Report the memory of this rank. Makes no collective call."""
    params = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
    reducer = optimizer.partition.reducer
    states, masters = 0, 0
    for gradients in reducer.slices:
        gradients.land()
    for part in optimizer.partition.parts():
        states += sum(value.nbytes for value in part.state.values() if isinstance(value, Tensor))
        masters += 0 if part.direct else part.tensor.nbytes
    return MemoryReport(
        parameters=sum(param.nbytes for param in params),
        whole_gradients=sum(p.grad.nbytes for p in params if p.grad is not None),
        buckets=reducer.backward.tasks.nbytes + sum(g.buffer.nbytes for g in reducer.slices if g.buffer is not None),
        gradient_shards=sum(g.average.nbytes for g in reducer.slices if g.average is not None),
        states=states,
        masters=masters,
        errors=sum(gradients.feedback.nbytes for gradients in reducer.slices if gradients.feedback is not None),
        resident=resident_bytes(),
        device_allocated=torch.get_device_module().memory_allocated() if torch.accelerator.is_available() else 0,
    )


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def release_memory() -> None:
    """Free unused memory: Python's garbage, torch's cache on the accelerator, the C library's free lists."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
