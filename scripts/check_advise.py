"""Compare the link that `hf_compressopt.advise` measures with the link's known speed.

    sudo python scripts/check_advise.py

Every rank has a network namespace and a shaped link of its own (_slow_network.py). Exit code 1 if a rate is off by more
than 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from _common import REPOSITORY, check_least, markdown, parser_of
from _slow_network import PORT, RATES, Network, check_rights

LIMIT = 0.1
SHAPED = [name for name, rate in RATES.items() if rate is not None]


def advise(network: Network, words: list[str], ranks: int) -> dict[str, Any]:
    """The JSON that rank 0 prints.

    Raises:
        RuntimeError: If a rank fails.
    """
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": network.address(0),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        }
        command = ["ip", "netns", "exec", network.namespace(rank), sys.executable, "-m", "hf_compressopt.advise"]
        pipe = subprocess.PIPE if rank == 0 else None
        processes.append(subprocess.Popen([*command, "--json", *words], env=environment, stdout=pipe, text=True))
    try:
        output, _ = processes[0].communicate()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"the ranks ended with the exit codes {codes}; see their words above")
    found: dict[str, Any] = json.loads(output)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (%(default)s)")
    parser.add_argument("--links", nargs="+", choices=SHAPED, default=["1 Gbit/s", "100 Mbit/s"])
    parser.add_argument("--params", default="29e6", help="of the model (%(default)s)")
    parser.add_argument("--compute-seconds", default="0.25s", help="of a step, so that none is timed (%(default)s)")
    parser.add_argument("--memory-bandwidth", default="10GB/s", help="of a rank, so that none is timed (%(default)s)")
    arguments = parser.parse_args()
    check_least(parser, arguments, {"ranks": 2})
    return arguments


def main() -> int:
    arguments = parse_arguments()
    check_rights()
    words = ["--params", arguments.params, "--compute-seconds", arguments.compute_seconds, "--use_cpu"]
    words += ["--memory-bandwidth", arguments.memory_bandwidth]
    network, worst = Network(arguments.ranks), 0.0
    cells = [["link", "all_reduce", "all_to_all", "all_gather", "taken", "error, %", "latency, us", "advised"]]
    try:
        network.build()
        for name in arguments.links:
            network.shape(RATES[name])
            found = advise(network, words, arguments.ranks)
            rates = {kind: 8 * row["bandwidth"] for kind, row in found["measured"]["link"].items()}
            taken, latency = 8 * found["assumptions"]["bandwidth"], found["assumptions"]["latency"]
            error = taken / RATES[name] - 1
            worst = max(worst, abs(error))
            each = [f"{rates[kind] / 1e6:,.1f}" for kind in cells[0][1:4]]
            cells.append(
                [name, *each, f"{taken / 1e6:,.1f}", f"{100 * error:+.1f}", f"{latency * 1e6:,.0f}", found["advised"]]
            )
    except KeyboardInterrupt:
        return 130
    finally:
        network.remove()
    print(f"{arguments.ranks} ranks; rates in Mbit/s\n")
    print("\n".join(markdown(cells, "right")))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
