import gc
from collections.abc import Generator, Iterator

import pytest
import torch

from hf_compressopt.kernels import messages
from tests.support import harness

messages.OWN_BLOCKS = 0  # models of tests are so small that none of their tensors would be sent as signs


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the modules of the tests out of the garbage collector's passes: each would take half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    """No worker is left behind at the end of the session."""
    yield
    harness._pool.kill()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """One thread, as the ranks have: sums of several have other bits, and some tests ask for several."""
    torch.set_num_threads(1)


@pytest.fixture
def fresh_ranks() -> None:
    """Ranks in new processes, whose allocators have kept nothing of other tests."""
    harness._pool.kill()
