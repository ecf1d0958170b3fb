"""Set-ups of Accelerate and Trainer in which compressed and partitioned optimizers cannot work."""

from __future__ import annotations

from typing import Any

from hf_compressopt.integrations.capabilities import saves_shards
from hf_compressopt.integrations.fsdp_models import (
    is_loaded_in_shards,
    why_not_between_replicas,
    why_not_loaded_in_shards,
)
from hf_compressopt.integrations.plugin import CompressOptPlugin

GRAD_COMPRESSION = "grad_compression="
_INSTEAD = {
    "DEEPSPEED": "DeepSpeed averages the gradients and takes the steps itself. Launch without DeepSpeed; "
    "`hf-compressopt from-deepspeed ds_config.json` translates its configuration",
    "MEGATRON_LM": "Megatron-LM averages the gradients and takes the steps itself. Launch without Megatron-LM, or use "
    "Megatron-LM's own optimizer",
    "FSDP": "FSDP partitions the parameters and averages the gradients itself. Use an ordinary optimizer with FSDP, or "
    "launch without FSDP; --optim zero2_adamw partitions gradients and optimizer state here",
    "XLA": "XLA averages the gradients itself. Use an ordinary optimizer there",
}


def why_unsupported(accelerator: Any, name: str, model: Any = None) -> str:
    """The reason why an optimizer of this name cannot work in the accelerator's set-up; "" if it can.

    ``name`` may also be that of grad_compression, which works between the replicas that FSDP2 shards.
    """
    kind = accelerator.distributed_type.name
    if is_loaded_in_shards(model):
        if not name.startswith(GRAD_COMPRESSION):
            return f"{name} works with DistributedDataParallel, not with from_pretrained(distributed_config=...)" + (
                ": leave out one of the two, or use an ordinary optimizer with grad_compression"
            )
        reason = why_not_loaded_in_shards(model)
        return f"{name} does not work with this model: {reason}" if reason else ""
    if kind not in _INSTEAD:
        return ""
    if kind == "FSDP" and name.startswith(GRAD_COMPRESSION):
        reason = why_not_between_replicas(accelerator)
        return f"{name} does not work with this FSDP: {reason}" if reason else ""
    return f"{name} works with DistributedDataParallel, not with {kind}: {_INSTEAD[kind]}"


def check_distributed_type(accelerator: Any, optimizer: Any, plugin: CompressOptPlugin | None = None) -> None:
    """Check that an optimizer, or what the plugin would make of it, works under the accelerator's set-up.

    Raises:
        ValueError: If it does not. The message says what to do instead.
    """
    name = type(optimizer).__name__ if saves_shards(optimizer) else ""
    if plugin is not None and not name:
        name = "ZeroOptimizer" if plugin.partitions else "" if plugin.optimizer == "none" else plugin.optimizer
        if plugin.ddp_compression != "none":
            name = f"{GRAD_COMPRESSION}{plugin.grad_compression}"
    if name and (reason := why_unsupported(accelerator, name)):
        raise ValueError(reason)
