"""An Axolotl plug-in that adds the compressed optimizers to its trainers; the README beside this file says how."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

import hf_compressopt


class CompressOpt(BasePlugin):
    """Registers the optimizers when Axolotl reads the configuration, before it makes a Trainer."""

    def register(self, cfg: dict[str, Any]) -> None:
        """Teach Trainer `optimizer: onebit_adam` and `optim_args: grad_compression=int4`."""
        hf_compressopt.register()
