"""Registration of the compressed optimizers with transformers' Trainer, by import: ``--optim onebit_adam``."""

from hf_compressopt.integrations.trainer import register

register()
