"""Registration of the compressed optimizers with transformers' Trainer, by import: ``--optim onebit_adam``."""

from hf_compressopt.integrations.transformers import register

register()
