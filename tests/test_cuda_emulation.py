"""The CUDA kernels' own source, compiled as C++ and run on the CPU by tests/emulation, against the reference.

What this cannot show: speed, the GPU's memory model beyond the order of threads, and CUDA's own runtime.
"""

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_compressopt.kernels import native
from hf_compressopt.kernels.operands import Combination, LambOptions, Segment
from tests import kernel_cases as cases

CPU = torch.device("cpu")
EMULATION = Path(__file__).parent / "emulation"
SOURCES = Path(native.__file__).parent / "csrc" / "cuda"
FLAGS = "-std=c++17 -O1 -fPIC -fno-strict-aliasing -fvisibility=hidden -ffp-contract=off -Wno-psabi -Wno-unknown-pragmas -x c++".split()
# A misaligned access, which a GPU refuses, and an overflowing index are reported on stderr.
CHECKS = ["-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-static-libubsan"]
ORDERS = {"downwards": 1, "at random": 20}  # of the threads of a block, and of blocks

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the kernels are compiled with g++, not found here")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a library of that name lies that runs the CUDA kernels."""
    build = tmp_path_factory.mktemp("emulation")
    sources = [*SOURCES.glob("*.cu"), EMULATION / "emulator.cpp"]
    objects = [build / f"{source.name}.o" for source in sources]

    def compile_one(source: Path, out: Path) -> None:
        run("g++", *FLAGS, *CHECKS, f"-I{EMULATION}", "-c", str(source), "-o", str(out))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    run("g++", "-shared", *CHECKS, *map(str, objects), "-o", str(build / "libcompressopt_cpu.so"))
    return build


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(autouse=True, params=ORDERS)
def emulation(
    request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    monkeypatch.setattr(native, "_DIRECTORY", directory)
    native._library.cache_clear()
    native._library("cpu").emulator_set_order(ORDERS[request.param])
    yield
    native._library.cache_clear()
    reported = capfd.readouterr().err
    assert "runtime error" not in reported, reported


def test_the_library_says_what_it_has() -> None:
    assert native.instruction_set("cpu") == "sm_90 compute_90"


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_compress(scale_block: int | None) -> None:
    for numel in cases.NUMELS:
        for world_size in (1, 3):
            cases.check_compress(CPU, numel, world_size, scale_block, segments=numel % 5, with_factors=numel % 5 > 2)
    cases.check_compress(CPU, 5003, 2, scale_block, segments=40, with_x=False, shift=1)
    cases.check_compress(CPU, 3001, 4, scale_block, segments=900, with_factors=True)  # more than a table holds


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_average_compress(scale_block: int | None) -> None:
    for numel in cases.NUMELS:
        cases.check_average_compress(CPU, numel, 1 + numel % 4, scale_block, shift=numel % 3)


@pytest.mark.parametrize("world_size", [0, 1, 3, 8])
def test_decompress(world_size: int) -> None:
    for numel in cases.NUMELS:
        for scale_block in (None, 24, 4096):
            cases.check_decompress(CPU, numel, world_size, scale_block, shift=numel % 2)


def test_combine() -> None:
    for with_x in (False, True):
        cases.check_combine(CPU, 5003, 0, with_x=with_x, with_factors=False)
        cases.check_combine(CPU, 5003, 30, with_x=with_x, with_factors=True)
        cases.check_combine(CPU, 1009, 800, with_x=with_x, with_factors=True)


@pytest.mark.parametrize("world_size", [0, 1, 3])
def test_apply_adam(world_size: int) -> None:
    for numel, segments in ((1, 1), (5003, 7), (4099, 30)):
        for descent in cases.DESCENTS:
            cases.check_apply_adam(CPU, numel, segments, world_size=world_size, descent=descent, shift=segments % 2)
            cases.check_apply_adam(
                CPU, numel, segments, world_size=world_size, scale_block=None, beta=0.1, corrected=True, descent=descent
            )
    cases.check_apply_adam(CPU, 999, 730, world_size=world_size)


def test_local_step() -> None:
    for descent in cases.DESCENTS:
        cases.check_local_step(CPU, 5003, 9, with_grads=True, descent=descent)
        cases.check_local_step(CPU, 5003, 9, with_grads=False, descent=descent)


@pytest.mark.parametrize("world_size", [0, 1, 3])
def test_sync_parameters(world_size: int) -> None:
    cases.check_sync_parameters(CPU, 5003, 9, world_size=world_size)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb(weight_decay: float) -> None:
    options = LambOptions(0.9, 0.999, 1e-6, weight_decay, weight_decay == 0)
    cases.check_lamb(CPU, 9001, 6, world_size=3, options=options)
    cases.check_lamb(CPU, 1009, 760, world_size=0, options=options)


def test_adam() -> None:
    sizes = [0, 1, 5, 1024, 4097, 0]
    scalar = torch.tensor
    for step in (
        cases.STEP,
        replace(cases.STEP, adam_w_mode=False, maximize=True),
        replace(cases.STEP, weight_decay=0.0, bias_correction=False, lr=scalar(1e-3)),
        replace(
            cases.STEP, grad_scale=scalar(1024.0), clip_factor=scalar(0.7), found_inf=scalar(0.0), write_grads=True
        ),
        replace(cases.STEP, found_inf=scalar(1.0), write_grads=True),
    ):
        cases.check_adam(CPU, sizes, step)
    cases.check_adam(CPU, sizes, shift=1)
    cases.check_adam(CPU, [3] * 500, steps=1)  # more than a table holds


def test_adam_of_all_dtypes() -> None:
    wide = torch.float32
    for k, low in enumerate((torch.bfloat16, torch.float16)):
        cases.check_adam(CPU, [9, 4097], dtypes=lambda k, low=low: (low, low, wide), copies=True, shift=k)
        cases.check_adam(CPU, [9, 4097], dtypes=lambda k, low=low: (low, low, low), shift=k)
        cases.check_adam(CPU, [9, 4097], dtypes=lambda k, low=low: (low, wide, wide), masters=True, copies=True)


def test_square_sums() -> None:
    cases.check_square_sums(CPU, [0, 1, 7, 4096, 10_001, 0, 30_000], shift=1)
    cases.check_square_sums(CPU, [3, 0, 1] * 300)


def test_wrong_arguments_are_refused_in_words() -> None:
    error, messages = torch.zeros(16), torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="scale_block is no multiple of 8"):
        native.call("co_compress", CPU, None, error.data_ptr(), messages.data_ptr(), 16, 12, 1)
    with pytest.raises(RuntimeError, match="z is null"):
        native.call("co_compress", CPU, None, error.data_ptr(), messages.data_ptr(), 16, 8, 1)
    with pytest.raises(RuntimeError, match="not aligned to 16 bytes"):
        native.call("co_compress", CPU, None, error.data_ptr(), messages.data_ptr() + 4, 16, 8, 1)
    segments = [Segment(error, 0, 16, 0), Segment(error, 0, 16, 0)]
    two = torch.zeros(32)
    with pytest.raises(RuntimeError, match="the same index"):
        options = LambOptions(0.9, 0.999, 1e-6, 0.0, False)
        sums = torch.zeros(1, 3, dtype=torch.float64)
        native.lamb_moments_(cases.Average.of(two), two, two, two, segments, torch.ones(1), sums, options)
    native.combine_(Combination.of(torch.zeros(0)), torch.zeros(0))
