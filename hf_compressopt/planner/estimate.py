"""The command ``hf-compressopt estimate``: its arguments, which ``advise`` shares, its predictions and its words."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_compressopt.quantities import argument, bandwidth, count, duration, mebibytes, seconds

if TYPE_CHECKING:
    from hf_compressopt.planner.cost import Cluster, Training

PARAMS_HELP = "number of trainable parameters: 350M, 7B, 124e6"
_MOST_RANKS = 1_000_000
_OF_THE_USER = ("compute-seconds", "update-seconds")  # times that nothing here measures
#: Parts of the memory table that are shown without --tables.
_MAIN_ROWS = ("no ZeRO", "ZeRO-1", "ZeRO-2", "grad_compression")

# -- arguments --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = argument(partial(count, most=_MOST_RANKS))
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=argument(count), help=PARAMS_HELP)
    size.add_argument("--model", metavar="DIR", help="count the parameters of a model: a folder with its config.json")
    parser.add_argument("--nodes", type=ranks, default=1, help="number of machines (%(default)s)")
    parser.add_argument("--gpus-per-node", type=ranks, default=1, help="ranks on each machine (%(default)s)")
    text = "parameters that train, if not all: LoRA's adapters. Only these travel"
    parser.add_argument("--trainable", type=argument(count), metavar="N", help=text)
    parser.add_argument(
        "--tables", action="store_true", help="print all tables: memory, stages, and every way to train"
    )
    add_training_arguments(parser)


def add_training_arguments(parser: argparse.ArgumentParser, *, measured: bool = False) -> None:
    """Add all arguments but the number of ranks; with ``measured`` the help says that missing ones are measured."""
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="dtype of the parameters")
    few, text = argument(partial(count, least=0, most=16)), "values of state per parameter: 2 for Adam (the default)"
    parser.add_argument("--states-per-parameter", type=few, default=2, help=f"{text}, 1 for SGD with momentum")
    on_cpus = "; on CPUs 25" if measured else ""
    text = "MiB of float32 values in a bucket, which is sent together (default: as on GPUs, 100, and 25 in DDP and "
    text += f"with grad_compression{on_cpus})"
    parser.add_argument("--bucket-cap-mb", type=argument(mebibytes), help=text)
    text = "topology of compressed messages: flat, hierarchical (one per node), or auto: hierarchical if there are "
    text += "several nodes of several GPUs (%(default)s)"
    parser.add_argument("--topology", choices=["auto", "flat", "hierarchical", "two-level"], default="auto", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    rate, time = argument(bandwidth), argument(seconds)
    link = "rate of a node's link in each direction, which its GPUs share; with one node, of each GPU's link: 25Gbit"
    times = parser.add_argument_group("predicted time")
    for name, kind, text, default in (
        ("bandwidth", rate, link, ""),
        (
            "compute-seconds",
            time,
            "a step without communication, with all micro-batches and AdamW's update: run your "
            "script on one GPU, with the same batch per GPU, and take 1 / train_steps_per_second",
            "",
        ),
        ("update-seconds", time, "AdamW's share of --compute-seconds", "a fused AdamW at --memory-bandwidth"),
        ("local-bandwidth", rate, "rate of the links between the GPUs of a node", "300GB/s, as NVLink 3"),
        ("memory-bandwidth", rate, "memory bandwidth of one rank", "2TB/s, as an A100"),
        ("host-bandwidth", rate, "rate at which a rank's CPU moves messages while it computes", "no limit"),
        ("latency", time, "latency of one hop between nodes", "20us"),
    ):
        told = "measured" if measured and name not in _OF_THE_USER else default
        required = measured and name == "compute-seconds"
        help_text = f"{text} (default: {told})" if told else text
        times.add_argument(f"--{name}", type=kind, required=required, help=help_text)
    text = "steps of the run, which decide the schedule (%(default)s)"
    times.add_argument("--steps", type=argument(partial(count, most=1e12)), default=10_000, help=text)
    text = "micro-batches of a step (gradient_accumulation_steps, %(default)s): ZeRO-2 sends each, others send the last"
    times.add_argument("--accumulation", type=argument(partial(count, most=1e6)), default=1, help=text)
    text = "bits per element of the gradients that compressed optimizers average in the warmup stage (default: theirs)"
    times.add_argument("--warmup-bits", type=int, choices=[4, 8, 16, 32], help=text)


# -- the command ------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Say which optimizer to use, and estimate the memory on each rank.

    Activations and the framework's own memory come on top. The advice needs --bandwidth and --compute-seconds: the
    seconds of a step are predicted by the model of docs/dev/planner.md.
    """
    count_model(arguments)
    facts = predict(arguments, arguments.nodes * arguments.gpus_per_node)
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(_lines(arguments, facts)))
    return 0


def count_model(arguments: argparse.Namespace) -> None:
    """Fill in the parameters of --model, and check --trainable."""
    if arguments.model is not None:
        from hf_compressopt.integrations import model_size

        size = model_size.size_of(arguments.model)
        arguments.params = size.params
        if not arguments.trainable:  # what else would train is not known
            arguments.in_full, arguments.beside_signs = size.in_full, size.beside_signs
    if arguments.trainable is not None and arguments.trainable > arguments.params:
        raise ValueError(f"--trainable must be at most the model's {arguments.params}, got {arguments.trainable}")


def describe_parameters(arguments: argparse.Namespace) -> str:
    """The parameters in words."""
    text = f"{arguments.params:,} {arguments.dtype} parameters"
    return f"{text}, of which {arguments.trainable:,} train" if arguments.trainable else text


def _lines(arguments: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    from hf_compressopt.planner import report

    what = describe_parameters(arguments)
    of_memory = f"{what}, {facts['ranks']} rank(s); GB (1e9 bytes) on each rank"
    memory = facts["bytes_per_rank"]
    if "ranking" not in facts:
        shown = memory if arguments.tables else {name: memory[name] for name in _MAIN_ROWS if name in memory}
        lines = [of_memory, report.memory_table(shown), ""]
        return [*lines, "for times and advice give --nodes or --gpus-per-node, --bandwidth and --compute-seconds"]
    accumulated = f" of {arguments.accumulation} micro-batches" if arguments.accumulation > 1 else ""
    run = (
        f"means of a run of {arguments.steps:,} steps{accumulated}, {duration(arguments.compute_seconds)} of computing"
    )
    lines = [facts["verdict"], "", f"{what}, {facts['ranks']} ranks; {run}"]
    if not arguments.tables:
        return [
            *lines,
            report.short_table(facts["ranking"]),
            "",
            "--tables shows all ways, their stages and their memory",
        ]
    lines += [report.ranking_table(facts["ranking"]), "", "steps of each stage"]
    lines += [report.time_table(facts["steps"], arguments.compute_seconds), ""]
    return [*lines, of_memory, report.memory_table(memory)]


def predict(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """All predictions, in values that JSON can hold."""
    import torch

    from hf_compressopt.planner import advice
    from hf_compressopt.planner.cost import Model
    from hf_compressopt.planner.memory import FSDP2, memory_rows

    if ranks > _MOST_RANKS:
        raise ValueError(f"--nodes times --gpus-per-node must be at most {_MOST_RANKS:,} ranks, got {ranks:,}")
    trained = arguments.trainable or arguments.params
    dtype, cluster = getattr(torch, arguments.dtype), _cluster(arguments)
    buckets = _buckets(arguments.bucket_cap_mb)
    sizes = {"dtype": dtype, "states": arguments.states_per_parameter, "node_size": cluster.node_size, **buckets}
    memory = memory_rows(trained, ranks, **sizes, accumulates=arguments.accumulation > 1)
    for name, row in memory.items():
        frozen = (arguments.params - trained) * dtype.itemsize // (ranks if name in FSDP2 else 1)
        row["parameters"] += frozen
        row["total"] += frozen
    times = {}
    if _asks_for_times(arguments):
        model = Model(_training(arguments, trained, dtype.itemsize), cluster)
        times = advice.as_json(model, arguments.steps, memory, arguments.warmup_bits)
    return {"ranks": ranks, "bytes_per_rank": memory, **times}


_RATES = ("local_bandwidth", "memory_bandwidth", "host_bandwidth", "latency")


def _asks_for_times(arguments: argparse.Namespace) -> bool:
    """True if times are to be predicted; a ValueError if they cannot be."""
    told = {name for name, value in vars(arguments).items() if value is not None}
    missing = [name for name in ("bandwidth", "compute_seconds") if name not in told]
    if len(missing) == 2 and told.isdisjoint({"update_seconds", "warmup_bits", *_RATES}):
        return False
    if missing:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"predicting time needs --bandwidth and --compute-seconds; {flags} missing")
    if arguments.nodes * arguments.gpus_per_node == 1:
        raise ValueError("one rank sends nothing, so there is no time to predict: give --nodes or --gpus-per-node")
    return True


def _cluster(arguments: argparse.Namespace) -> Cluster:
    """The machines; those of a cluster of unknown bandwidth cost no time."""
    from hf_compressopt.planner.cost import Cluster

    nodes, gpus = arguments.nodes, arguments.gpus_per_node
    if nodes == 1:
        nodes, gpus = gpus, 1  # each GPU has a link of its own
    rates = {name: getattr(arguments, name) for name in _RATES if getattr(arguments, name) is not None}
    return Cluster(nodes, gpus, arguments.bandwidth or math.inf, topology=arguments.topology, **rates)


def _buckets(size: float | None) -> dict[str, float | None]:
    """The sizes of buckets, in MiB: those of GPUs, unless one is given for all."""
    from hf_compressopt.flat import DDP_BUCKET_MB, DEFAULT_BUCKET_MB_ON_CUDA

    if size is not None:
        return {"bucket_cap_mb": size, "ddp_bucket_cap_mb": None}
    return {"bucket_cap_mb": DEFAULT_BUCKET_MB_ON_CUDA, "ddp_bucket_cap_mb": DDP_BUCKET_MB}


def _training(arguments: argparse.Namespace, trained: int, itemsize: int) -> Training:
    from hf_compressopt.planner.cost import Training

    names = ("update_seconds", "warmup_bits", "in_full", "beside_signs")
    more = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    more |= {"itemsize": itemsize, "accumulation": arguments.accumulation, **_buckets(arguments.bucket_cap_mb)}
    return Training(trained, arguments.compute_seconds, **more)
