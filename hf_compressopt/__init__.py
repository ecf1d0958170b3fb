"""Communication-compressed training for Hugging Face Trainer and Accelerate."""

# Public names load on first use, so that importing the package is cheap and needs neither transformers nor accelerate.
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_compressopt.amp import GradScaler as GradScaler
    from hf_compressopt.checkpoint.io import async_save_state as async_save_state
    from hf_compressopt.checkpoint.io import load_state as load_state
    from hf_compressopt.checkpoint.io import save_state as save_state
    from hf_compressopt.checkpoint.io import wait_for_saves as wait_for_saves
    from hf_compressopt.collectives.backward import guard_torch_clipping as guard_torch_clipping
    from hf_compressopt.collectives.buffers import SharedBuffers as SharedBuffers
    from hf_compressopt.collectives.ddp import GradientSync as GradientSync
    from hf_compressopt.collectives.ddp import attach_ddp as attach_ddp
    from hf_compressopt.collectives.ddp import ddp_hook as ddp_hook
    from hf_compressopt.collectives.gradients import average_gradients as average_gradients
    from hf_compressopt.fsdp.compression import FSDPCompression as FSDPCompression
    from hf_compressopt.fsdp.compression import compress_fsdp as compress_fsdp
    from hf_compressopt.grad_compression import GradientCompression as GradientCompression
    from hf_compressopt.grad_compression import compress_hook as compress_hook
    from hf_compressopt.integrations.accelerate import CompressOptAccelerator as CompressOptAccelerator
    from hf_compressopt.integrations.accelerate import attach as attach
    from hf_compressopt.integrations.plugin import CompressOptPlugin as CompressOptPlugin
    from hf_compressopt.integrations.trainer import register as register
    from hf_compressopt.optim.fused_adam import FusedAdam as FusedAdam
    from hf_compressopt.optim.lamb import Lamb as Lamb
    from hf_compressopt.optim.lamb import OnebitLamb as OnebitLamb
    from hf_compressopt.optim.muon import MuonAdamW as MuonAdamW
    from hf_compressopt.optim.onebit_adam import OnebitAdam as OnebitAdam
    from hf_compressopt.optim.zero_one_adam import ZeroOneAdam as ZeroOneAdam
    from hf_compressopt.zero.config import ZeroConfig as ZeroConfig
    from hf_compressopt.zero.memory import estimate_zero_memory as estimate_zero_memory
    from hf_compressopt.zero.optimizer import ZeroOptimizer as ZeroOptimizer

__version__ = "0.1.0"

#: The modules of the public names, of which there is an import above for type checkers.
_HOME = {
    "amp": ("GradScaler",),
    "checkpoint.io": ("async_save_state", "load_state", "save_state", "wait_for_saves"),
    "collectives.backward": ("guard_torch_clipping",),
    "collectives.buffers": ("SharedBuffers",),
    "collectives.ddp": ("GradientSync", "attach_ddp", "ddp_hook"),
    "collectives.gradients": ("average_gradients",),
    "fsdp.compression": ("FSDPCompression", "compress_fsdp"),
    "grad_compression": ("GradientCompression", "compress_hook"),
    "integrations.accelerate": ("CompressOptAccelerator", "attach"),
    "integrations.plugin": ("CompressOptPlugin",),
    "integrations.trainer": ("register",),
    "optim.fused_adam": ("FusedAdam",),
    "optim.lamb": ("Lamb", "OnebitLamb"),
    "optim.muon": ("MuonAdamW",),
    "optim.onebit_adam": ("OnebitAdam",),
    "optim.zero_one_adam": ("ZeroOneAdam",),
    "zero.config": ("ZeroConfig",),
    "zero.memory": ("estimate_zero_memory",),
    "zero.optimizer": ("ZeroOptimizer",),
}

__all__ = sorted(name for names in _HOME.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
