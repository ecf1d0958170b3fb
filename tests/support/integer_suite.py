"""Tests of b-bit integers that run on every device: a test file inherits them, and gives a fixture `device`."""

import pytest
import torch

from tests.support import integer_cases as cases

_BITS = pytest.mark.parametrize("bits", [4, 8])


class IntegerSuite:
    @_BITS
    def test_compress_integers(self, device: torch.device, bits: int) -> None:
        for numel in cases.NUMELS:
            for world_size in (1, 3):
                cases.check_compress(device, numel, world_size, bits, segments=numel % 5, with_factors=numel % 5 > 2)
        cases.check_compress(device, 5003, 4, bits, segments=40, with_x=False, shift=1)
        cases.check_compress(device, 3001, 4, bits, segments=900, with_factors=True)  # more than a table holds
        cases.check_compress(device, 9001, 2, bits, segments=1700, with_x=False)

    @_BITS
    def test_compress_all_kinds_of_values(self, device: torch.device, bits: int) -> None:
        random = torch.Generator().manual_seed(1)
        for count in range(2, len(cases.SPECIAL) + 1):
            u = cases.SPECIAL[torch.randint(count, (300,), generator=random)]
            cases.check_compress_values(device, u, bits)
        cases.check_compress_values(device, torch.randn(9_000, generator=random) * torch.rand(9_000).pow(40), bits)

    @_BITS
    def test_average_compress_integers(self, device: torch.device, bits: int) -> None:
        for numel in cases.NUMELS:
            for world_size in (1 + numel % 4, 5 + numel % 5):
                cases.check_average_compress(device, numel, world_size, bits, shift=numel % 3, in_place=numel % 2 == 0)
        for count in range(7, len(cases.SPECIAL) + 1):
            cases.check_average_compress(device, 700, 3, bits, values=cases.SPECIAL[:count])

    @_BITS
    def test_mean_of_integers(self, device: torch.device, bits: int) -> None:
        for numel in cases.NUMELS:
            for world_size in (1 + numel % 4, 5 + numel % 5):
                cases.check_mean(device, numel, world_size, bits, shift=numel % 3)
        for count in range(7, len(cases.SPECIAL) + 1):
            cases.check_mean(device, 700, 3, bits, values=cases.SPECIAL[:count])

    @_BITS
    @pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
    def test_add_integers(self, device: torch.device, bits: int, decay: float) -> None:
        for numel in cases.NUMELS:
            for world_size in (1, 3):
                cases.check_add(device, numel, world_size, bits, segments=1 + numel % 5, decay=decay, scale=numel % 3)
        cases.check_add(device, 5003, 4, bits, segments=40, decay=decay, scale=1.0)
        cases.check_add(device, 1009, 2, bits, segments=800, decay=decay, scale=3.0)  # more than a table holds

    @_BITS
    def test_decompress_integers(self, device: torch.device, bits: int) -> None:
        for numel in cases.NUMELS:
            for world_size in (1, 3, 8):
                cases.check_decompress(device, numel, world_size, bits, shift=numel % 2)

    @_BITS
    def test_commit_integers(self, device: torch.device, bits: int) -> None:
        for numel in cases.NUMELS:
            for world_size in (1, 3):
                cases.check_commit(device, numel, world_size, bits, segments=1 + numel % 5, shift=numel % 2)
        cases.check_commit(device, 5003, 4, bits, segments=40, with_x=True, with_factors=True, elsewhere=True)
        cases.check_commit(device, 1009, 2, bits, segments=800)
