"""Cases of compact operands for native kernels on any device: errors and variances in 8 bits, x as messages."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hf_compressopt.kernels import integer_native, integer_reference, native, reference, signs
from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.errors import CompactErrors, keep_errors_, like_errors, tensor_of, values_of_errors
from hf_compressopt.kernels.integer_messages import chunk_integer_message_nbytes, integer_message_nbytes
from hf_compressopt.kernels.messages import chunk_message_nbytes, message_nbytes, num_blocks
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import AdamUpdate, Descent, LambMoments, LambOptions, LocalUpdate, ParameterSync
from hf_compressopt.kernels.variance import ZERO_CODE, LogVariance, Variance
from tests.support import integer_cases, kernel_cases
from tests.support.kernel_cases import DESCENTS, Arena, Pair, assert_equal_with_nan, assert_same_bits

# Blocks of errors hold 128 elements, as many as a warp takes; blocks of signs, runs and tiles up to 4096.
NUMELS = (1, 7, 8, 33, 127, 129, 1000, 4097, 9_001)
SCALE_BLOCKS = (8, 24, 64, 128, 136, 384, 1000, 4096, 8192, None)
WORLD_SIZES = (1, 3, 8)
_LOWEST_TOP, _HIGHEST_TOP = -754, 1023  # with every code a normal float32 number


def errors(case: Pair, numel: int, world_size: int, *, compact: bool = True) -> tuple[Tensor, CompactErrors | Tensor]:
    """Errors of random sizes. Returns their values, which the kernel does not see, and the kernel's errors."""
    values = torch.randn(numel, generator=case.random) * 0.5
    if not compact:
        return values, case.arena.put(values)
    made = CompactErrors.zeros(numel, world_size)
    keep_errors_(made, values)
    return values_of_errors(made), replace(made, messages=case.arena.put(made.messages))


def assert_errors(got: CompactErrors | Tensor, expected: Tensor) -> None:
    """expected: the values, before they are rounded."""
    if isinstance(got, Tensor):
        assert_same_bits(got, expected)
        return
    rounded = CompactErrors.zeros(got.count, got.world_size)
    keep_errors_(rounded, expected)
    assert_same_bits(got.messages, rounded.messages)


def combination(
    case: Pair,
    numel: int,
    segments: int,
    *,
    last: int = 0,
    with_x: bool = True,
    still: bool = False,
    with_factors: bool = False,
    alpha: float = 0.9,
    scale_block: int | None = 4096,
    with_rest: bool = False,
) -> tuple[Combination, Combination]:
    """Values to send: for the reference, and for the kernel. last: chunks of the average that x is, or 0."""
    rest, own_rest = case.normal(numel, shift=1) if with_rest else (None, None)
    x, own_x = case.normal(numel) if with_x and not last else (None, None)
    y, own_y = kernel_cases.average(case, numel, last, scale_block) if last else (None, None)
    factors, own_factors = case.positive(segments) if with_factors and segments else (None, None)
    grads, own_grads, _ = case.segments(numel, segments, missing=True, still=still) if segments else (None, None, None)
    cpu = torch.device("cpu")
    return (
        Combination(numel, cpu, x, alpha, grads, 0.1, factors, y, rest),
        Combination(numel, case.arena.device, own_x, alpha, own_grads, 0.1, own_factors, own_y, own_rest),
    )


# -- compression ------------------------------------------------------------------------------------------------------


def check_combine(device: torch.device, numel: int, segments: int, **options: object) -> None:
    case = Pair(Arena(device), numel + segments)
    z, own = combination(case, numel, segments, **options)  # type: ignore[arg-type]
    out, own_out = case.normal(numel, shift=3)
    reference.combine_(z, out)
    native.combine_(own, own_out)
    case.check()


def check_compress(
    device: torch.device,
    numel: int,
    world_size: int,
    scale_block: int | None,
    *,
    segments: int = 0,
    compact: bool = True,
    **options: object,
) -> None:
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    z, own = combination(case, numel, segments, **options)  # type: ignore[arg-type]
    error, own_error = errors(case, numel, world_size, compact=compact)
    u = reference.values_of(z) + error
    nbytes = sum(chunk_message_nbytes(numel, world_size, scale_block))
    messages = case.arena.put(torch.full((nbytes,), 7, dtype=torch.uint8))
    native.compress_(own, own_error, messages, world_size, scale_block)
    case.check()
    assert_errors(own_error, kernel_cases.check_messages(u, messages.cpu(), world_size, scale_block))


def check_commit(
    device: torch.device,
    numel: int,
    world_size: int,
    scale_block: int | None,
    *,
    segments: int = 0,
    compact: bool = True,
    **options: object,
) -> None:
    """Messages first and errors later are, in bits, what one pass leaves."""
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    z, own = combination(case, numel, segments, **options)  # type: ignore[arg-type]
    _, error = errors(case, numel, world_size, compact=compact)
    start = tensor_of(error).clone()
    at_once, expected = (like_errors(error) for _ in range(2))
    for copy in (at_once, expected):
        tensor_of(copy).copy_(start)
    nbytes = sum(chunk_message_nbytes(numel, world_size, scale_block))
    sent, messages = (case.arena.put(torch.full((nbytes,), byte, dtype=torch.uint8)) for byte in (7, 9))
    native.compress_(own, at_once, sent, world_size, scale_block)
    native.compress_only_(own, error, messages, world_size, scale_block)
    assert_same_bits(messages, sent)
    assert_same_bits(tensor_of(error), start)
    native.commit_(own, error, messages, world_size, scale_block)
    case.check()
    assert_same_bits(tensor_of(error), tensor_of(at_once))
    if device.type == "cpu":
        reference.commit_(z, expected, messages, world_size, scale_block)
        assert_same_bits(tensor_of(expected), tensor_of(at_once))
        if world_size == 1 and compact:  # the reference itself, whose scales may differ by rounding
            reference.compress_only_(z, at_once, messages, world_size, scale_block)
            reference.compress_(z, expected, sent, world_size, scale_block)
            assert_same_bits(messages, sent)
            reference.commit_(z, at_once, messages, world_size, scale_block)
            assert_same_bits(tensor_of(at_once), tensor_of(expected))


def check_average_compress(device: torch.device, numel: int, world_size: int, scale_block: int | None) -> None:
    case = Pair(Arena(device), numel + 17 * world_size)
    messages, own_messages = case.put(kernel_cases.sign_messages(case, numel, world_size, scale_block))
    error, own_error = errors(case, numel, 1)
    u = signs.mean_of_messages(messages.view(world_size, -1), numel, scale_block) + error
    out = case.arena.put(torch.full((message_nbytes(numel, scale_block),), 7, dtype=torch.uint8))
    native.average_compress_(own_messages, own_error, out, world_size, scale_block)
    case.check()
    assert_errors(own_error, kernel_cases.check_messages(u, out.cpu(), 1, scale_block))


def check_not_finite(device: torch.device, numel: int, scale_block: int | None) -> None:
    """What is not finite makes the scale of its block NaN or infinite, and the errors of the block NaN."""
    case = Pair(Arena(device), numel)
    x = torch.randn(numel, generator=case.random)
    x[numel // 3], x[2 * numel // 3] = math.inf, math.nan
    x, own_x = case.put(x)
    error, own_error = errors(case, numel, 1)
    message = case.arena.put(torch.full((message_nbytes(numel, scale_block),), 7, dtype=torch.uint8))
    for _ in range(2):
        u = x + error
        native.compress_(Combination.of(own_x), own_error, message, 1, scale_block)
        case.check()
        got = message.cpu()
        scales = got[: 4 * num_blocks(numel, scale_block)].view(torch.float32)
        assert torch.equal(scales.isfinite(), kernel_cases.mean_squares(u, scale_block).isfinite())
        expected = u - signs.decompress_message(got, numel, scale_block)
        assert_errors(own_error, expected)
        assert isinstance(own_error, CompactErrors)
        error = values_of_errors(replace(own_error, messages=own_error.messages.cpu()))
        assert 2 <= int(error.isnan().sum()) and bool(error.isnan()[numel // 3])


# -- integers ---------------------------------------------------------------------------------------------------------


def _compact_pair(case: Pair, numel: int, world_size: int) -> tuple[CompactErrors, CompactErrors]:
    made = CompactErrors.zeros(numel, world_size)
    keep_errors_(made, torch.randn(numel, generator=case.random) * 0.5)
    made_messages, own_messages = case.put(made.messages)
    return replace(made, messages=made_messages), replace(made, messages=own_messages)


def check_compress_integers(
    device: torch.device, numel: int, world_size: int, bits: int, *, segments: int = 0, **options: object
) -> None:
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    z, own = combination(case, numel, segments, **options)  # type: ignore[arg-type]
    error, own_error = _compact_pair(case, numel, world_size)
    nbytes = sum(chunk_integer_message_nbytes(numel, world_size, bits))
    messages, own_messages = case.put(torch.full((nbytes,), 7, dtype=torch.uint8))
    integer_reference.compress_(z, error, messages, world_size, bits)
    integer_native.compress_(own, own_error, own_messages, world_size, bits)
    case.check()
    left, own_left = (error, own_error) if numel % 2 == 0 else _compact_pair(case, numel, world_size)
    integer_reference.compress_(z, error, messages, world_size, bits, left)
    integer_native.compress_(own, own_error, own_messages, world_size, bits, own_left)
    case.check()


def check_average_integers(
    device: torch.device,
    numel: int,
    world_size: int,
    bits: int,
    *,
    in_place: bool = False,
    values: Tensor | None = None,
) -> None:
    case = Pair(Arena(device), numel + 17 * world_size)
    messages, own_messages = case.put(integer_cases.messages_of(case, numel, world_size, bits, values))
    out, own_out = case.put(torch.full((integer_message_nbytes(numel, bits),), 7, dtype=torch.uint8))
    error, own_error = _compact_pair(case, numel, 1)
    new_error, own_new_error = (error, own_error) if in_place else _compact_pair(case, numel, 1)
    integer_reference.average_compress_(messages, error, new_error, out, world_size, bits)
    integer_native.average_compress_(own_messages, own_error, own_new_error, own_out, world_size, bits)
    case.check()


def check_commit_integers(
    device: torch.device,
    numel: int,
    world_size: int,
    bits: int,
    *,
    segments: int,
    compact: bool = True,
    **options: object,
) -> None:
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    z, own = combination(case, numel, segments, **options)  # type: ignore[arg-type]
    assert z.grads is not None and own.grads is not None
    error, own_error = _compact_pair(case, numel, world_size) if compact else case.normal(numel)
    nbytes = sum(chunk_integer_message_nbytes(numel, world_size, bits))
    messages, own_messages = case.put(torch.zeros(nbytes, dtype=torch.uint8))
    integer_reference.compress_(z, error, messages, world_size, bits)
    own_messages.copy_(messages)
    y, own_y = integer_cases.average(case, numel, world_size, bits)
    integer_reference.commit_(Commit(z, error, messages, y, z.grads, 3.0))
    integer_native.commit_(Commit(own, own_error, own_messages, own_y, own.grads, 3.0))
    case.check()


# -- what the optimizers do with the average --------------------------------------------------------------------------


def variance(case: Pair, numel: int, tensors: int, *, shift: int = 0) -> tuple[LogVariance, LogVariance]:
    """Variances in 8 bits: tensors of ordinary sizes, and of the least and the largest; every code, and many zeros."""
    codes = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=case.random)
    codes[torch.rand(numel, generator=case.random) < 0.1] = ZERO_CODE
    tops = torch.randint(-100, 60, (tensors,), dtype=torch.int32, generator=case.random)
    tops[3::4], tops[4::5] = _LOWEST_TOP, _HIGHEST_TOP
    pairs = case.put(codes, shift), case.put(tops)
    return LogVariance(pairs[0][0], pairs[1][0]), LogVariance(pairs[0][1], pairs[1][1])


def check_apply_adam(
    device: torch.device,
    numel: int,
    segments: int,
    *,
    world_size: int,
    scale_block: int | None = 4096,
    beta: float = 1.0,
    with_m: bool = False,
    log: bool = True,
    corrected: bool = False,
    still: bool = True,
    missing: bool = True,
    descent: Descent = DESCENTS[0],
    shift: int = 0,
) -> None:
    case = Pair(Arena(device), numel + segments)
    y, own_y = kernel_cases.average(case, numel, world_size, scale_block)
    m, own_m = case.normal(numel) if with_m else (None, None)
    v: Variance
    own_v: Variance
    v, own_v = variance(case, numel, segments, shift=shift) if log else case.positive(numel, shift=shift)
    params, own_params, _ = case.segments(numel, segments, missing=missing, still=still)
    corrections, own_corrections = None, None
    if corrected:
        values = torch.rand(segments, 2, generator=case.random) + 0.1
        values[::4, 0] = math.inf
        corrections, own_corrections = case.put(values)
    reference.apply_adam_(AdamUpdate(y, m, v, params, descent, beta, corrections))
    native.apply_adam_(AdamUpdate(own_y, own_m, own_v, own_params, descent, beta, own_corrections))
    case.check()


def check_scales_that_are_not_ordinary(device: torch.device, numel: int, scale_block: int) -> None:
    """NaN stays NaN, zeros keep their signs, and infinity is bounded."""
    for bound in (math.inf, 0.5):
        case = Pair(Arena(device), numel)
        y, _ = kernel_cases.average(case, numel, 1, scale_block)
        assert y.messages is not None
        y = replace(y, messages=y.messages.clone())
        assert y.messages is not None
        scales = y.messages[: 4 * num_blocks(numel, scale_block)].view(torch.float32)
        for place, scale in enumerate((math.nan, 0.0, math.inf, 1e-40, 3e38)):
            scales[place::7] = scale
        own_y = replace(y, messages=case.arena.put(y.messages))
        v, own_v = variance(case, numel, 1)
        start = torch.randn(numel, generator=case.random)
        start[torch.rand(numel, generator=case.random) < 0.1] = -0.0
        own_param, param = case.arena.put(start), start.clone()
        descent = Descent(1e-2, 1.0, 1e-8, False, bound)
        reference.apply_adam_(AdamUpdate(y, None, v, [Segment(param, 0, numel, 0)], descent))
        native.apply_adam_(AdamUpdate(own_y, None, own_v, [Segment(own_param, 0, numel, 0)], descent))
        case.check()
        assert_equal_with_nan(own_param.cpu(), param)
        assert bool(param.isnan().any()) and not bool(param.isnan().all())


def check_local_step(device: torch.device, numel: int, segments: int, *, with_grads: bool, descent: Descent) -> None:
    case = Pair(Arena(device), numel + segments)
    m, own_m = case.normal(numel)
    v, own_v = variance(case, numel, segments)
    u, own_u = case.normal(numel)
    params, own_params, cuts = case.segments(numel, segments, missing=True, still=True)
    grads, own_grads, _ = case.segments(numel, segments, missing=True, cuts=cuts)
    reference.local_step_(LocalUpdate(m, v, u, grads if with_grads else None, params, 0.9, descent))
    native.local_step_(LocalUpdate(own_m, own_v, own_u, own_grads if with_grads else None, own_params, 0.9, descent))
    case.check()


def check_sync_parameters(
    device: torch.device, numel: int, segments: int, *, world_size: int, descent: Descent = DESCENTS[0]
) -> None:
    case = Pair(Arena(device), numel + segments)
    y, own_y = kernel_cases.average(case, numel, world_size, 512)
    m, own_m = case.normal(numel)
    anchor, own_anchor = case.normal(numel)
    v, own_v = variance(case, numel, segments)
    u, own_u = case.normal(numel)
    if world_size == 0:  # as in a run of one rank
        y, own_y = Average.of(u), Average.of(own_u)
    params, own_params, _ = case.segments(numel, segments, missing=True, still=True)
    reference.sync_parameters_(ParameterSync(y, m, anchor, v, u, params, 0.03, descent))
    native.sync_parameters_(ParameterSync(own_y, own_m, own_anchor, own_v, own_u, own_params, 0.03, descent))
    case.check()


def check_lamb(device: torch.device, numel: int, segments: int, *, world_size: int, options: LambOptions) -> None:
    case = Pair(Arena(device), numel + segments)
    y, own_y = kernel_cases.average(case, numel, world_size, 4096)
    m, own_m = case.normal(numel)
    fresh, own_fresh = case.positive(numel)
    v, own_v = variance(case, numel, segments)
    params, own_params, _ = case.segments(numel, segments, missing=True, still=True)
    factors, own_factors = case.positive(segments)
    rates, own_rates = case.positive(segments)
    start = torch.rand(segments, 3, generator=case.random, dtype=torch.float64)
    sums, own_sums = start.clone(), case.arena.put(start)
    nonempty = [segment for segment in params if segment.numel]
    reference.lamb_moments_(LambMoments(y, m, fresh, v, nonempty, factors, sums, options))
    native.lamb_moments_(LambMoments(own_y, own_m, own_fresh, own_v, own_params, own_factors, own_sums, options))
    case.check()
    torch.testing.assert_close(own_sums.cpu(), sums, rtol=1e-12, atol=0)
    reference.lamb_apply_(m, v, params, rates, options)
    native.lamb_apply_(own_m, own_v, own_params, own_rates, options)
    case.check()
