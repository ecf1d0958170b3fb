"""The command ``hf-compressopt estimate``: its arguments, which ``advise`` shares, and numbers as people write them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hf_compressopt.planner.cost import Model

_Value = TypeVar("_Value")

_MOST_RANKS = 1_000_000
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_SCALES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_RATES = (1.0, 1e18)  # bytes per second
_TIMES = (1e-12, 1e7)  # seconds
_SMALLEST_MIB, _LARGEST_MIB = 4 / 2**20, 1e6  # one float32 value
PARAMS_HELP = "number of trainable parameters: 350M, 7B, 124e6"
_DESCRIPTION = (
    "Estimate the memory of parameters, gradients and optimizer state on each rank. Activations and the framework's "
    "own memory come on top. With --bandwidth and --compute-seconds, also predict the seconds of a step, by the model "
    "of docs/dev/planner.md, rank the optimizers by the time of a run, and say which one to use."
)

# -- numbers ----------------------------------------------------------------------------------------------------------


def count(text: str, least: int = 1, most: float = 1e15) -> int:
    """A whole number from text: 8, 124e6, 350M, 7B."""
    legal = f"a whole number from {least} to {most:g}, such as 8, 124e6 or 350M"
    found = re.fullmatch(r"(.*?)([kKmMgGbBtT]?)", text.strip())
    value = _float(found[1], legal, text) * _PREFIXES[found[2].lower()] if found else -1
    if not least <= value <= most or value != int(value):
        raise ValueError(f"must be {legal}, got {text!r}")
    return int(value)


def mebibytes(text: str) -> float:
    """A size in MiB from text: 25, 0.5."""
    legal = f"a number of MiB, at least one float32 value and at most {_LARGEST_MIB:g}"
    value = _float(text, legal, text)
    if not _SMALLEST_MIB <= value <= _LARGEST_MIB:
        raise ValueError(f"must be {legal}, got {text!r}")
    return value


def bandwidth(text: str) -> float:
    """Bytes per second from text: 10G, 25Gbit, 25Gbps, 100 Mbit/s, 3.1GB/s. Prefixes are powers of 1000."""
    legal = "a number with a unit, such as 25Gbit, 25Gbps, 25G, 100Mbit/s (bits) or 3.1GB/s (bytes)"
    found = re.fullmatch(r"(\S*?)\s*([kKmMgGtT]?)(bit|b|B|byte|)(/s|ps|)", text.strip())
    if found is None or (found[3] in ("b", "B") and not found[4]) or not (found[3] or (found[2] and not found[4])):
        raise ValueError(f"must be {legal}; got {text!r}")
    scale = _PREFIXES[found[2].lower()] / (1 if found[3] in ("B", "byte") else 8)
    return _scaled(found[1], scale, text, legal, _RATES, "bytes per second")


def seconds(text: str) -> float:
    """Seconds from text: 1.2, 1.2s, 350ms, 20us."""
    legal = "a number of seconds, or with a unit: 1.2, 1.2s, 350ms, 20us"
    found = re.fullmatch(r"(\S*?)\s*(s|ms|us|)", text.strip())
    if found is None:
        raise ValueError(f"must be {legal}; got {text!r}")
    return _scaled(found[1], _SCALES[found[2]], text, legal, _TIMES, "seconds")


def _scaled(digits: str, scale: float, text: str, legal: str, bounds: tuple[float, float], unit: str) -> float:
    value = _float(digits, legal, text)
    if not 0 < value < float("inf"):
        raise ValueError(f"must be above zero and finite, {legal}; got {text!r}")
    if not bounds[0] <= value * scale <= bounds[1]:
        raise ValueError(f"must be from {bounds[0]:g} to {bounds[1]:g} {unit}, got {text!r}")
    return value * scale


def _float(digits: str, legal: str, text: str) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ValueError(f"must be {legal}; got {text!r}") from None


# -- arguments --------------------------------------------------------------------------------------------------------


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A parser for argparse, which shows the message of an ArgumentTypeError and hides that of a ValueError."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "estimate",
        help="estimate the memory of each optimizer and, for a given network, its bytes and time, and advise",
        description=_DESCRIPTION,
    )
    ranks = argument(partial(count, most=_MOST_RANKS))
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=argument(count), help=PARAMS_HELP)
    size.add_argument("--model", metavar="DIR", help="count the parameters of a model: a folder with its config.json")
    parser.add_argument("--nodes", type=ranks, default=1, help="number of machines (%(default)s)")
    parser.add_argument("--gpus-per-node", type=ranks, default=1, help="ranks on each machine (%(default)s)")
    add_training_arguments(parser)
    parser.set_defaults(run=_run, parser=parser)


def add_training_arguments(parser: argparse.ArgumentParser, *, measured: bool = False) -> None:
    """Add all arguments but the number of ranks; with ``measured`` the help says that missing ones are measured."""
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="dtype of the parameters")
    few, text = argument(partial(count, least=0, most=16)), "values of state per parameter: 2 for Adam (the default)"
    parser.add_argument("--states-per-parameter", type=few, default=2, help=f"{text}, 1 for SGD with momentum")
    text = "MiB of float32 values in a bucket, which is sent together (%(default)s)"
    parser.add_argument("--bucket-cap-mb", type=argument(mebibytes), default=25.0, help=text)
    text = "topology of compressed messages: flat, hierarchical (one per node), or auto: hierarchical if there are "
    text += "several nodes of several GPUs (%(default)s)"
    parser.add_argument("--topology", choices=["auto", "flat", "hierarchical", "two-level"], default="auto", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    rate, time = argument(bandwidth), argument(seconds)
    link = "rate of a node's link in each direction, which its GPUs share; with one node, of each GPU's link: 25Gbit"
    times = parser.add_argument_group("predicted time")
    for name, kind, text, default in (
        ("bandwidth", rate, link, ""),
        ("compute-seconds", time, "a step without communication, with AdamW's update: measure it on one GPU", ""),
        ("update-seconds", time, "AdamW's share of --compute-seconds", "a fused AdamW at --memory-bandwidth"),
        ("local-bandwidth", rate, "rate of the links between the GPUs of a node", "300GB/s, as NVLink 3"),
        ("memory-bandwidth", rate, "memory bandwidth of one rank", "2TB/s, as an A100"),
        ("host-bandwidth", rate, "rate at which a rank's CPU moves messages while it computes", "no limit"),
        ("latency", time, "latency of one hop between nodes", "20us"),
    ):
        told = "measured" if measured else default
        times.add_argument(f"--{name}", type=kind, help=f"{text} (default: {told})" if told else text)
    text = "steps of the run, which decide the schedule (%(default)s)"
    times.add_argument("--steps", type=argument(partial(count, most=1e12)), default=10_000, help=text)
    text = "bits per element of the gradients that compressed optimizers average in the warmup stage (default: theirs)"
    times.add_argument("--warmup-bits", type=int, choices=[4, 8, 16, 32], help=text)


# -- the command ------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    from hf_compressopt.planner import report

    try:
        if arguments.model is not None:
            from hf_compressopt.integrations import step_time

            arguments.params, arguments.in_full = step_time.parameters_of(arguments.model)
        found = predict(arguments, arguments.nodes * arguments.gpus_per_node)
    except ValueError as error:
        arguments.parser.error(str(error))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{arguments.params:,} {arguments.dtype} parameters, {found['ranks']} rank(s); GB (1e9 bytes) on each rank")
    print(report.memory_table(found["bytes_per_rank"]))
    if "ranking" in found:
        print("\npredicted steps")
        print(report.time_table(found["steps"], arguments.compute_seconds))
        print(f"\npredicted for a run of {arguments.steps:,} steps, the fastest first")
        print(report.ranking_table(found["ranking"]))
        print(f"\n{found['verdict']}")
    else:
        print("\nfor times and advice give --nodes or --gpus-per-node, --bandwidth and --compute-seconds")
    return 0


def predict(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """All predictions, in values that JSON can hold."""
    import torch

    from hf_compressopt.planner import report

    if ranks > _MOST_RANKS:
        raise ValueError(f"--nodes times --gpus-per-node must be at most {_MOST_RANKS:,} ranks, got {ranks:,}")
    dtype, several = getattr(torch, arguments.dtype), arguments.topology != "flat" and arguments.nodes > 1
    sizes = dtype, arguments.states_per_parameter, arguments.bucket_cap_mb
    memory = report.memory_rows(arguments.params, ranks, *sizes, arguments.gpus_per_node if several else 1)
    model = _cost_model(arguments, dtype.itemsize)
    times = {} if model is None else report.as_json(model, arguments.steps, memory, arguments.warmup_bits)
    return {"ranks": ranks, "bytes_per_rank": memory, **times}


def _cost_model(arguments: argparse.Namespace, itemsize: int) -> Model | None:
    """The model of time, or None if no time is asked for."""
    from hf_compressopt.planner.cost import Cluster, Model, Training

    cluster = ("local_bandwidth", "memory_bandwidth", "host_bandwidth", "latency")
    of_training, of_cluster = (
        {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
        for names in (("update_seconds", "warmup_bits"), cluster)
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
    in_full = getattr(arguments, "in_full", 0)  # known of --model alone
    size = {"itemsize": itemsize, "bucket_cap_mb": arguments.bucket_cap_mb, "in_full": in_full}
    training = Training(arguments.params, arguments.compute_seconds, **size, **of_training)
    return Model(training, Cluster(nodes, gpus, arguments.bandwidth, topology=arguments.topology, **of_cluster))
