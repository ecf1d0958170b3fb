from collections.abc import Iterator

import pytest
import torch

from tests.support import harness


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    """One thread for this process too, and no worker left behind at the end of the session."""
    torch.set_num_threads(1)
    yield
    harness._pool.kill()
