"""The optimizers."""
