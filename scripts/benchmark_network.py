"""Train over links of known speed, and compare what a step takes with every way to exchange gradients.

    sudo python scripts/benchmark_network.py --report docs/network.md      # a shaped link for every rank
    sudo python scripts/benchmark_network.py --nodes 2 --ranks-per-node 2  # several ranks share a shaped link
    python scripts/benchmark_network.py --loopback                         # without the right to make networks

Every rank, or every node, has a network namespace and a shaped link of its own (_slow_network.py). Each rank trains the
same GPT-2-like model (_network_training.py), one method after the other, and that several times over, so that a
slow spell of the machine meets all methods. Times are those of whole steps in the stage that a method spends most of a
run in; bytes are the interface's own.

An existing report keeps its rows of other models, numbers of ranks, links and methods. To resume an interrupted run,
repeat its command with --missing: it measures only the rows that the report does not have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from _common import check_least, in_turn, parser_of
from _network_methods import LONGEST_INTERVAL, METHODS, MODELS, Method, Row
from _network_report import merged, report, write_report
from _network_training import train
from _slow_network import (
    RATES,
    Network,
    Ranks,
    add_link_arguments,
    check_report,
    check_rights,
    ranks_on_links,
    serve,
)

# ----------------------------------------------------------------------------------------------------- measuring


def steps_for(method: Method, link: str, arguments: argparse.Namespace) -> int:
    """Steps of a window: fewer on links where a step takes many seconds, but whole periods of the method."""
    rate = RATES[link]
    steps: int = arguments.slow_steps if rate is not None and rate < 2e8 else arguments.steps
    return math.ceil(steps / method.period) * method.period


class Plan:
    """The turns of the methods at each number of ranks, model and link.

    Attributes:
        methods: The methods that take turns, by number of ranks, model and link.
    """

    def __init__(self, arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
        """Take all methods, with --missing only those without a row in ``rows``."""
        known = {row.place for row in rows} if arguments.missing else set()
        links = ["unshaped"] if arguments.loopback else arguments.links
        self.methods: dict[tuple[int, str, str], list[str]] = {}
        for place in itertools.product(arguments.ranks, arguments.models, links):
            count, model, link = place
            todo = [Row(model, count, link, name, 0, [], 0.0, arguments.ranks_per_node) for name in arguments.methods]
            if names := [row.method for row in todo if row.place not in known]:
                self.methods[place] = names
        self._windows = arguments.rounds * sum(map(len, self.methods.values()))
        self._done, self._began = 0, time.monotonic()

    def progress(self) -> str:
        """Count a window, and say how many are done and how long the others take if they are like these."""
        self._done += 1
        left = (time.monotonic() - self._began) * (self._windows / self._done - 1)
        return f"{self._done} of {self._windows}, about {left / 60:.0f} min left"


def measure(arguments: argparse.Namespace, network: Network | None, ranks: Ranks, plan: Plan) -> Iterator[list[Row]]:
    """The rows of every model on every link; on each the methods take turns."""
    per_node = arguments.ranks_per_node
    for (count, model, link), names in plan.methods.items():
        if count != len(ranks.processes):
            continue
        if network is not None:
            network.shape(RATES[link])
        rows = {name: Row(model, count, link, name, 0, [], 0.0, per_node) for name in names}
        for number in range(arguments.rounds):
            for name in in_turn(names, number):
                steps = steps_for(METHODS[name], link, arguments)
                answers = ranks.order(method=name, model=model, steps=steps, per_node=per_node)
                mean = statistics.fmean(statistics.fmean(answer["seconds"]) for answer in answers)
                sent = statistics.fmean(answer["sent"] for answer in answers) / steps
                row = rows[name]
                row.numel, row.sent = answers[0]["numel"], row.sent + sent / arguments.rounds
                row.seconds.append(mean)
                where = f"{model}, {count} ranks, {link}, round {number + 1}"
                print(f"{where}: {METHODS[name].title}: {mean * 1e3:.0f} ms ({plan.progress()})", flush=True)
        if network is None:
            for row in rows.values():
                row.sent /= count  # one interface for all ranks
        yield list(rows.values())


# ----------------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks (2)")
    parser.add_argument("--nodes", type=int, help="instead of --ranks: nodes of --ranks-per-node ranks each")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="that share a link (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["10M", "30M"])
    add_link_arguments(parser, list(RATES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="all of the package and of torch")
    parser.add_argument("--rounds", type=int, default=3, help="how often the methods take turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=LONGEST_INTERVAL, help="measured in each turn (%(default)s)")
    parser.add_argument("--slow-steps", type=int, default=4, help="the same at 100 Mbit/s (%(default)s)")
    parser.add_argument("--missing", action="store_true", help="only what the report does not have yet")
    arguments = parser.parse_args()
    least = {"ranks": 2, "ranks_per_node": 1, "threads": 1, "rounds": 1, "steps": 2, "slow_steps": 2}
    check_least(parser, arguments, least)
    shared = arguments.ranks_per_node > 1
    if shared and (arguments.nodes is None or arguments.nodes < 2 or arguments.loopback):
        parser.error("--ranks-per-node needs --nodes of 2 or more, and links of their own: no --loopback")
    if arguments.nodes is not None:
        arguments.ranks = [arguments.nodes * arguments.ranks_per_node]
    levels = [name for name, method in METHODS.items() if method.needs_nodes]
    if arguments.methods is None:
        mine = [name for name, method in METHODS.items() if not method.rival]
        arguments.methods = [name for name in mine if shared or name not in levels]
    if not shared and set(levels) & set(arguments.methods):
        parser.error(f"--methods: {', '.join(levels)} need --ranks-per-node of 2 or more")
    if arguments.missing and arguments.report is None:
        parser.error("--missing needs --report: the file whose rows are not measured again")
    check_report(parser, arguments.report)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve is not None:
        return serve(partial(train, interface=arguments.serve))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not arguments.loopback:
        check_rights()
    rows: list[Row] = []
    if arguments.report is not None and (data := arguments.report.with_suffix(".json")).exists():
        rows = [Row(**row) for row in json.loads(data.read_text())]
    plan = Plan(arguments, rows)
    try:
        for count in dict.fromkeys(count for count, _, _ in plan.methods):
            per_node, loopback = arguments.ranks_per_node, arguments.loopback
            links = ranks_on_links(count, arguments.threads, __file__, loopback=loopback, per_node=per_node)
            with links as (network, ranks):
                for fresh in measure(arguments, network, ranks, plan):
                    rows = merged(rows, fresh)
                    if arguments.report is not None:
                        write_report(rows, arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind but the report of the links that were done")
    print(f"\n{report(rows, arguments)}")


if __name__ == "__main__":
    main()
