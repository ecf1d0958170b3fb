"""A DeepSpeed configuration in the terms of this package, and the rules that translate it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_compressopt.integrations.algorithms import ALGORITHMS

AUTO = "auto"
#: The kinds of rows of a translation.
BECOMES, SAME, DIFFERS, LOST = "becomes", "same", "differs", "lost"
KINDS = (BECOMES, SAME, DIFFERS, LOST)


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
        config: The options that are set, by their paths with dots, and a batch size that follows from them.
        given: The paths of those that are set.
        facts: Other facts for rules.
        optim: Trainer's ``--optim``; "" if the configuration names no optimizer.
        optim_args: Options in Trainer's ``--optim_args``, by name.
        flags: Trainer's other flags, by name; True for one without a value.
        accelerate: Arguments of ``Accelerator``, by name.
        scaler: Arguments of Accelerate's GradScalerKwargs, by name.
        rows: The translation of every option.
    """

    config: dict[str, Any]
    given: Set[str]
    facts: dict[str, Any]
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
        words += ["--optim_args", self.optim_args_text] if self.optim_args else []
        return words + [word for name, value in self.flags.items() for word in words_of(name, value)]

    def apply(self, rules: Iterable[Rule]) -> None:
        """Translate options by rules; the first rule that fits an option translates it.

        Raises:
            ValueError: If an option has an illegal value.
        """
        for rule in rules:
            said = {row.option for row in self.rows}
            given = [name for name in self.config if rule.fits(name)]
            for option in given if not rule.absent else [] if given else [rule.path]:
                case = Case(option, self.config.get(option, rule.default), self)
                if option not in said and rule.when(case):
                    self._record(rule, case)

    def _record(self, rule: Rule, case: Case) -> None:
        kind, remark, here = rule.kind, rule.remark.format(case=case), list[str]()
        names, values = [name.format(case=case) for name, _ in rule.targets], [value(case) for _, value in rule.targets]
        if AUTO in values:
            kind, here = SAME, [name for name in names if name.startswith("--")]
            remark = "Trainer's flag decides, as before" if here else "left out: the default here is used"
        else:
            for name, value in zip(names, values, strict=True):
                here += self._set(name, value)
        self.rows.append(Row(case.option, case.value, kind, " ".join(here), remark, case.option in self.given))

    def _set(self, name: str, value: Any) -> list[str]:
        """Set a flag or an option; return the words that do so."""
        place, _, key = name.rpartition(":")
        if place == "Accelerator":
            self.accelerate[key] = value
            return []
        if place == "GradScalerKwargs":
            self.scaler.setdefault(key, value)
            return [f"{place}({key}={value!r})"]
        if name == "--optim":
            self.optim = value
        elif name.startswith("--"):
            self.flags[name] = value
        else:
            self.optim_args[name] = value
            name, value = "--optim_args", f"{name}={as_text(value)}"
        return [shlex.join(words_of(name, value))]


class Case(NamedTuple):
    """One option of a configuration, as a rule sees it: its path, its value (or default), the translation so far."""

    option: str
    value: Any
    translation: Translation

    @property
    def section(self) -> str:
        """The first part of the path."""
        return self.option.split(".", 1)[0]

    @property
    def key(self) -> str:
        """The last part of the path."""
        return self.option.rsplit(".", 1)[-1]

    @property
    def config(self) -> dict[str, Any]:
        """All options of the configuration, by their paths."""
        return self.translation.config

    @property
    def facts(self) -> dict[str, Any]:
        """See :class:`Translation`."""
        return self.translation.facts

    @property
    def optim(self) -> str:
        """Trainer's ``--optim``."""
        return self.translation.optim

    @property
    def compressed(self) -> bool:
        """True for one of the compressed optimizers."""
        return self.optim in ALGORITHMS


class Rule(NamedTuple):
    """One row of the tables.

    Attributes:
        path: The option; "SECTION*" for a section, "*" for any option.
        when: The condition.
        kind: The kind of the row in the report.
        targets: Flags and options to set, and for each of them its value.
        remark: A word for the user, in which ``{case}`` stands for the :class:`Case`.
        absent: True if the rule is for configurations that leave the option out.
        default: DeepSpeed's default, in such rules.
    """

    path: str
    when: Callable[[Case], Any]
    kind: str
    targets: Sequence[tuple[str, Callable[[Case], Any]]]
    remark: str
    absent: bool
    default: Any

    def fits(self, option: str) -> bool:
        """Return whether the rule is for an option."""
        section = self.path.removesuffix("*")
        return option == section or (self.path != section and f"{option}.".startswith(f"{section}." if section else ""))


def words_of(flag: str, value: Any) -> list[str]:
    """Return a flag as words of a command line."""
    return [flag] if value is True else [flag, as_text(value)]


def as_text(value: Any) -> str:
    """Return a value as a command line writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def number(option: str, value: Any) -> Any:
    """Return the value, if it is a finite number.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise ValueError(f'{option} must be a finite number or "auto", got {value!r}')
    return value
