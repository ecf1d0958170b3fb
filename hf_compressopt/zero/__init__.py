"""ZeRO stages 1 and 2: an ordinary optimizer whose state and gradients are shared out among the ranks."""
