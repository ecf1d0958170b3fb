"""Communication-compressed training for Hugging Face Trainer and Accelerate."""

# Public names load on first use, so that importing the package is cheap and needs neither transformers nor accelerate.
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_compressopt.amp import GradScaler
    from hf_compressopt.checkpoint.io import async_save_state, load_state, save_state, wait_for_saves
    from hf_compressopt.collectives.backward import guard_torch_clipping
    from hf_compressopt.collectives.ddp import GradientSync, attach_ddp, ddp_hook
    from hf_compressopt.collectives.gradients import average_gradients
    from hf_compressopt.fsdp.compression import FSDPCompression, compress_fsdp
    from hf_compressopt.grad_compression import GradientCompression, compress_hook
    from hf_compressopt.integrations.accelerate import CompressOptAccelerator, attach
    from hf_compressopt.integrations.plugin import CompressOptPlugin
    from hf_compressopt.integrations.trainer import register
    from hf_compressopt.optim.fused_adam import FusedAdam
    from hf_compressopt.optim.lamb import Lamb, OnebitLamb
    from hf_compressopt.optim.muon import MuonAdamW
    from hf_compressopt.optim.onebit_adam import OnebitAdam
    from hf_compressopt.optim.zero_one_adam import ZeroOneAdam
    from hf_compressopt.zero.config import ZeroConfig
    from hf_compressopt.zero.memory import estimate_zero_memory
    from hf_compressopt.zero.optimizer import ZeroOptimizer

__version__ = "0.1.0"

_HOME = {
    "amp": ("GradScaler",),
    "checkpoint.io": ("async_save_state", "load_state", "save_state", "wait_for_saves"),
    "collectives.backward": ("guard_torch_clipping",),
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

__all__ = [
    "CompressOptAccelerator",
    "CompressOptPlugin",
    "FSDPCompression",
    "FusedAdam",
    "GradScaler",
    "GradientCompression",
    "GradientSync",
    "Lamb",
    "MuonAdamW",
    "OnebitAdam",
    "OnebitLamb",
    "ZeroOneAdam",
    "ZeroConfig",
    "ZeroOptimizer",
    "async_save_state",
    "attach",
    "attach_ddp",
    "average_gradients",
    "compress_fsdp",
    "compress_hook",
    "ddp_hook",
    "estimate_zero_memory",
    "guard_torch_clipping",
    "load_state",
    "register",
    "save_state",
    "wait_for_saves",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
