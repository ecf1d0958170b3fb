"""Communication-compressed training for Hugging Face Trainer and Accelerate."""

# Public names load on first use, so that importing the package is cheap and needs neither transformers nor accelerate.
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_compressopt.amp import GradScaler
    from hf_compressopt.checkpoint.io import async_save_state, load_state, save_state, wait_for_saves
    from hf_compressopt.collectives.ddp import GradientSync, attach_ddp, average_gradients, ddp_hook
    from hf_compressopt.collectives.torch_clipping import guard_torch_clipping
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
    "CompressOptAccelerator": "hf_compressopt.integrations.accelerate",
    "CompressOptPlugin": "hf_compressopt.integrations.plugin",
    "FSDPCompression": "hf_compressopt.fsdp.compression",
    "FusedAdam": "hf_compressopt.optim.fused_adam",
    "GradScaler": "hf_compressopt.amp",
    "GradientCompression": "hf_compressopt.grad_compression",
    "GradientSync": "hf_compressopt.collectives.ddp",
    "Lamb": "hf_compressopt.optim.lamb",
    "MuonAdamW": "hf_compressopt.optim.muon",
    "OnebitAdam": "hf_compressopt.optim.onebit_adam",
    "OnebitLamb": "hf_compressopt.optim.lamb",
    "ZeroOneAdam": "hf_compressopt.optim.zero_one_adam",
    "ZeroConfig": "hf_compressopt.zero.config",
    "ZeroOptimizer": "hf_compressopt.zero.optimizer",
    "async_save_state": "hf_compressopt.checkpoint.io",
    "attach_ddp": "hf_compressopt.collectives.ddp",
    "average_gradients": "hf_compressopt.collectives.ddp",
    "compress_fsdp": "hf_compressopt.fsdp.compression",
    "compress_hook": "hf_compressopt.grad_compression",
    "ddp_hook": "hf_compressopt.collectives.ddp",
    "attach": "hf_compressopt.integrations.accelerate",
    "estimate_zero_memory": "hf_compressopt.zero.memory",
    "guard_torch_clipping": "hf_compressopt.collectives.torch_clipping",
    "load_state": "hf_compressopt.checkpoint.io",
    "register": "hf_compressopt.integrations.trainer",
    "save_state": "hf_compressopt.checkpoint.io",
    "wait_for_saves": "hf_compressopt.checkpoint.io",
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
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
