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
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(BEST)


@pytest.fixture
def threads() -> Iterator[None]:
    """torch's number of threads, which is restored after the test."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
