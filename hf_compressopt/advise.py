"""Measure this cluster, and say which optimizer trains fastest on it.

    torchrun --nproc_per_node 2 -m hf_compressopt.advise --params 350e6 --compute-seconds 0.6
    accelerate launch -m hf_compressopt.advise --model gpt2 --compute-seconds 0.6

Start it on all machines like a training. It times the collectives between the ranks, and gives these numbers to the
planner of "hf-compressopt estimate" (docs/dev/planner.md). Numbers that you give are not measured. The seconds of a
step without communication, --compute-seconds, are those of your own training: run it on one GPU, with the same batch
per GPU, and take 1 / train_steps_per_second of its last log line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_compressopt import quantities
from hf_compressopt.collectives import topology
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import TorchCommunicator, announced
from hf_compressopt.flat import DEFAULT_BUCKET_MB
from hf_compressopt.planner import estimate, link, report
from hf_compressopt.planner.link import Link

_PROGRAM = "python -m hf_compressopt.advise"
_START = "start it on every rank: torchrun --nproc_per_node 2 -m hf_compressopt.advise ..."
_LONGEST_WAIT = 300.0  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on this rank."""
    arguments = _parser().parse_args(argv)
    try:
        launch = _Launch(arguments.use_cpu)
        launch.join(arguments.timeout)
    except ValueError as error:
        return _complain(2, error)
    except (RuntimeError, OSError) as error:
        return _complain(1, f"the ranks did not find each other: {error}")
    try:
        text = _advise(arguments, launch)
    except ValueError as error:
        code = _complain(2, error)
    except (RuntimeError, OSError) as error:
        return _complain(1, f"the link or another rank failed: {error}")
    else:
        code = 0
        if launch.everyone.rank == 0:
            print(text, flush=True)
    dist.destroy_process_group()
    return code


def _complain(code: int, what: object) -> int:
    print(f"hf_compressopt.advise, rank {os.environ.get('RANK', '?')}: {what}", file=sys.stderr, flush=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="DIR", help="count the parameters of a model: a folder with its config.json")
    count = quantities.argument(quantities.count)
    model.add_argument("--params", type=count, help=estimate.PARAMS_HELP)
    text = "parameters that train, if not all: LoRA's adapters. Only these travel, and compressing them helps below "
    parser.add_argument("--trainable", type=count, metavar="N", help=f"{text}about 10 Gbit/s; above, seldom")
    parser.add_argument("--use_cpu", action="store_true", help="use the CPU and gloo even if there is a GPU")
    wait = f"longest time to wait for another rank (default: {_LONGEST_WAIT:g}s)"
    parser.add_argument("--timeout", type=quantities.argument(quantities.seconds), default=_LONGEST_WAIT, help=wait)
    estimate.add_training_arguments(parser, measured=True)
    return parser


class _Launch:
    """The ranks of this launch, by the launcher's variables, and the groups of them."""

    everyone: Communicator  # from join() on
    neighbours: Communicator | None = None  # the ranks of this node, if there are several, and several nodes

    def __init__(self, use_cpu: bool) -> None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"{', '.join(missing)} are not set, which a launcher does: {_START}")
        self.ranks, self.local = announced("WORLD_SIZE", 1), announced("LOCAL_WORLD_SIZE", 1)
        if self.ranks < 2:
            raise ValueError(f"one rank sends nothing, so there is no link to measure: {_START}")
        if self.ranks % self.local:
            raise ValueError(
                f"LOCAL_WORLD_SIZE must divide WORLD_SIZE={self.ranks}, got {self.local}: start as many ranks on "
                "every machine"
            )
        self.nodes, self.device = self.ranks // self.local, torch.device("cpu")
        use_cpu |= os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        if torch.cuda.is_available() and not use_cpu:
            if self.local > torch.cuda.device_count():
                raise ValueError(
                    f"there are {self.local} ranks on this machine and {torch.cuda.device_count()} GPU(s): start one "
                    "rank for each, or give --use_cpu"
                )
            self.device = torch.device("cuda", announced("LOCAL_RANK", 0))

    def join(self, timeout: float) -> None:
        """Wait for the others, at most ``timeout`` seconds."""
        wait = timedelta(seconds=timeout)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", timeout=wait, device_id=self.device)
        else:
            dist.init_process_group("gloo", timeout=wait)
        self.everyone = TorchCommunicator(device=self.device)
        self.everyone.require_equal("the ranks of a machine (LOCAL_WORLD_SIZE)", self.local)
        if self.nodes > 1 and self.local > 1:
            starts = range(0, self.ranks, self.local)
            groups = [dist.new_group(list(range(start, start + self.local)), timeout=wait) for start in starts]
            of_node = groups[self.everyone.rank // self.local]
            self.neighbours = TorchCommunicator(of_node, device=self.device)


def _advise(arguments: argparse.Namespace, launch: _Launch) -> str:
    """Measure what is not given, and render the ranking. All ranks call, and raise together."""
    everyone = launch.everyone
    everyone.require_equal("the arguments", {key: value for key, value in vars(arguments).items() if value is not None})
    measured: dict[str, Any] = {"backend": everyone.name, "device": launch.device.type}
    everyone.run_together(lambda: estimate.count_model(arguments), others=ValueError)
    if arguments.memory_bandwidth is None:
        arguments.memory_bandwidth = measured["memory_bandwidth"] = link.measure_memory(everyone)
    _measure_links(arguments, launch, measured)

    if arguments.bucket_cap_mb is None and launch.device.type == "cpu":
        arguments.bucket_cap_mb = DEFAULT_BUCKET_MB

    def render() -> str:
        arguments.nodes, arguments.gpus_per_node = launch.nodes, launch.local
        facts = estimate.predict(arguments, launch.ranks)
        if arguments.json:
            return json.dumps({**facts, "measured": measured}, indent=2)
        table = report.short_table(facts["ranking"])
        return "\n".join([facts["verdict"], "", table, "", *_facts(arguments, launch, measured)])

    return everyone.run_together(render, others=ValueError)


def _measure_links(arguments: argparse.Namespace, launch: _Launch, measured: dict[str, Any]) -> None:
    """Fill in the rates of the links."""
    missing = [name for name in ("bandwidth", "latency", "host_bandwidth") if getattr(arguments, name) is None]
    if missing:
        shape = (launch.ranks, 1) if launch.nodes == 1 else (launch.nodes, launch.local)
        rates = _link(launch.everyone, launch, shape, measured, "link")
        for name in missing:
            setattr(arguments, name, getattr(rates, name))
    if launch.neighbours is not None and arguments.local_bandwidth is None:
        rates = _link(launch.neighbours, launch, (launch.local, 1), measured, "local_link")
        arguments.local_bandwidth = -link.slowest([-rates.bandwidth], launch.everyone)[0]
    if launch.neighbours is not None and arguments.topology == topology.AUTO:
        levels = topology.with_topology(launch.everyone, topology.TopologyOptions(node_size=launch.local)).levels
        if levels is not None:
            measured["topology"] = link.exchange_seconds(launch.everyone, levels)
            if not link.nodes_pay(*measured["topology"]):
                arguments.topology = topology.FLAT


def _link(channel: Communicator, launch: _Launch, shape: tuple[int, int], measured: dict[str, Any], name: str) -> Link:
    """Measure a link by all collectives, and return the medians of their rates."""
    timings = link.measure(channel, launch.everyone)

    def fit() -> dict[str, Link]:
        return {collective: link.fit(collective, *shape, rows) for collective, rows in timings.items()}

    links = launch.everyone.run_together(fit, others=ValueError)
    measured[name] = {}
    for collective, rows in timings.items():
        rates = {key: None if value == math.inf else value for key, value in asdict(links[collective]).items()}
        measured[name][collective] = {**rates, "times": [asdict(row) for row in rows]}
    return link.middle(list(links.values()))


def _facts(arguments: argparse.Namespace, launch: _Launch, measured: dict[str, Any]) -> list[str]:
    """Lines on what was measured, and the command that predicts the same."""
    lines = [
        f"{launch.ranks} ranks on {launch.nodes} machine(s), {measured['backend']} on {measured['device']}; "
        f"{estimate.describe_parameters(arguments)}"
    ]
    for name, title in (
        ("link", "the link of a machine" if launch.nodes > 1 else "the link"),
        ("local_link", "inside"),
    ):
        for collective, row in measured.get(name, {}).items():
            host = f", {_gigabits(row['host_bandwidth'])} by a rank's CPU" if row["host_bandwidth"] else ""
            rate, hop = _gigabits(row["bandwidth"]), f"{row['latency'] * 1e6:,.0f} us"
            lines.append(f"measured {title}, {collective}: {rate}, {hop} a hop{host}")
    if "topology" in measured:
        lines.append(f"measured both topologies: {link.described(*measured['topology'])}")
    if "memory_bandwidth" in measured:
        lines.append(f"measured memory of a rank: {measured['memory_bandwidth'] / 1e9:.3g} GB/s")
    return [*lines, f"to predict the same: {_estimate(arguments, launch)}"]


def _estimate(arguments: argparse.Namespace, launch: _Launch) -> str:
    """The command ``hf-compressopt estimate`` with these numbers."""
    size = {"model": arguments.model} if arguments.model is not None else {"params": arguments.params}
    options = {**size, "nodes": launch.nodes, "gpus_per_node": launch.local}
    same = ("trainable", "dtype", "states_per_parameter", "bucket_cap_mb", "steps", "accumulation")
    options |= {name: getattr(arguments, name) for name in same}
    for name in ("bandwidth", "local_bandwidth", "memory_bandwidth", "host_bandwidth"):
        rate = getattr(arguments, name)
        options[name] = f"{rate / 1e9:.4g}GB/s" if rate and rate < math.inf else None
    for name in ("latency", "compute_seconds", "update_seconds"):
        options[name] = f"{getattr(arguments, name):.4g}" if getattr(arguments, name) else None
    options["topology"] = topology.FLAT if arguments.topology == topology.FLAT else None
    options["warmup_bits"] = arguments.warmup_bits
    words = (f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value is not None)
    return " ".join(["hf-compressopt estimate", *words])


def _gigabits(rate: float) -> str:
    return f"{8e-9 * rate:.3g} Gbit/s"


if __name__ == "__main__":
    sys.exit(main())
