"""The registry of optimizers, by the names that users type. A new algorithm is one row here."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping

import torch

from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.fused_adam import FusedAdam
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.onebit_adam import OnebitAdam
from hf_compressopt.optim.onebit_lamb import OnebitLamb
from hf_compressopt.optim.zero_one_adam import ZeroOneAdam

#: The compressed optimizers: ``--optim NAME`` and ``CompressOptPlugin(optimizer=NAME)``.
ALGORITHMS: dict[str, type[CompressedOptimizer]] = {
    "onebit_adam": OnebitAdam,
    "zero_one_adam": ZeroOneAdam,
    "onebit_lamb": OnebitLamb,
}
#: The ordinary optimizers of this package: ``--optim NAME``.
ORDINARY: dict[str, type[torch.optim.Optimizer]] = {"lamb": Lamb, "fused_adam": FusedAdam}
#: All of them, as a view of the two tables.
OPTIMIZERS: MutableMapping[str, type[torch.optim.Optimizer]] = ChainMap(ORDINARY, ALGORITHMS)  # type: ignore[arg-type]
#: Partitioned AdamW by name, with its ZeRO stage; in Trainer it is the AdamW that is Trainer's default.
#: Any other element-wise optimizer takes zero_stage in its optim_args.
ZERO_NAMES = {"zero1_adamw": 1, "zero2_adamw": 2}
