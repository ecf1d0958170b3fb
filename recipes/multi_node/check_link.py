"""Measure the network between the ranks, and how long a step of a model would wait for it.

Start it on every machine like a training script; the README beside this file has the commands.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

SCALE_BLOCK = 4096  # elements that share a scale in a message


def start(use_cpu: bool) -> torch.device:
    """Join the process group that torchrun describes. Returns the device of this rank."""
    if use_cpu or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def seconds(send: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Measure the median time of the slowest rank, after one call that sets up the connections."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        send()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--params", type=float, default=25e6, help="parameters of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--use_cpu", action="store_true", help="use gloo even if there is a GPU")
    args = parser.parse_args()
    if args.params < 1 or args.repeats < 1:
        parser.error(f"--params and --repeats must be >= 1, got {args.params:g} and {args.repeats}")
    device = start(args.use_cpu)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        raise ValueError("a network needs at least 2 ranks: start this with torchrun")
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname())

    gradients = torch.zeros(int(args.params), device=device)
    chunk = -(-int(args.params) // world_size)  # elements that a rank owns
    chunk_bytes = -(-chunk // 8) + 4 * -(-chunk // SCALE_BLOCK)  # a sign each, and the scales
    message = torch.zeros(chunk_bytes * world_size, dtype=torch.uint8, device=device)
    received = torch.empty_like(message)

    def compressed() -> None:
        for _ in range(2):  # the chunks to their owners, and the owners' results to all: as many bytes each
            dist.all_to_all_single(received, message)

    full = seconds(lambda: dist.all_reduce(gradients), device, args.repeats)
    signs = seconds(compressed, device, args.repeats)
    share = 2 * (world_size - 1) / world_size  # of what is exchanged, each rank sends and receives this much
    if rank == 0:
        backend = dist.get_backend()
        interface = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", f"chosen by {backend}")
        print(f"{world_size} ranks over {backend}, interface {interface}: {dict(Counter(hosts))}")
        for name, exchanged, took in (("float32 gradients", gradients, full), ("1-bit messages", message, signs)):
            sent = share * exchanged.nbytes
            print(f"{name:18} {sent / 1e6:9.2f} MB sent per rank, {took:8.4f} s, {8e-9 * sent / took:7.2f} Gbit/s")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
