"""The CUDA kernels' own source, compiled as C++ and run on the CPU by tests/support/emulation, against the reference.

What this cannot show: speed, the GPU's memory model beyond the order of threads, and CUDA's own runtime.
"""

import ctypes
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_compressopt.kernels import library, native
from hf_compressopt.kernels.c_operands import ErrorsRecord
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import LambMoments, LambOptions
from tests.support import emulated
from tests.support import kernel_cases as cases
from tests.support.compact_suite import CompactSuite
from tests.support.emulated import Emulator
from tests.support.integer_suite import IntegerSuite
from tests.support.kernel_suite import KernelSuite
from tests.support.made_once import made_once
from tests.support.sketch_suite import SketchSuite

CPU = torch.device("cpu")
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the kernels are compiled with g++, not found here")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library of that name that runs the CUDA kernels."""
    return made_once(tmp_path_factory, "emulation", emulated.build)


@pytest.fixture
def device() -> torch.device:
    return CPU


@pytest.fixture
def emulator(directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Emulator]:
    """The emulated GPU as the CPU's library, whose buffers are guarded."""
    yield from installed(directory, monkeypatch)
    reported = capfd.readouterr().err
    assert "runtime error" not in reported, reported


def installed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    emulator = Emulator(directory)
    monkeypatch.setattr(library, "_DIRECTORY", directory)
    monkeypatch.setattr(cases.Arena, "place", staticmethod(emulator.place))
    library._library.cache_clear()
    yield emulator
    library._library.cache_clear()
    emulator.release()


@pytest.fixture(autouse=True, params=SEEDS)
def order(request: pytest.FixtureRequest, emulator: Emulator) -> None:
    """The order of threads: another one in each launch, of each test and of each parameter."""
    emulator.seed(zlib.crc32(request.node.nodeid.encode()) + request.param)


class TestKernels(KernelSuite):
    """The suite, on the emulated GPU."""


class TestIntegers(IntegerSuite):
    """The suite, on the emulated GPU."""


@pytest.mark.full
class TestCompact(CompactSuite):
    """The suite, on the emulated GPU."""


class TestSketch(SketchSuite):
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
