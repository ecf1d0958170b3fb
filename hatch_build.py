"""Build hook of the wheel: CMake makes the native libraries, where there is a C++ compiler.

Where there is none, or the build fails, the wheel is pure Python, and the package computes with its reference
implementation. An editable install gets the libraries into the source tree. CUDA kernels are compiled for the GPUs of
this machine. ``CMAKE_ARGS`` in the environment are more arguments for CMake, such as
``-DCOMPRESSOPT_CUDA_ARCHITECTURES=all``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

OLDEST_CMAKE = (3, 25)
LIBRARIES = "hf_compressopt/kernels/lib"
# The machines for which the registry has cmake and ninja as wheels: elsewhere pip would compile them.
HAVE_WHEELS = "; platform_machine in 'x86_64 aarch64 arm64'"


class NativeLibraries(BuildHookInterface):
    """Adds the libraries to the wheel, or leaves it as it is."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """The build tools that are missing; none where a compiler is missing, too."""
        if not _compiler():
            return []
        missing = [] if _cmake_version() >= OLDEST_CMAKE else ["cmake>=3.25" + HAVE_WHEELS]
        if not (shutil.which("ninja") or shutil.which("make")):
            missing.append("ninja" + HAVE_WHEELS)
        return missing

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build; on success the wheel is one for this platform."""
        self._build_folder = Path(tempfile.mkdtemp(prefix="compressopt-"))
        output = Path(self.root, LIBRARIES) if version == "editable" else self._build_folder / "lib"
        if not self._build(output):
            return
        if version != "editable":
            build_data["force_include"] = {str(file): f"{LIBRARIES}/{file.name}" for file in output.iterdir()}
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built on the way."""
        shutil.rmtree(self._build_folder)

    def _build(self, output: Path) -> bool:
        """Whether the libraries are there now; without the CUDA one where only that fails."""
        if not _compiler():
            self.app.display_warning("No C++ compiler: installing without native kernels.")
            return False
        for more in ([], ["-DCOMPRESSOPT_CUDA_ARCHITECTURES=none"]):
            try:
                _run_cmake(self.root, self._build_folder / "build", output, more)
                if more:
                    (output / "cuda.txt").write_text("not built: it did not compile (pip install -v shows why)\n")
                return True
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"CMake failed{' without CUDA, too' if more else ''}: {error}")
        self.app.display_warning("Installing without native kernels.")
        return False


def _run_cmake(source: str, build: Path, output: Path, more: list[str]) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    arguments = [*generator, f"-DCOMPRESSOPT_OUTPUT={output}", *shlex.split(os.environ.get("CMAKE_ARGS", "")), *more]
    subprocess.run(["cmake", "-S", source, "-B", str(build), *arguments], check=True)
    subprocess.run(["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1)], check=True)


def _compiler() -> str | None:
    names = (os.environ.get("CXX", "").partition(" ")[0], "c++", "g++", "clang++")
    return next(filter(None, map(shutil.which, filter(None, names))), None)


def _cmake_version() -> tuple[int, ...]:
    try:
        said = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0,)
    found = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


def _platform() -> str:
    """The platform of a library built here. Of Linux, no manylinux tag: auditwheel gives it, if it is deserved."""
    if sys.platform == "linux":
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    return next(iter(platform_tags()))
