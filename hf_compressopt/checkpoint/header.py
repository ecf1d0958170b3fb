"""The header of a checkpoint: what it says beside tensors, and which optimizers have written it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

#: The optimizers whose state is Adam's moments: as they are, or inside a ZeroOptimizer.
PLAIN = ("AdamW", "Adam", "FusedAdam", "Lamb")
COMPRESSED = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")
_ZERO = re.compile(r"ZeroOptimizer\((\w+)\)")


@dataclass(frozen=True)
class Header:
    """A checkpoint's header.

    Attributes:
        values: What the index holds.
        optimizer: Name of the optimizer's class, without ZeRO.
        compressed: Whether it is a compressed optimizer.
    """

    values: dict[str, Any]
    optimizer: str
    compressed: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> Header:
        """Tell from the values which optimizer has written them."""
        if "optimizer" in values:
            return cls(values, str(values["optimizer"]), True)
        name = str(values.get("class"))
        zero = _ZERO.fullmatch(name)
        return cls(values, zero[1] if zero else name, False)

    @property
    def title(self) -> Any:
        """The name that the header gives the optimizer, such as "ZeroOptimizer(AdamW)"."""
        return self.values.get("optimizer", self.values.get("class"))

    @property
    def is_partitioned(self) -> bool:
        """True if a ZeroOptimizer of stage 1 or 2 has written it, which saves master copies of 16-bit parameters.

        ``stage`` is a number for these, 0 for an ordinary optimizer, and a word for a compressed one.
        """
        return not self.compressed and self.values.get("stage") != 0

    def param_groups(self, count: int) -> list[Any]:
        """The hyperparameters of each param group.

        Args:
            count: Param groups of the optimizer that loads them.

        Raises:
            ValueError: If there are more or fewer.
        """
        saved = self.values.get("param_groups")
        if not isinstance(saved, list) or len(saved) != count:
            raise ValueError(f"the checkpoint has the param groups {saved!r}, this optimizer has {count}")
        return saved
