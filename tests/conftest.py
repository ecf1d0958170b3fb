import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support import harness

gc.disable()  # until the modules of the tests are there: each pass through them would take half a second


def pytest_collection_finish() -> None:
    """Leave what the modules made out of later passes of the garbage collector."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    """One thread for this process too, and no worker left behind at the end of the session."""
    torch.set_num_threads(1)
    yield
    harness._pool.kill()
