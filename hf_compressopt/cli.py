"""The command ``hf-compressopt``, also ``python -m hf_compressopt.cli``."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hf_compressopt
from hf_compressopt.planner import estimate

_FOLDER = "the folder: Trainer's checkpoint-<step>, or the one given to save_state"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand."""
    for stream in (sys.stdout, sys.stderr):  # arguments and files may hold names that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(prog="hf-compressopt", description=hf_compressopt.__doc__)
    parser.add_argument("--version", action="version", version=hf_compressopt.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    estimate.add_parser(commands)
    for name, run, failed, help_line, description, options in _SUBCOMMANDS:
        subparser = commands.add_parser(name, help=help_line, description=description)
        for option, keywords in options.items():
            subparser.add_argument(option, **keywords)
        subparser.set_defaults(run=run, name=name, failed=failed)
    arguments = parser.parse_args(argv)
    try:
        with _as_one_process():
            code = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough; nothing is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        if not getattr(arguments, "failed", 0):
            raise
        _complain(arguments.name, error)
        return int(arguments.failed)
    return code


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Hide a launcher's WORLD_SIZE inside: every subcommand runs in one process, also on a machine of a cluster."""
    exported = os.environ.pop("WORLD_SIZE", None)
    try:
        yield
    finally:
        if exported is not None:
            os.environ["WORLD_SIZE"] = exported


def _env(arguments: argparse.Namespace) -> int:
    from hf_compressopt import environment

    facts = environment.collect()
    print(json.dumps(facts, indent=2) if arguments.json else environment.render(facts))
    return 1 if facts["problems"] else 0


def _selftest(arguments: argparse.Namespace) -> int:
    from hf_compressopt import selftest

    try:
        found = selftest.run(arguments.gpu)
    except RuntimeError as error:
        return _complain("selftest", error)
    print(json.dumps(found, indent=2))
    return 0 if found["passed"] else 1


def _from_deepspeed(arguments: argparse.Namespace) -> int:
    from hf_compressopt.integrations import deepspeed

    config = deepspeed.read_config(arguments.config)
    found = deepspeed.translate(config, ranks=arguments.ranks, same_arithmetic=arguments.same_arithmetic)
    print(json.dumps(deepspeed.as_json(found), indent=2) if arguments.json else deepspeed.render(found))
    return 1 if found.lost else 0


def _inspect(arguments: argparse.Namespace) -> int:
    from hf_compressopt.format import inspect

    found = inspect.collect(arguments.directory, prefix=arguments.prefix, verify=arguments.verify)
    if not found:
        return _complain("inspect", f"{arguments.directory} holds no checkpoint of hf_compressopt")
    print(json.dumps(found, indent=2) if arguments.json else "\n\n".join(map(inspect.render, found)))
    return 1 if any(facts["problems"] for facts in found) else 0


def _consolidate(arguments: argparse.Namespace) -> int:
    from hf_compressopt.checkpoint import portable

    index = portable.find_index(arguments.directory, arguments.prefix)
    if index is None:
        return _complain("consolidate", f"{arguments.directory} holds no checkpoint of hf_compressopt")
    for note in portable.consolidate(index, arguments.out, force=arguments.force):
        _complain("consolidate", note)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from hf_compressopt.checkpoint import portable

    if not Path(arguments.source).is_file():
        return _complain("import", f"there is no file {arguments.source}")
    portable.import_state(arguments.source, arguments.directory, prefix=arguments.prefix, force=arguments.force)
    return 0


def _prefix(text: str) -> str:
    if not text or set(text) & set("/\\\0*?[]"):
        raise argparse.ArgumentTypeError(f"must be the start of a file name, such as compressopt_1, got {text!r}")
    return text


def _complain(command: str, what: object) -> int:
    """Print to stderr. Returns the exit code of a command that cannot begin."""
    from hf_compressopt.format.inspect import printable

    text = "\n".join(map(printable, str(what).splitlines()))  # names in a file may hold terminal sequences
    print(f"hf-compressopt {command}: {text}", file=sys.stderr)
    return 2


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _prefix_option(text: str, default: str | None = None) -> dict[str, Any]:
    return {"type": _prefix, "default": default, "help": f"start of the file names{text}"}


#: Name, what runs and returns the exit code, that of a ValueError or OSError (0: none is expected), help in the list,
#: its own help, keyword arguments of ``add_argument``.
_SUBCOMMANDS: tuple[tuple[str, Callable[[argparse.Namespace], int], int, str, str, dict[str, dict[str, Any]]], ...] = (
    (
        "env",
        _env,
        0,
        "print versions, native libraries, GPUs, communicators, and which kernels are in use",
        "Print the information to include in a bug report. Exit code 1 if something cannot work.",
        {"--json": _flag("print JSON")},
    ),
    (
        "selftest",
        _selftest,
        0,
        "test all kernels and each optimizer on this machine, and print one JSON for an issue",
        "Compare all native kernels with the reference at odd sizes and alignments, and train with each optimizer on "
        "two processes. Exit code 0 if all is well, 1 if something differs, 2 if there is no GPU to test.",
        {"--gpu": _flag("on the GPU; over NCCL where there are two, else over gloo")},
    ),
    (
        "from-deepspeed",
        _from_deepspeed,
        2,
        "translate a DeepSpeed configuration into Trainer's flags and Accelerate's call",
        "Translate every option of a DeepSpeed configuration. Exit code 0 if each has a counterpart, 1 if one has "
        "none, 2 if the file is not a valid configuration.",
        {
            "config": {"help": "ds_config.json, for DeepSpeed or, with auto values, for Transformers"},
            "--ranks": {
                "type": estimate.argument(partial(estimate.count, most=1e6)),
                "help": "number of ranks, to divide a train_batch_size by",
            },
            "--same-arithmetic": _flag(
                "compute what DeepSpeed's optimizers did, except for their faults; the defaults here are better"
            ),
            "--json": _flag("print JSON"),
        },
    ),
    (
        "inspect",
        _inspect,
        2,
        "list what a checkpoint holds, and check that it is complete",
        "List the optimizers' checkpoints in a folder. Exit code 0 if all are complete, 1 if one is damaged, 2 if "
        "there is none.",
        {
            "directory": {"help": _FOLDER},
            "--prefix": _prefix_option(" (compressopt, compressopt_1, ...)"),
            "--verify": _flag("read every tensor and compare its checksums"),
            "--json": _flag("print JSON, with every tensor"),
        },
    ),
    (
        "consolidate",
        _consolidate,
        1,
        "write a checkpoint as one file with the state of torch.optim.AdamW",
        "Write the checkpoint of any number of ranks as one file, in little memory. torch.load reads OUT.pt, for "
        "AdamW's load_state_dict. OUT.safetensors has the parameters' names. Exit code 0 if the file is written, 1 if "
        "it cannot be, 2 if there is no checkpoint.",
        {
            "directory": {"help": _FOLDER},
            "out": {"help": "the file, .safetensors or .pt"},
            "--prefix": _prefix_option(", if the folder holds several checkpoints"),
            "--force": _flag("replace OUT if it exists"),
        },
    ),
    (
        "import",
        _import,
        1,
        "write one file with the state of torch.optim.AdamW as a checkpoint",
        "Write a checkpoint that load_state of every optimizer here accepts. Exit code 0 if it is written, 1 if it "
        "cannot be, 2 if there is no such file.",
        {
            "source": {"help": "the file: Trainer's optimizer.pt, or the output of consolidate"},
            "directory": {"help": "the folder, created if missing"},
            "--prefix": _prefix_option(" (%(default)s)", "compressopt"),
            "--force": _flag("replace an existing checkpoint"),
        },
    ),
)


if __name__ == "__main__":
    sys.exit(main())
