"""Full-precision access, memory estimates and reports, and the precision of messages and state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import Lamb, ZeroConfig, ZeroOptimizer, estimate_zero_memory
from hf_compressopt.zero.memory import memory_report, release_memory
from tests.support.harness import on_ranks
from tests.support.zero_runs import Case, Net, averaged, bits, different, gradients, loss_of, train_plain, train_zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(3)
def test_values_states_and_gradients_are_read_and_written(rank: int, world_size: int, dtype: torch.dtype) -> None:
    case = Case(options={"reduce_bucket_size": 300}, dtype=dtype)
    plain_model, plain = train_plain(rank, case)
    model, optimizer = train_zero(rank, case)
    masters = plain.param_groups[0]["params"]
    params = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(KeyError, match="not a trainable parameter"):
        optimizer.get_full_param(nn.Parameter(torch.zeros(1)))
    for p, master in zip(params, masters, strict=True):
        assert torch.equal(optimizer.get_full_param(p), master)
        if plain.state.get(master) and p.numel():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(optimizer.get_full_state(p, name), plain.state[master][name]), name
            with pytest.raises(KeyError, match="exp_avg_sq"):
                optimizer.get_full_state(p, "momentum_buffer")
    weight = model.first.weight
    value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    optimizer.set_full_param(weight, value)
    assert torch.equal(optimizer.get_full_param(weight), value) and torch.equal(weight, value.to(dtype))
    optimizer.set_full_state(weight, "exp_avg", value)
    optimizer.set_full_state(weight, "step", 7)
    assert torch.equal(optimizer.get_full_state(weight, "exp_avg"), value)
    assert float(optimizer.get_full_state(weight, "step")) == 7
    with pytest.raises(ValueError, match="shape"):
        optimizer.set_full_param(weight, value.flatten())
    # gradients: averages, set anew, taken by the step
    mean = averaged(gradients(model, loss_of(model, rank, 9)), params)
    loss_of(model, rank, 9).backward()
    for p, grad in zip(params, mean, strict=True):
        found = optimizer.get_full_grad(p)
        assert (found is None and grad is None) or torch.equal(found, grad.float())
    new = torch.full(weight.shape, 0.25)
    optimizer.set_full_grad(weight, new)
    assert torch.equal(optimizer.get_full_grad(weight), new)
    others = [g.float() for p, g in zip(params, mean, strict=True) if g is not None and p is not weight]
    square = sum(float(g.double().square().sum()) for g in others) + 0.25**2 * weight.numel()
    assert float(optimizer.clip_grad_norm_(1e9)) == pytest.approx(square**0.5, rel=1e-6)
    optimizer.step()
    with pytest.raises(ValueError, match="no accelerator"):
        optimizer.offload_states()


@on_ranks(2)
def test_by_name(rank: int, world_size: int) -> None:
    model = Net()
    optimizer = ZeroOptimizer(model.named_parameters(), Lamb, lr=1e-2)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    assert torch.equal(optimizer.get_full_param("norm.weight"), model.norm.weight)
    assert optimizer.get_full_state("norm.weight", "exp_avg").shape == (19,)
    assert 0 < float(optimizer.get_full_state("norm.weight", "trust_ratio")) <= 10
    with pytest.raises(KeyError, match="legal are empty, never"):
        optimizer.get_full_grad("norm.wait")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_reports_are_what_was_estimated(rank: int, world_size: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to(dtype)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, reduce_bucket_size=4096, clip_grad=1.0)
    for _ in range(2):
        with optimizer.no_sync():
            model(torch.ones(1, 64, dtype=dtype)).sum().backward()
    held = memory_report(optimizer)
    assert held.whole_gradients == held.parameters and held.buckets == held.gradient_shards == 0
    model(torch.ones(1, 64, dtype=dtype)).sum().backward()
    sent, estimate = memory_report(optimizer), estimate_zero_memory(model, world_size, 2)
    assert sent.whole_gradients == sent.buckets == 0
    assert sent.gradient_shards == pytest.approx(estimate.gradients, rel=0.05)
    optimizer.step()
    release_memory()
    found = memory_report(optimizer)
    assert found.gradient_shards == 0 and found.parameters == estimate.parameters and found.resident > 10**7
    assert found.states + found.masters == pytest.approx(estimate.states, rel=0.05)


def test_estimates_are_the_formulas() -> None:
    psi = 10**9
    for world_size in (1, 2, 8):
        for stage, fixed, shared in ((0, 16, 0), (1, 8, 8), (2, 4, 12)):
            found = estimate_zero_memory(psi, world_size, stage, bucket_cap_mb=0)
            assert found.total == psi * fixed + psi * shared // world_size
        for stage, fixed, shared in ((0, 8, 0), (1, 4, 12), (2, 2, 14)):  # without ZeRO as torch's AdamW
            found = estimate_zero_memory(psi, world_size, stage, dtype=torch.bfloat16, bucket_cap_mb=0)
            assert found.total == psi * fixed + psi * shared // world_size
    assert estimate_zero_memory(psi, 2, 2, bucket_cap_mb=25).buckets == 50 * 2**20
    assert estimate_zero_memory(psi, 2, 0).buckets == 50 * 2**20  # DistributedDataParallel's
    on_gpus = ZeroConfig().on(torch.device("cuda"))
    assert estimate_zero_memory(psi, 2, 2).buckets == 2 * 4 * on_gpus.reduce_numel
    model = nn.Linear(10, 10)
    model.bias.requires_grad_(False)
    assert estimate_zero_memory(model, 1, 1) == estimate_zero_memory(100, 1, 1).__class__(440, 400, 800, 0)
    assert estimate_zero_memory(psi, 4, 2, offload_optimizer=True).host == psi * 12 // 4
    for model, world_size, stage in ((10, 2, 3), (10, 0, 1), ("x", 1, 1)):
        with pytest.raises(ValueError, match="must be"):
            estimate_zero_memory(model, world_size, stage)  # type: ignore[arg-type]


def test_options_as_one_object() -> None:
    params = [nn.Parameter(torch.ones(3))]
    config = ZeroConfig(stage=1, bucket_cap_mb=1.0, master_dtype="bf16")
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, config, lr=0.25)
    assert optimizer.config is config and optimizer.stage == 1 and optimizer.param_groups[0]["lr"] == 0.25
    assert ZeroOptimizer(params, torch.optim.AdamW, stage=1, bucket_cap_mb=1.0, master_dtype="bf16").config == config
    with pytest.raises(ValueError, match=r"\['stage'\] must be part of config=ZeroConfig"):
        ZeroOptimizer(params, torch.optim.AdamW, config, stage=2)
    with pytest.raises(TypeError, match="config must be a ZeroConfig"):
        ZeroOptimizer(params, torch.optim.AdamW, 2)  # type: ignore[arg-type]


@on_ranks(2)
def test_low_precision_on_the_wire_and_in_memory(rank: int, world_size: int) -> None:
    reference, _ = train_zero(rank, Case())
    found: dict[str, tuple[list[Tensor], Any]] = {}
    for name, dtype, options in (
        ("sent in bf16", torch.float32, {"communication_data_type": "bf16"}),
        ("kept in bf16", torch.float32, {"gradient_accumulation_dtype": torch.bfloat16}),
        ("states in bf16", torch.float32, {"state_dtype": "bf16"}),
        ("no masters", torch.bfloat16, {"master_dtype": "bf16"}),
        ("kept in fp32", torch.bfloat16, {"gradient_accumulation_dtype": "fp32"}),
    ):
        model, optimizer = train_zero(rank, Case(dtype=dtype, options=options))
        found[name] = (bits(model), memory_report(optimizer))
        assert list(different(bits(reference), [b.float() for b in bits(model)])), f"{name} had no effect"
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q.float(), rtol=0.05, atol=0.05)
    whole = memory_report(train_zero(rank, Case())[1])
    assert found["states in bf16"][1].states == pytest.approx(whole.states / 2, rel=0.05)
    assert found["no masters"][1].masters == whole.masters / 2  # those of a parameter that is not contiguous
    assert found["no masters"][1].states == pytest.approx(whole.states / 2, rel=0.2)
    sent = {}
    for dtype in (None, "bf16"):
        _, optimizer = train_zero(rank, Case(options={"communication_data_type": dtype}))
        sent[dtype] = optimizer.traffic.bytes["all_to_all"]
    assert sent["bf16"] * 2 == sent[None]
