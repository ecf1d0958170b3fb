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
from pathlib import Path

import hf_compressopt
from hf_compressopt.integrations.algorithms import OPTIMIZERS
from hf_compressopt.options import ACCEPTED, Option, descriptions, options_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
COMPRESSED = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")
OTHERS = ("Lamb", "FusedAdam", "MuonAdamW", "ZeroOptimizer", "GradientCompression")

INTRODUCTION = """\
# Options

Made by `python scripts/make_options.py` from signatures and docstrings. Each option is described once; nobody has
to set the [accepted arguments](#accepted-arguments).

| where | how |
|---|---|
| Python | keyword arguments of the classes below |
| Trainer | `--optim NAME --optim_args "name=value,name=value"`; `none` is None, `--optim_args help` lists all. \
`lr`, `betas`, `eps`, `weight_decay` and `max_grad_norm` are Trainer's own flags |
| Accelerate | the fields of [CompressOptPlugin](#compressoptplugin), or environment variables of the same names |

## Names for `--optim`

{names}

`zero_stage` partitions any other element-wise optimizer of Trainer, by [ZeroOptimizer](#zerooptimizer).
`grad_compression` goes with any optimizer. `async_save=true` saves
[in the background](checkpoints.md#save-in-the-background).

Trainer fits every schedule to the length of the run, as `total_steps` does in a loop of your own:

| option | fitted to the run |
|---|---|
| `max_freeze_step` | 20 % of the run (1-bit LAMB with `warmup_bits` below 32: 30 %; 0/1 Adam with 32: 10 %) |
| `min_freeze_step` | 100; 1 in a run of fewer than 300 steps with `warmup_bits=32` |
| both | beyond the end of a run of fewer than 1/(1 - beta2) or 300 steps, unless `warmup_bits=32` |
| `var_update_scaler` | the length of the run, at least 16 |
| `local_step_scaler` | 10 % of the run |

`scale_block` of 512 suits models narrower than 256.
"""


SPELLINGS = """\
## Accepted arguments

Spellings of DeepSpeed and of torch's AdamW, and what is found by itself.
"""


def main() -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/options.md from signatures and docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file differs")
    if parser.parse_args().check:
        return int(PAGE.read_text() != render())
    PAGE.write_text(render())
    return 0


def render() -> str:
    """The whole page: each option once, where the first class has it."""
    classes = {name: getattr(hf_compressopt, name) for name in (*COMPRESSED, *OTHERS)}
    first, *others = (options(classes[name]) for name in COMPRESSED)
    common = {name: option for name, option in first.items() if all(other.get(name) == option for other in others)}
    parts = [INTRODUCTION.format(names=_names())]
    parts += [f"## All compressed optimizers\n\n{_table(common)}\n"]
    known = dict(common)
    for name, cls in classes.items():
        parts += [_section(name, summary(cls), options(cls), known)]
    plugin = hf_compressopt.CompressOptPlugin
    words = f"{summary(plugin)} The environment variable of a field is `COMPRESSOPT_<FIELD>`, in capitals."
    parts += [_section("CompressOptPlugin", words, _fields(plugin), known)]
    found = {key: option for cls in reversed(classes.values()) for key, option in options_of(cls).items()}
    parts += [f"{SPELLINGS}\n{_table({name: found[name] for name in ACCEPTED})}\n"]
    return "\n".join(parts)


def _section(name: str, words: str, found: dict[str, Option], known: dict[str, Option]) -> str:
    """The section of a class; options that are known with the same default are named only."""
    told = name == "CompressOptPlugin"  # whose own words count: it also knows what an optimizer does not
    mine = {key: option for key, option in found.items() if not _is_known(key, option, known, told=told)}
    same = {key for key in mine if key in known and known[key].help == mine[key].help}
    shared = [f"`{key}`" for key in found if key not in mine]
    known |= {key: option for key, option in mine.items() if key not in known}
    more = f"\n\nAnd, as above: {', '.join(shared)}." if shared else ""
    if name in COMPRESSED:
        more = "\n\nAnd the options of [all compressed optimizers](#all-compressed-optimizers)."
    shown = {key: option._replace(help="As above.") if key in same else option for key, option in mine.items()}
    table = f"\n\n{_table(shown)}" if shown else ""
    return f"## {name}\n\n{words}{table}{more}\n"


def _is_known(name: str, option: Option, known: dict[str, Option], *, told: bool) -> bool:
    if name not in known or not option.help:
        return not option.help
    return not told and _code(known[name].default) == _code(option.default)


def options(cls: type) -> dict[str, Option]:
    """The options of a class but for the accepted spellings; each has a description."""
    found = {name: option for name, option in options_of(cls).items() if name not in ACCEPTED}
    if missing := [name for name, option in found.items() if not option.help]:
        raise KeyError(f"no description of {', '.join(missing)} in the docstrings of {cls.__name__}")
    return found


def summary(cls: type) -> str:
    """The first paragraph of a class's docstring."""
    return _markdown(" ".join(inspect.getdoc(cls).split("\n\n")[0].split()))


def _fields(plugin: type) -> dict[str, Option]:
    told, made = descriptions(plugin), plugin()
    return {
        name: Option((), getattr(made, name), kind, True, told.get(name, ""))
        for name, kind in plugin.__annotations__.items()
    }


def _names() -> str:
    rows = [f"| `{name}` | [{cls.__name__}](#{cls.__name__.lower()}) |" for name, cls in OPTIMIZERS.items()]
    rows += [f"| `zero{stage}_adamw` | [ZeroOptimizer](#zerooptimizer) of AdamW, stage {stage} |" for stage in (1, 2)]
    return "\n".join(["| name | class |", "|---|---|", *rows])


def _table(rows: dict[str, Option]) -> str:
    lines = [f"| `{name}` | {_cell(_value(option))} | {_markdown(option.help)} |" for name, option in rows.items()]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *lines])


def _value(option: Option) -> str:
    """The default, and the type where the default does not show it."""
    default, kind = _code(option.default), _kind(option.annotation)
    return f"{default}: {kind}" if default == "None" else default


def _kind(annotation: str) -> str:
    annotation = annotation.replace(" | None", "")
    modules = r"torch|dist|distributed\.distributed_c10d|hf_compressopt|collectives\.communicator|collections\.abc"
    return re.sub(rf"\b(?:{modules})\.", "", annotation)


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
