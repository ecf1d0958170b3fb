"""The factor that keeps small float16 gradients from becoming zero: fixed, or adapted while training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor of the loss before backward.

    Attributes:
        value: The present factor.
        growth_interval: Steps without an overflow after which the factor doubles; 0 keeps it fixed.
        minimum: Lower bound of the factor.
        good_steps: Steps without an overflow since the factor changed.
        of_scaler: The factor of a GradScaler, which comes on top.
    """

    value: float = 1.0
    growth_interval: int = 0
    minimum: float = 1.0
    good_steps: int = 0
    of_scaler: float = 1.0

    @property
    def of_gradients(self) -> float:
        """The factor that the gradients of the coming backward carry."""
        return self.value * self.of_scaler

    @classmethod
    def make(cls, option: float | str, initial: float, growth_interval: int) -> LossScale:
        """Read the ``loss_scale`` option: a number > 0, or "dynamic".

        Raises:
            ValueError: For anything else.
        """
        if option == "dynamic":
            if not initial >= 1 or growth_interval < 1:
                raise ValueError(
                    f"initial_loss_scale and loss_scale_window must be >= 1, got {initial} and {growth_interval}"
                )
            return cls(float(initial), growth_interval)
        if isinstance(option, bool) or not isinstance(option, (int, float)) or not 0 < option < float("inf"):
            raise ValueError(f"loss_scale must be a number > 0 or 'dynamic', got {option!r}")
        return cls(float(option))

    def update(self, overflow: bool) -> None:
        """Count a step: halve the factor after an overflow, double it after ``growth_interval`` good steps."""
        if self.growth_interval == 0:
            return
        if overflow:
            self.value, self.good_steps = max(self.value / 2, self.minimum), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
