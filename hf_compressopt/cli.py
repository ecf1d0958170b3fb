"""The command ``hf-compressopt``, also ``python -m hf_compressopt.cli``.

A function adds each subcommand's parser. Its default ``run`` takes the parsed arguments and returns the exit code.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hf_compressopt
from hf_compressopt.planner import command, units

_FOLDER = "the folder: Trainer's checkpoint-<step>, or the one given to save_state"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments; None takes those of the command line.

    Returns:
        The subcommand's exit code. Invalid arguments exit with 2.
    """
    for stream in (sys.stdout, sys.stderr):  # arguments and files may hold names that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(prog="hf-compressopt", description=hf_compressopt.__doc__)
    parser.add_argument("--version", action="version", version=hf_compressopt.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_env(commands)
    command.add_parser(commands)
    _add_from_deepspeed(commands)
    _add_inspect(commands)
    _add_consolidate(commands)
    _add_import(commands)
    arguments = parser.parse_args(argv)
    with _as_one_process():
        return int(arguments.run(arguments))


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Hide a launcher's WORLD_SIZE inside: every subcommand runs in one process, also on a machine of a cluster."""
    exported = os.environ.pop("WORLD_SIZE", None)
    try:
        yield
    finally:
        if exported is not None:
            os.environ["WORLD_SIZE"] = exported


def _add_env(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "env",
        help="print versions, native libraries, GPUs, communicators, and which kernels are in use",
        description="Print the information to include in a bug report. Exit code 1 if something cannot work.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_env)


def _env(arguments: argparse.Namespace) -> int:
    from hf_compressopt import environment

    facts = environment.collect()
    print(json.dumps(facts, indent=2) if arguments.json else environment.render(facts))
    return 1 if facts["problems"] else 0


def _add_from_deepspeed(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "from-deepspeed",
        help="translate a DeepSpeed configuration into Trainer's flags and Accelerate's call",
        description="Translate every option of a DeepSpeed configuration. Exit code 0 if each has a counterpart, 1 if "
        "one has none, 2 if the file is not a valid configuration.",
    )
    parser.add_argument("config", help="ds_config.json, for DeepSpeed or, with auto values, for Transformers")
    parser.add_argument("--ranks", type=_ranks, help="number of ranks, to divide a train_batch_size by")
    parser.add_argument(
        "--same-arithmetic",
        action="store_true",
        help="compute what DeepSpeed's optimizers did, except for their faults; the defaults here are better",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_from_deepspeed)


def _ranks(text: str) -> int:
    try:
        return units.count(text, most=1e6)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _from_deepspeed(arguments: argparse.Namespace) -> int:
    from hf_compressopt.integrations import deepspeed
    from hf_compressopt.integrations.deepspeed import render, translation

    try:
        config = translation.read_config(arguments.config)
        found = deepspeed.translate(config, ranks=arguments.ranks, same_arithmetic=arguments.same_arithmetic)
        text = json.dumps(render.as_json(found), indent=2) if arguments.json else render.render(found)
    except ValueError as error:
        _complain("from-deepspeed", error)
        return 2
    print(text)
    return 1 if found.lost else 0


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="list what a checkpoint holds, and check that it is complete",
        description="List the optimizers' checkpoints in a folder. Exit code 0 if all are complete, 1 if one is "
        "damaged, 2 if there is none.",
    )
    parser.add_argument("directory", help=_FOLDER)
    parser.add_argument("--prefix", type=_prefix, help="start of the file names (compressopt, compressopt_1, ...)")
    parser.add_argument("--verify", action="store_true", help="read every tensor and compare its checksums")
    parser.add_argument("--json", action="store_true", help="print JSON, with every tensor")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from hf_compressopt.format import inspect

    try:
        found = inspect.collect(arguments.directory, prefix=arguments.prefix, verify=arguments.verify)
    except (ValueError, OSError) as error:
        _complain("inspect", error)
        return 2
    if not found:
        _complain("inspect", f"{arguments.directory} holds no checkpoint of hf_compressopt")
        return 2
    print(json.dumps(found, indent=2) if arguments.json else "\n\n".join(map(inspect.render, found)))
    return 1 if any(facts["problems"] for facts in found) else 0


def _add_consolidate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "consolidate",
        help="write a checkpoint as one file with the state of torch.optim.AdamW",
        description="Write the checkpoint of any number of ranks as one file, in little memory. torch.load reads "
        "OUT.pt, for AdamW's load_state_dict. OUT.safetensors has the parameters' names. Exit code 0 if the file is "
        "written, 1 if it cannot be, 2 if there is no checkpoint.",
    )
    parser.add_argument("directory", help=_FOLDER)
    parser.add_argument("out", help="the file, .safetensors or .pt")
    parser.add_argument(
        "--prefix", type=_prefix, help="start of the file names, if the folder holds several checkpoints"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.set_defaults(run=_consolidate)


def _consolidate(arguments: argparse.Namespace) -> int:
    from hf_compressopt.checkpoint import portable

    try:
        index = portable.find_index(arguments.directory, arguments.prefix)
        if index is None:
            _complain("consolidate", f"{arguments.directory} holds no checkpoint of hf_compressopt")
            return 2
        for note in portable.consolidate(index, arguments.out, force=arguments.force):
            _complain("consolidate", note)
    except (ValueError, OSError) as error:
        _complain("consolidate", error)
        return 1
    return 0


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "import",
        help="write one file with the state of torch.optim.AdamW as a checkpoint",
        description="Write a checkpoint that load_state of every optimizer here accepts. Exit code 0 if it is written, "
        "1 if it cannot be, 2 if there is no such file.",
    )
    parser.add_argument("source", help="the file: Trainer's optimizer.pt, or the output of consolidate")
    parser.add_argument("directory", help="the folder, created if missing")
    parser.add_argument("--prefix", type=_prefix, default="compressopt", help="start of the file names (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    parser.set_defaults(run=_import)


def _import(arguments: argparse.Namespace) -> int:
    from hf_compressopt.checkpoint import portable

    try:
        if not Path(arguments.source).is_file():
            _complain("import", f"there is no file {arguments.source}")
            return 2
        portable.import_state(arguments.source, arguments.directory, prefix=arguments.prefix, force=arguments.force)
    except (ValueError, OSError) as error:
        _complain("import", error)
        return 1
    return 0


def _prefix(text: str) -> str:
    if not text or set(text) & set("/\\\0*?[]"):
        raise argparse.ArgumentTypeError(f"must be the start of a file name, such as compressopt_1, got {text!r}")
    return text


def _complain(command: str, what: object) -> None:
    print(f"hf-compressopt {command}: {what}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
