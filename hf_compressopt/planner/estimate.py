"""The command ``hf-compressopt estimate``: its arguments, which ``advise`` shares, and numbers as people write them."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hf_compressopt.planner.cost import Model

_Value = TypeVar("_Value")

PARAMS_HELP = "number of trainable parameters: 350M, 7B, 124e6"
_MOST_RANKS = 1_000_000
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_BITS_OR_BYTES = "[kmgtKMGT]?(bit|byte)(/s|ps)?|[kmgtKMGT]?[bB](/s|ps)|[kmgtKMGT]"

# -- numbers ----------------------------------------------------------------------------------------------------------


def count(text: str, least: int = 1, most: float = 1e15) -> int:
    """A whole number from text: 8, 124e6, 350M, 7B."""
    legal = f"a whole number from {least} to {most:g}, such as 8, 124e6 or 350M"
    digits, prefix = _split(text, "[kmgbtKMGBT]")
    value = _number(digits, _PREFIXES[prefix.lower()], text, legal, least, most)
    if value != int(value):
        raise ValueError(f"must be {legal}; got {text!r}")
    return int(value)


def mebibytes(text: str) -> float:
    """A size in MiB from text: 25, 0.5."""
    return _number(text, 1, text, "a number of MiB, at least one float32 value and at most 1e6", 4 / 2**20, 1e6)


def bandwidth(text: str) -> float:
    """Bytes per second from text: 10G, 25Gbit, 25Gbps, 100 Mbit/s, 3.1GB/s. Prefixes are powers of 1000."""
    digits, unit = _split(text, _BITS_OR_BYTES)
    prefix = unit[:1].lower() if unit[:1] in tuple("kmgtKMGT") else ""
    scale = _PREFIXES[prefix] / (1 if "B" in unit or "byte" in unit else 8)
    legal = "from 1 to 1e18 bytes/s, with a unit such as 25Gbit, 25Gbps, 25G, 100Mbit/s (bits) or 3.1GB/s (bytes)"
    return _number(digits if unit else "", scale, text, legal, 1, 1e18)


def seconds(text: str) -> float:
    """Seconds from text: 1.2, 1.2s, 350ms, 20us."""
    digits, unit = _split(text, "s|ms|us")
    legal = "a number of seconds from 1e-12 to 1e7, or with a unit: 1.2, 1.2s, 350ms, 20us"
    return _number(digits, {"ms": 1e-3, "us": 1e-6}.get(unit, 1), text, legal, 1e-12, 1e7)


def _split(text: str, unit: str) -> tuple[str, str]:
    """Return what stands before a unit at the end, and the unit, which may be missing; ``unit`` is its pattern."""
    digits = re.sub(rf"\s*({unit})$", "", text.strip())
    return digits, text.strip().removeprefix(digits).strip()


def _number(digits: str, scale: float, text: str, legal: str, least: float, most: float) -> float:
    try:
        value = float(digits) * scale
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ValueError(f"must be {legal}; got {text!r}")
    return value


# -- arguments --------------------------------------------------------------------------------------------------------


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A parser for argparse, which shows the message of an ArgumentTypeError and hides that of a ValueError."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = argument(partial(count, most=_MOST_RANKS))
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=argument(count), help=PARAMS_HELP)
    size.add_argument("--model", metavar="DIR", help="count the parameters of a model: a folder with its config.json")
    parser.add_argument("--nodes", type=ranks, default=1, help="number of machines (%(default)s)")
    parser.add_argument("--gpus-per-node", type=ranks, default=1, help="ranks on each machine (%(default)s)")
    add_training_arguments(parser)


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


def run(arguments: argparse.Namespace) -> int:
    """Estimate the memory of parameters, gradients and optimizer state on each rank.

    Activations and the framework's own memory come on top. With --bandwidth and --compute-seconds, also predict the
    seconds of a step, by the model of docs/dev/planner.md, rank the optimizers by the time of a run, and say which one
    to use.
    """
    from hf_compressopt.planner import report

    if arguments.model is not None:
        from hf_compressopt.integrations import step_time

        arguments.params, arguments.in_full = step_time.parameters_of(arguments.model)
    found = predict(arguments, arguments.nodes * arguments.gpus_per_node)
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

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    of_training = {name: given[name] for name in ("update_seconds", "warmup_bits", "in_full") if name in given}
    rates = ("local_bandwidth", "memory_bandwidth", "host_bandwidth", "latency")
    of_cluster = {name: given[name] for name in rates if name in given}
    missing = [name for name in ("bandwidth", "compute_seconds") if name not in given]
    if len(missing) == 2 and not {"update_seconds", "warmup_bits", *rates} & given.keys():
        return None
    if missing:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"predicting time needs --bandwidth and --compute-seconds; {flags} missing")
    nodes, gpus = arguments.nodes, arguments.gpus_per_node
    if nodes * gpus == 1:
        raise ValueError("one rank sends nothing, so there is no time to predict: give --nodes or --gpus-per-node")
    if nodes == 1:
        nodes, gpus = gpus, 1  # each GPU has a link of its own
    sizes = {"itemsize": itemsize, "bucket_cap_mb": arguments.bucket_cap_mb}
    training = Training(arguments.params, arguments.compute_seconds, **sizes, **of_training)
    return Model(training, Cluster(nodes, gpus, arguments.bandwidth, topology=arguments.topology, **of_cluster))
