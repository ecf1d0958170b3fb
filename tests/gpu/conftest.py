import pytest
import torch

MESSAGE = "NO GPU TEST RUNS: torch sees no CUDA device here (torch.cuda.is_available() is False)"


def pytest_sessionstart(session: pytest.Session) -> None:
    if not torch.cuda.is_available():
        pytest.exit(f"\n{'!' * 100}\n{MESSAGE}\n{'!' * 100}", returncode=3)
