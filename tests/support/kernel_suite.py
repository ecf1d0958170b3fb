"""Tests of native kernels that run on every device: a test file inherits them, and gives a fixture `device`."""

from dataclasses import replace

import pytest
import torch

from hf_compressopt.kernels.updates import LambOptions
from tests.support import kernel_cases as cases


class KernelSuite:
    @pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
    def test_compress(self, device: torch.device, scale_block: int | None) -> None:
        for numel in cases.NUMELS:
            for world_size in (1, 3):
                cases.check_compress(
                    device, numel, world_size, scale_block, segments=numel % 5, with_factors=numel % 5 > 2
                )
        cases.check_compress(device, 5003, 2, scale_block, segments=40, with_x=False, shift=1)
        cases.check_compress(device, 3001, 4, scale_block, segments=900, with_factors=True)  # more than a table holds

    @pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
    def test_average_compress(self, device: torch.device, scale_block: int | None) -> None:
        for numel in cases.NUMELS:
            for world_size in (1 + numel % 4, 5 + numel % 5):
                cases.check_average_compress(device, numel, world_size, scale_block, shift=numel % 3)

    @pytest.mark.parametrize("world_size", [0, 1, 3, 8])
    def test_decompress(self, device: torch.device, world_size: int) -> None:
        for numel in cases.NUMELS:
            for scale_block in (None, 24, 4096):
                cases.check_decompress(device, numel, world_size, scale_block, shift=numel % 2)

    def test_combine(self, device: torch.device) -> None:
        for with_x in (False, True):
            cases.check_combine(device, 5003, 0, with_x=with_x, with_factors=False)
            cases.check_combine(device, 5003, 30, with_x=with_x, with_factors=True)
            cases.check_combine(device, 1009, 800, with_x=with_x, with_factors=True)

    @pytest.mark.parametrize("world_size", [0, 1, 3])
    def test_apply_adam(self, device: torch.device, world_size: int) -> None:
        for numel, segments in ((1, 1), (5003, 7), (4099, 30)):
            for descent in cases.DESCENTS:
                cases.check_apply_adam(
                    device, numel, segments, world_size=world_size, descent=descent, shift=segments % 2
                )
                cases.check_apply_adam(
                    device,
                    numel,
                    segments,
                    world_size=world_size,
                    scale_block=None,
                    beta=0.1,
                    corrected=True,
                    descent=descent,
                )
        cases.check_apply_adam(device, 999, 730, world_size=world_size)

    def test_local_step(self, device: torch.device) -> None:
        for descent in cases.DESCENTS:
            cases.check_local_step(device, 5003, 9, with_grads=True, descent=descent)
            cases.check_local_step(device, 5003, 9, with_grads=False, descent=descent)

    @pytest.mark.parametrize("world_size", [0, 1, 3])
    def test_sync_parameters(self, device: torch.device, world_size: int) -> None:
        for descent in cases.DESCENTS[::2]:
            cases.check_sync_parameters(device, 5003, 9, world_size=world_size, descent=descent)

    def test_directions_beyond_a_bound(self, device: torch.device) -> None:
        cases.check_bound(device)

    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_lamb(self, device: torch.device, weight_decay: float) -> None:
        options = LambOptions(0.9, 0.999, 1e-6, weight_decay, weight_decay == 0)
        cases.check_lamb(device, 9001, 6, world_size=3, options=options)
        cases.check_lamb(device, 1009, 760, world_size=0, options=options)

    def test_adam(self, device: torch.device) -> None:
        sizes = [0, 1, 5, 1024, 4097, 0]
        scalar = torch.tensor
        for step in (
            cases.STEP,
            replace(cases.STEP, adam_w_mode=False, maximize=True),
            replace(cases.STEP, weight_decay=0.0, bias_correction=False, lr=scalar(1e-3)),
            replace(
                cases.STEP, grad_scale=scalar(1024.0), clip_factor=scalar(0.7), found_inf=scalar(0.0), write_grads=True
            ),
            replace(cases.STEP, found_inf=scalar(1.0), write_grads=True),
        ):
            cases.check_adam(device, sizes, step)
        cases.check_adam(device, sizes, shift=1)
        cases.check_adam(device, [3] * 500, steps=1)  # more than a table holds

    def test_adam_of_all_dtypes(self, device: torch.device) -> None:
        wide = torch.float32
        for k, low in enumerate((torch.bfloat16, torch.float16)):
            cases.check_adam(device, [9, 4097], dtypes=lambda k, low=low: (low, low, wide), copies=True, shift=k)
            cases.check_adam(device, [9, 4097], dtypes=lambda k, low=low: (low, low, low), shift=k)
            cases.check_adam(device, [9, 4097], dtypes=lambda k, low=low: (low, wide, wide), masters=True, copies=True)

    def test_square_sums(self, device: torch.device) -> None:
        cases.check_square_sums(device, [0, 1, 7, 4096, 10_001, 0, 30_000], shift=1)
        cases.check_square_sums(device, [3, 0, 1] * 300)
