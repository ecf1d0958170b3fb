"""An Accelerator that saves and loads optimizers' states in shards, the base of CompressOptAccelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn

from hf_compressopt.amp import innermost
from hf_compressopt.checkpoint.background import wait_for_saves
from hf_compressopt.fsdp.compression import FSDPCompression
from hf_compressopt.grad_compression import GradientCompression, MessageOptions
from hf_compressopt.integrations import capabilities
from hf_compressopt.integrations.ddp_models import DDPModels, without_compile
from hf_compressopt.integrations.fsdp_models import ShardedModels, is_loaded_in_shards
from hf_compressopt.integrations.plugin import CompressOptPlugin
from hf_compressopt.integrations.shards import load_compressions, load_shards, save_compressions, save_shards


@dataclass
class Attachment:
    """State of a CompressOptAccelerator beside that of an Accelerator."""

    plugin: CompressOptPlugin | None = None
    by_trainer: bool = False  # a Trainer has set the options
    asked: str = ""  # how the user asked for an optimizer of this package, in words
    checked: bool = False  # since the last object was prepared
    said: list[str] = field(default_factory=list)  # lines of the log that were written
    untold: list[Any] = field(default_factory=list)  # optimizers and compressions whose first step is not over
    models: DDPModels = field(default_factory=DDPModels)
    sharded: ShardedModels = field(default_factory=ShardedModels)
    partitioned: set[int] = field(default_factory=set)  # parameters (by id) of partitioned optimizers
    following: set[int] = field(default_factory=set)  # parameters (by id) of compressed optimizers given to prepare
    without_ddp: set[int] = field(default_factory=set)  # parameters (by id) of models prepared without DDP for them
    grad_compression: str = "none"  # for the models of ordinary optimizers
    messages: MessageOptions = field(default_factory=MessageOptions)  # of grad_compression
    gradient_as_bucket_view: bool = True  # in DDP, where gradients travel in messages of this package
    loading: ExitStack = field(default_factory=ExitStack)  # open while Accelerate loads a state
    in_checkpoint: bool = False  # all ranks are saving a checkpoint
    rotations: list[Callable[[], None]] = field(default_factory=list)  # put off until a save in the background is done

    def take(self, plugin: CompressOptPlugin) -> None:
        """Take over the options of a plugin."""
        self.plugin, self.grad_compression, self.messages = plugin, plugin.ddp_compression, plugin.message_options()
        self.gradient_as_bucket_view = plugin.gradient_as_bucket_view
        if plugin.partitions:
            self.asked = f"CompressOptPlugin(zero_stage={plugin.zero_stage})"
        elif plugin.optimizer != "none":
            self.asked = f"CompressOptPlugin(optimizer={plugin.optimizer!r})"

    def note_given(self, optimizer: Any) -> None:
        """Take note of the parameters of an optimizer that is given to ``prepare``, before any model is prepared."""
        if capabilities.owns_gradients(optimizer) or capabilities.frees_gradients(optimizer):
            self.partitioned |= {id(p) for p in optimizer.trainable_parameters}
        elif capabilities.follows_plan(optimizer):
            self.following |= {id(p) for p in optimizer.trainable_parameters}

    def forget(self) -> None:
        """Forget the parameters of all optimizers."""
        for known in (self.partitioned, self.following, self.without_ddp):
            known.clear()

    @contextmanager
    def gradients_in_buckets(self, accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
        """Inside, a model whose gradients travel in messages of this package has them in the buckets of its DDP."""
        travels = self.grad_compression != "none" or (self.plugin is not None and self.plugin.optimizer != "none")
        given = accelerator.ddp_handler
        if self.gradient_as_bucket_view and (travels or capabilities.shares(model.parameters(), self.following)):
            accelerator.ddp_handler = replace(given or DistributedDataParallelKwargs(), gradient_as_bucket_view=True)
        try:
            yield
        finally:
            accelerator.ddp_handler = given

    def compress_sharded(self, prepared: Any, accelerator: Accelerator, loss_scale: Callable[[], float]) -> None:
        """Send the gradients of FSDP2's models between replicas in low-bit messages, if the user asked for it.

        Args:
            prepared: What the accelerator has prepared: one object, a tuple, or a list.
            accelerator: The accelerator.
            loss_scale: Returns the factor that the gradients of the coming step carry.
        """
        if self.grad_compression != "none":
            objects = prepared if isinstance(prepared, (tuple, list)) else (prepared,)
            models = [found for found in objects if isinstance(found, nn.Module)]
            if accelerator.distributed_type != DistributedType.FSDP:
                models = [model for model in models if is_loaded_in_shards(without_compile(model))]
            if models:
                self.sharded.compress(models, accelerator, self.grad_compression, self.messages, loss_scale)

    def compressions(self) -> list[GradientCompression | FSDPCompression]:
        """Return the states of the models whose gradients are compressed."""
        return [*self.models.compressions(), *self.sharded.compressions()]

    def metrics(self) -> dict[str, float]:
        """Return their metrics, for a log line."""
        return {**self.models.metrics(), **self.sharded.metrics()}


class SavingAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that knows the optimizers of this package, and saves and loads their states in shards."""

    _compressopt: Attachment

    def compressed_optimizers(self) -> list[capabilities.FollowsPlan]:
        """The compressed optimizers among those that were prepared."""
        return [optimizer for optimizer in map(innermost, self._optimizers) if capabilities.follows_plan(optimizer)]

    def our_optimizers(self) -> list[capabilities.SavesShards]:
        """The compressed and the partitioned optimizers among those that were prepared."""
        return [optimizer for optimizer in map(innermost, self._optimizers) if capabilities.saves_shards(optimizer)]

    def partitioned_optimizers(self) -> list[capabilities.OwnsGradients]:
        """The partitioned optimizers among those that were prepared."""
        return [optimizer for optimizer in map(innermost, self._optimizers) if capabilities.owns_gradients(optimizer)]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the model's state dict as Accelerate does; inside a local interval of 0/1 Adam, that of the last sync.

        Between two syncs every rank has parameters of its own. Those of the last sync are the same on all ranks, and
        reading them needs no communication, so that one rank alone may call this and ``save_model``. With a
        ZeroOptimizer's ``param_compression`` the state dict has the masters, which the ranks share: all ranks call.
        """
        params = {id(p) for p in model.parameters()}
        with ExitStack() as stack:
            owners = [o for o in self.compressed_optimizers() if capabilities.shares(o.trainable_parameters, params)]
            apart = any(owner.ranks_are_apart for owner in owners)
            for optimizer in self.partitioned_optimizers():
                if optimizer.partition.has_replicas and capabilities.shares(optimizer.trainable_parameters, params):
                    stack.enter_context(optimizer.masters_in_parameters())
                    apart = True
            for owner in owners:
                stack.enter_context(owner.synced_parameters())
            state = super().get_state_dict(model, unwrap)
            if not apart:
                return state
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does; compressed optimizers' states go to safetensors shards. All ranks call.

        Raises:
            OSError: If a file cannot be written, or an earlier save in the background has failed; on all ranks.
        """
        wait_for_saves()  # Accelerate may remove older folders first
        with ExitStack() as stack:
            for optimizer in self.our_optimizers():
                stack.enter_context(optimizer.state_in_shards())
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load as Accelerate does; compressed optimizers' states come from the shards. All ranks call.

        Raises:
            CheckpointError: If they are damaged or do not fit.
            OSError: If a save in the background has failed; on all ranks.
        """
        wait_for_saves()
        with ExitStack() as self._compressopt.loading:
            return super().load_state(*args, **kwargs)

    def end_training(self) -> None:
        """End the training as Accelerate does, after the saves in the background.

        Raises:
            OSError: If one of them has failed; on all ranks.
        """
        wait_for_saves()
        super().end_training()

    def _save_shards(self, models: list[nn.Module], weights: Any, directory: str) -> None:
        background = self._compressopt.plugin is not None and self._compressopt.plugin.async_save
        save_shards([innermost(o) for o in self._optimizers], models, directory, background=background)
        save_compressions(self._compressopt.compressions(), directory)

    def _load_shards(self, models: list[nn.Module], directory: str) -> None:
        optimizers = [innermost(optimizer) for optimizer in self._optimizers]
        load_shards(optimizers, models, directory, self.device, self._compressopt.loading)
        load_compressions(self._compressopt.compressions(), directory)
