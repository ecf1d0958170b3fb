"""A DeepSpeed configuration in the terms of this package."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

#: The kinds of rows of a translation.
BECOMES, SAME, DIFFERS, LOST = KINDS = ("becomes", "same", "differs", "lost")


@dataclass(frozen=True)
class Row:
    """The translation of one option.

    Attributes:
        option: Its path in the configuration, with dots.
        value: Its value; DeepSpeed's default if ``given`` is False.
        kind: "becomes" (a flag or option here), "same" (nothing to do), "differs" (something else, see the remark), or
            "lost" (no counterpart).
        here: The flag or option.
        remark: The reason, or the difference.
        given: True if the configuration has the option.
    """

    option: str
    value: Any
    kind: str
    here: str = ""
    remark: str = ""
    given: bool = True


@dataclass
class Translation:
    """A configuration in the terms of this package.

    Attributes:
        optim: Trainer's ``--optim``; "" if the configuration names no optimizer.
        optim_args: Options in Trainer's ``--optim_args``, by name.
        flags: Trainer's other flags, by name; True for one without a value.
        accelerate: Arguments of ``Accelerator``, by name.
        scaler: Arguments of Accelerate's GradScalerKwargs, by name.
        rows: The translation of every option.
    """

    optim: str = ""
    optim_args: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    accelerate: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def lost(self) -> list[Row]:
        """Options without a counterpart."""
        return [row for row in self.rows if row.kind == LOST]

    @property
    def optim_args_text(self) -> str:
        """The options as ``--optim_args`` takes them."""
        return ",".join(f"{name}={_text(value)}" for name, value in self.optim_args.items())

    def flags_as_words(self) -> list[list[str]]:
        """Trainer's flags, each as words of a command line."""
        named = {"--optim": self.optim, "--optim_args": self.optim_args_text}
        return [_words(flag, value) for flag, value in ({k: v for k, v in named.items() if v} | self.flags).items()]

    def arguments(self) -> list[str]:
        """Trainer's flags, as the words of one command line."""
        return [word for words in self.flags_as_words() for word in words]

    def set(self, name: str, value: Any) -> str:
        """Set "--FLAG" of Trainer, "Accelerator:NAME", "GradScalerKwargs:NAME", or the option NAME of the optimizer.

        Returns:
            The words that do so, for the report.
        """
        place, _, key = name.rpartition(":")
        if place == "Accelerator":
            self.accelerate[key] = value
            return ""
        if place == "GradScalerKwargs":
            self.scaler.setdefault(key, value)
            return f"{place}({key}={value!r})"
        if name == "--optim":
            self.optim = value
        elif name.startswith("--"):
            self.flags[name] = value
        else:
            self.optim_args[name] = value
            name, value = "--optim_args", f"{name}={_text(value)}"
        return shlex.join(_words(name, value))


def _words(flag: str, value: Any) -> list[str]:
    return [flag] if value is True else [flag, _text(value)]


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
