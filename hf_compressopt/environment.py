"""Facts about this machine and installation: ``hf-compressopt env``.

A missing or broken part does not stop the report of the others.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import hf_compressopt

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "datasets", "numpy", "mpi4py")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def collect() -> dict[str, Any]:
    """Collect all facts, in values that JSON can hold."""
    facts: dict[str, Any] = {
        "package": {"version": hf_compressopt.__version__, "path": str(Path(hf_compressopt.__file__).parent)},
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "libraries": {},
        "gpu": {"driver": _driver(), "cuda": None, "devices": []},
        "communicators": {"torch": [], "mpi": None},
        "kernels": None,
        "problems": [],
    }
    try:
        import torch
    except (ImportError, OSError) as error:
        facts["problems"].append(f"torch cannot be imported, and nothing works without it: {error}")
        return facts
    facts["libraries"] = {name: _library(name) for name in ("cpu", "cuda")}
    facts["gpu"] |= {"cuda": torch.version.cuda, "devices": _gpus()}
    facts["communicators"] = {"torch": _backends(), "mpi": _mpi()}
    facts["kernels"] = _kernels(facts["problems"])
    return facts


def render(facts: dict[str, Any]) -> str:
    """Render the facts of :func:`collect` as text."""
    gpu, kernels = facts["gpu"], facts["kernels"]
    devices = {f"GPU {index}": text for index, text in enumerate(gpu["devices"])} or {"devices": "none"}
    python = f"{facts['python']['version']} on {facts['python']['platform']}"
    communicators = facts["communicators"]
    backends, mpi = ", ".join(communicators["torch"]) or "none", _mpi_text(communicators["mpi"])
    sections = {
        f"hf_compressopt {facts['package']['version']}": {"path": facts["package"]["path"], "python": python},
        "packages": {name: version or "not installed" for name, version in facts["packages"].items()},
        "native libraries": {name: _library_text(library) for name, library in facts["libraries"].items()},
        "GPU": {"driver": gpu["driver"] or "none", "torch's CUDA": gpu["cuda"] or "none", **devices},
        "communicators": {"torch": backends, "mpi": mpi},
    }
    if kernels is not None:
        in_use = {f"{name.upper()} tensors": kernels[name] for name in ("cpu", "cuda")}
        sections[f"in use (HF_COMPRESSOPT_KERNELS={kernels['setting'] or 'not set'})"] = in_use
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<14}{text}" for name, text in rows.items())]
    return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in facts["problems"])])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library(device_type: str) -> dict[str, Any]:
    import torch

    from hf_compressopt.kernels import library

    path, problem = library.path_of(device_type), library.why_not(torch.device(device_type, 0))
    built = library.what_was_built() if device_type == "cuda" else ""
    facts: dict[str, Any] = {"path": str(path), "built": built or None, "problem": problem or None}
    try:
        facts["instruction_set"] = library.instruction_set(device_type)
    except RuntimeError:
        return {**facts, "instruction_set": None, "interface": None}
    return {**facts, "interface": ctypes.CDLL(str(path)).co_abi_version()}


def _library_text(library: dict[str, Any]) -> str:
    if library["interface"] is None:
        return str(library["problem"])
    lines = [f"{library['instruction_set']}; interface {library['interface']}; {library['path']}"]
    return f"\n{'':<16}".join(filter(None, [*lines, library["built"], library["problem"]]))


def _driver() -> str | None:
    """The version of NVIDIA's driver, and the CUDA version that it supports."""
    try:
        query = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    offered = ctypes.c_int(0)
    if query(ctypes.byref(offered)) != 0 or offered.value == 0:
        return None
    text = f"CUDA {offered.value // 1000}.{offered.value % 1000 // 10}"
    version = _NVIDIA_DRIVER.read_text() if _NVIDIA_DRIVER.exists() else ""
    release = re.search(r"Module.*?\s(\d+\.[\d.]+)", version)
    return f"{release[1]} ({text})" if release else text


def _gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB" for gpu in cards]


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    names = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return [name for name in names if getattr(dist, f"is_{name}_available", lambda: True)()]


def _mpi() -> dict[str, Any] | None:
    """The MPI library that mpi4py loads, without starting MPI."""
    if _version("mpi4py") is None:
        return None
    try:
        mpi4py = importlib.import_module("mpi4py")
        mpi4py.rc.initialize = False
        library = importlib.import_module("mpi4py.MPI").Get_library_version()
    except Exception as error:  # a library of the system may raise anything
        return {"problem": f"mpi4py does not load: {error}"}
    from hf_compressopt.collectives.mpi import has_cuda_support

    return {"library": re.split(r"[,\n\0]", library)[0].strip(), "cuda_aware": has_cuda_support()}


def _mpi_text(mpi: dict[str, Any] | None) -> str:
    if mpi is None or "problem" in mpi:
        return mpi["problem"] if mpi else "none"
    return f"{mpi['library']}, {'CUDA-aware' if mpi['cuda_aware'] else 'through host buffers'}"


def _kernels(problems: list[str]) -> dict[str, Any]:
    import torch

    from hf_compressopt.kernels import library

    in_use: dict[str, Any] = {"setting": os.environ.get(library.VARIABLE)}
    for name in ("cpu", "cuda"):
        if name == "cuda" and not torch.cuda.is_available():
            in_use[name] = "no GPU"
            continue
        try:
            is_native = library.available(torch.device(name, 0))
        except (ValueError, RuntimeError) as error:
            problems.append(str(error))
            in_use[name] = "an error"
        else:
            in_use[name] = f"native, {library.instruction_set(name)}" if is_native else "reference"
    return in_use
