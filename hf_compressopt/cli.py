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


if __name__ == "__main__":
    sys.exit(main())
