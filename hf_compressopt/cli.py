"""The command ``hf-compressopt``, also ``python -m hf_compressopt.cli``.

A subcommand is a function that adds its parser, with ``run`` as its default: what is called with the parsed arguments,
and returns the exit code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hf_compressopt

if TYPE_CHECKING:
    from hf_compressopt.planner.cost import Model


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
    _add_from_deepspeed(commands)
    _add_inspect(commands)
    _add_consolidate(commands)
    _add_import(commands)
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
        help="memory that every way to train takes on each rank; over a given network also bytes and time of a step",
        description="Memory is that of parameters, gradients and optimizer state: activations and what the framework "
        "needs come on top. With --bandwidth and --compute-seconds the seconds of a step are predicted too, by the "
        "model of docs/planner.md.",
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
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="MiB that are sent together (%(default)s)")
    parser.add_argument("--json", action="store_true", help="in bytes and seconds, as JSON, for programs")
    times = parser.add_argument_group("predicted time")
    for name, kind, text in (
        (
            "bandwidth",
            _rate,
            "each node's link, each way, which its GPUs share: 25Gbit, 3.1GB/s; of one node, its GPUs'",
        ),
        (
            "compute-seconds",
            _time,
            "a step that exchanges nothing, AdamW's update with it: measure one on a single GPU",
        ),
        ("update-seconds", _time, "of these, AdamW's update (that of a fused one, by --memory-bandwidth)"),
        ("local-bandwidth", _rate, "between the GPUs of a node, for each of them (300GB/s, as NVLink 3)"),
        ("memory-bandwidth", _rate, "memory of one rank (2TB/s, as an A100)"),
        ("host-bandwidth", _rate, "messages that a rank's CPU moves, where it computes too (no limit, as with GPUs)"),
        ("latency", _time, "one hop between nodes (20us)"),
    ):
        times.add_argument(f"--{name}", type=kind, help=text)
    times.add_argument("--steps", type=_count, default=10_000, help="of the run, for its schedule (%(default)s)")
    parser.set_defaults(run=_estimate, parser=parser)


def _count(text: str) -> int:
    """A whole number >= 1, also in the form 7e9."""
    value = float(text)
    if not 1 <= value < 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(value)


def _rate(text: str) -> float:
    return _quantity(text, "bandwidth")


def _time(text: str) -> float:
    return _quantity(text, "seconds")


def _quantity(text: str, kind: str) -> float:
    from hf_compressopt.planner import units

    try:
        return float(getattr(units, kind)(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_TIME_OPTIONS = ("update_seconds", "local_bandwidth", "memory_bandwidth", "host_bandwidth", "latency")


def _estimate(arguments: argparse.Namespace) -> int:
    import torch

    from hf_compressopt.planner import report

    ranks, dtype = arguments.nodes * arguments.gpus_per_node, getattr(torch, arguments.dtype)
    try:
        memory = report.memory_rows(
            arguments.params, ranks, dtype, arguments.states_per_parameter, arguments.bucket_cap_mb
        )
        model = _cost_model(arguments, dtype.itemsize)
    except ValueError as error:
        arguments.parser.error(str(error))
    if arguments.json:
        times = report.as_json(model, arguments.steps) if model else {}
        print(json.dumps({"ranks": ranks, "bytes_per_rank": memory, **times}, indent=2))
        return 0
    print(f"{arguments.params:,} {arguments.dtype} parameters, {ranks} rank(s); GB (1e9 bytes) on each rank")
    print(report.memory_table(memory))
    if model:
        print(f"\npredicted, of a step; the shares of stages are those of a run of {arguments.steps:,} steps")
        print(report.time_table(model, arguments.steps))
    return 0


def _cost_model(arguments: argparse.Namespace, itemsize: int) -> Model | None:
    """The model of time, where it is asked for.

    Raises:
        ValueError: If only a part of what it needs is given, or there is nobody to exchange anything with.
    """
    from hf_compressopt.planner.cost import Cluster, Model, Training

    given = {name: getattr(arguments, name) for name in _TIME_OPTIONS if getattr(arguments, name) is not None}
    needed = {"--bandwidth": arguments.bandwidth, "--compute-seconds": arguments.compute_seconds}
    missing = [name for name, value in needed.items() if value is None]
    if len(missing) == len(needed) and not given:
        return None
    if missing:
        raise ValueError(f"predicting time needs --bandwidth and --compute-seconds; {' and '.join(missing)} missing")
    nodes, gpus = arguments.nodes, arguments.gpus_per_node
    if nodes * gpus == 1:
        raise ValueError(
            "one rank sends nothing: give --nodes or --gpus-per-node, without them there is no time to tell"
        )
    if nodes == 1:
        nodes, gpus = gpus, 1  # each GPU has a link of its own
    training = Training(
        arguments.params,
        arguments.compute_seconds,
        given.pop("update_seconds", None),
        itemsize=itemsize,
        bucket_cap_mb=arguments.bucket_cap_mb,
    )
    return Model(training, Cluster(nodes, gpus, arguments.bandwidth, **given))


def _add_from_deepspeed(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "from-deepspeed",
        help="what a DeepSpeed configuration becomes here: Trainer's flags, Accelerate's call",
        description="Every option is accounted for. Exit code 0 where each has a counterpart, 1 where one has none, 2 "
        "where the file is no configuration.",
    )
    parser.add_argument("config", help="ds_config.json, for DeepSpeed itself or, with auto values, for Transformers")
    parser.add_argument("--ranks", type=_count, help="number of ranks, by which a train_batch_size is divided")
    parser.add_argument(
        "--same-arithmetic",
        action="store_true",
        help="have the compressed optimizers compute what DeepSpeed's did, faults apart; the defaults here are better",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.set_defaults(run=_from_deepspeed)


def _from_deepspeed(arguments: argparse.Namespace) -> int:
    from hf_compressopt.integrations import deepspeed
    from hf_compressopt.integrations.deepspeed import render, translation

    try:
        config = translation.read_config(arguments.config)
        found = deepspeed.translate(config, ranks=arguments.ranks, same_arithmetic=arguments.same_arithmetic)
    except ValueError as error:
        print(f"hf-compressopt from-deepspeed: {error}", file=sys.stderr)
        return 2
    print(json.dumps(render.as_json(found), indent=2) if arguments.json else render.render(found))
    return 1 if found.lost else 0


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
        _complain("inspect", f"{arguments.directory} holds no checkpoint of hf_compressopt")
        return 2
    print(json.dumps(found, indent=2) if arguments.json else "\n\n".join(map(inspect.render, found)))
    return 1 if any(facts["problems"] for facts in found) else 0


def _add_consolidate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "consolidate",
        help="a checkpoint as one ordinary file of torch.optim.AdamW's state",
        description="Write the checkpoint of any number of ranks as one file, in little memory: OUT.pt is what "
        "torch.load reads and AdamW's load_state_dict takes, OUT.safetensors has the parameters' names. Exit code 0 "
        "where it is written, 1 where it cannot be, 2 where there is no checkpoint.",
    )
    parser.add_argument("directory", help="the folder: Trainer's checkpoint-<step>, or where save_state saved")
    parser.add_argument("out", help="the file, .safetensors or .pt")
    parser.add_argument("--prefix", help="start of the files' names, where the folder holds several checkpoints")
    parser.add_argument("--force", action="store_true", help="replace OUT where it exists")
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
        help="a checkpoint of an ordinary file of torch.optim.AdamW's state",
        description="Make a checkpoint that load_state of every optimizer here takes. Exit code 0 where it is written, "
        "1 where it cannot be, 2 where there is no such file.",
    )
    parser.add_argument("source", help="the file: Trainer's optimizer.pt, or what consolidate wrote")
    parser.add_argument("directory", help="the folder, made where missing")
    parser.add_argument("--prefix", default="compressopt", help="start of the files' names (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    parser.set_defaults(run=_import)


def _import(arguments: argparse.Namespace) -> int:
    from hf_compressopt.checkpoint import portable

    if not Path(arguments.source).is_file():
        _complain("import", f"there is no file {arguments.source}")
        return 2
    try:
        portable.import_state(arguments.source, arguments.directory, prefix=arguments.prefix, force=arguments.force)
    except (ValueError, OSError) as error:
        _complain("import", error)
        return 1
    return 0


def _complain(command: str, what: object) -> None:
    print(f"hf-compressopt {command}: {what}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
