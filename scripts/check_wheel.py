"""Check what a wheel of hf_compressopt holds: files, tag, and what its libraries ask of the machine they are loaded on.

``python scripts/check_wheel.py dist/*.whl`` prints a table, or what is wrong; ``--cpu-only`` for one without CUDA.
Needs readelf.
"""

from __future__ import annotations

import argparse
import ctypes
import email
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
PACKAGE = REPO_ROOT / "hf_compressopt"
#: Files of the package beside its modules.
_DATA = ("py.typed",)
HEADER = PACKAGE / "kernels" / "csrc" / "compressopt.h"
LIBRARIES = "hf_compressopt/kernels/lib"

# What torch's own wheels ask for, from 2.6 on: where torch runs, ours load.
OLDEST_GLIBC = (2, 28)
SYSTEM_LIBRARIES = {
    *("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"),
    *("libstdc++.so.6", "libgcc_s.so.1"),
}
#: Of the wheel. CUDA 12 packs kernels for drivers from R525 on: those of 2.6 MB by CUDA 13 in 5.5.
MOST_MEGABYTES, MOST_BY_CUDA_12 = 5, 8


class Library:
    """The dynamic section of a shared library."""

    def __init__(self, path: Path) -> None:
        environment = {**os.environ, "LC_ALL": "C"}
        command = ["readelf", "--wide", "--dynamic", "--version-info", "--dyn-syms", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        self.needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
        self.search_paths = set(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text))
        self.exports = set(re.findall(r" (?:GLOBAL|WEAK) +DEFAULT +\d+ (\w+)", text))
        versions = re.findall(r"Name: GLIBC_(\d[\d.]*) ", text)
        self.glibc = max(tuple(map(int, version.split("."))) for version in versions)  # the oldest that it loads with


def declared_functions(*, cuda: bool) -> set[str]:
    """The functions that a library must have. The comment above one says if only one library has it."""
    header = HEADER.read_text()
    other = re.findall(rf"{'CPU' if cuda else 'CUDA'} only\. \*/\nCO_API .*?\b(co_\w+)\(", header)
    return set(re.findall(r"^CO_API .*?\b(co_\w+)\(", header, flags=re.MULTILINE)) - set(other)


def problems_of_library(path: Path) -> list[str]:
    library, found = Library(path), []
    if foreign := library.needed - SYSTEM_LIBRARIES:
        found.append(f"needs {sorted(foreign)}, which not every machine has")
    if library.search_paths:
        found.append(f"has search paths: {sorted(library.search_paths)}")
    if library.glibc > OLDEST_GLIBC:
        found.append(f"needs glibc {library.glibc}, more than {OLDEST_GLIBC}; see cmake/OldGlibc.cmake")
    if different := sorted(library.exports ^ declared_functions(cuda="cuda" in path.name)):
        found.append(f"exports other functions than compressopt.h declares: {different}")
    content = path.read_bytes()
    places = ("/csrc/", f"{REPO_ROOT}/", f"{Path.home()}/")  # wherever it was built, the sources lay in csrc
    found.extend(f"contains the path {place}" for place in places if place != "//" and place.encode() in content)
    loaded = ctypes.CDLL(str(path))
    abi = int(re.findall(r"#define CO_ABI_VERSION (\d+)", HEADER.read_text())[0])
    if loaded.co_abi_version() != abi:
        found.append(f"has version {loaded.co_abi_version()} of the interface, compressopt.h {abi}")
    return [f"{path.name} {problem}" for problem in found]


def expected_files(libraries: list[str]) -> set[str]:
    sources = (path for path in PACKAGE.rglob("*") if path.suffix == ".py" or path.name in _DATA)
    built = [*libraries, "cuda.txt"] if libraries else []
    return {*(str(path.relative_to(REPO_ROOT)) for path in sources), *(f"{LIBRARIES}/{name}" for name in built)}


def problems_of_files(wheel: Path, libraries: list[str]) -> list[str]:
    """List what is wrong with the files and tags of a wheel that should hold these libraries (none: a pure wheel)."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        description = email.message_from_bytes(archive.read(f"{info}/WHEEL"))
        told = f"{LIBRARIES}/cuda.txt"
        by_cuda_12 = told in names and b"by CUDA 12" in archive.read(told)
    expected = expected_files(libraries)
    package = {name for name in names if not name.startswith(f"{info}/")}
    found = [f"{name} is missing" for name in sorted(expected - package)]
    found += [f"{name} does not belong there" for name in sorted(package - expected)]
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    found += [f"{name} is missing" for name in sorted(metadata - names)]
    tags = description.get_all("Tag", [])
    python, abi, platforms = wheel.stem.split("-")[-3:]
    if sorted(tags) != sorted(f"{python}-{abi}-{platform}" for platform in platforms.split(".")):
        found.append(f"the file's name says {python}-{abi}-{platforms}, its WHEEL {tags}")
    if (python, abi) != ("py3", "none") or (platforms == "any") == bool(libraries):
        found.append(f"is tagged {python}-{abi}-{platforms}")
    if description["Root-Is-Purelib"] != str(not libraries).lower():
        found.append(f"Root-Is-Purelib is {description['Root-Is-Purelib']}")
    most = MOST_BY_CUDA_12 if by_cuda_12 else MOST_MEGABYTES
    if wheel.stat().st_size > most * 1e6:
        found.append(f"has {wheel.stat().st_size / 1e6:.1f} MB, more than {most}")
    return found


def libraries_in(wheel: Path) -> Iterator[Path]:
    """Unpack the libraries of a wheel, one by one."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as unpacked:
        for name in archive.namelist():
            if name.endswith(".so"):
                yield Path(archive.extract(name, unpacked))


def describe(wheel: Path) -> None:
    print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB, {len(zipfile.ZipFile(wheel).namelist())} files")
    for path in libraries_in(wheel):
        library, loaded = Library(path), ctypes.CDLL(str(path))
        loaded.co_instruction_set.restype = ctypes.c_char_p
        print(f"  {path.name}: {path.stat().st_size / 1e3:.0f} kB, interface {loaded.co_abi_version()}")
        print(f"    instruction set here: {loaded.co_instruction_set().decode()}")
        print(f"    glibc {'.'.join(map(str, library.glibc))}; needs {', '.join(sorted(library.needed))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu-only", action="store_true", help="the wheel was built without nvcc")
    parser.add_argument("--manylinux", action="store_true", help="the tag must be a manylinux one")
    arguments = parser.parse_args()
    libraries = ["libcompressopt_cpu.so", *([] if arguments.cpu_only else ["libcompressopt_cuda.so"])]
    found = problems_of_files(arguments.wheel, libraries)
    found += [problem for path in libraries_in(arguments.wheel) for problem in problems_of_library(path)]
    if arguments.manylinux and "manylinux" not in arguments.wheel.name:
        found.append("has no manylinux tag")
    for problem in found:
        print(f"{arguments.wheel.name}: {problem}", file=sys.stderr)
    if not found:
        describe(arguments.wheel)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
