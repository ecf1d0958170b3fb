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
    problems: list[str] = []
    try:
        importlib.import_module("torch")
        has_torch = True
    except (ImportError, OSError) as error:
        problems.append(f"torch cannot be imported, and nothing works without it: {error}")
        has_torch = False
    return {
        "package": {"version": hf_compressopt.__version__, "path": str(Path(hf_compressopt.__file__).parent)},
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "libraries": {name: _library(name) for name in ("cpu", "cuda")} if has_torch else {},
        "gpu": {"driver": _driver(), **(_gpus() if has_torch else {"cuda": None, "devices": []})},
        "communicators": {"torch": _backends() if has_torch else [], "mpi": _mpi() if has_torch else None},
        "kernels": _kernels(problems) if has_torch else None,
        "problems": problems,
    }


def render(facts: dict[str, Any]) -> str:
    """Render the facts of :func:`collect` as text."""
    gpu, kernels, mpi = facts["gpu"], facts["kernels"], facts["communicators"]["mpi"]
    devices = {f"GPU {index}": text for index, text in enumerate(gpu["devices"])}
    sections = {
        f"hf_compressopt {facts['package']['version']}": {
            "path": facts["package"]["path"],
            "python": f"{facts['python']['version']} on {facts['python']['platform']}",
        },
        "packages": {name: version or "not installed" for name, version in facts["packages"].items()},
        "native libraries": {name: _library_text(library) for name, library in facts["libraries"].items()},
        "GPU": {
            "driver": gpu["driver"] or "none",
            "torch's CUDA": gpu["cuda"] or "none",
            **(devices or {"devices": "none"}),
        },
        "communicators": {
            "torch": ", ".join(facts["communicators"]["torch"]) or "none",
            "mpi": "none" if mpi is None else mpi.get("problem") or _mpi_text(mpi),
        },
    }
    if kernels is not None:
        sections[f"in use (HF_COMPRESSOPT_KERNELS={kernels['setting'] or 'not set'})"] = {
            "CPU tensors": kernels["cpu"],
            "CUDA tensors": kernels["cuda"],
        }
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
    found: dict[str, Any] = {"path": str(path), "built": built or None, "problem": problem or None}
    try:
        found["instruction_set"] = library.instruction_set(device_type)
    except RuntimeError:
        return {**found, "instruction_set": None, "interface": None}
    return {**found, "interface": ctypes.CDLL(str(path)).co_abi_version()}


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
    said = _NVIDIA_DRIVER.read_text() if _NVIDIA_DRIVER.exists() else ""
    release = re.search(r"Module.*?\s(\d+\.[\d.]+)", said)
    return f"{release[1]} ({text})" if release else text


def _gpus() -> dict[str, Any]:
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        devices.append(f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.1f} GiB")
    return {"cuda": torch.version.cuda, "devices": devices}


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


def _mpi_text(mpi: dict[str, Any]) -> str:
    return f"{mpi['library']}, {'CUDA-aware' if mpi['cuda_aware'] else 'through host buffers'}"


def _kernels(problems: list[str]) -> dict[str, Any]:
    import torch

    from hf_compressopt.kernels import library

    found: dict[str, Any] = {"setting": os.environ.get(library.VARIABLE)}
    for name in ("cpu", "cuda"):
        if name == "cuda" and not torch.cuda.is_available():
            found[name] = "no GPU"
            continue
        try:
            is_native = library.available(torch.device(name, 0))
        except (ValueError, RuntimeError) as error:
            problems.append(str(error))
            found[name] = "an error"
        else:
            found[name] = f"native, {library.instruction_set(name)}" if is_native else "reference"
    return found
