"""The command ``hf-compressopt``, also ``python -m hf_compressopt.cli``.

A subcommand is a function that adds its parser, with ``run`` as its default: what is called with the parsed arguments,
and returns the exit code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import hf_compressopt


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments; those of the command line where None.

    Returns:
        The subcommand's exit code. Arguments that cannot be understood exit with 2.
    """
    parser = argparse.ArgumentParser(prog="hf-compressopt", description=hf_compressopt.__doc__)
    parser.add_argument("--version", action="version", version=hf_compressopt.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_env(commands)
    _add_estimate(commands)
    _add_inspect(commands)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


def _add_env(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "env",
        help="versions, native libraries, GPUs, communicators, and what is in use for what",
        description="Print what a report of a bug should say. Exit code 1 where something cannot work as it is set up.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.set_defaults(run=_env)


def _env(arguments: argparse.Namespace) -> int:
    from hf_compressopt import environment

    facts = environment.collect()
    print(json.dumps(facts, indent=2) if arguments.json else environment.render(facts))
    return 1 if facts["problems"] else 0


def _add_estimate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "estimate",
        help="memory that parameters, gradients and optimizer state take on each rank, with ZeRO and without",
        description="Activations and what the framework itself needs come on top.",
    )
    parser.add_argument("--params", type=_count, required=True, help="number of trainable parameters: 124e6, 7e9")
    parser.add_argument("--nodes", type=_count, default=1, help="machines (%(default)s)")
    parser.add_argument("--gpus-per-node", type=_count, default=1, help="ranks on each of them (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="theirs")
    parser.add_argument(
        "--states-per-parameter",
        type=int,
        default=2,
        help="2 for Adam (the default), 1 for SGD with momentum",
    )
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="as of ZeroOptimizer (%(default)s)")
    parser.add_argument("--json", action="store_true", help="in bytes, as JSON, for programs")
    parser.set_defaults(run=_estimate)


def _count(text: str) -> int:
    """A whole number >= 1, also in the form 7e9."""
    value = float(text)
    if not 1 <= value < 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(value)


def _estimate(arguments: argparse.Namespace) -> int:
    import torch

    from hf_compressopt.zero.memory import estimate_zero_memory

    ranks = arguments.nodes * arguments.gpus_per_node
    rows = {}
    for stage, name in enumerate(("no ZeRO", "ZeRO-1", "ZeRO-2")):
        memory = estimate_zero_memory(
            arguments.params,
            ranks,
            stage,
            dtype=getattr(torch, arguments.dtype),
            states_per_parameter=arguments.states_per_parameter,
            bucket_cap_mb=arguments.bucket_cap_mb,
        )
        parts = {name: getattr(memory, name) for name in ("parameters", "gradients", "states", "buckets", "total")}
        rows[name] = parts
    if arguments.json:
        print(json.dumps({"ranks": ranks, "bytes_per_rank": rows}, indent=2))
        return 0
    print(f"{arguments.params:,} {arguments.dtype} parameters, {ranks} rank(s); GB (1e9 bytes) on each rank")
    print(f"{'':8}" + "".join(f"{part:>12}" for part in rows["no ZeRO"]))
    for name, parts in rows.items():
        print(f"{name:8}" + "".join(f"{value / 1e9:12,.3f}" for value in parts.values()))
    return 0


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, and whether it is whole",
        description="Look at the optimizers' checkpoints in a folder. Exit code 0 where all are whole, 1 where one is "
        "damaged, 2 where there is none.",
    )
    parser.add_argument("directory", help="the folder: Trainer's checkpoint-<step>, or where save_state saved")
    parser.add_argument("--prefix", help="start of the files' names (compressopt, compressopt_1, ...)")
    parser.add_argument("--verify", action="store_true", help="read every tensor and compare its checksums")
    parser.add_argument("--json", action="store_true", help="as JSON, with every tensor, for programs")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from hf_compressopt.checkpoint import inspect

    found = inspect.collect(arguments.directory, prefix=arguments.prefix, verify=arguments.verify)
    if not found:
        print(f"hf-compressopt inspect: {arguments.directory} holds no checkpoint of hf_compressopt", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if arguments.json else "\n\n".join(map(inspect.render, found)))
    return 1 if any(facts["problems"] for facts in found) else 0


if __name__ == "__main__":
    sys.exit(main())
