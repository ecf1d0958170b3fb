"""The CUDA library where there is no GPU: it loads, and says what is missing."""

import pytest
import torch

from hf_compressopt.kernels import library

LIBRARY = library._DIRECTORY / "libcompressopt_cuda.so"


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the CUDA library has not been built (make kernels, with nvcc)")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make test-gpu tests the library")
def test_without_a_gpu_it_loads_and_says_what_is_missing() -> None:
    cuda = torch.device("cuda", 0)
    assert library.instruction_set("cuda").startswith("sm_75 sm_80")
    assert "NVIDIA driver" in library.why_not(cuda)
