"""Write docs/options.md from the signatures and docstrings of the public classes.

    python scripts/make_options.py            # write docs/options.md
    python scripts/make_options.py --check    # exit code 1 if the file differs

Run it after a change of an option, its default or its description.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import hf_compressopt
from hf_compressopt.integrations.algorithms import OPTIMIZERS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
COMPRESSED = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")
OTHERS = ("Lamb", "FusedAdam", "ZeroOptimizer", "GradientCompression")

INTRODUCTION = """\
# Options

This page is made by `python scripts/make_options.py` from the signatures and docstrings of the classes.

| where | how |
|---|---|
| Python | keyword arguments of the classes below |
| Trainer | `--optim NAME` and `--optim_args "name=value,name=value"`; `none` is None. `lr`, `betas`, `eps`, \
`weight_decay` and `max_grad_norm` are Trainer's own flags |
| Accelerate | the fields of [CompressOptPlugin](#compressoptplugin), or the environment variables of the same names |

Options that are no numbers, names or booleans, such as process groups, can only be given in Python.

## Names for `--optim`

{names}

`zero_stage=1` or `zero_stage=2` in `--optim_args` partitions any other element-wise optimizer of Trainer; the options
of [ZeroOptimizer](#zerooptimizer) are legal then. `onebit_adam` has a `zero_stage` of its own
([zero.md](zero.md#onebitadam-under-zero)). `async_save=true` writes checkpoints in the background
([checkpoints.md](checkpoints.md#save-in-the-background)).

Trainer knows the length of the run, and fits the schedule of every compressed optimizer to it, as `total_steps` does
in a loop of your own:

| option | fitted to the run |
|---|---|
| `freeze_step` | `auto`: the first step at which the variance is stable enough |
| `max_freeze_step` | 20 % of the run (1-bit LAMB with `warmup_bits` below 32: 30 %; 0/1 Adam with 32: 10 %) |
| `min_freeze_step` | as below; 1 in a run of fewer than 300 steps with `warmup_bits=32` |
| `var_update_scaler` | the length of the run, at least 16: all steps of the variance stage are variance steps |
| `local_step_scaler` | 10 % of the run |

With `warmup_bits` of less than 32, a run of fewer than 300 steps stays in its first stage, and the log says so. A
`freeze_step` of your own is honoured in a run of any length.

`scale_block` of 512 is a better choice for models narrower than 256, because a block then spans fewer rows of a matrix.
"""


class Option(NamedTuple):
    """One row: an option's type and default as code, and its description."""

    kind: str
    default: str
    text: str


def main() -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/options.md from signatures and docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file differs")
    if parser.parse_args().check:
        return int(PAGE.read_text() != render())
    PAGE.write_text(render())
    return 0


def render() -> str:
    """The whole page."""
    classes = {name: getattr(hf_compressopt, name) for name in (*COMPRESSED, *OTHERS)}
    found = {name: options(cls) for name, cls in classes.items()}
    first, *others = (found[name] for name in COMPRESSED)
    common = {name: option for name, option in first.items() if all(other.get(name) == option for other in others)}
    parts = [INTRODUCTION.format(names=_names())]
    parts += [f"## All compressed optimizers\n\n{_table(common)}\n"]
    for name in classes:
        mine = {key: option for key, option in found[name].items() if name in OTHERS or key not in common}
        more = "" if name in OTHERS else "\n\nAnd [those of all compressed optimizers](#all-compressed-optimizers)."
        parts += [f"## {name}\n\n{summary(classes[name])}\n\n{_table(mine)}{more}\n"]
    plugin = hf_compressopt.CompressOptPlugin
    parts += [
        f"## CompressOptPlugin\n\n{summary(plugin)} The environment variable of a field is `COMPRESSOPT_<FIELD>`, in "
        f"capitals.\n\n{_table(_fields(plugin))}\n"
    ]
    return "\n".join(parts)


def options(cls: type) -> dict[str, Option]:
    """The options of an optimizer class, its own constructor's first, then those that it hands to its bases."""
    described: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for documented in (base, vars(base).get("__init__"), vars(base).get("config_class")):
            described.update(descriptions(documented))
    found: dict[str, Option] = {}
    for parameter in _parameters(cls):
        name = parameter.name
        if name not in ("self", "params", "optimizer_class", "config") and name not in found:
            found[name] = Option(_kind(parameter.annotation), _code(parameter.default), described[name])
    return found


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base in (torch.optim.Optimizer, object):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())
        yield from (p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if config := vars(base).get("config_class"):  # its fields are further options
            yield from inspect.signature(config).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            return


def descriptions(documented: object) -> dict[str, str]:
    """The description of each name in the ``Args`` or ``Attributes`` of a docstring; a class must have it itself."""
    own = vars(documented).get("__doc__") if isinstance(documented, type) else getattr(documented, "__doc__", "")
    found = re.search(r"^(?:Args|Attributes):\n(.*?)(?:^\S|\Z)", inspect.cleandoc(own or ""), re.S | re.M)
    entries = re.split(r"^ {4}(?=\S)", found[1], flags=re.M)[1:] if found else []
    pairs = (entry.partition(":") for entry in entries)
    return {name.strip("* "): " ".join(text.split()) for name, _, text in pairs}


def summary(cls: type) -> str:
    """The first paragraph of a class's docstring."""
    return _markdown(" ".join(inspect.getdoc(cls).split("\n\n")[0].split()))


def _fields(plugin: type) -> dict[str, Option]:
    told, made = descriptions(plugin), plugin()
    return {
        name: Option(_kind(kind), _code(getattr(made, name)), told[name])
        for name, kind in plugin.__annotations__.items()
    }


def _names() -> str:
    rows = [f"| `{name}` | [{cls.__name__}](#{cls.__name__.lower()}) |" for name, cls in OPTIMIZERS.items()]
    rows += [f"| `zero{stage}_adamw` | [ZeroOptimizer](#zerooptimizer) of AdamW, stage {stage} |" for stage in (1, 2)]
    return "\n".join(["| name | class |", "|---|---|", *rows])


def _table(rows: dict[str, Option]) -> str:
    lines = [
        f"| `{name}` | {_cell(option.kind)} | {_cell(option.default)} | {_markdown(option.text)} |"
        for name, option in rows.items()
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *lines])


def _kind(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(
        r"\b(?:torch|dist|distributed\.distributed_c10d|hf_compressopt|collectives\.communicator|collections\.abc)\.",
        "",
        text,
    )


def _code(default: object) -> str:
    return "" if default is inspect.Parameter.empty else str(default).removeprefix("torch.")


def _cell(code: str) -> str:
    return f"`{code}`".replace("|", "\\|") if code else ""


def _markdown(text: str) -> str:
    """Docstring markup as Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
