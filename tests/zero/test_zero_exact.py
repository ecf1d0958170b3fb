"""Parameters of 16 bits that are sent as their changes: the bits of a run that sends them in full, in fewer bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import ZeroOptimizer
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.logs import log_lines
from tests.support.zero_runs import Case, Net, fresh, run_steps

FULL, EXACT = {"param_compression": "none"}, {"param_compression": "exact"}
BF16 = Case(dtype=torch.bfloat16, steps=8, options={"reduce_bucket_size": 600})
CASES = [
    BF16,
    replace(BF16, steps=200, options={"stage": 1, "lr": 1e-4}),
    replace(BF16, dtype=torch.float16, options={"reduce_bucket_size": 300, "loss_scale": 64.0}, clip=0.5),
    replace(BF16, options={"stage": 1, "grad_compression": "int4"}, passes=2, hold=True),
    replace(BF16, optimizer="lamb", groups=True),
    replace(BF16, optimizer="sgd", options={"lr": 0.0}, steps=2),
    replace(BF16, steps=200, options={"stage": 2, "lr": 1e-4, "grad_compression": "int4"}),
]
#: Of ranks and cases, those that are run for long.
LONG = [(3, 1), (4, 1), (2, 6), (3, 6), (4, 6)]
#: Zeros, denormals, the largest numbers, infinities, and NaN with payloads; as bits, of bfloat16 and of float16.
SPECIAL = (0x0000, -0x8000, 0x0001, -0x7FFF, 0x007F, 0x03FF, 0x7F7F, 0x7BFF, 0x7F80, 0x7C00, -0x0080, 0x7FA5, -0x0043)


def patterns(model: nn.Module) -> list[Tensor]:
    return [p.detach().view(torch.int16).clone() for p in model.parameters()]


def differences(a: nn.Module, b: nn.Module) -> list[int]:
    return [k for k, (x, y) in enumerate(zip(patterns(a), patterns(b), strict=True)) if not torch.equal(x, y)]


def two_runs(case: Case) -> list[tuple[Net, ZeroOptimizer, Case]]:
    """A run in full and one of changes, which have not begun."""
    cases = [replace(case, options={**case.options, **options}) for options in (FULL, EXACT)]
    return [(*fresh(each), each) for each in cases]


def trained_alike(rank: int, world_size: int, number: int) -> None:
    case = CASES[number]
    (plain, full, _), (model, exact, _) = runs = two_runs(case)
    for step in range(case.steps):
        for net, optimizer, each in runs:
            run_steps(rank, each, net, optimizer, [step])
        assert differences(plain, model) == []
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.requires_grad:
            assert torch.equal(full.get_full_param(p), exact.get_full_param(q))
    assert same_on_all_ranks(model.parameters())
    assert "parameters as their changes" in exact.describe()
    bits = exact.metrics()["bits_per_parameter"]
    assert "bits_per_parameter" not in full.metrics()
    assert (
        0 < bits < 16 * 1.01 + 16 * 64 * world_size * len(exact._reducer.slices) / 3000
    )  # rows of sizes of tiny slices
    sent = [optimizer.metrics()["bytes_sent"] for optimizer in (full, exact)]
    if case.options.get("lr") == 1e-4 or case.optimizer == "sgd":
        assert sent[1] < 0.75 * sent[0]


@pytest.mark.parametrize(
    ("world_size", "number"),
    [
        *[(2, 0), (2, 1), (2, 2), (3, 0), (3, 3), (3, 4), (3, 5), (4, 3)],
        *(pytest.param(*case, marks=pytest.mark.full) for case in LONG),
    ],
)
def test_the_bits_of_a_run_in_full(world_size: int, number: int) -> None:
    run_ranks(world_size, trained_alike, number)


def in_two_levels(rank: int, world_size: int) -> None:
    case = replace(BF16, options={**BF16.options, "topology": "hierarchical", "node_size": 2})
    (plain, *_), (model, *_) = runs = two_runs(case)
    for net, optimizer, each in runs:
        run_steps(rank, each, net, optimizer, range(4))
    assert differences(plain, model) == [] and same_on_all_ranks(model.parameters())


def test_the_bits_of_a_run_in_full_in_two_levels() -> None:
    run_ranks(4, in_two_levels)


@on_ranks(2)
def test_all_kinds_of_values_that_others_write(rank: int, world_size: int) -> None:
    """On all ranks alike, or on one: then the owner's values count, as in full precision."""
    warned: list[bool] = []
    for dtype in (torch.bfloat16, torch.float16):
        (plain, *_), (model, exact, _) = runs = two_runs(replace(BF16, dtype=dtype))
        special = torch.tensor(SPECIAL, dtype=torch.int16).repeat(3).view(dtype)[: 2 * 19]
        for step in range(6):
            for net, optimizer, _ in runs:
                with torch.no_grad():
                    if step == 2:
                        net.second.bias.data.copy_(special[:19])
                        net.never.data.copy_(special[19:24])
                        net.sometimes.data.copy_(torch.arange(19))
                    if step == 4 and rank == 1:  # two elements change places: the sum of all bits stays
                        net.sometimes.data[:2] = net.sometimes.data[:2].flip(0) + 1
                    if step == 4 and rank == 0:
                        net.sometimes.data[:2] += 1
                for p in net.parameters():
                    if p.requires_grad:
                        p.grad = torch.full_like(p, 0.01 * (step + 1))
                with log_lines() as lines:
                    optimizer.step()
                warned += ["the ranks have different values" in line for line in lines]
            assert differences(plain, model) == [], step
        assert exact.steps == 6 and same_on_all_ranks([p.view(torch.int16) for p in model.parameters()])
    assert sum(warned) == (2 if rank == 0 else 0)


@on_ranks(2)
def test_auto_takes_what_has_16_bits(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32).bfloat16())
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert same_on_all_ranks(model.parameters()) and "bits_per_parameter" in optimizer.metrics()
    model.float()  # as changes there are none
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert same_on_all_ranks(model.parameters()) and "bits_per_parameter" not in optimizer.metrics()


@pytest.mark.parametrize(
    ("dtype", "options", "error", "message"),
    [
        (torch.float32, EXACT, TypeError, "got torch.float32 in param group 0: load the model in bfloat16"),
        (torch.bfloat16, {**EXACT, "master_dtype": "bf16"}, ValueError, "exact needs master copies, got master_dtype"),
    ],
)
def test_what_has_no_changes_is_refused(
    dtype: torch.dtype, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ZeroOptimizer([nn.Parameter(torch.ones(3, dtype=dtype))], torch.optim.AdamW, **options)
