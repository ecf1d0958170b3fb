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
    of_the_checkout = {name for name in tracked if name.startswith((".ci/", ".github/", ".pre-commit"))}
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
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("hf_compressopt/kernels/lib/cuda.txt").startswith(b"not built: ")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("hf_compressopt/stray.py", "")
    assert check_wheel.problems_of_files(wheel, []) == [
        "hf_compressopt/kernels/lib/cuda.txt does not belong there",
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
    assert sorted(path.name for path in (small_source / check_wheel.LIBRARIES).iterdir()) == ["cuda.txt", CPU]


@needs_compiler
@pytest.mark.parametrize(
    ("gpus", "wanted", "chosen", "because"),
    [
        ("9.0 8.6 9.0", "auto", "86;90", "the GPUs of this machine"),
        ("12.1 7.5", "auto", "75;120", "the GPUs of this machine"),
        ("7.0", "auto", "", "nvcc knows 75 80 86 90 120, and this machine has 70"),
        ("", "auto", "", "nvidia-smi finds no GPU here, -DCOMPRESSOPT_CUDA_ARCHITECTURES=all compiles for all GPUs"),
        ("9.0", "all", "75;80;86;90;120", "wanted are 75 80 86 89 90 100 120, nvcc knows 75 80 86 90 120"),
        ("", "80;90", "80;90", "wanted are 80 90, nvcc knows 75 80 86 90 120"),
        ("9.0", "none", "", "not wanted (COMPRESSOPT_CUDA_ARCHITECTURES=none)"),
    ],
)
def test_cuda_kernels_are_compiled_for_the_gpus_that_are_here_unless_others_are_wanted(
    tmp_path: Path, gpus: str, wanted: str, chosen: str, because: str
) -> None:
    said = "\n".join(gpus.split()) or "No devices were found"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\nexit {0 if gpus else 6}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "choose.cmake").write_text(
        f'cmake_minimum_required(VERSION 3.25)\ninclude("{REPO_ROOT}/cmake/Architectures.cmake")\n'
        f'choose_architectures("{wanted}" "75;80;86;90;120")\nmessage("${{architectures}} | ${{because}}")\n'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert run(["cmake", "-P", "choose.cmake"], tmp_path, PATH=path).strip() == f"{chosen} | {because}".strip()


@needs_compiler
@pytest.mark.full
def test_make_takes_cmake_from_pip_where_it_is_too_old_and_says_for_which_gpus_it_builds(
    small_source: Path, tmp_path: Path
) -> None:
    old = tmp_path / "bin" / "cmake"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho cmake version 3.22.1; exit 1\n")
    old.chmod(0o755)
    said = run(["make", "kernels", f"PYTHON={sys.executable}"], small_source, PATH=f"{old.parent}:{os.environ['PATH']}",
               CMAKE_ARGS="-DCOMPRESSOPT_CUDA_ARCHITECTURES=none")  # fmt: skip
    assert "cmake >= 3.25, from pip" in said and "CUDA kernels: not built: not wanted" in said
    assert sorted(path.name for path in (small_source / check_wheel.LIBRARIES).iterdir()) == ["cuda.txt", CPU]


def test_the_oldest_versions_that_are_tested_are_the_minimums() -> None:
    minimums = re.findall(r'^    "([a-z]+)>=([0-9.]+)",$', (REPO_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = dict(
        line.split("==") for line in (REPO_ROOT / "compat" / "oldest.txt").read_text().split() if "==" in line
    )
    for name in ("torch", "transformers", "accelerate", "safetensors", "xxhash"):
        minimum = dict(minimums)[name]
        assert pinned[name] == minimum + ".0" * (2 - minimum.count(".")), name
