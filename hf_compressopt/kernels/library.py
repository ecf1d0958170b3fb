"""The libraries of native code: loading, checks of devices, and calls of their C interface, ``csrc/compressopt.h``.

``HF_COMPRESSOPT_KERNELS`` chooses the kernels: ``native`` (an error if there is no working library) or ``reference``.
If it is not set, native kernels are used if there is a working library.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

VARIABLE = "HF_COMPRESSOPT_KERNELS"
CHOICES = ("native", "reference")

_ABI_VERSION = 11
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


_Exec = record("co_exec", (c_int32, "threads device"), (c_void_p, "stream allocate"))
_ARGUMENTS: dict[str, list[Any]] = {  # the last one, co_exec, is added to each
    "co_compress": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32],
    "co_average_compress": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32],
    "co_decompress": [c_void_p, c_void_p],
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
    key = device.type, 0 if device.type == "cpu" else _index(device)
    if key not in _found:
        try:
            library = _library(device.type)
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
    return str(_library(device_type).co_instruction_set().decode())


def use_instruction_set(name: str) -> None:
    """Use "avx512_gfni", "avx512", "avx2" or "portable" on the CPU from now on, if it can. For tests."""
    library = _library("cpu")
    if library.co_use_instruction_set(name.encode()):
        raise RuntimeError(library.co_last_error().decode())


def call(function: str, device: torch.device, *arguments: Any) -> None:
    """Call a function of the C interface with torch's threads or the current stream; a RuntimeError if it fails."""
    kind = device.type
    library = _library(kind)
    if kind == "cpu":
        threads = 1 if _one_thread else torch.get_num_threads()
        where = _exec(threads, 0, _host_threads() if threads > 1 else None)
    else:
        index = _index(device)
        if index != torch.cuda.current_device():  # torch makes it current, and leaves no context on the other one
            with torch.cuda.device(index):
                return call(function, device, *arguments)
        where = _exec(1, index, torch.cuda.current_stream(device).cuda_stream)
    failed = getattr(library, function)(*arguments, where)
    if _scratch.tensors:
        _scratch.tensors.clear()  # whoever gets the memory next uses it after these kernels, on the same stream
    if _scratch.error is not None:
        error, _scratch.error = _scratch.error, None
        raise error
    if failed:
        raise RuntimeError(library.co_last_error().decode())


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let kernels on the CPU use the caller's thread alone, and leave open which threads later ones use."""
    global _one_thread
    _one_thread += 1
    try:
        yield
    finally:
        _one_thread -= 1


_one_thread = 0


@lru_cache
def _exec(threads: int, device: int, where: int | None) -> Any:
    return ctypes.byref(_Exec(threads, device, where, ctypes.cast(_allocate, c_void_p)))


class _Scratch(threading.local):
    """The memory that a call of this thread was given, and what went wrong with it."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.error: Exception | None = None


_scratch = _Scratch()


def _give_scratch(device: int, nbytes: int) -> int | None:
    """Give a kernel memory of torch's allocator, on the current stream, until its call returns."""
    try:
        tensor = _new_scratch(device, nbytes)
    except Exception as error:  # out of memory; nothing may be raised through C
        _scratch.error = error
        return None
    _scratch.tensors.append(tensor)
    return tensor.data_ptr()


_allocate = ctypes.CFUNCTYPE(c_void_p, c_int32, c_int64)(_give_scratch)


def _new_scratch(device: int, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))


@lru_cache
def _host_threads() -> int | None:
    """Return the address of GOMP_parallel of torch's OpenMP runtime, or None if its threads do not run.

    They spin after each operator, and would compete with a second pool. A child of fork() has none, and the runtime
    would wait for them forever. The number of threads of the process, at the first kernel on several, shows it.
    """
    if _forked or "OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        if len(os.listdir("/proc/self/task")) < torch.get_num_threads():
            return None
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None


def _after_fork() -> None:
    global _forked
    _forked = True
    _host_threads.cache_clear()


_forked = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def path_of(device_type: str) -> Path:
    return _DIRECTORY / f"libcompressopt_{device_type}.so"


@lru_cache
def _library(device_type: str) -> ctypes.CDLL:
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


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
