"""Gradients in bfloat16: what torch's bf16_compress_hook does, times 1/W first and then the sum in 16 bits."""

from __future__ import annotations

import torch

from rivals.rival import Rival, joined, write


class BFloat16(Rival):
    """The mean of the gradients by an all-reduce in bfloat16."""

    @torch.no_grad()
    def gradients(self) -> None:
        """Exchange the gradients, in place."""
        grads = [param.grad for param in self.params if param.grad is not None]
        write(self.mean_(joined(grads).to(torch.bfloat16)).float(), grads)
