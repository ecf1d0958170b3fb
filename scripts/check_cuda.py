"""Compile the CUDA kernels for each architecture, and check what ptxas and the machine code say of them.

No kernel may spill more than a few bytes of registers, and every kernel that streams float32 must load and store 128
bits at a time.

Needs nvcc, and cuobjdump and nvdisasm: of the CUDA toolkit, or `pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm`. One kernel file takes some seconds to a minute per architecture.

Usage: check_cuda.py [--architectures 75 80 ...] [--cuobjdump PATH]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _common import REPOSITORY, parser_of

SOURCES = REPOSITORY / "hf_compressopt" / "kernels" / "csrc" / "cuda"
SPILL_BUDGET = 16  # bytes of a thread

# Kernels that stream values, and so move 16 bytes at a time: loads, stores.
BOTH = ("compress_blocks", "compress_large_blocks", "compress_tiles", "sum_tiles", "step_tensors", "lamb_items")
VECTORS = dict.fromkeys((*BOTH, "commit_tiles"), (True, True)) | {"over_runs": (False, True)}
VECTORS |= dict.fromkeys(("square_items", "learning_items", "find_nan", "find_sizes", "write_blocks"), (True, False))
VECTORS |= {"apply_blocks": (True, True)}
ACCESSES = {"load": "LDG", "store": "STG"}  # their instructions


@dataclass
class Kernel:
    """Findings of the tools on a kernel for one architecture."""

    name: str
    spills: int
    wide: set[str]  # "load" and "store", of 128 bits at a time

    @property
    def family(self) -> str:
        """The name without arguments of the template."""
        return self.name.split("<")[0]


def readable(mangled: list[str]) -> dict[str, str]:
    """Short names of kernels by their symbols."""
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    result = {}
    for symbol, name in zip(mangled, names.stdout.splitlines(), strict=True):
        short = re.sub(r"\(anonymous namespace\)::|compressopt::|_GLOBAL__N__\w+::|^void ", "", name)
        result[symbol] = re.sub(r" ?\(.*", "", short).replace("> >", ">>")
    return result


def compiled(source: Path, architecture: str, folder: Path) -> tuple[Path, dict[str, int]]:
    """Compile a file. Returns the machine code, and the spilled bytes of each kernel."""
    out = folder / f"{source.stem}_{architecture}.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "--fmad=false", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-cubin"]
    result = subprocess.run([*command, "-o", str(out), str(source)], capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"nvcc cannot compile {source.name} for sm_{architecture}:\n{result.stderr[-4000:]}")
    found = re.finditer(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
        result.stderr + result.stdout,
        re.DOTALL,
    )
    return out, {m[1]: max(int(m[2]), int(m[3])) for m in found}


def machine_code(cuobjdump: str, cubin: Path) -> dict[str, str]:
    """The instructions of each kernel."""
    environment = {**os.environ, "PATH": f"{Path(cuobjdump).parent}:{os.environ['PATH']}"}  # it calls nvdisasm
    result = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise SystemExit(f"{cuobjdump} cannot read {cubin.name}:\n{result.stderr}")
    return {text.split()[0]: text for text in result.stdout.split("Function : ")[1:]}


def kernels(source: Path, architecture: str, cuobjdump: str, folder: Path) -> list[Kernel]:
    """All kernels of a file."""
    cubin, used = compiled(source, architecture, folder)
    functions, names, found = machine_code(cuobjdump, cubin), readable(list(used)), []
    for symbol, spills in used.items():
        code = functions[symbol]
        wide = {doing for doing, access in ACCESSES.items() if re.search(rf"{access}\.E\S*\.128", code)}
        found.append(Kernel(names[symbol], spills, wide))
    return sorted(found, key=lambda kernel: kernel.name)


def complaints(kernel: Kernel) -> list[str]:
    """List the faults of a kernel."""
    found = []
    if kernel.spills > SPILL_BUDGET:
        found.append(f"spills {kernel.spills} bytes of registers, at most {SPILL_BUDGET} are allowed")
    compact = "CompactErrors" in kernel.name  # which are bytes, as messages and codes are
    learns_from_bytes = "Learning<Messages, LogVariance>" in kernel.name
    wanted = dict(zip(("load", "store"), VECTORS.get(kernel.family, (False, False)), strict=True))
    exempt = {
        "load": (compact and "Mean" in kernel.name) or learns_from_bytes,
        "store": compact or "StoreCodes" in kernel.name,
    }
    for doing in ("load", "store"):
        if wanted[doing] and not exempt[doing] and doing not in kernel.wide:
            found.append(f"does not {doing} 128 bits at a time")
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
                    for complaint in complaints(kernel):
                        wrong += 1
                        print(f"  WRONG {source.name}: {kernel.name} {complaint}")
    print(f"{wrong} faults" if wrong else f"no spills above {SPILL_BUDGET} bytes, and 128 bits at a time")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
