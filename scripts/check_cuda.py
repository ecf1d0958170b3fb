"""Compile the CUDA kernels for each architecture, and check what ptxas and the machine code say of them.

No kernel may spill more than a few bytes of registers, and every kernel that streams float32 must load and store 128
bits at a time. With --table, it prints the loads that a thread has under way at once, counted in the machine code by
the barriers that instructions wait for, and what a multiprocessor so has under way beside what an H100 needs to reach
the roof of its memory.

Needs nvcc, and cuobjdump and nvdisasm: of the CUDA toolkit, or `pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm`. One kernel file takes some seconds to a minute per architecture.

Usage: check_cuda.py [--architectures 75 80 ...] [--cuobjdump PATH] [--table]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from _common import REPOSITORY, parser_of

SOURCES = REPOSITORY / "hf_compressopt" / "kernels" / "csrc" / "cuda"
SPILL_BUDGET = 16  # bytes of a thread
THREADS = 256
REGISTERS = 65_536  # of a multiprocessor
# An H100: 3.35 TB/s over 132 multiprocessors, and some 650 ns from asking to having.
NEEDED = 3.35e12 * 650e-9 / 132

# Kernels that stream float32, and so move 16 bytes at a time: loads, stores.
BOTH = ("compress_blocks", "compress_large_blocks", "compress_tiles", "sum_tiles", "step_tensors", "lamb_items")
VECTORS = dict.fromkeys((*BOTH, "commit_tiles"), (True, True)) | {"over_runs": (False, True)}
VECTORS |= dict.fromkeys(("square_items", "find_nan"), (True, False))
# What a kernel must move of an element: bytes read and written, float32 gradients, parameters and moments.
MOVES = {
    r"compress_blocks.*Combination.*FloatErrors": "8 + 4.1",
    r"compress_blocks.*Combination.*CompactErrors": "5 + 1.1",
    r"compress_blocks.*Mean.*FloatErrors": "4 + W / 8 + 4.1",
    r"compress_tiles.*Combination.*FloatErrors": "8 + 4.5 (4 bits)",
    r"compress_tiles.*IntegerMean<4>.*FloatErrors": "4 + W / 2 + 4.5",
    r"compress_tiles.*IntegerMean<8>.*FloatErrors": "4 + W + 5",
    r"over_runs.*ApplyAdam<FloatVariance>": "8.1 + 8",
    r"over_runs.*ApplyAdam<LogVariance>": "5.1 + 8",
    r"step_tensors": "16 + 12",
    r"square_items": "4 + 0",
    r"sketch_spans": "4 + 0",
    r"find_nan": "1 / 64 + 0",
}


@dataclass
class Kernel:
    """Findings of the tools on a kernel for one architecture."""

    name: str
    registers: int = 0
    spills: int = 0
    loads: dict[int, int] = field(default_factory=dict)  # by bits
    stores: dict[int, int] = field(default_factory=dict)
    in_flight: int = 0  # loads
    bytes_in_flight: int = 0

    @property
    def family(self) -> str:
        """The name without arguments of the template."""
        return self.name.split("<")[0]

    @property
    def bytes_of_multiprocessor(self) -> int:
        """The bytes that all threads of a multiprocessor have under way."""
        blocks = min(2048 // THREADS, REGISTERS // (THREADS * -(-max(self.registers, 1) // 8) * 8))
        return self.bytes_in_flight * THREADS * blocks


def readable(mangled: list[str]) -> dict[str, str]:
    """Short names of kernels by their symbols."""
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    result = {}
    for symbol, name in zip(mangled, names.stdout.splitlines(), strict=True):
        short = re.sub(r"\(anonymous namespace\)::|compressopt::|_GLOBAL__N__\w+::|^void ", "", name)
        result[symbol] = re.sub(r" ?\(.*", "", short).replace("> >", ">>")
    return result


def compiled(source: Path, architecture: str, folder: Path) -> tuple[Path, dict[str, tuple[int, int]]]:
    """Compile a file. Returns the machine code, and registers and spilled bytes of each kernel."""
    out = folder / f"{source.stem}_{architecture}.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "--fmad=false", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-cubin"]
    result = subprocess.run([*command, "-o", str(out), str(source)], capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"nvcc cannot compile {source.name} for sm_{architecture}:\n{result.stderr[-4000:]}")
    found = re.finditer(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        result.stderr + result.stdout,
        re.DOTALL,
    )
    return out, {m[1]: (int(m[4]), max(int(m[2]), int(m[3]))) for m in found}


def machine_code(cuobjdump: str, cubin: Path) -> dict[str, list[tuple[str, int]]]:
    """The instructions of each kernel, each with the upper half of its code, which has the barriers."""
    environment = {**os.environ, "PATH": f"{Path(cuobjdump).parent}:{os.environ['PATH']}"}  # it calls nvdisasm
    result = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise SystemExit(f"{cuobjdump} cannot read {cubin.name}:\n{result.stderr}")
    functions: dict[str, list[tuple[str, int]]] = {}
    words = r"/\*[0-9a-f]{4,}\*/\s+(.*?) ?;\s+/\* 0x\w+ \*/\s+/\* (0x\w+) \*/"
    for text in result.stdout.split("Function : ")[1:]:
        functions[text.split()[0]] = [(match[1], int(match[2], 16)) for match in re.finditer(words, text)]
    return functions


def count(kernel: Kernel, instructions: list[tuple[str, int]]) -> None:
    """Count accesses of global memory, and loads that are under way before the thread waits for the first of them.

    A load counts up one of six barriers until it has ended; an instruction waits for those of its mask.
    """
    waiting: dict[int, tuple[int, int, int]] = {}  # by register: which load, bytes, barrier
    for number, (instruction, code) in enumerate(instructions):
        mask, barrier = code >> 52 & 63, code >> 46 & 7
        waiting = {register: row for register, row in waiting.items() if not mask >> row[2] & 1}
        access = re.match(r"(?:@!?U?P\w+ )?(LDG|STG)\.E\S*? (\S.*)", f"{instruction} ")
        if access is None:
            continue
        width = re.search(r"\.(128|64|U16|S16|U8|S8)\b", instruction.split(" R")[0].split(" [")[0])
        bits = int(re.sub(r"\D", "", width[1])) if width else 32
        table = kernel.loads if access[1] == "LDG" else kernel.stores
        table[bits] = table.get(bits, 0) + 1
        if access[1] == "LDG" and (target := re.search(r"\bR(\d+)\b", instruction)):
            for register in range(int(target[1]), int(target[1]) + max(bits // 32, 1)):
                row = number, min(bits, 32) // 8, barrier
                waiting[register] = max(row, waiting.get(register, row), key=lambda row: (row[1], row[0]))
            kernel.in_flight = max(kernel.in_flight, len({row[0] for row in waiting.values()}))
            kernel.bytes_in_flight = max(kernel.bytes_in_flight, sum(row[1] for row in waiting.values()))


def kernels(source: Path, architecture: str, cuobjdump: str, folder: Path) -> list[Kernel]:
    """All kernels of a file."""
    cubin, used = compiled(source, architecture, folder)
    functions, names, found = machine_code(cuobjdump, cubin), readable(list(used)), []
    for symbol, (registers, spills) in used.items():
        kernel = Kernel(names[symbol], registers, spills)
        count(kernel, functions[symbol])
        found.append(kernel)
    return sorted(found, key=lambda kernel: kernel.name)


def complaints(kernel: Kernel) -> list[str]:
    """List the faults of a kernel."""
    found = []
    if kernel.spills > SPILL_BUDGET:
        found.append(f"spills {kernel.spills} bytes of registers, at most {SPILL_BUDGET} are allowed")
    compact = "CompactErrors" in kernel.name  # which are bytes, as messages are
    wanted = dict(zip(("load", "store"), VECTORS.get(kernel.family, (False, False)), strict=True))
    exempt = {"load": compact and "Mean" in kernel.name, "store": compact}
    for doing, have in (("load", kernel.loads), ("store", kernel.stores)):
        if wanted[doing] and not exempt[doing] and not have.get(128):
            found.append(f"does not {doing} 128 bits at a time, but {have}")
    return found


def find_cuobjdump() -> str | None:
    """The program on the path, beside nvcc, or in a Python package of this environment."""
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).resolve().parent / "cuobjdump"] if nvcc else []
    places += [path for entry in sys.path for path in Path(entry).glob("nvidia/*/bin/cuobjdump")]
    return shutil.which("cuobjdump") or next((str(place) for place in places if place.is_file()), None)


def architectures() -> list[str]:
    """Architectures that the library is built for, as far as nvcc knows them."""
    wanted = re.search(r"set\(ALL_ARCHITECTURES ([\d ]+)\)", (REPOSITORY / "cmake" / "Architectures.cmake").read_text())
    known = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    return [name for name in (wanted[1].split() if wanted else ()) if f"compute_{name}\n" in known + "\n"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--architectures", nargs="+", metavar="NUMBER")
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not shutil.which("nvcc") or not options.cuobjdump:
        raise SystemExit(
            "needs nvcc and cuobjdump: of the CUDA toolkit, or `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
        )
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for architecture in options.architectures or architectures():
            print(f"sm_{architecture}", flush=True)
            for source in sorted(SOURCES.glob("*.cu")):
                for kernel in kernels(source, architecture, options.cuobjdump, Path(folder)):
                    if options.table:
                        print(row(kernel))
                    for complaint in complaints(kernel):
                        wrong += 1
                        print(f"  WRONG {source.name}: {kernel.name} {complaint}")
    print(f"{wrong} faults" if wrong else f"no spills above {SPILL_BUDGET} bytes, and 128 bits at a time")
    raise SystemExit(1 if wrong else 0)


def row(kernel: Kernel) -> str:
    """A line of the table."""
    moves = next((moves for pattern, moves in MOVES.items() if re.match(pattern, kernel.name)), "")
    return (
        f"  {kernel.name[:72]:72} {kernel.registers:3} registers {kernel.spills:3} B spilled, "
        f"{kernel.in_flight:2} loads of {kernel.bytes_in_flight:3} B under way, "
        f"{kernel.bytes_of_multiprocessor / 1024:5.1f} KiB of {NEEDED / 1024:.0f} needed; "
        f"bytes/element {moves or '-'}"
    )


if __name__ == "__main__":
    main()
