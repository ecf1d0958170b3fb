import shutil
from collections.abc import Iterator

import pytest
import torch

from hf_compressopt.kernels import library
from tests.support.instruction_sets import BEST, CPU, INSTRUCTION_SETS


@pytest.fixture
def native_library() -> None:
    """The CPU library, which must work wherever it can be built."""
    missing = library.why_not(CPU)
    if missing and shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip(f"no library, and no compiler to build it with: {missing}")
    assert not missing, f"{missing}; `make kernels` builds it"


@pytest.fixture(params=INSTRUCTION_SETS)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU with each of its instruction sets."""
    library.use_instruction_set(request.param)
    yield CPU
    library.use_instruction_set(BEST)


@pytest.fixture(params=["native", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(library.VARIABLE, request.param)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """torch's number of threads, which is restored after the test."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
