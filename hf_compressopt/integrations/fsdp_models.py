"""The models of Accelerate that FSDP2 shards, and the low-bit messages between their replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from hf_compressopt.fsdp.compression import FSDPCompression, compress_fsdp
from hf_compressopt.grad_compression import MessageOptions
from hf_compressopt.integrations.ddp_models import without_compile
from hf_compressopt.integrations.log import prefix_of, prefixed_metrics


def why_not_between_replicas(accelerator: Any) -> str:
    """The reason why low-bit messages cannot carry the gradients of the accelerator's FSDP; "" if they can."""
    if not getattr(accelerator, "is_fsdp2", False):
        return "FSDP1 averages the gradients itself: give FullyShardedDataParallelPlugin(fsdp_version=2)"
    config = getattr(accelerator, "parallelism_config", None)
    if config is None or config.dp_replicate_size < 2:
        return (
            "FSDP2 partitions every parameter over all ranks here, so that no replicas exchange gradients: give "
            "ParallelismConfig(dp_replicate_size=NODES, dp_shard_size=RANKS_PER_NODE)"
        )
    if config.non_data_parallel_size > 1:
        return "it needs a mesh of dp_replicate and dp_shard only, without tensor or context parallelism"
    return ""


def is_loaded_in_shards(model: Any) -> bool:
    """True for a model that ``from_pretrained(..., distributed_config=...)`` has sharded, or cut in another way."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def why_not_loaded_in_shards(model: Any) -> str:
    """The reason why low-bit messages cannot carry the gradients of such a model; "" if they can."""
    config = model.config.distributed_config
    given = {name: getattr(config, name, None) or 1 for name in ("tp_size", "pp_size", "ep_size")}
    if other := [f"{name}={size}" for name, size in given.items() if size > 1]:
        return f"{', '.join(other)} of DistributedConfig cuts parameters in a way that its messages do not know"
    if config.dp_replicate_size < 2:
        return (
            f"DistributedConfig(fsdp_size={config.fsdp_size}) partitions every parameter over all ranks, so that no "
            "replicas exchange gradients: give DistributedConfig(fsdp_size=RANKS_PER_NODE, dp_replicate_size=NODES)"
        )
    return ""


class ShardedModels:
    """The messages of the models that FSDP2 shards. It does not keep the models alive."""

    def __init__(self) -> None:
        """Begin without models."""
        self._found: list[weakref.ref[FSDPCompression]] = []  # a model's hooks keep its state alive, and that the model

    def compress(
        self,
        models: Iterable[nn.Module],
        accelerator: Any,
        compression: str,
        messages: MessageOptions,
        loss_scale: Callable[[], float],
    ) -> None:
        """Give every model that FSDP2 shards low-bit messages between its replicas, unless it has them.

        Args:
            models: Prepared models.
            accelerator: The accelerator, for its mesh; a model that is loaded in shards has one of its own.
            compression: "int4" or "int8".
            messages: The options of the messages; the mesh alone says which ranks share a node.
            loss_scale: Returns the factor that the gradients of the coming step carry.

        Raises:
            ValueError: For options of the topology, and if the model cannot have them.
        """
        if replace(messages, bucket_cap_mb=MessageOptions.bucket_cap_mb) != MessageOptions():
            raise ValueError(
                f"topology={messages.topology!r}, node_size={messages.node_size} and node_bits={messages.node_bits} "
                "have no effect with FSDP, whose mesh says which ranks share a node: leave them out"
            )
        for model in map(without_compile, models):
            if any(state.model is model for state in self.compressions()):
                continue
            if is_loaded_in_shards(model):
                mesh: Any = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
            else:
                mesh = accelerator.torch_device_mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
            cap = messages.bucket_cap_mb
            state = compress_fsdp(model, mesh, compression, bucket_cap_mb=cap, loss_scale=loss_scale)
            self._found.append(weakref.ref(state))

    def models(self) -> list[nn.Module]:
        """The models that are alive."""
        return [state.model for state in self.compressions()]

    def compressions(self) -> list[FSDPCompression]:
        """The states of the models that are alive."""
        return [state for reference in self._found if (state := reference()) is not None]

    def metrics(self) -> dict[str, float]:
        """Metrics of the messages, for a log line."""
        found: dict[str, float] = {}
        for number, state in enumerate(self.compressions()):
            found.update(prefixed_metrics(state, prefix_of(number)))
        return found
