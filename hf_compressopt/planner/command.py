"""The command ``hf-compressopt estimate``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hf_compressopt.planner import units

if TYPE_CHECKING:
    from hf_compressopt.planner.cost import Model

_Value = TypeVar("_Value")

_MOST_RANKS = 1_000_000
PARAMS_HELP = "number of trainable parameters: 124e6, 7e9"
_DESCRIPTION = (
    "Estimate the memory of parameters, gradients and optimizer state on each rank. Activations and the framework's "
    "own memory come on top. With --bandwidth and --compute-seconds, also predict the seconds of a step, by the model "
    "of docs/planner.md."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``estimate``."""
    parser = commands.add_parser(
        "estimate",
        help="estimate the memory of each optimizer and, for a given network, the bytes and the time of a step",
        description=_DESCRIPTION,
    )
    ranks = argument(partial(units.count, most=_MOST_RANKS))
    parser.add_argument("--params", type=argument(units.count), required=True, help=PARAMS_HELP)
    parser.add_argument("--nodes", type=ranks, default=1, help="number of machines (%(default)s)")
    parser.add_argument("--gpus-per-node", type=ranks, default=1, help="ranks on each machine (%(default)s)")
    add_training_arguments(parser)
    parser.set_defaults(run=_run, parser=parser)


def add_training_arguments(parser: argparse.ArgumentParser, *, measured: bool = False) -> None:
    """Add all arguments but the number of ranks; with ``measured`` the help says that missing ones are measured."""
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="dtype of the parameters"
    )
    parser.add_argument(
        "--states-per-parameter",
        type=argument(partial(units.count, least=0, most=16)),
        default=2,
        help="values of state per parameter: 2 for Adam (the default), 1 for SGD with momentum",
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=argument(units.mebibytes),
        default=25.0,
        help="MiB of float32 values in a bucket, which is sent together (%(default)s)",
    )
    parser.add_argument(
        "--topology",
        choices=["auto", "flat", "two-level"],
        default="auto",
        help="topology of compressed messages: flat, two-level (one message per node), or auto: two-level if there "
        "are several nodes of several GPUs (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    _add_times(parser, measured)


def _add_times(parser: argparse.ArgumentParser, measured: bool) -> None:
    rate, time = argument(units.bandwidth), argument(units.seconds)
    times = parser.add_argument_group("predicted time")
    for name, kind, text, default in (
        (
            "bandwidth",
            rate,
            "rate of a node's link in each direction, which its GPUs share; with one node, of each GPU's link: 25Gbit",
            "",
        ),
        (
            "compute-seconds",
            time,
            "a step without communication, with AdamW's update: measure it on one GPU",
            "",
        ),
        ("update-seconds", time, "AdamW's share of --compute-seconds", "a fused AdamW at --memory-bandwidth"),
        ("local-bandwidth", rate, "rate of the links between the GPUs of a node", "300GB/s, as NVLink 3"),
        ("memory-bandwidth", rate, "memory bandwidth of one rank", "2TB/s, as an A100"),
        ("host-bandwidth", rate, "rate at which a rank's CPU moves messages while it computes", "no limit"),
        ("latency", time, "latency of one hop between nodes", "20us"),
    ):
        told = "measured" if measured else default
        times.add_argument(f"--{name}", type=kind, help=f"{text} (default: {told})" if told else text)
    length = "steps of the run, which decide the schedule (%(default)s)"
    times.add_argument("--steps", type=argument(partial(units.count, most=1e12)), default=10_000, help=length)
    bits = "bits per element of the gradients that compressed optimizers average in the first stage (default: theirs)"
    times.add_argument("--warmup-bits", type=int, choices=[4, 8, 16, 32], help=bits)


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A parser for argparse, which shows the message of an ArgumentTypeError and hides that of a ValueError."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


_TRAINING_OPTIONS = ("update_seconds", "warmup_bits")
_CLUSTER_OPTIONS = ("local_bandwidth", "memory_bandwidth", "host_bandwidth", "latency")


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from hf_compressopt.planner import report

    ranks, dtype = arguments.nodes * arguments.gpus_per_node, getattr(torch, arguments.dtype)
    if ranks > _MOST_RANKS:
        arguments.parser.error(f"--nodes times --gpus-per-node must be at most {_MOST_RANKS:,} ranks, got {ranks:,}")
    node_size = 1 if arguments.topology == "flat" or arguments.nodes == 1 else arguments.gpus_per_node
    try:
        memory = report.memory_rows(
            arguments.params, ranks, dtype, arguments.states_per_parameter, arguments.bucket_cap_mb, node_size
        )
        model = cost_model(arguments, dtype.itemsize)
    except ValueError as error:
        arguments.parser.error(str(error))
    if arguments.json:
        times = report.as_json(model, arguments.steps) if model else {}
        print(json.dumps({"ranks": ranks, "bytes_per_rank": memory, **times}, indent=2))
        return 0
    print(f"{arguments.params:,} {arguments.dtype} parameters, {ranks} rank(s); GB (1e9 bytes) on each rank")
    print(report.memory_table(memory))
    if model:
        print(f"\npredicted time of a step; the stages have the shares of a run of {arguments.steps:,} steps")
        print(report.time_table(model, arguments.steps))
        print(f"\npredicted for a run of {arguments.steps:,} steps")
        print(report.run_table(model, arguments.steps))
    return 0


def cost_model(arguments: argparse.Namespace, itemsize: int) -> Model | None:
    """The model of time, or None if no time is asked for.

    Raises:
        ValueError: If an argument that the model needs is missing, or if there is only one rank.
    """
    from hf_compressopt.planner.cost import Model, Training
    from hf_compressopt.planner.wire import Cluster

    of_training, of_cluster = (
        {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
        for names in (_TRAINING_OPTIONS, _CLUSTER_OPTIONS)
    )
    needed = {"--bandwidth": arguments.bandwidth, "--compute-seconds": arguments.compute_seconds}
    missing = [name for name, value in needed.items() if value is None]
    if len(missing) == len(needed) and not of_training and not of_cluster:
        return None
    if missing:
        raise ValueError(f"predicting time needs --bandwidth and --compute-seconds; {' and '.join(missing)} missing")
    nodes, gpus = arguments.nodes, arguments.gpus_per_node
    if nodes * gpus == 1:
        raise ValueError("one rank sends nothing, so there is no time to predict: give --nodes or --gpus-per-node")
    if nodes == 1:
        nodes, gpus = gpus, 1  # each GPU has a link of its own
    training = Training(
        arguments.params,
        arguments.compute_seconds,
        itemsize=itemsize,
        bucket_cap_mb=arguments.bucket_cap_mb,
        **of_training,
    )
    return Model(training, Cluster(nodes, gpus, arguments.bandwidth, topology=arguments.topology, **of_cluster))
