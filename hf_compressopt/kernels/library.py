"""The libraries of native code, whose C interface is ``csrc/compressopt.h``: loading, and checks of devices.

``HF_COMPRESSOPT_KERNELS`` chooses the kernels: ``native`` (an error if there is no working library) or ``reference``.
If it is not set, native kernels are used if there is a working library.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

VARIABLE = "HF_COMPRESSOPT_KERNELS"
CHOICES = ("native", "reference")

_ABI_VERSION = 13
_DIRECTORY = Path(__file__).resolve().parent / "lib"
_DEVICES = ("cpu", "cuda")
_DEVICE_ERROR = 3  # co_status of a failure that may pass

logger = logging.getLogger(__name__)
_found: dict[tuple[str, int], str] = {}  # what lastingly hinders native kernels on a device, "" for nothing
_warned: set[str] = set()


def record(name: str, *groups: tuple[type[Any], str]) -> Any:
    """Return the class of a structure of ``compressopt.h``, by groups of fields of one type."""
    fields = [(field, kind) for kind, names in groups for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_ARGUMENTS: dict[str, list[Any]] = {  # the last one, co_exec, is added to each
    "co_compress": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32],
    "co_average_compress": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32],
    "co_decompress": [c_void_p, c_void_p],
    "co_add_average": [c_void_p, c_void_p, c_int64, c_float, c_float],
    "co_combine": [c_void_p, c_void_p, c_int64],
    "co_sum_rows": [c_void_p, c_int32, c_int64, c_void_p, c_int64, c_float],
    "co_compress_integers": [c_void_p] * 4 + [c_int64, c_int32, c_int32],
    "co_average_integers": [c_void_p] * 4 + [c_int64, c_int32, c_int32],
    "co_mean_integers": [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_float],
    "co_add_integers": [c_void_p, c_void_p, c_int64, c_float, c_float],
    "co_decode_integers": [c_void_p, c_void_p],
    "co_any_nan": [c_void_p, c_void_p],
    "co_apply_adam": [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_void_p],
    "co_local_step": [c_void_p] * 5 + [c_int64, c_int64, c_float, c_float, c_void_p],
    "co_sync_parameters": [c_void_p] * 6 + [c_int64, c_float, c_void_p],
    "co_lamb_moments": [c_void_p] * 5 + [c_int64, c_void_p, c_void_p, c_void_p],
    "co_lamb_apply": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    "co_variance_sums": [c_void_p, c_void_p, c_void_p, c_int64, c_void_p],
    "co_refresh_variance": [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_uint64],
    "co_adam": [c_void_p, c_int64, c_void_p],
    "co_square_sums": [c_void_p, c_int64, c_void_p],
    "co_sketch": [c_void_p, c_int64, c_int64, c_uint64, c_void_p, c_void_p],
    "co_change_sizes": [c_void_p, c_void_p, c_int64, c_void_p],
    "co_write_changes": [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p],
    "co_apply_changes": [c_void_p] * 4 + [c_int64],
    "co_copy": [c_void_p, c_void_p, c_int64],
}


def chosen() -> str | None:
    """Return ``HF_COMPRESSOPT_KERNELS``: "native", "reference", or None; a ValueError if it is anything else."""
    choice = os.environ.get(VARIABLE)
    if not choice:
        return None
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be 'native', 'reference' or not set, got {choice!r}")
    return choice


def available(device: torch.device) -> bool:
    """Return whether native kernels work on a device; a RuntimeError if not, and the user wants "native"."""
    choice = chosen()
    if choice == "reference":
        return False
    missing = why_not(device)
    if missing and choice == "native":
        raise RuntimeError(f"{VARIABLE}=native, but there are no native kernels for {device}: {missing}")
    if missing and device.type == "cuda" and missing not in _warned:
        _warned.add(missing)
        logger.warning(
            f"{device} gets the reference kernels, in PyTorch and slower: {missing}. `hf-compressopt env` says more; "
            f"{VARIABLE}=reference chooses them without this warning"
        )
    return not missing


def why_not(device: torch.device) -> str:
    """Return the reason why there are no native kernels for a device, or "" if there are."""
    if device.type not in _DEVICES:
        return f"there is no library for {device.type}; there are libraries for {' and '.join(_DEVICES)}"
    key = device.type, 0 if device.type == "cpu" else index_of(device)
    if key not in _found:
        try:
            library = loaded(device.type)
        except RuntimeError as error:
            code, found = 1, str(error)
        else:
            with _current(key):
                code = library.co_check_device(key[1])
            found = library.co_last_error().decode() if code else ""
        if code == _DEVICE_ERROR:
            return found
        _found[key] = found
    return _found[key]


def _current(place: tuple[str, int]) -> AbstractContextManager[object]:
    """Make a GPU that torch knows the current one: torch returns to the one before without leaving a context on it."""
    kind, index = place
    known = kind == "cuda" and torch.cuda.is_available() and index < torch.cuda.device_count()
    return torch.cuda.device(index) if known else nullcontext()


def what_was_built() -> str:
    """Return for which GPUs the CUDA library was built, or why there is none; "" if the build did not say."""
    try:
        return (_DIRECTORY / "cuda.txt").read_text().strip()
    except OSError:
        return ""


def instruction_set(device_type: str) -> str:
    """Return the instruction set of the library of a device type, such as "avx512"; a RuntimeError without one."""
    return str(loaded(device_type).co_instruction_set().decode())


def use_instruction_set(name: str) -> None:
    """Use "avx512_gfni", "avx512", "avx2" or "portable" on the CPU from now on, if it can. For tests."""
    library = loaded("cpu")
    if library.co_use_instruction_set(name.encode()):
        raise RuntimeError(library.co_last_error().decode())


def path_of(device_type: str) -> Path:
    return _DIRECTORY / f"libcompressopt_{device_type}.so"


@lru_cache
def loaded(device_type: str) -> ctypes.CDLL:
    """Return the library of a device type, with the interface that is called; a RuntimeError without one."""
    path = path_of(device_type)
    if not path.is_file():
        built = what_was_built() if device_type == "cuda" else ""
        raise RuntimeError(f"{path} does not exist: {built or 'this installation was made without it'}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}") from error
    if (version := library.co_abi_version()) != _ABI_VERSION:
        raise RuntimeError(f"{path} has version {version} of the interface, needed is {_ABI_VERSION}: build it again")
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = [*arguments, c_void_p]
    library.co_instruction_set.restype = library.co_last_error.restype = ctypes.c_char_p
    return library


def index_of(device: torch.device) -> int:
    """Return the number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index
