"""Print what compressed steps send, as the network interface counts it. Started with torchrun, in a network of its own.

Usage: traffic.py NUMEL STEPS SCALE_BLOCK
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hf_compressopt import OnebitAdam


def transmitted(interface: str) -> int:
    """Bytes sent so far, as the kernel counts them in this process's network namespace."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line)
    return int({name.strip(): row for name, row in rows.items()}[interface].split()[8])


def main() -> None:
    numel, steps, scale_block = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(numel))
    optimizer = OnebitAdam([p], freeze_step=1, scale_block=scale_block)
    p.grad = torch.randn(numel)  # the same on all ranks, as averaged gradients are
    optimizer.step()
    p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer.step()
    dist.barrier()
    before = transmitted("lo")
    dist.barrier()
    for _ in range(steps):
        optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        on_the_wire = (transmitted("lo") - before) / steps / dist.get_world_size()
        print(json.dumps({"interface": on_the_wire, "counted": optimizer.metrics()["bytes_sent_step"]}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
