"""From equal state, the same steps over gloo and over MPI. Started with mpirun; rank 0 prints what it found as JSON.

Four ranks are two nodes of two.

Usage: mpi_family.py STORE_FILE CHECKPOINT_FOLDER
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import hf_compressopt
from hf_compressopt import async_save_state, load_state
from hf_compressopt.kernels import messages

SHAPES = [(37, 5), (11,), (0, 2), (3, 4, 5)]
FAMILY: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 3},
    "OnebitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 5, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4},
}


def make(name: str, communicator: str) -> tuple[list[torch.nn.Parameter], Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    # sums of three float32 values depend on the order of the ranks, which is each library's own
    groups = [{"params": params[:-1]}, {"params": params[-1:], "non_freeze": dist.get_world_size() == 2}]
    options = {**FAMILY[name], "lr": 1e-2, "scale_block": 16, "bucket_cap_mb": 0.0003, "weight_decay": 0.1}
    if dist.get_world_size() == 4:
        options["node_size"] = 2
    return params, getattr(hf_compressopt, name)(groups, communicator=communicator, **options)


def take_steps(params: list[torch.nn.Parameter], optimizer: Any, steps: range) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        generator = torch.Generator().manual_seed(100 * rank + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
            if optimizer.plan.reduce_grads:
                p.grad.mul_(1 / world_size)
                dist.all_reduce(p.grad)
        if world_size == 2:
            optimizer.clip_grad_norm_(5.0)
        optimizer.step()


def state(params: list[torch.nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
    own = optimizer.state_dict()["compressopt"]
    return [t.detach().clone() for t in [*params, *own["worker_error"], *own["server_error"]]]


def compare(name: str, folder: str) -> dict[str, Any]:
    results, metrics = {}, {}
    for communicator in ("gloo", "mpi"):
        params, optimizer = make(name, communicator)
        take_steps(params, optimizer, range(14))
        results[communicator], metrics[communicator] = state(params, optimizer), optimizer.metrics()
    params, optimizer = make(name, "mpi")
    take_steps(params, optimizer, range(9))
    async_save_state(optimizer, f"{folder}/{name}")
    values = [p.detach().clone() for p in params]
    params, optimizer = make(name, "mpi")
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value)
    load_state(optimizer, f"{folder}/{name}")
    take_steps(params, optimizer, range(9, 14))
    resumed = state(params, optimizer)
    pairs = zip(results["gloo"], results["mpi"], resumed, strict=True)
    same = all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in pairs)
    sent = [metrics[communicator]["bytes_sent"] for communicator in ("gloo", "mpi")]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {"same": same, "sent": sent, "name": optimizer.describe()})
    return {"ranks": everywhere}


def refusals() -> dict[str, str]:
    messages = {}
    for options in ({"communicator": "mpi", "cuda_aware": True}, {"communicator": "smoke_signals"}):
        try:
            hf_compressopt.OnebitAdam([torch.nn.Parameter(torch.zeros(3))], **options)
        except ValueError as error:
            messages[options["communicator"]] = str(error)
    return messages


def main() -> None:
    messages.OWN_BLOCKS = 0  # else all would be sums in float32, whose order is another one over MPI
    torch.set_num_threads(1)
    rank, world_size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], world_size), rank=rank, world_size=world_size)
    found = {name: compare(name, sys.argv[2]) for name in FAMILY}
    found["refusals"] = refusals()
    if rank == 0:
        print("FOUND " + json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
