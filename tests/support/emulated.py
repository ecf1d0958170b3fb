"""The CUDA kernels as a library that runs on the CPU, by ``emulation/``, and buffers that no kernel may leave."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from hf_compressopt.kernels import library
from tests.support.emulation.translate import translate
from tests.support.launching import run

EMULATION = Path(__file__).with_name("emulation")
SOURCES = Path(library.__file__).parent / "csrc"
NAME = "libcompressopt_cpu.so"
FLAGS = [
    *("-std=c++17", "-g", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-Wno-psabi", "-Wno-unknown-pragmas", f"-I{EMULATION}"),
]
# What a GPU refuses, and an overflowing index, are reported on stderr.
CHECKS = ["-O1", "-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-static-libubsan"]
RACES = ["-O1", "-fsanitize=thread", "-DEMULATOR_TSAN"]
FILLER = 0xA5
POISON = 0x7FF47FF4  # not a number as float64, float32, bfloat16 or float16

# The numbers of CUDA's errors.
OUT_OF_MEMORY, INSUFFICIENT_DRIVER, NO_DEVICE, NO_KERNEL_IMAGE = 2, 35, 100, 209


def build(folder: Path, *, checks: Sequence[str] = CHECKS, replace: dict[str, str] | None = None) -> None:
    """Build the library, after replacements in the sources."""
    translate(SOURCES, folder / "csrc", replace)
    sources = sorted((folder / "csrc" / "cuda").glob("*.cu"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    emulator = folder / "emulator.o"

    def compile_one(source: Path, out: Path) -> None:
        run(["g++", *FLAGS, *checks, "-x", "c++", "-c", str(source), "-o", str(out)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    defined = [option for option in checks if option.startswith("-D")]
    run(["g++", *FLAGS, "-O2", *defined, "-c", str(EMULATION / "emulator.cpp"), "-o", str(emulator)])
    run(["g++", "-shared", *checks, *map(str, objects), str(emulator), "-o", str(folder / NAME)])


def build_changed(folder: Path, built: Path, source: str, replace: dict[str, str]) -> None:
    """Build the library of a folder again with one source, or the headers that it includes, changed."""
    translate(SOURCES, folder / "csrc", replace)
    changed = folder / f"{source}.o"
    run(["g++", *FLAGS, *CHECKS, "-x", "c++", "-c", str(folder / "csrc" / "cuda" / f"{source}.cu"), "-o", str(changed)])
    rest = [str(path) for path in built.glob("*.o") if path.stem != source]
    # of functions that are alike the linker takes the first one's
    run(["g++", "-shared", *CHECKS, str(changed), *rest, "-o", str(folder / NAME)])


class Emulator:
    """The library of a folder, and what tests ask of the emulator in it."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / NAME))
        self._library.emulator_allocate.restype = ctypes.c_void_p
        self._placed = count()

    def seed(self, seed: int) -> None:
        """Draw the order of threads, from now on, from this seed."""
        self._library.emulator_set_seed(seed % 2**31)

    def place(self, tensor: Tensor, shift: int) -> Tensor:
        """A copy with a forbidden page close before it or close behind it, by turns."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor)
        nbytes, item = tensor.numel() * tensor.element_size(), tensor.element_size()
        alignment = 16 if tensor.dtype == torch.uint8 and nbytes % 16 == 0 else item
        at_end = next(self._placed) % 2
        arguments = map(ctypes.c_size_t, (nbytes, shift * item, alignment))
        size, offset, step = arguments
        address = self._library.emulator_allocate(size, offset, at_end, step, FILLER)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    def scratch(self, device: int, nbytes: int) -> Tensor:
        """Memory for a kernel, of NaN, between forbidden pages."""
        numbers = torch.full((-(-nbytes // 16) * 4,), POISON, dtype=torch.int32)
        return self.place(numbers.view(torch.uint8), 0)

    def release(self) -> None:
        """Free all buffers, beside which nothing may have been written."""
        beside = self._library.emulator_beside(FILLER)
        self._library.emulator_free_all()
        assert not beside, "written beside a buffer"

    def set(self, **settings: int) -> None:
        """Set what the driver says: device, devices, driver, runtime, capture, major, minor."""
        for name, value in settings.items():
            self._library.emulator_set(name.encode(), value)

    def get(self, name: str) -> int:
        """What :meth:`set` has set, or the library."""
        return int(self._library.emulator_get(name.encode()))

    def fail(self, function: str, error: int, after: int = 0) -> None:
        """Let a function of the runtime fail once, after some calls."""
        self._library.emulator_fail(function.encode(), after, error)

    def calls(self, function: str) -> int:
        """How often a function of the runtime has been called."""
        return int(self._library.emulator_calls(function.encode()))


def races(folder: Path, *arguments: str) -> str:
    """Run programs/emulated_races.py with the library of a folder, built with ``RACES``. Returns the races' reports."""
    found = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    program = Path(__file__).with_name("programs") / "emulated_races.py"
    command = [sys.executable, str(program), str(folder), *arguments]
    if shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # ThreadSanitizer has fixed places in memory
    reported = run(command, timeout=1200, LD_PRELOAD=found.stdout.strip(), TSAN_OPTIONS="exitcode=0").stderr
    return reported if "WARNING: ThreadSanitizer" in reported else ""
