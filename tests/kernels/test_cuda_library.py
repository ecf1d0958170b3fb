"""The CUDA library where there is no GPU: it loads, and says what is missing. `make wheel` builds it everywhere."""

import re

import pytest
import torch

from hf_compressopt.kernels import library

LIBRARY = library._DIRECTORY / "libcompressopt_cuda.so"


@pytest.mark.skipif(not LIBRARY.is_file(), reason=f"no CUDA library; make wheel tests it. {library.what_was_built()}")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make test-gpu tests the library")
def test_without_a_gpu_it_loads_and_says_what_is_missing() -> None:
    names = library.instruction_set("cuda").split()
    assert names[-1] == names[-2].replace("sm_", "compute_")
    assert set(re.findall(r"sm_\d+", library.what_was_built())) <= set(names)
    assert "NVIDIA driver" in library.why_not(torch.device("cuda", 0))
