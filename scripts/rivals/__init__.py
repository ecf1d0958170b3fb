"""Methods that others use on slow networks, each written from its paper, for comparisons on equal terms."""

from rivals.bfloat16 import BFloat16
from rivals.demo import DeMo
from rivals.diloco import DiLoCo
from rivals.local_sgd import LocalSGD
from rivals.powersgd import PowerSGD
from rivals.rival import Rival
from rivals.signsgd import SignSGD

#: Methods around AdamW.
RIVALS = {"bfloat16": BFloat16, "PowerSGD": PowerSGD, "LocalSGD": LocalSGD, "DiLoCo": DiLoCo}
#: Methods that are optimizers.
OPTIMIZERS = {"DeMo": DeMo, "SignSGD": SignSGD}

__all__ = ["OPTIMIZERS", "RIVALS", "BFloat16", "DeMo", "DiLoCo", "LocalSGD", "PowerSGD", "Rival", "SignSGD"]
