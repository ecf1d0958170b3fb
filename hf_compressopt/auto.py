"""Importing this module registers the compressed optimizers with transformers' Trainer: ``--optim onebit_adam``."""

from hf_compressopt.integrations.transformers import register

register()
