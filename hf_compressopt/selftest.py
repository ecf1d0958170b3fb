"""The long check of an installation, ``hf-compressopt selftest``: all kernels, and each optimizer on two processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import environment
from hf_compressopt.kernels import implementation, library, selfcheck

SIZES = (1, 2, 7, 8, 9, 33, 1000, 4096, 4097, 20_011)  # elements of a bucket
SHIFTS = range(4)  # elements from the begin of an allocation to that of a tensor
#: Elements of a bucket, elements that its tensors are off, and how many tensors there are, or 0 for a few.
CASES = [
    *((numel, shift, 0) for numel in SIZES for shift in SHIFTS),
    *((4097, shift, count) for count in selfcheck.MANY_TENSORS for shift in (0, 3)),
]
STEPS, RANKS = 20, 2

#: Options of each optimizer; what follows its name compresses gradients.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 5},
    "OnebitLamb": {"freeze_step": 5},
    "ZeroOneAdam": {"freeze_step": 8},
    "FusedAdam": {},
    "Lamb": {},
    "AdamW int4": {},
    "AdamW int8": {},
}


def run(gpu: bool) -> dict[str, Any]:
    """Run everything. Returns what JSON can hold; ``passed`` says whether all is well."""
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    if gpu and not torch.cuda.is_available():
        raise RuntimeError("there is no GPU: torch.cuda.is_available() is False. Leave out --gpu to test on the CPU")
    kernels = _kernels(device)
    training = _training(gpu)
    alike = all(each.get("ranks_alike") and each.get("loss_falls") for each in training["optimizers"].values())
    return {
        "passed": not any(kernels["different"].values()) and alike and "error" not in training,
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "kernels": kernels,
        "training": training,
        "environment": environment.collect(),
    }


def render(results: dict[str, Any]) -> list[str]:
    """Render the results of :func:`run`: a line for each item, and the verdict."""
    training, kernels = results["training"], results["kernels"]
    lines = []
    if not kernels["native"]:
        lines.append(f"SKIP  native kernels: {kernels['because']}")
    for family, words in kernels["different"].items():
        lines.append(f"FAIL  kernels of {family}: {words[0]}" if words else f"PASS  kernels of {family}")
    for name, result in training["optimizers"].items():
        wrong = [what for what in ("ranks_alike", "loss_falls") if not result[what]]
        same = "bits of the reference" if result["bits_of_the_reference"] else "differs from the reference by rounding"
        first, last = result["losses"]
        facts = f"loss {first:.3f} -> {last:.3f} on {training['ranks']} ranks, {same}"
        lines.append(f"FAIL  {name}: not {', '.join(wrong)}; {facts}" if wrong else f"PASS  {name}: {facts}")
    if "error" in training:
        lines.append(f"FAIL  training: {training['error']}")
    if results["passed"]:
        return [*lines, f"all passed on {results['device']}, over {training['backend']}"]
    return [*lines, "FAILED: report it with the output of `hf-compressopt selftest --json`"]


def _kernels(device: torch.device) -> dict[str, Any]:
    """Compare all kernels with the reference."""
    if missing := library.why_not(device):
        return {"native": False, "because": missing, "different": {}}
    different = {family: differences(family, device) for family in selfcheck.FAMILIES}
    return {"native": True, "cases": len(CASES), "different": different}


def differences(family: str, device: torch.device) -> list[str]:
    """Return in which cases a family of kernels differs from the reference, and how: odd sizes, many tensors."""
    lines = []
    for numel, shift, count in CASES:
        if words := selfcheck.difference(family, device, numel, shift, numel, count):
            tensors = f", {count} tensors" if count else ""
            lines.append(f"{numel} elements, {shift} off{tensors}: {words}")
    return lines


def _training(gpu: bool) -> dict[str, Any]:
    """Train with each optimizer on two processes, and once more with the reference kernels."""
    backend = "nccl" if gpu and torch.cuda.device_count() >= RANKS else "gloo"
    results: dict[str, Any] = {"backend": backend, "ranks": RANKS, "steps": STEPS, "optimizers": {}}
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for reference in (False, True):
            place = Path(folder) / str(reference)
            place.mkdir()
            try:
                spawn(_rank, args=(str(place), backend, gpu, reference), nprocs=RANKS)  # type: ignore[no-untyped-call]
            except ProcessException as error:
                return {**results, "error": str(error)[-4000:]}
            runs.append([json.loads((place / f"{rank}.json").read_text()) for rank in range(RANKS)])
    native, reference_ = runs
    for name in OPTIMIZERS:
        first, *others = (rank["optimizers"][name] for rank in native)
        results["optimizers"][name] = {
            "ranks_alike": all(other["digest"] == first["digest"] for other in others),
            "loss_falls": first["losses"][1] < first["losses"][0],
            "bits_of_the_reference": first["digest"] == reference_[0]["optimizers"][name]["digest"],
            **first,
        }
    results["kernels"] = native[0]["kernels"]
    return results


def _rank(rank: int, folder: str, backend: str, gpu: bool, reference: bool) -> None:
    """Train on one process, with the reference kernels if asked, and write what came of it into the folder."""
    if reference:
        os.environ[library.VARIABLE] = "reference"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    logging.getLogger("hf_compressopt").setLevel(logging.ERROR)  # of runs that are too short, and say so
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        optimizers = {name: _trained(name, options, rank, device) for name, options in OPTIMIZERS.items()}
        result = {"kernels": implementation(device), "optimizers": optimizers}
        (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _trained(name: str, options: dict[str, Any], rank: int, device: torch.device) -> dict[str, Any]:
    """Train a small model. Returns the digest of its parameters, and the first and the last loss."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(33, 257), nn.Tanh(), nn.Linear(257, 7)).to(device)
    kind, *how = name.split()
    model = DistributedDataParallel(layers, device_ids=[device.index] if device.type == "cuda" else None)
    for compression in how:
        state = hf_compressopt.GradientCompression(model.parameters(), compression)
        model.register_comm_hook(state, hf_compressopt.compress_hook)
    optimizer = getattr(torch.optim if kind == "AdamW" else hf_compressopt, kind)(
        model.parameters(), lr=3e-3, **options
    )
    if "freeze_step" in options:
        hf_compressopt.attach_ddp(model, optimizer)
    losses = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(1000 * (step % 4) + rank)
        x, y = torch.randn(16, 33, generator=random), torch.randn(16, 7, generator=random)
        optimizer.zero_grad()
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().numpy().tobytes())
    return {"digest": digest.hexdigest()[:16], "losses": [sum(losses[:4]) / 4, sum(losses[-4:]) / 4]}
