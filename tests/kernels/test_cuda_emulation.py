"""The CUDA kernels' own source, compiled as C++ and run on the CPU by tests/support/emulation, against the reference.

What this cannot show: speed, the GPU's memory model beyond the order of threads, and CUDA's own runtime.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_compressopt.kernels import Average, Combination, LambMoments, LambOptions, Segment, library, native
from hf_compressopt.kernels.c_abi import ErrorsRecord
from tests.support.kernel_suite import CompactSuite, KernelSuite
from tests.support.made_once import made_once

CPU = torch.device("cpu")
EMULATION = Path(__file__).parents[1] / "support" / "emulation"
SOURCES = Path(library.__file__).parent / "csrc" / "cuda"
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-Wno-psabi", "-Wno-unknown-pragmas", "-x", "c++"),
]
# A misaligned access, which a GPU refuses, and an overflowing index are reported on stderr.
CHECKS = ["-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-static-libubsan"]
ORDERS = {"downwards": 1, "at random": 20}  # of the threads of a block, and of blocks
BOTH = [pytest.param("downwards"), pytest.param("at random", marks=pytest.mark.full)]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the kernels are compiled with g++, not found here")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library of that name that runs the CUDA kernels."""
    return made_once(tmp_path_factory, "emulation", build)


def build(folder: Path) -> None:
    sources = [*SOURCES.glob("*.cu"), EMULATION / "emulator.cpp"]
    objects = [folder / f"{source.name}.o" for source in sources]

    def compile_one(source: Path, out: Path) -> None:
        run("g++", *FLAGS, *CHECKS, f"-I{EMULATION}", "-c", str(source), "-o", str(out))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    run("g++", "-shared", *CHECKS, *map(str, objects), "-o", str(folder / "libcompressopt_cpu.so"))


@pytest.fixture
def device() -> torch.device:
    return CPU


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(autouse=True, params=BOTH)
def emulation(
    request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    monkeypatch.setattr(library, "_DIRECTORY", directory)
    library._library.cache_clear()
    library._library("cpu").emulator_set_order(ORDERS[request.param])
    yield
    library._library.cache_clear()
    reported = capfd.readouterr().err
    assert "runtime error" not in reported, reported


class TestKernels(KernelSuite):
    """The suite, on the emulated GPU."""


@pytest.mark.full
class TestCompact(CompactSuite):
    """The suite, on the emulated GPU."""


def test_the_library_says_what_it_has() -> None:
    assert library.instruction_set("cpu") == "sm_90 compute_90"


def test_wrong_arguments_are_refused_in_words() -> None:
    values, messages = torch.zeros(16), torch.zeros(32, dtype=torch.uint8)
    error = ctypes.byref(ErrorsRecord(values.data_ptr(), None))
    with pytest.raises(RuntimeError, match="scale_block is no multiple of 8"):
        library.call("co_compress", CPU, None, error, messages.data_ptr(), 16, 12, 1)
    with pytest.raises(RuntimeError, match="z is null"):
        library.call("co_compress", CPU, None, error, messages.data_ptr(), 16, 8, 1)
    with pytest.raises(RuntimeError, match="not aligned to 16 bytes"):
        library.call("co_compress", CPU, None, error, messages.data_ptr() + 4, 16, 8, 1)
    segments = [Segment(values, 0, 16, 0), Segment(values, 0, 16, 0)]
    two = torch.zeros(32)
    with pytest.raises(RuntimeError, match="the same index"):
        options = LambOptions(0.9, 0.999, 1e-6, 0.0, False)
        sums = torch.zeros(1, 3, dtype=torch.float64)
        native.lamb_moments_(LambMoments(Average.of(two), two, two, two, segments, torch.ones(1), sums, options))
    native.combine_(Combination.of(torch.zeros(0)), torch.zeros(0))


@pytest.fixture
def as_cuda(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The emulated GPU as CUDA device 0, with nothing known of it yet."""
    (tmp_path / "libcompressopt_cuda.so").symlink_to(directory / "libcompressopt_cpu.so")
    monkeypatch.setattr(library, "_DIRECTORY", tmp_path)
    monkeypatch.setattr(library, "_found", {})
    monkeypatch.setattr(library, "_warned", set())
    emulator = library._library("cuda")
    yield emulator
    emulator.emulator_set_out_of_memory(0)
    emulator.emulator_set_driver(13000)


@pytest.mark.parametrize(
    ("hinder", "values", "reason", "later"),
    [
        ("emulator_set_out_of_memory", (1, 0), "loading the kernels on CUDA device 0: ", True),
        ("emulator_set_driver", (12080, 13000), "the NVIDIA driver is too old: it supports CUDA 12.8", False),
    ],
)
def test_a_gpu_without_native_kernels_is_told_once_and_one_that_was_busy_gets_them_later(
    as_cuda: ctypes.CDLL,
    caplog: pytest.LogCaptureFixture,
    hinder: str,
    values: tuple[int, int],
    reason: str,
    later: bool,
) -> None:
    cuda = torch.device("cuda", 0)
    getattr(as_cuda, hinder)(values[0])
    assert [library.available(cuda) for _ in range(3)] == [False] * 3
    getattr(as_cuda, hinder)(values[1])
    assert library.available(cuda) is later
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"cuda:0 gets the reference kernels, in PyTorch and slower: {reason}")
