"""Tests of compact operands that run on every device: a test file inherits them, and gives a fixture `device`."""

from dataclasses import replace

import pytest
import torch

from hf_compressopt.kernels import native
from hf_compressopt.kernels.operands import Average, Segment
from hf_compressopt.kernels.updates import AdamUpdate, LambOptions
from tests.support import compact_cases as cases
from tests.support.integer_cases import SPECIAL

_BITS = pytest.mark.parametrize("bits", [4, 8])
_BLOCKS = pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)


class CompactSuite:
    @_BLOCKS
    def test_compress_with_errors_in_8_bits(self, device: torch.device, scale_block: int | None) -> None:
        for numel in cases.NUMELS:
            for world_size in cases.WORLD_SIZES:
                options = {"segments": numel % 5, "with_factors": numel % 5 > 2, "with_x": numel % 3 > 0}
                cases.check_compress(device, numel, world_size, scale_block, **options)
        cases.check_compress(device, 5003, 2, scale_block, segments=40, with_x=False)
        cases.check_compress(device, 3001, 4, scale_block, segments=900, with_factors=True)  # more than a table holds

    @_BLOCKS
    @pytest.mark.parametrize("compact", [True, False])
    def test_messages_first_and_errors_later(
        self, device: torch.device, scale_block: int | None, compact: bool
    ) -> None:
        for numel in cases.NUMELS:
            for world_size in cases.WORLD_SIZES:
                options = {"segments": numel % 5, "with_factors": numel % 5 > 2, "with_x": numel % 3 > 0}
                cases.check_commit(device, numel, world_size, scale_block, compact=compact, **options)
        cases.check_commit(device, 5003, 2, scale_block, compact=compact, segments=40, last=3, still=True)

    @_BLOCKS
    def test_average_with_errors_in_8_bits(self, device: torch.device, scale_block: int | None) -> None:
        for numel in cases.NUMELS:
            for world_size in (1 + numel % 4, 5 + numel % 5):
                cases.check_average_compress(device, numel, world_size, scale_block)
        for world_size in (9, 16, 17):  # more messages than are summed in one round, and in two
            cases.check_average_compress(device, 5003, world_size, scale_block)

    def test_blocks_beyond_the_caches(self, device: torch.device) -> None:
        for numel, scale_block in ((150_001, 100_000), (150_001, None), (140_000, 65_536), (140_000, 65_544)):
            cases.check_compress(device, numel, 1, scale_block, segments=3, last=2)
            cases.check_compress(device, numel, 3, scale_block, segments=3)
            cases.check_average_compress(device, numel, 2, scale_block)
        for block in (100_000, 65_536, None):
            for compact in (True, False):
                cases.check_commit(device, 150_001, 2, block, compact=compact, segments=3)

    @pytest.mark.parametrize("scale_block", (8, 136, 4096, None))
    def test_errors_that_are_not_finite(self, device: torch.device, scale_block: int | None) -> None:
        cases.check_not_finite(device, 5003, scale_block)

    @_BITS
    def test_integers_with_errors_in_8_bits(self, device: torch.device, bits: int) -> None:
        for numel in cases.NUMELS:
            for world_size in cases.WORLD_SIZES:
                segments = 1 + numel % 5
                with_factors = numel % 5 > 2
                options = {"segments": segments, "with_factors": with_factors, "with_x": numel % 3 > 0}
                cases.check_compress_integers(device, numel, world_size, bits, **options)
                cases.check_commit_integers(device, numel, world_size, bits, **options)
            for world_size in (1 + numel % 4, 5 + numel % 5):
                cases.check_average_integers(device, numel, world_size, bits, in_place=numel % 2 == 0)
        cases.check_commit_integers(device, 5003, 4, bits, segments=40, with_factors=True)
        for count in range(7, len(SPECIAL) + 1):
            cases.check_average_integers(device, 700, 3, bits, values=SPECIAL[:count], in_place=count % 2 == 0)

    def test_more_runs_than_a_table_holds(self, device: torch.device) -> None:
        many = {"last": 3, "still": True, "with_factors": True}
        for scale_block in (24, 4096, 8192, None):
            cases.check_compress(device, 9001, 2, scale_block, segments=800, **many)
        for bits in (4, 8):
            cases.check_compress_integers(device, 9001, 2, bits, segments=1700, **many)
            cases.check_commit_integers(device, 9001, 2, bits, segments=1700, **many)

    @pytest.mark.parametrize("scale_block", (None, 24, 512, 4096))
    def test_the_last_average_as_x(self, device: torch.device, scale_block: int | None) -> None:
        for numel, world_size in ((1, 1), (33, 3), (1000, 8), (5003, 1), (9001, 3)):
            for segments in (0, 1, 7):
                options = {"last": world_size, "scale_block": scale_block, "still": segments == 7}
                cases.check_combine(device, numel, segments, **options)
                cases.check_combine(device, numel, segments, **options, with_factors=True, alpha=1.0)
        many = {"last": 2, "still": True, "with_factors": True}
        cases.check_combine(device, 1009, 800, **many)  # more than a table holds

    @pytest.mark.parametrize("scale_block", (None, 24, 512, 4096))
    def test_the_last_average_is_compressed(self, device: torch.device, scale_block: int | None) -> None:
        for numel in (33, 1000, 5003, 9001):
            for compact in (False, True):
                for segments in (0, 1, 7):
                    options = {"last": 3, "still": segments == 7, "with_factors": numel % 2 > 0, "compact": compact}
                    cases.check_compress(device, numel, 3, scale_block, segments=segments, **options)

    @_BITS
    def test_integers_of_the_last_average(self, device: torch.device, bits: int) -> None:
        for numel in (33, 1000, 5003):
            for segments in (1, 7):
                options = {"last": 3, "still": segments == 7, "with_factors": numel % 2 > 0, "scale_block": 512}
                cases.check_compress_integers(device, numel, 3, bits, segments=segments, **options)
                for compact in (False, True):
                    cases.check_commit_integers(device, numel, 3, bits, segments=segments, compact=compact, **options)

    @pytest.mark.parametrize("world_size", [0, 1, 3])
    @pytest.mark.parametrize("log", [False, True])
    def test_apply_adam_without_momentum(self, device: torch.device, world_size: int, log: bool) -> None:
        for numel, segments in ((1, 1), (5003, 7), (4099, 30), (9001, 1)):
            for descent in cases.DESCENTS:
                for scale_block in (None, 24, 512, 4096):
                    options = {"world_size": world_size, "scale_block": scale_block, "shift": segments % 2, "log": log}
                    cases.check_apply_adam(device, numel, segments, descent=descent, **options)
        cases.check_apply_adam(device, 5003, 7, world_size=world_size, corrected=True, log=log)
        cases.check_apply_adam(device, 999, 730, world_size=world_size, log=log)
        cases.check_apply_adam(device, 40_003, 4, world_size=world_size, still=False, missing=False, log=log)

    @pytest.mark.parametrize("world_size", [0, 1, 3])
    def test_apply_adam_with_variance_in_8_bits(self, device: torch.device, world_size: int) -> None:
        for numel, segments in ((1, 1), (5003, 7), (4099, 30)):
            for descent in cases.DESCENTS:
                options = {"world_size": world_size, "with_m": True, "descent": descent}
                cases.check_apply_adam(device, numel, segments, shift=segments % 2, **options)
                cases.check_apply_adam(device, numel, segments, beta=0.1, corrected=True, **options)

    def test_scales_that_are_not_ordinary(self, device: torch.device) -> None:
        for numel, scale_block in ((40_003, 4096), (40_003, 2000), (5003, 8)):
            cases.check_scales_that_are_not_ordinary(device, numel, scale_block)

    def test_other_steps_with_variance_in_8_bits(self, device: torch.device) -> None:
        for descent in cases.DESCENTS:
            cases.check_local_step(device, 5003, 9, with_grads=True, descent=descent)
            cases.check_local_step(device, 5003, 9, with_grads=False, descent=descent)
            for world_size in (0, 1, 3):
                cases.check_sync_parameters(device, 5003, 9, world_size=world_size, descent=descent)

    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_lamb_with_variance_in_8_bits(self, device: torch.device, weight_decay: float) -> None:
        options = LambOptions(0.9, 0.999, 1e-6, weight_decay, weight_decay == 0)
        cases.check_lamb(device, 9001, 6, world_size=3, options=options)
        cases.check_lamb(device, 1009, 760, world_size=0, options=options)

    def test_without_momentum_beta_must_be_1(self, device: torch.device) -> None:
        ones = torch.ones(8, device=device)
        update = AdamUpdate(Average.of(ones), None, ones, [Segment(ones, 0, 8, 0)], cases.DESCENTS[0])
        with pytest.raises(ValueError, match="beta must be 1 without exp_avg"):
            native.apply_adam_(replace(update, beta=0.5))
