"""Cases that native kernels must pass on any device: the reference's bits, and nothing written beside the buffers.

Each check makes its data on the CPU from a seed, runs the reference there and the native kernel on copies that lie
between guards on the device, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels import native, reference, signs
from hf_compressopt.kernels.adam_native import AdamTable
from hf_compressopt.kernels.adam_operands import AdamStep, AdamTensors
from hf_compressopt.kernels.adam_reference import reference_
from hf_compressopt.kernels.messages import chunk_message_nbytes, message_nbytes, num_blocks
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import AdamUpdate, Descent, LambMoments, LambOptions, LocalUpdate, ParameterSync

_GUARD = 64  # bytes on either side of every buffer
_PATTERN = 0xA5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tiles of kernels hold 4096 elements, blocks of threads 1024 at a time, warps 128.
NUMELS = (1, 7, 8, 33, 1000, 4096, 4097, 9_001)
SCALE_BLOCKS = (None, 8, 24, 136, 512, 1000, 4096, 8192, 20_000)


class Arena:
    """Copies of tensors on a device, each between guards, and off the 16-byte alignment where asked."""

    place: Callable[[Tensor, int], Tensor] | None = None  # makes the copies instead, if a fixture has set it

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[tuple[Tensor, int, int]] = []

    def put(self, tensor: Tensor, shift: int = 0) -> Tensor:
        if self.place is not None:
            return self.place(tensor, shift)
        begin = _GUARD + shift * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        block = torch.full((end + _GUARD,), _PATTERN, dtype=torch.uint8, device=self.device)
        self._blocks.append((block, begin, end))
        copy = block[begin:end].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def check(self) -> None:
        for block, begin, end in self._blocks:
            assert bool((block[:begin] == _PATTERN).all() and (block[end:] == _PATTERN).all()), (
                "written beside a buffer"
            )


@dataclass
class Pair:
    """The same tensors for the reference and for the kernel."""

    arena: Arena
    seed: int

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def put(self, tensor: Tensor, shift: int = 0) -> tuple[Tensor, Tensor]:
        self._pairs.append((tensor, self.arena.put(tensor, shift)))
        return self._pairs[-1]

    def normal(self, *shape: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        return self.put(torch.randn(shape, generator=self.random), shift)

    def positive(self, *shape: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        return self.put(torch.rand(shape, generator=self.random) + 0.1, shift)

    def segments(
        self, numel: int, count: int, *, missing: bool = False, still: bool = False, cuts: Sequence[int] | None = None
    ) -> tuple[list[Segment], list[Segment], list[int]]:
        """Random runs, some of them empty, of tensors of all dtypes; without tensors, or still, every third."""
        if cuts is None:
            cuts = sorted(self.integer(0, numel) for _ in range(count - 1))
        indices = torch.randperm(count, generator=self.random).tolist()
        sides: tuple[list[Segment], list[Segment]] = ([], [])
        for k, (start, stop) in enumerate(zip([0, *cuts], [*cuts, numel], strict=True)):
            before = self.integer(0, 5)
            values = torch.randn(before + stop - start + 2, generator=self.random).to(DTYPES[self.integer(0, 2)])
            tensors = (None, None) if missing and k % 3 == 1 else self.put(values, self.integer(0, 3))
            for side, tensor in zip(sides, tensors, strict=True):
                side.append(Segment(tensor, before, stop - start, indices[k], still and k % 3 == 2))
        return *sides, list(cuts)

    def check(self) -> None:
        self.arena.check()
        for expected, got in self._pairs:
            assert_same_bits(got, expected)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    different = got.cpu().reshape(-1).view(integers) != expected.reshape(-1).view(integers)
    if bool(different.any()):
        k = int(different.nonzero()[0])
        values = f"{got.reshape(-1)[k]} instead of {expected.reshape(-1)[k]}"
        raise AssertionError(f"{int(different.sum())} of {different.numel()} differ, the first at {k}: {values}")


def assert_all_same_bits(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


def assert_equal_with_nan(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert_same_bits(got[kept], expected[kept])


def assert_scales_close(got: Tensor, expected: Tensor) -> None:
    """Within 2 units in the last place. got: [n] float32; expected: [n] float64."""
    step = torch.nextafter(expected.float(), torch.tensor(math.inf)).double() - expected.float().double()
    assert bool(((got.double() - expected).abs() <= 2 * step).all()), (got - expected).abs().max()


# -- compression ------------------------------------------------------------------------------------------------------


def check_compress(
    device: torch.device,
    numel: int,
    world_size: int,
    scale_block: int | None,
    *,
    segments: int = 0,
    with_x: bool = True,
    with_factors: bool = False,
    shift: int = 0,
) -> None:
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    x, own_x = case.normal(numel, shift=shift) if with_x else (None, None)
    error = torch.randn(numel, generator=case.random)
    factors, own_factors = case.positive(max(segments, 1))
    grads, own_grads, _ = case.segments(numel, segments, missing=True) if segments else (None, None, None)
    z = Combination(numel, torch.device("cpu"), x, 0.9, grads, 0.1)
    own = Combination(numel, device, own_x, 0.9, own_grads, 0.1)
    if with_factors:
        z, own = replace(z, factors=factors), replace(own, factors=own_factors)
    u = torch.empty(numel)
    reference.combine_(z, u)
    u += error
    nbytes = sum(chunk_message_nbytes(numel, world_size, scale_block))
    messages = case.arena.put(torch.full((nbytes,), 7, dtype=torch.uint8))
    own_error = case.arena.put(error, shift)
    native.compress_(own, own_error, messages, world_size, scale_block)
    case.check()
    assert_same_bits(own_error, check_messages(u, messages.cpu(), world_size, scale_block))


def check_average_compress(
    device: torch.device, numel: int, world_size: int, scale_block: int | None, *, shift: int = 0
) -> None:
    case = Pair(Arena(device), numel + 17 * world_size)
    messages, own_messages = case.put(sign_messages(case, numel, world_size, scale_block))
    error = torch.randn(numel, generator=case.random)
    u = signs.mean_of_messages(messages.view(world_size, -1), numel, scale_block) + error
    out = case.arena.put(torch.full((message_nbytes(numel, scale_block),), 7, dtype=torch.uint8))
    own_error = case.arena.put(error, shift)
    native.average_compress_(own_messages, own_error, out, world_size, scale_block)
    case.check()
    assert_same_bits(own_error, check_messages(u, out.cpu(), 1, scale_block))


def sign_messages(case: Pair, numel: int, count: int, scale_block: int | None) -> Tensor:
    """Messages of `count` ranks, each of the same chunk of numel elements."""
    nbytes = message_nbytes(numel, scale_block)
    messages = torch.zeros(count * nbytes, dtype=torch.uint8)
    for part in messages.view(count, nbytes) if nbytes else ():
        values = Combination.of(torch.randn(numel, generator=case.random))
        reference.compress_(values, torch.zeros(numel), part, 1, scale_block)
    return messages


def mean_squares(values: Tensor, block: int | None) -> Tensor:
    """The mean square of each block, the last of which may be shorter: float64."""
    squares = values.double().square()
    whole = squares.numel() - squares.numel() % (block or max(squares.numel(), 1))
    head, tail = squares[:whole], squares[whole:]
    means = [head.view(-1, block or whole).mean(1)] * bool(whole) + [tail.mean()[None]] * bool(tail.numel())
    return torch.cat(means)


def check_messages(u: Tensor, messages: Tensor, world_size: int, scale_block: int | None) -> Tensor:
    """Scales within 2 ulp of float64's, and the reference's signs and padding. Returns the errors that they leave."""
    errors, byte = torch.empty_like(u), 0
    for rank in range(world_size):
        start, stop = chunk_range(u.numel(), world_size, rank)
        if start == stop:
            continue
        part, blocks, nbytes = (
            u[start:stop],
            num_blocks(stop - start, scale_block),
            message_nbytes(stop - start, scale_block),
        )
        message = messages[byte : byte + nbytes]
        scales = message[: 4 * blocks].view(torch.float32)
        whole = u if scale_block is None else part
        assert_scales_close(scales, mean_squares(whole, scale_block).sqrt())
        expected = torch.zeros(nbytes - 4 * blocks, dtype=torch.uint8)
        packed = signs.pack_signs(part)
        expected[: packed.numel()] = packed
        assert_same_bits(message[4 * blocks :], expected)
        errors[start:stop] = part - signs.decompress_message(message, stop - start, scale_block)
        byte += nbytes
    assert byte == messages.numel()
    return errors


def average(case: Pair, numel: int, world_size: int, scale_block: int | None) -> tuple[Average, Average]:
    """An averaged bucket: messages of its chunks; for world_size 0 the values themselves."""
    if world_size == 0:
        values, own = case.normal(numel)
        return Average.of(values), Average.of(own)
    sizes = chunk_message_nbytes(numel, world_size, scale_block)
    stride = max(sizes)
    messages = torch.zeros(world_size * stride, dtype=torch.uint8)
    for rank in range(world_size):
        start, stop = chunk_range(numel, world_size, rank)
        if start < stop:
            part = messages[rank * stride :][: sizes[rank]]
            values = Combination.of(torch.randn(stop - start, generator=case.random))
            reference.compress_(values, torch.zeros(stop - start), part, 1, scale_block)
    messages, own = case.put(messages)
    y = Average(numel, None, messages, world_size, scale_block, stride)
    return y, replace(y, messages=own)


def check_decompress(
    device: torch.device, numel: int, world_size: int, scale_block: int | None, shift: int = 0
) -> None:
    case = Pair(Arena(device), numel)
    y, own_y = average(case, numel, world_size, scale_block)
    out, own_out = case.normal(numel, shift=shift)
    reference.decompress_(y, out)
    native.decompress_(own_y, own_out)
    case.check()


def check_combine(device: torch.device, numel: int, segments: int, *, with_x: bool, with_factors: bool) -> None:
    case = Pair(Arena(device), numel + segments)
    x, own_x = case.normal(numel, shift=1) if with_x else (None, None)
    factors, own_factors = case.positive(max(segments, 1))
    grads, own_grads, _ = case.segments(numel, segments, missing=True) if segments else (None, None, None)
    z = Combination(numel, torch.device("cpu"), x, 0.9, grads, 1.0, factors if with_factors else None)
    own = Combination(numel, device, own_x, 0.9, own_grads, 1.0, own_factors if with_factors else None)
    out, own_out = case.normal(numel, shift=3)
    reference.combine_(z, out)
    native.combine_(own, own_out)
    case.check()


# -- what the optimizers do with the average --------------------------------------------------------------------------

DESCENTS = (
    Descent(1e-2, 0.99, 1e-8, False),
    Descent(1e-2, 1.0, 1e-6, True),
    Descent(1e-2, 0.99, 1e-8, False, 0.7),
    Descent(1e-2, 1.0, 1e-6, True, 0.3),
)


def check_apply_adam(
    device: torch.device,
    numel: int,
    segments: int,
    *,
    world_size: int,
    scale_block: int | None = 4096,
    beta: float = 1.0,
    corrected: bool = False,
    descent: Descent = DESCENTS[0],
    shift: int = 0,
) -> None:
    case = Pair(Arena(device), numel + segments)
    y, own_y = average(case, numel, world_size, scale_block)
    m, own_m = case.normal(numel, shift=shift)
    v, own_v = case.positive(numel, shift=shift)
    params, own_params, _ = case.segments(numel, segments, missing=True, still=True)
    corrections, own_corrections = None, None
    if corrected:
        values = torch.rand(segments, 2, generator=case.random) + 0.1
        values[::4, 0] = math.inf
        corrections, own_corrections = case.put(values)
    reference.apply_adam_(AdamUpdate(y, m, v, params, descent, beta, corrections))
    native.apply_adam_(AdamUpdate(own_y, own_m, own_v, own_params, descent, beta, own_corrections))
    case.check()


def check_local_step(device: torch.device, numel: int, segments: int, *, with_grads: bool, descent: Descent) -> None:
    case = Pair(Arena(device), numel + segments)
    m, own_m = case.normal(numel)
    v, own_v = case.positive(numel)
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
    y, own_y = average(case, numel, world_size, 512)
    m, own_m = case.normal(numel)
    anchor, own_anchor = case.normal(numel)
    v, own_v = case.positive(numel)
    u, own_u = case.normal(numel)
    if world_size == 0:  # as in a run of one rank
        y, own_y = Average.of(u), Average.of(own_u)
    params, own_params, _ = case.segments(numel, segments, missing=True, still=True)
    reference.sync_parameters_(ParameterSync(y, m, anchor, v, u, params, 0.03, descent))
    native.sync_parameters_(ParameterSync(own_y, own_m, own_anchor, own_v, own_u, own_params, 0.03, descent))
    case.check()


def check_bound(device: torch.device) -> None:
    """Check a bound: values beyond it become the bound, NaN stays NaN, and an infinite bound changes nothing."""
    directions = torch.tensor([0.5, 2.0, 2.5, -2.0, -3e38, math.inf, -math.inf, math.nan, -0.0, 1e-45] * 5)
    ones, expected = torch.ones_like(directions), directions.clamp(-2.0, 2.0)
    for bound in (2.0, math.inf):
        for how in (reference, native):
            on = torch.device("cpu") if how is reference else device
            params = [torch.zeros(len(directions), device=on) for _ in range(3)]
            runs = [[Segment(p, 0, len(directions), 0)] for p in params]
            m, u, anchor = (values.to(on, copy=True) for values in (directions, 0 * ones, 0 * ones))
            y, v, descent = Average.of(directions.to(on)), ones.to(on), Descent(1.0, 1.0, 0.0, False, bound)
            how.apply_adam_(AdamUpdate(y, m, v, runs[0], descent))
            how.local_step_(LocalUpdate(m, v, u, None, runs[1], 0.9, descent))
            how.sync_parameters_(ParameterSync(y, m, anchor, v, u, runs[2], 1.0, descent))
            for param in params:
                wanted = -expected if bound == 2.0 else -directions
                torch.testing.assert_close(param.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def check_lamb(device: torch.device, numel: int, segments: int, *, world_size: int, options: LambOptions) -> None:
    case = Pair(Arena(device), numel + segments)
    y, own_y = average(case, numel, world_size, 4096)
    m, own_m = case.normal(numel)
    fresh, own_fresh = case.positive(numel)
    v, own_v = case.positive(numel)
    params, own_params, _ = case.segments(numel, segments, missing=True, still=True)
    factors, own_factors = case.positive(segments)
    rates, own_rates = case.positive(segments)
    start = torch.rand(segments, 3, generator=case.random, dtype=torch.float64)
    sums, own_sums = start.clone(), case.arena.put(start)
    nonempty = [segment for segment in params if segment.numel]
    reference.lamb_moments_(LambMoments(y, m, fresh, v, [replace(s) for s in nonempty], factors, sums, options))
    native.lamb_moments_(LambMoments(own_y, own_m, own_fresh, own_v, own_params, own_factors, own_sums, options))
    case.check()
    torch.testing.assert_close(own_sums.cpu(), sums, rtol=1e-12, atol=0)
    reference.lamb_apply_(m, v, params, rates, options)
    native.lamb_apply_(own_m, own_v, own_params, own_rates, options)
    case.check()


# -- FusedAdam, and norms ---------------------------------------------------------------------------------------------

STEP = AdamStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def check_adam(
    device: torch.device,
    numels: Sequence[int],
    step: AdamStep = STEP,
    *,
    dtypes: Callable[[int], tuple[torch.dtype, torch.dtype, torch.dtype]] = lambda k: (torch.float32,) * 3,
    masters: bool = False,
    copies: bool = False,
    shift: int = 0,
    steps: int = 3,
) -> None:
    """dtypes: of parameter, gradient and moments of the k-th tensor."""
    case = Pair(Arena(device), len(numels))
    sides: list[list[list[Tensor | None]]] = [[], []]
    for k, numel in enumerate(numels):
        param, grad, moment = dtypes(k)
        weights = torch.randn(numel, generator=case.random)
        row = [
            case.put(torch.randn(numel, generator=case.random).to(grad), shift),
            case.put(weights.to(param), shift),
            case.put(torch.randn(numel, generator=case.random).to(moment), shift),
            case.put(torch.rand(numel, generator=case.random).to(moment), shift),
            case.put(torch.tensor(float(k % 3))),
            case.put(weights.clone(), shift) if masters else (None, None),
            case.put(torch.zeros(numel, dtype=torch.bfloat16), shift) if copies else (None, None),
        ]
        for side, tensors in zip(sides, zip(*row, strict=True), strict=True):
            side.append(list(tensors))
    expected, own = (AdamTensors(*map(list, zip(*side, strict=True))) for side in sides)
    table = AdamTable(own)
    for _ in range(steps):
        reference_(expected, step)
        table.run(own.grads, _on(step, device), device)
    case.check()


def _on(step: AdamStep, device: torch.device) -> AdamStep:
    names = ("lr", "grad_scale", "found_inf", "clip_factor")
    moved = {n: getattr(step, n).to(device) for n in names if isinstance(getattr(step, n), Tensor)}
    return replace(step, **moved)


def check_square_sums(device: torch.device, numels: Sequence[int], shift: int = 0) -> None:
    case = Pair(Arena(device), len(numels))
    pairs = [
        case.put((torch.randn(numel, generator=case.random) * 3).to(DTYPES[k % 3]), shift)
        for k, numel in enumerate(numels)
    ]
    expected = torch.stack([cpu.double().square().sum() for cpu, _ in pairs])
    got = native.sum_of_squares([own for _, own in pairs], device)
    case.check()
    torch.testing.assert_close(got.cpu(), expected.sum(), rtol=1e-13, atol=0)
