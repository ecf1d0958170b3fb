"""The CUDA kernels' own source, compiled as C++ and run on the CPU by tests/support/emulation, against the reference.

What this cannot show: speed, the GPU's memory model beyond the order of threads, and CUDA's own runtime.
"""

import ctypes
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hf_compressopt.kernels import (
    Average,
    Combination,
    IntegerFormat,
    LambMoments,
    LambOptions,
    Segment,
    SignFormat,
    library,
    native,
    selfcheck,
)
from hf_compressopt.kernels.native import ErrorsRecord
from tests.support import emulated
from tests.support import kernel_cases as cases
from tests.support.emulated import Emulator
from tests.support.kernel_suite import CompactSuite, KernelSuite
from tests.support.made_once import made_once

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


@pytest.fixture(autouse=True)
def emulator(
    request: pytest.FixtureRequest,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Emulator]:
    """The emulated GPU as the CPU's library: guarded buffers, and other orders of threads in each test and launch."""
    for emulator in installed(directory, monkeypatch):
        emulator.seed(zlib.crc32(request.node.nodeid.encode()))
        yield emulator
    reported = capfd.readouterr().err
    assert "runtime error" not in reported, reported


def installed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    emulator = Emulator(directory)
    monkeypatch.setattr(library, "_DIRECTORY", directory)
    monkeypatch.setattr(cases.Pair, "place", staticmethod(emulator.place))
    monkeypatch.setattr(native, "_new_scratch", emulator.scratch)
    library.loaded.cache_clear()
    yield emulator
    library.loaded.cache_clear()
    emulator.release()


@pytest.fixture(params=SEEDS)
def order(request: pytest.FixtureRequest) -> None:
    """Run a test with more orders."""


orders = pytest.mark.usefixtures("order")


@orders
class TestKernels(KernelSuite):
    """The suite, on the emulated GPU."""


@pytest.mark.full
@orders
class TestCompact(CompactSuite):
    """The suite, on the emulated GPU."""


def test_the_library_says_what_it_has() -> None:
    assert library.instruction_set("cpu") == "sm_90 compute_90"


def test_wrong_arguments_are_refused_in_words() -> None:
    values, messages = torch.zeros(16), torch.zeros(32, dtype=torch.uint8)
    error = ctypes.byref(ErrorsRecord(values.data_ptr(), None))
    with pytest.raises(RuntimeError, match="scale_block is no multiple of 8"):
        native.call("co_compress", CPU, None, error, messages.data_ptr(), 16, 12, 1)
    with pytest.raises(RuntimeError, match="z is null"):
        native.call("co_compress", CPU, None, error, messages.data_ptr(), 16, 8, 1)
    with pytest.raises(RuntimeError, match="not aligned to 16 bytes"):
        native.call("co_compress", CPU, None, error, messages.data_ptr() + 4, 16, 8, 1)
    segments = [Segment(values, 0, 16, 0), Segment(values, 0, 16, 0)]
    two = torch.zeros(32)
    with pytest.raises(RuntimeError, match="the same index"):
        options = LambOptions(0.9, 0.999, 1e-6, 0.0, False)
        sums = torch.zeros(1, 3, dtype=torch.float64)
        native.lamb_moments_(LambMoments(Average.of(two), two, two, two, segments, torch.ones(1), sums, options))
    native.combine_(Combination.of(torch.zeros(0)), torch.zeros(0))


def status(emulator: Emulator) -> str:
    """What the library says of the device that is asked for."""
    native_library = library.loaded("cpu")
    return native_library.co_last_error().decode() if native_library.co_check_device(emulator.get("device")) else ""


def test_a_driver_that_is_too_old_is_refused_in_words_and_only_then(emulator: Emulator) -> None:
    assert status(emulator) == ""
    emulator.set(driver=12080)
    assert "the NVIDIA driver is too old: it supports CUDA 12.8" in status(emulator)
    emulator.set(driver=12020, runtime=12090)  # a driver of the same major version runs the code of any minor one
    assert status(emulator) == ""
    emulator.set(driver=12000)  # but no kernels with so many parameters
    assert "supports CUDA 12.0, this library is built with CUDA 12.9 and needs driver 530" in status(emulator)
    emulator.set(driver=0)
    assert "there is no NVIDIA driver on this machine" in status(emulator)
    emulator.set(driver=13000, runtime=13000)
    emulator.fail("cudaFuncGetAttributes", emulated.NO_KERNEL_IMAGE)
    assert "no code for CUDA device 0, of compute capability 9.0: it has sm_90 compute_90" in status(emulator)
    emulator.fail("cudaGetDeviceCount", emulated.NO_DEVICE)
    assert "finds no GPU (is it hidden by CUDA_VISIBLE_DEVICES?)" in status(emulator)
    assert status(emulator) == ""


@pytest.mark.parametrize("error", [emulated.OUT_OF_MEMORY, emulated.INSUFFICIENT_DRIVER])
def test_an_error_of_a_launch_reaches_the_caller_and_the_next_call_works(emulator: Emulator, error: int) -> None:
    if error == emulated.INSUFFICIENT_DRIVER:
        emulator.set(driver=12000)
    emulator.fail("cudaLaunchKernelEx", error)
    with pytest.raises(RuntimeError, match="launching a kernel: out of memory|the NVIDIA driver is too old"):
        cases.check_combine(CPU, 1009, 3, with_x=True, with_factors=True)
    emulator.set(driver=13000)
    cases.check_combine(CPU, 1009, 3, with_x=True, with_factors=True)


def test_the_device_is_switched_only_if_another_one_is_current_and_switched_back(emulator: Emulator) -> None:
    before = emulator.calls("cudaSetDevice")
    cases.check_square_sums(CPU, [5, 5000])
    assert emulator.calls("cudaSetDevice") == before
    emulator.set(devices=2, device=1)
    try:
        cases.check_square_sums(CPU, [5, 5000])
        assert emulator.get("device") == 1
        assert emulator.calls("cudaSetDevice") == before + 2
    finally:
        emulator.set(devices=1, device=0)


@pytest.fixture
def cuda(emulator: Emulator, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The emulated GPU as CUDA device 0, with nothing known of it yet."""
    (tmp_path / "libcompressopt_cuda.so").symlink_to(directory / emulated.NAME)
    monkeypatch.setattr(library, "_DIRECTORY", tmp_path)
    monkeypatch.setattr(library, "_found", {})
    monkeypatch.setattr(library, "_warned", set())
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("old", "reason", "later"),
    [
        (False, "loading the kernels on CUDA device 0: out of memory", True),
        (True, "the NVIDIA driver is too old: it supports CUDA 12.8", False),
    ],
)
def test_a_gpu_without_native_kernels_is_told_once_and_one_that_was_busy_gets_them_later(
    cuda: torch.device, emulator: Emulator, caplog: pytest.LogCaptureFixture, old: bool, reason: str, later: bool
) -> None:
    emulator.set(driver=12080 if old else 13000)
    if not old:  # which asks for no kernel, and would leave the failure to the next test
        emulator.fail("cudaFuncGetAttributes", emulated.OUT_OF_MEMORY)
    first = library.available(cuda)
    emulator.set(driver=13000)
    assert [first, library.available(cuda), library.available(cuda)] == [False, later, later]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"cuda:0 gets the reference kernels, in PyTorch and slower: {reason}")


def test_a_device_is_asked_where_torch_has_made_it_current(
    cuda: torch.device, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch leaves no context on the GPU that was current before; the library itself would."""
    emulator.set(devices=2)

    @contextmanager
    def current(index: int) -> Iterator[None]:
        before = emulator.get("device")
        emulator.set(device=index)
        yield
        emulator.set(device=before)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", current)
    switched = emulator.calls("cudaSetDevice")
    assert library.why_not(torch.device("cuda", 1)) == ""
    assert emulator.calls("cudaSetDevice") == switched
    emulator.set(devices=1)


# Faults that a CPU does not mind, in sums.cu or what it includes, and the check that must find each.
WRITE = "    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;\n"
LAST = "    __syncthreads();  // of_warp may be written again\n"
FAULTS = {
    "a barrier is missing before a read": {f"{WRITE}    __syncthreads();\n": WRITE},
    "a barrier is missing before a write": {LAST: ""},
    "threads meet at two barriers": {
        LAST: "    if (threadIdx.x < 32) __syncthreads();\n    if (threadIdx.x >= 32) __syncthreads();\n"
    },
    "a mask names half of the lanes": {"__shfl_xor_sync(kAllLanes, value": "__shfl_xor_sync(kAllLanes >> 16, value"},
    "shared memory is read that nobody wrote": {WRITE: WRITE.replace("== 0)", "== 0 && value != 0)")},
    "a vector is read beyond the end": {
        "if (span.whole() && (reinterpret": "if (span.last > 0 && (reinterpret",
    },
    "an element is read before the begin": {
        "    RawQuad raw = {};\n": "    RawQuad raw = {};\n    reinterpret_cast<const volatile char*>(first)[-1];\n"
    },
    "PTX reads a vector off its alignment": {
        '"@!wide ld.global.v2.u32 {%0, %1}, [%4];}"': '"@!wide ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"'
    },
    "PTX writes a register too few": {
        '"@wide ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\\n"': '"@wide ld.global.v2.u32 {%0, %1}, [%4];\\n"'
    },
    "two threads write what one should": {"if (threadIdx.x == 0) of_item[blockIdx.x]": "of_item[blockIdx.x]"},
}
#: All lanes of a warp write the same number to the same place, which only ThreadSanitizer sees.
RACE = {WRITE: "    of_warp[threadIdx.x / kWarp] = value;\n"}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.build_changed(tmp_path, directory, "sums", FAULTS[fault])
    changed = installed(tmp_path, monkeypatch)
    next(changed).seed(1)
    options = LambOptions(0.9, 0.999, 1e-6, 0.1, False)
    with pytest.raises((AssertionError, RuntimeError)):
        for _ in range(2):
            cases.check_square_sums(CPU, [7, 10_000, 10_001, 4097, 3, 10_001])
            cases.check_lamb(CPU, 9001, 6, chunks=3, options=options)
    with pytest.raises(StopIteration):
        next(changed)


@pytest.mark.full
def test_no_threads_race(tmp_path: Path) -> None:
    for name, replace in (("as it is", {}), ("with a race", RACE)):
        folder = tmp_path / name
        folder.mkdir()
        emulated.build(folder, checks=emulated.RACES, replace=replace)
        reports = emulated.races(folder, *(["sums"] if replace else []))
        assert bool(reports) == bool(replace), reports[:8000]


def test_scratch_is_the_callers_and_there_may_be_none(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"no {nbytes} bytes on {device}")

    asked: list[int] = []
    monkeypatch.setattr(native, "_new_scratch", lambda device, n: asked.append(n) or emulator.scratch(device, n))
    cases.check_square_sums(CPU, [5, 5000])
    assert len(asked) == 1
    monkeypatch.setattr(native, "_new_scratch", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="no [0-9]+ bytes on 0"):
        cases.check_square_sums(CPU, [5, 5000])
    monkeypatch.setattr(native, "_new_scratch", emulator.scratch)
    cases.check_square_sums(CPU, [5, 5000])
    assert emulator.calls("cudaMalloc") == 0


@pytest.mark.parametrize("count", [0, *selfcheck.MANY_TENSORS])
@pytest.mark.parametrize("family", selfcheck.FAMILIES)
def test_the_check_of_the_first_use_passes(emulator: Emulator, family: str, count: int) -> None:
    assert not selfcheck.difference(family, CPU, count=count)


# Numbers that are wrong in the kernels of large tables alone, which models of more than 46 or 80 tensors take.
FLIPPED = {
    "adam": ("adam", "1.0 - options.beta1)", "1.0 - options.beta1 + (Tensors::capacity > 46 ? 0.125 : 0.0))"),
    "apply": ("sums", "of_tensor[0] += sum;", "of_tensor[0] += sum + (Runs::capacity > 80);"),
    "sketch": ("sums", ".index] = squares;", ".index] = squares + (Runs::capacity > 80);"),
}


@pytest.mark.full
@pytest.mark.parametrize("family", FLIPPED)
def test_the_check_of_the_first_use_finds_a_flipped_constant_in_a_kernel_of_many_tensors(
    family: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, right, wrong = FLIPPED[family]
    emulated.build_changed(tmp_path, directory, source, {right: wrong})
    monkeypatch.setattr(selfcheck, "_cache", list)
    monkeypatch.setattr(selfcheck, "checked", {})
    changed = installed(tmp_path, monkeypatch)
    next(changed).seed(1)
    assert not selfcheck.difference(family, CPU)
    assert selfcheck.failures(CPU) == {family}
    with pytest.raises(StopIteration):
        next(changed)


SIGNS, INTEGERS = SignFormat(4096), IntegerFormat(4)
KERNELS = {  # of a bucket
    "compress signs": lambda c: cases.check_compress(CPU, SIGNS, 9001, 3, segments=5, compact=c),
    "average signs": lambda c: cases.check_average_compress(CPU, SIGNS, 9001, 8, compact=c),
    "apply": lambda c: cases.check_apply_adam(CPU, 9001, 5, chunks=3, log=c),
    "compress integers": lambda c: cases.check_compress(CPU, INTEGERS, 9001, 3, segments=5, compact=c),
    "average integers": lambda c: cases.check_average_compress(CPU, INTEGERS, 9001, 8, compact=c),
    "sum rows": lambda c: cases.check_sum_rows(CPU, 9001, 8, torch.bfloat16 if c else torch.float32, 0.5, 0),
    "add integers": lambda c: cases.check_add(CPU, INTEGERS, 9001, 3, segments=5, decay=0.5 * c, scale=2.0),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("compact", [False, True])
def test_a_kernel_of_a_bucket_is_one_launch(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kernel: str, compact: bool
) -> None:
    """So a bucket takes 3 for signs (compress, average, apply), and 4 for integers (and a look for NaN)."""
    calls: list[str] = []
    original = native.call

    def counted(function: str, *arguments: object) -> None:
        calls.append(function)
        original(function, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "call", counted)
    before = emulator.calls("cudaLaunchKernelEx")
    KERNELS[kernel](compact)
    assert emulator.calls("cudaLaunchKernelEx") - before == len(calls) > 0
