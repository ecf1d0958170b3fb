"""Tests of the count sketch that run on every device: a test file inherits them, and gives a fixture `device`."""

import pytest
import torch

from tests.support import sketch_cases as cases


class SketchSuite:
    @pytest.mark.parametrize("offset", cases.OFFSETS)
    def test_sketch(self, device: torch.device, offset: int) -> None:
        for numel in cases.NUMELS:
            cases.check_sketch(device, numel, 1 + numel % 7, offset=offset, seed=numel)
        cases.check_sketch(device, 9_001, 40, offset=offset, seed=2**64 - 1)
        cases.check_sketch(device, 150_000, 800, offset=offset, seed=2**63)  # more than a table of a GPU holds
