"""The sdist has what it needs; with a compiler it becomes a wheel with libraries, without one a pure one."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import check_wheel
from tests.support.launching import REPO_ROOT

CAN_COMPILE = bool(shutil.which("cmake") and shutil.which("c++"))
needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="needs cmake and a C++ compiler")
CPU = "libcompressopt_cpu.so"


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": "", **env}, text=True, stdout=-1, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def hatchling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the build backend."""
    folder = tmp_path_factory.mktemp("hatchling")
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "hatchling"], folder)
    return folder


def build(target: str, source: Path, hatchling: Path, **env: str) -> tuple[Path, str]:
    """Build a target with hatchling; return the file and the output."""
    out = hatchling / f"{target.replace(':', '-')}-{len(list(hatchling.iterdir()))}"
    said = run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)], source,
               PYTHONPATH=str(hatchling), **env)  # fmt: skip
    (made,) = out.iterdir()
    return made, said


@pytest.fixture(scope="module")
def sdist(hatchling: Path) -> Path:
    return build("sdist", REPO_ROOT, hatchling)[0]


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # not in the first releases of Python 3.10 and 3.11
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (source,) = folder.iterdir()
    return source


@pytest.fixture
def small_source(sdist: Path, tmp_path: Path) -> Path:
    """The sdist, unpacked, with a CPU library that is compiled in no time, and CUDA code that does not compile."""
    source = unpack(sdist, tmp_path / "unpacked")
    csrc = source / "hf_compressopt" / "kernels" / "csrc"
    shutil.rmtree(csrc)
    for name, text in {
        "compressopt.h": "",
        "cpu/only.cpp": 'extern "C" int co_abi_version() { return 0; }',
        "cuda/only.cu": "#error",
    }.items():
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(text)
    return source


def test_the_sdist_holds_every_file_of_the_project(sdist: Path) -> None:
    if not (REPO_ROOT / ".git").exists():
        pytest.skip("needs a git checkout to compare with")
    tracked = set(run(["git", "ls-files"], REPO_ROOT).split())
    of_the_checkout = {name for name in tracked if name.startswith((".ci/", ".pre-commit"))}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - of_the_checkout - names == set()
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.parametrize("library", ["libcompressopt_cpu.so", "libcompressopt_cuda.so"])
def test_the_libraries_ask_for_little_and_export_the_interface(library: str) -> None:
    path = REPO_ROOT / check_wheel.LIBRARIES / library
    if not path.exists():
        pytest.skip("not built here (make kernels)")
    assert check_wheel.problems_of_library(path) == []


@needs_compiler
@pytest.mark.full
def test_with_a_compiler_the_wheel_has_the_library_without_cuda_where_that_does_not_compile(
    small_source: Path, hatchling: Path
) -> None:
    wheel, said = build("wheel", small_source, hatchling)
    assert check_wheel.problems_of_files(wheel, [CPU]) == [], said
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("hf_compressopt/stray.py", "")
    assert check_wheel.problems_of_files(wheel, []) == [
        "hf_compressopt/kernels/lib/libcompressopt_cpu.so does not belong there",
        "hf_compressopt/stray.py does not belong there",
        f"is tagged {'-'.join(wheel.stem.split('-')[-3:])}",
        "Root-Is-Purelib is false",
    ]


@pytest.mark.full
def test_without_a_compiler_pip_installs_pure_python_that_works(sdist: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    for tool in ("cmake", "ninja", "make"):  # no compiler: these alone help nobody
        if found := shutil.which(tool):
            (nothing / tool).symlink_to(found)
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--target", str(tmp_path / "site"), str(sdist)]
    said = run(pip, tmp_path, PATH=str(nothing))
    assert "No C++ compiler: installing without native kernels." in said
    assert not [path.name for path in (tmp_path / "site").rglob("*.so")]
    facts = json.loads(run([sys.executable, "-m", "hf_compressopt.cli", "env", "--json"], tmp_path,
                           PYTHONPATH=str(tmp_path / "site")))  # fmt: skip
    assert facts["package"]["path"] == str(tmp_path / "site" / "hf_compressopt")
    assert facts["libraries"]["cpu"]["interface"] is None and facts["kernels"]["cpu"] == "reference"


def test_with_a_broken_compiler_the_wheel_is_pure(small_source: Path, hatchling: Path, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    wheel, said = build("wheel", small_source, hatchling, CXX=str(broken))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Installing without native kernels." in said
    assert check_wheel.problems_of_files(wheel, []) == []


@needs_compiler
def test_an_editable_install_only_adds_a_path_and_puts_the_library_into_the_tree(
    small_source: Path, hatchling: Path
) -> None:
    wheel, _ = build("wheel:editable", small_source, hatchling, CMAKE_ARGS="-DCOMPRESSOPT_CUDA_ARCHITECTURES=none")
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert files == ["_hf_compressopt.pth"]
        assert archive.read(files[0]).decode().split() == [str(small_source)]
    assert [path.name for path in (small_source / check_wheel.LIBRARIES).iterdir()] == [CPU]


def test_the_oldest_versions_that_are_tested_are_the_minimums() -> None:
    minimums = re.findall(r'^    "([a-z]+)>=([0-9.]+)",$', (REPO_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = dict(
        line.split("==") for line in (REPO_ROOT / "compat" / "oldest.txt").read_text().split() if "==" in line
    )
    for name in ("torch", "transformers", "accelerate", "safetensors", "xxhash"):
        minimum = dict(minimums)[name]
        assert pinned[name] == minimum + ".0" * (2 - minimum.count(".")), name
