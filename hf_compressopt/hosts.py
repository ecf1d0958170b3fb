"""Attachment of an optimizer to the hosts that the program has imported, and to no others."""

from __future__ import annotations

import sys
from importlib import import_module

# The modules are named, not imported: an optimizer knows no host, and a program without one loads none.
_INTEGRATIONS = {
    "transformers.trainer": "hf_compressopt.integrations.transformers",
    "accelerate.accelerator": "hf_compressopt.integrations.accelerate",
}


def attach_to_hosts() -> None:
    """Have Trainer and Accelerate attach, if they are imported, to the optimizers that they are given.

    Optimizers call this when they are made, so that ``Trainer(optimizers=(OnebitAdam(...), None))`` and a stock
    Accelerator leave gradients local without another import. With other optimizers both work as before.
    """
    for host, integration in _INTEGRATIONS.items():
        if host in sys.modules:
            import_module(integration).register()
