"""The records of a translation: a DeepSpeed configuration in the terms of this package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_compressopt.integrations.deepspeed.tables import BECOMES, LOST, SAME

AUTO = "auto"
_DEEPEST = 8  # levels of a configuration; DeepSpeed's own have four


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
        return ",".join(f"{name}={as_text(value)}" for name, value in self.optim_args.items())

    def arguments(self) -> list[str]:
        """Trainer's flags, as words of a command line."""
        words = ["--optim", self.optim] if self.optim else []
        if self.optim_args:
            words += ["--optim_args", self.optim_args_text]
        for flag, value in self.flags.items():
            words += [flag] if value is True else [flag, as_text(value)]
        return words


def read_config(path: str) -> dict[str, Any]:
    """Read a configuration.

    Raises:
        ValueError: If the file cannot be read, or is no JSON object, or names an option twice; with the file's name.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} given twice")
        return dict(pairs)

    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{path} is no DeepSpeed configuration in JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no DeepSpeed configuration in JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no DeepSpeed configuration: it must be a JSON object, got {type(config).__name__}")
    return config


def as_text(value: Any) -> str:
    """A value as a command line writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


class Options:
    """A configuration that is read option by option, and the translation so far.

    Attributes:
        rest: Options that are not read yet, by their paths.
        off: Sections that are switched off.
        translation: The translation of the options read so far.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Split a configuration into options with paths.

        Raises:
            ValueError: If a section of options is no object.
        """
        for section in ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16"):
            if not isinstance(config.get(section, {}), dict):
                raise ValueError(f"{section} must be an object with options, got {config[section]!r}")
        self.rest: dict[str, Any] = {}
        self.translation = Translation()
        self._walk("", {{"bfloat16": "bf16"}.get(name, name): value for name, value in config.items()})
        self.off = {name.split(".")[0] for name, value in self.rest.items() if name.endswith(".enabled") and not value}

    def _walk(self, prefix: str, section: dict[str, Any]) -> None:
        if prefix.count(".") > _DEEPEST:
            raise ValueError(f"{prefix[:-1]} is nested more than {_DEEPEST} levels deep")
        for name, value in section.items():
            if isinstance(value, dict):
                self._walk(f"{prefix}{name}.", value)
            else:
                self.rest[prefix + name] = value

    def take(self, option: str, default: Any = None) -> Any:
        """Remove an option and return its value."""
        return self.rest.pop(option, default)

    def take_section(self, section: str) -> list[tuple[str, Any]]:
        """Remove the rest of a section and return its paths and values."""
        names = [name for name in self.rest if name == section or name.startswith(f"{section}.")]
        return [(name, self.rest.pop(name)) for name in names]

    def take_all(self) -> list[tuple[str, Any]]:
        """Remove the rest of the configuration and return its paths and values."""
        left, self.rest = self.rest, {}
        return list(left.items())

    def say(self, option: str, value: Any, kind: str, here: str = "", remark: str = "", given: bool = True) -> None:
        """Record the translation of an option: see :class:`Row`."""
        self.translation.rows.append(Row(option, value, kind, here, remark, given))

    def flag(self, option: str, value: Any, *flags: str, remark: str = "", given: bool = True) -> None:
        """Translate an option into one of Trainer's flags, or several.

        Raises:
            ValueError: If its value is no number, or not as many as there are flags.
        """
        if value == AUTO:
            return self.say(option, value, SAME, " ".join(flags), "Trainer's flag decides, as before")
        values = value if len(flags) > 1 else [value]
        if not isinstance(values, (list, tuple)) or len(values) != len(flags):
            raise ValueError(f"{option} must be {len(flags)} numbers, got {value!r}")
        for flag, part in zip(flags, values, strict=True):
            self.translation.flags[flag] = number(option, part)
        here = " ".join(f"{flag} {as_text(part)}" for flag, part in zip(flags, values, strict=True))
        self.say(option, value, BECOMES, here, remark, given)

    def optim_arg(self, option: str, value: Any, name: str, remark: str = "", given: bool = True) -> None:
        """Translate an option into one of the optimizer's options."""
        if value == AUTO:
            return self.say(option, value, SAME, "", "left out: the default here is used")
        self.translation.optim_args[name] = value
        self.say(option, value, BECOMES, f"--optim_args {name}={as_text(value)}", remark, given)


def number(option: str, value: Any) -> Any:
    """The value, if it is a finite number.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise ValueError(f'{option} must be a finite number or "auto", got {value!r}')
    return value


def whole_number(option: str, value: Any, least: int = 1) -> int:
    """The value as an int, if it is a whole number of at least ``least``: 8, 8.0, 5e8.

    Raises:
        ValueError: If it is not.
    """
    if number(option, value) < least or value != int(value):
        raise ValueError(f'{option} must be a whole number >= {least} or "auto", got {value!r}')
    return int(value)
