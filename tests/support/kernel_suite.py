"""Tests of native kernels that run on every device: a test file inherits them, and gives a fixture `device`."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from hf_compressopt.kernels import AdamUpdate, Average, IntegerFormat, LambOptions, Segment, native
from tests.support import kernel_cases as cases
from tests.support.kernel_cases import Form

_FORMATS = pytest.mark.parametrize("form", cases.FORMATS, ids=str)
_INTEGERS = pytest.mark.parametrize("form", cases.INTEGERS, ids=str)
_SOME_BLOCKS = pytest.mark.parametrize("scale_block", (None, 24, 512, 4096))


_SCALAR = torch.tensor
_GIVEN = {"grad_scale": _SCALAR([1024.0]), "clip_factor": _SCALAR(0.7), "found_inf": _SCALAR(0.0)}
_ADAM_STEPS = (
    cases.STEP,
    replace(cases.STEP, adam_w_mode=False, maximize=True, grad_scale=_SCALAR([3.0]), write_grads=True),
    replace(cases.STEP, weight_decay=0.0, bias_correction=False, lr=_SCALAR(1e-3)),
    replace(cases.STEP, write_grads=True, **_GIVEN),
    replace(cases.STEP, found_inf=_SCALAR([1.0]), write_grads=True),
)


class KernelSuite:
    @_FORMATS
    def test_compress(self, device: torch.device, form: Form) -> None:
        for numel in cases.NUMELS:
            for chunks in (1, 3):
                options = {"segments": numel % 5, "with_factors": numel % 5 > 2, "shift": numel % 2}
                cases.check_compress(device, form, numel, chunks, **options)
        cases.check_compress(device, form, 5003, 4, segments=40, with_x=False, shift=1)
        cases.check_compress(device, form, 3001, 4, segments=900, with_factors=True)  # more than a table holds
        cases.check_compress(device, form, 100, 1, with_x=False)

    @_FORMATS
    def test_average_compress(self, device: torch.device, form: Form) -> None:
        for numel in cases.NUMELS:
            for ranks in (1 + numel % 4, 5 + numel % 5):
                cases.check_average_compress(device, form, numel, ranks, shift=numel % 3)

    @_FORMATS
    def test_decompress(self, device: torch.device, form: Form) -> None:
        for numel in cases.NUMELS:
            for chunks in (0, 1, 3, 8):
                if chunks or form not in cases.INTEGERS:
                    cases.check_decompress(device, form, numel, chunks, shift=numel % 2)

    @_INTEGERS
    def test_integers_of_all_kinds_of_values(self, device: torch.device, form: IntegerFormat) -> None:
        random = torch.Generator().manual_seed(1)
        for count in range(2, len(cases.SPECIAL) + 1):
            u = cases.SPECIAL[torch.randint(count, (300,), generator=random)]
            cases.check_compress(device, form, 300, 1, values=u)
        outliers = torch.randn(9_000, generator=random) * torch.rand(9_000, generator=random).pow(40)
        cases.check_compress(device, form, 9_000, 1, values=outliers)
        for count in range(7, len(cases.SPECIAL) + 1):
            cases.check_average_compress(device, form, 700 + count, 3, values=cases.SPECIAL[:count])
            cases.check_mean(device, form, 700, 3, values=cases.SPECIAL[:count])

    @_INTEGERS
    def test_any_nan(self, device: torch.device, form: IntegerFormat) -> None:
        for numel, chunks in (*product(cases.NUMELS, (1, 2, 3, 8)), (140_001, 2)):
            cases.check_any_nan(device, form, numel, chunks)
        assert not native.any_nan(Average(0, form, torch.zeros(16, dtype=torch.uint8, device=device), 1, 16))

    @_INTEGERS
    def test_mean_of_integers(self, device: torch.device, form: IntegerFormat) -> None:
        for numel in cases.NUMELS:
            for ranks in (1 + numel % 4, 5 + numel % 5):
                cases.check_mean(device, form, numel, ranks, shift=numel % 3)

    @_INTEGERS
    @pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
    def test_add_integers(self, device: torch.device, form: IntegerFormat, decay: float) -> None:
        for numel in cases.NUMELS:
            for chunks in (1, 3):
                cases.check_add(device, form, numel, chunks, segments=1 + numel % 5, decay=decay, scale=numel % 3)
        cases.check_add(device, form, 5003, 4, segments=40, decay=decay, scale=1.0)
        cases.check_add(device, form, 1009, 2, segments=800, decay=decay, scale=3.0)  # more than a table holds

    @pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
    def test_add_values_and_signs(self, device: torch.device, decay: float) -> None:
        for numel in cases.NUMELS:
            for chunks, form in ((0, cases.SignFormat(512)), (1, cases.SignFormat(None)), (3, cases.SignFormat(24))):
                cases.check_add(device, form, numel, chunks, segments=1 + numel % 5, decay=decay, scale=numel % 3)
        cases.check_add(device, cases.SignFormat(512), 1009, 0, segments=800, decay=decay, scale=3.0)
        cases.check_add(device, cases.SignFormat(512), 5003, 2, segments=40, decay=decay, scale=1.0)

    @pytest.mark.parametrize("dtype", cases.DTYPES)
    def test_add_all_kinds_of_values(self, device: torch.device, dtype: torch.dtype) -> None:
        cases.check_add_all_kinds_of_values(device, dtype)

    def test_combine(self, device: torch.device) -> None:
        for numel in cases.NUMELS:
            for with_x in (False, True):
                for segments in (0, 1, 30):
                    cases.check_combine(device, numel, segments, with_x=with_x, with_factors=segments > 1)
        cases.check_combine(device, 1009, 800, with_factors=True)

    def test_sum_rows(self, device: torch.device) -> None:
        for numel in cases.NUMELS:
            for count in (1, 2, 4, 5, 9):
                for dtype, factor in zip(cases.DTYPES, (1.0, 1 / count, 3.0), strict=True):
                    cases.check_sum_rows(device, numel, count, dtype, factor, shift=numel % 3)

    @pytest.mark.parametrize("chunks", [0, 1, 3])
    def test_apply_adam(self, device: torch.device, chunks: int) -> None:
        for numel, segments in ((1, 1), (5003, 7), (4099, 30)):
            for descent in cases.DESCENTS:
                for scale_block, more in ((4096, {"shift": segments % 2}), (None, {"beta": 0.1, "corrected": True})):
                    options: dict[str, Any] = {"chunks": chunks, "scale_block": scale_block, "descent": descent, **more}
                    cases.check_apply_adam(device, numel, segments, **options)
        cases.check_apply_adam(device, 999, 730, chunks=chunks)

    def test_other_steps(self, device: torch.device) -> None:
        for descent in cases.DESCENTS:
            for with_grads in (True, False):
                cases.check_local_step(device, 5003, 9, with_grads=with_grads, descent=descent)
            for chunks in (0, 1, 3):
                cases.check_sync_parameters(device, 5003, 9, chunks=chunks, descent=descent)

    def test_directions_beyond_a_bound(self, device: torch.device) -> None:
        cases.check_bound(device)

    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    @pytest.mark.parametrize("eps_inside_sqrt", [False, True])
    def test_lamb(self, device: torch.device, weight_decay: float, eps_inside_sqrt: bool) -> None:
        options = LambOptions(0.9, 0.999, 1e-6, weight_decay, eps_inside_sqrt, 0.5 if eps_inside_sqrt else math.inf)
        cases.check_lamb(device, 9001, 6, chunks=3, options=options)
        cases.check_lamb(device, 1009, 760, chunks=0, options=options)

    @pytest.mark.parametrize("log", [False, True], ids=["float32", "8 bits"])
    @pytest.mark.parametrize("form", [None, *cases.INTEGERS], ids=str)
    def test_refresh(self, device: torch.device, form: IntegerFormat | None, log: bool) -> None:
        for numel, segments, chunks in ((1, 1, 1), (5003, 7, 3), (9001, 1, 2), (4099, 30, 1), (1009, 760, 2)):
            cases.check_refresh(device, numel, segments, form, chunks=chunks, log=log)

    def test_adam(self, device: torch.device) -> None:
        sizes = [0, 1, 5, 1024, 4099, 0]
        for step in _ADAM_STEPS:
            cases.check_adam(device, sizes, step)
        cases.check_adam(device, sizes, shift=1)
        cases.check_adam(device, [3] * 500, steps=1)  # more than a table holds

    @pytest.mark.parametrize("own", [False, True], ids=["float32 moments", "moments of the parameter's dtype"])
    def test_adam_of_all_dtypes(self, device: torch.device, own: bool) -> None:
        def dtypes(k: int) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
            param, grad = cases.DTYPES[k % 3], cases.DTYPES[k // 3 % 3]
            return param, grad, param if own else torch.float32

        sizes = (1, 513, 100, 31, 40, 1025, 7, 4097, 3)
        for masters in (False, True) if not own else (False,):
            for shift, step in enumerate(_ADAM_STEPS[1::2]):
                cases.check_adam(device, sizes, step, dtypes=dtypes, masters=masters, copies=True, shift=shift)

    def test_square_sums(self, device: torch.device) -> None:
        cases.check_square_sums(device, [0, 1, 7, 4096, 10_001, 0, 65_537], shift=1)
        cases.check_square_sums(device, [3, 0, 1] * 300)

    @pytest.mark.parametrize("offset", (0, 1, 63, 4095, 200_000))
    def test_sketch(self, device: torch.device, offset: int) -> None:
        for numel in (1, 15, 16, 17, 64, 1000, 4096, 4097, 70_001):
            cases.check_sketch(device, numel, 1 + numel % 7, offset=offset, seed=numel)
        cases.check_sketch(device, 9_001, 40, offset=offset, seed=2**64 - 1)
        cases.check_sketch(device, 150_000, 800, offset=offset, seed=2**63)  # more than a table of a GPU holds

    @pytest.mark.parametrize("spread", (0, 0.3, 1, 4, 30, 1e5))
    def test_changes(self, device: torch.device, spread: float) -> None:
        random = torch.Generator().manual_seed(1)
        for numel in (*cases.NUMELS, 255, 256, 257, 512, 2049):
            old = torch.randint(-0x8000, 0x8000, (numel,), generator=random).short()
            by = (spread * torch.randn(numel, generator=random)).int()
            cases.check_changes(device, old, by, shift=numel % 3)

    def test_changes_of_all_patterns(self, device: torch.device) -> None:
        random = torch.Generator().manual_seed(1)
        patterns = torch.arange(-0x8000, 0x8000).short()
        cases.check_changes(device, patterns, torch.randint(-12, 13, (0x10000,), generator=random))
        few = torch.rand(0x10000, generator=random) < 0.05
        cases.check_changes(device, patterns, torch.where(few, torch.randint(-0x8000, 0x8000, few.shape), 0))


class CompactSuite:
    """Errors and variances in 8 bits, and the last average as x."""

    @_FORMATS
    def test_compress_with_errors_in_8_bits(self, device: torch.device, form: Form) -> None:
        for numel in cases.NUMELS:
            for chunks in (1, 3, 8):
                segments = 1 + numel % 5
                options = {"segments": segments, "with_factors": segments > 3, "with_x": numel % 3 > 0}
                cases.check_compress(device, form, numel, chunks, compact=True, **options)
        many = {"segments": 900, "last": 3, "still": True, "with_factors": True}  # more than a table holds
        cases.check_compress(device, form, 9001, 2, compact=True, **many)

    @_FORMATS
    def test_average_with_errors_in_8_bits(self, device: torch.device, form: Form) -> None:
        for numel in cases.NUMELS:
            for ranks in (1 + numel % 4, 5 + numel % 5):
                cases.check_average_compress(device, form, numel, ranks, compact=True)
        for ranks in (9, 16, 17):  # more messages than are summed in one round, and in two
            cases.check_average_compress(device, form, 5003, ranks, compact=True)
        for count in range(7, len(cases.SPECIAL) + 1) if form in cases.INTEGERS else ():
            values = cases.SPECIAL[:count]
            cases.check_average_compress(device, form, 700 + count, 3, values=values, compact=True)

    def test_blocks_beyond_the_caches(self, device: torch.device) -> None:
        for numel, block in ((150_001, 100_000), (150_001, None), (140_000, 65_536), (140_000, 65_544)):
            form = cases.SignFormat(block)
            cases.check_compress(device, form, numel, 1, compact=True, segments=3, last=2)
            cases.check_compress(device, form, numel, 3, compact=True, segments=3)
            cases.check_average_compress(device, form, numel, 2, compact=True)

    @pytest.mark.parametrize("scale_block", (8, 136, 4096, None))
    def test_errors_that_are_not_finite(self, device: torch.device, scale_block: int | None) -> None:
        cases.check_not_finite(device, 5003, scale_block)

    @_SOME_BLOCKS
    def test_the_last_average_as_x(self, device: torch.device, scale_block: int | None) -> None:
        for numel, chunks in ((1, 1), (33, 3), (1000, 8), (5003, 1), (9001, 3)):
            for segments in (0, 1, 7):
                options = {"last": chunks, "scale_block": scale_block, "still": segments == 7}
                cases.check_combine(device, numel, segments, **options)
                cases.check_combine(device, numel, segments, **options, with_factors=True, alpha=1.0)
        cases.check_combine(device, 1009, 800, last=2, still=True, with_factors=True)  # more than a table holds

    @_SOME_BLOCKS
    @pytest.mark.parametrize("compact", (False, True))
    def test_the_last_average_is_compressed(self, device: torch.device, scale_block: int | None, compact: bool) -> None:
        for numel in (33, 1000, 5003, 9001):
            for segments in (0, 1, 7):
                for form in (cases.SignFormat(scale_block), *cases.INTEGERS):
                    options = {"last": 3, "still": segments == 7, "with_factors": numel % 2 > 0, "compact": compact}
                    options |= {"segments": segments, "scale_block": scale_block}
                    cases.check_compress(device, form, numel, 3, **options)

    @pytest.mark.parametrize("chunks", [0, 1, 3])
    @pytest.mark.parametrize("log", [False, True])
    def test_apply_adam_without_momentum(self, device: torch.device, chunks: int, log: bool) -> None:
        options: dict[str, Any] = {"chunks": chunks, "log": log, "with_m": False}
        for numel, segments in ((1, 1), (5003, 7), (4099, 30), (9001, 1)):
            for descent in cases.DESCENTS:
                for block in (None, 24, 512, 4096):
                    more = {"scale_block": block, "shift": segments % 2, "descent": descent}
                    cases.check_apply_adam(device, numel, segments, **options, **more)
        cases.check_apply_adam(device, 5003, 7, corrected=True, **options)
        cases.check_apply_adam(device, 999, 730, **options)
        cases.check_apply_adam(device, 40_003, 4, whole=True, **options)

    @pytest.mark.parametrize("chunks", [0, 1, 3])
    def test_steps_with_variance_in_8_bits(self, device: torch.device, chunks: int) -> None:
        for descent in cases.DESCENTS:
            for numel, segments in ((1, 1), (5003, 7), (4099, 30)):
                options: dict[str, Any] = {"chunks": chunks, "log": True, "descent": descent}
                cases.check_apply_adam(device, numel, segments, shift=segments % 2, **options)
                cases.check_apply_adam(device, numel, segments, beta=0.1, corrected=True, **options)
            cases.check_local_step(device, 5003, 9, with_grads=chunks > 0, descent=descent, log=True)
            cases.check_sync_parameters(device, 5003, 9, **options)
        for decay in (0.0, 0.1):
            lamb = LambOptions(0.9, 0.999, 1e-6, decay, decay == 0, 0.5)
            cases.check_lamb(device, 1009, 760, chunks=chunks, options=lamb, log=True)
            cases.check_lamb(device, 9001, 6, chunks=chunks, options=lamb, log=True)

    def test_scales_that_are_not_ordinary(self, device: torch.device) -> None:
        for numel, scale_block in ((40_003, 4096), (40_003, 2000), (5003, 8)):
            cases.check_scales_that_are_not_ordinary(device, numel, scale_block)

    def test_without_momentum_beta_must_be_1(self, device: torch.device) -> None:
        ones = torch.ones(8, device=device)
        update = AdamUpdate(Average.of(ones), None, ones, [Segment(ones, 0, 8, 0)], cases.DESCENTS[0])
        with pytest.raises(ValueError, match="beta must be 1 without exp_avg"):
            native.apply_adam_(replace(update, beta=0.5))
