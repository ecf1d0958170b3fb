"""FusedAdam: torch's numbers, whichever kernels run, and what every user of torch optimizers expects of one."""

import copy
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import FusedAdam
from hf_compressopt.kernels import adam, library
from tests.optim import test_optimizer_contract as contract
from tests.support.family import through_a_file

SHAPES = [(7,), (3, 5), (2, 3, 4), (), (1,), (1027,), (0,), (0, 4)]
STEPS = 10
MOMENTS = ("exp_avg", "exp_avg_sq")
LOW = (torch.bfloat16, torch.float16)

MODES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {}),
    "l2": (torch.optim.Adam, {"weight_decay": 0.1}),
    "maximize": (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
    "other_numbers": (torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.5, 0.9), "eps": 1e-3}),
    "no_momentum": (torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.0, 0.5)}),
}


@pytest.fixture(params=["reference", "torch", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test that takes it runs with each implementation."""
    choice: str = request.param
    if choice == "torch":  # what a machine without native libraries does
        monkeypatch.delenv("HF_COMPRESSOPT_KERNELS", raising=False)
        monkeypatch.setattr(library, "available", lambda device: False)
    else:
        monkeypatch.setenv("HF_COMPRESSOPT_KERNELS", choice)
    if choice == "native":
        request.getfixturevalue("native_kernels")
    return choice


@pytest.fixture
def native_kernels() -> None:
    if reason := library.why_not(torch.device("cpu")):
        pytest.skip(reason)


def parameters(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def twins(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype)) for p in params]


def draw(t: int, *lists: list[nn.Parameter], scale: float = 1.0, missing: Any = ()) -> None:
    """The same gradients for each list of parameters, rounded to the first one's dtypes."""
    generator = torch.Generator().manual_seed(1000 + t)
    for index, row in enumerate(zip(*lists, strict=True)):
        grad = (torch.randn(row[0].shape, generator=generator) * scale).to(row[0].dtype)
        for p in row:
            p.grad = None if index in missing else grad.clone().to(p.dtype)


def run(
    *runs: tuple[Any, torch.optim.Optimizer],
    steps: Iterable[int] = range(STEPS),
    missing: Callable[[int], Any] = lambda t: (),
) -> None:
    """Take steps of optimizers, each with its parameters, with the same gradients."""
    for t in steps:
        draw(t, *(params for params, _ in runs), missing=missing(t))
        for _, optimizer in runs:
            optimizer.step()


def ours(params: Any, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> FusedAdam:
    return FusedAdam(params, adam_w_mode=cls is torch.optim.AdamW, **options)


def assert_close(one: Any, other: Any, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach().double(), rtol=rtol, atol=atol)


def assert_same(one: Any, other: Any) -> None:
    for p, q in zip(one, other, strict=True):
        assert p.dtype == q.dtype and torch.equal(p, q)


def snapshot(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for p in params for value in optimizer.state[p].values()]
    return [tensor.detach().clone() for tensor in [*params, *states]]


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(14)
@pytest.mark.parametrize("mode", MODES)
def test_equals_torch_in_float64(mode: str, kernels: str) -> None:
    """In three groups, whose parameters get their first gradients late, and some of the time."""
    cls, options = MODES[mode]
    params = parameters()
    exact, double = twins(params, torch.float64), twins(params, torch.float64)
    groups = [
        [{"params": row[:2]}, {"params": row[2:4], "lr": 0.03}, {"params": row[4:]}] for row in (params, exact, double)
    ]
    reference = cls(groups[1], lr=0.01, foreach=False, **options)
    optimizers = [ours(row, cls, lr=0.01, **options) for row in groups[::2]]
    late = [{0, 3}, {3}, (), (), {1}, {2, 3}, (), {4}, (), ()]
    run((params, optimizers[0]), (exact, reference), (double, optimizers[1]), missing=lambda t: late[t])
    assert [*map(id, optimizers[0].state)] != [*map(id, params)]
    assert_close(params, exact)
    assert_close(double, exact, rtol=1e-12, atol=1e-13)
    for p, q in zip(params, exact, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert_close([optimizers[0].state[p][name]], [reference.state[q][name]])


@pytest.mark.invariant(15)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_equals_torch_fused(mode: str, dtype: torch.dtype, kernels: str) -> None:
    """With the parameter's dtype for moments, as torch has it; and with float32 moments nearer to float64."""
    cls, options = MODES[mode]
    params = parameters(dtype=dtype)
    as_torch, theirs, exact = twins(params), twins(params), twins(params, torch.float64)
    optimizers = [
        ours(params, cls, lr=0.01, **options),
        ours(as_torch, cls, lr=0.01, fp32_moments=False, **options),
        cls(theirs, lr=0.01, fused=True, **options),
        cls(exact, lr=0.01, **options),
    ]
    run(*zip((params, as_torch, theirs, exact), optimizers, strict=True))
    assert_close(as_torch, theirs, rtol=5e-3, atol=5e-3)
    assert_close(params, exact, rtol=STEPS * torch.finfo(dtype).eps, atol=5e-3)
    for p, q, r in zip(params, as_torch, exact, strict=True):
        first = optimizers[0].state[p]
        assert first["exp_avg"].dtype == torch.float32 and optimizers[1].state[q]["exp_avg_sq"].dtype == dtype
        assert_close([first["exp_avg"]], [optimizers[3].state[r]["exp_avg"]], rtol=0.05, atol=0.02)


def test_without_bias_correction(kernels: str) -> None:
    params, lr, (beta1, beta2), eps, decay = parameters(), 0.01, (0.9, 0.99), 1e-6, 0.1
    optimizer = FusedAdam(params, lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, bias_correction=False)
    exact = [p.detach().double() for p in params]
    m, v = [torch.zeros_like(p) for p in exact], [torch.zeros_like(p) for p in exact]
    for t in range(STEPS):
        draw(t, params)
        for i, p in enumerate(params):
            g = p.grad.double()
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            exact[i] = exact[i] * (1 - lr * decay) - lr * m[i] / (v[i].sqrt() + eps)
        optimizer.step()
    assert_close(params, exact)


@pytest.mark.invariant(17)
def test_mixed_dtypes_and_intermittent_gradients(kernels: str) -> None:
    """One group of four dtypes does what four optimizers do; every parameter counts its own steps."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64] * 2
    params = [p for i, dtype in enumerate(dtypes) for p in parameters([SHAPES[i]], dtype, seed=i)]
    alone = twins(params)
    together = FusedAdam(params, lr=0.01, weight_decay=0.1)
    apart = [FusedAdam([p], lr=0.01, weight_decay=0.1) for p in alone]
    for t in range(STEPS):
        draw(t, params, alone, missing={t % 8, (3 * t) % 8} if t % 2 else ())
        for optimizer in (together, *apart):
            optimizer.step()
    assert_same(params, alone)
    counts = [float(together.state[p]["step"]) for p in params]
    assert counts == [sum(not (t % 2 and i in (t % 8, 3 * t % 8)) for t in range(STEPS)) for i in range(8)]


@pytest.mark.invariant(12)
def test_no_gradient_changes_nothing(kernels: str) -> None:
    params = parameters()
    params[0].requires_grad_(False)
    before = [p.detach().clone() for p in params]
    optimizer = FusedAdam(params, lr=0.01, weight_decay=0.1)
    optimizer.step()
    assert_same(params, before)
    assert not optimizer.state
    run((params[2:], optimizer), steps=[0])
    assert_same(params[:2], before[:2])


def test_memory_layout_does_not_matter(kernels: str) -> None:
    contract.test_memory_layout_does_not_matter(FusedAdam)


@pytest.mark.parametrize("beside", ["no elements", "lazy zeros"])
def test_strides_are_kept_beside_gradients_without_memory(beside: str, kernels: str) -> None:
    """Elements meet their own gradients in every layout, also in a plan that is used again."""
    shapes = [(6, 4), (2, 3, 4, 4), (0, 4), (2, 3, 4, 4), (5, 3, 2)]

    def laid_out() -> list[nn.Parameter]:
        matrix, image, empty, lazy, turned = (p.detach() for p in parameters(shapes))
        image, lazy = (t.contiguous(memory_format=torch.channels_last) for t in (image, lazy))
        rows = [matrix.t().contiguous().t(), image, lazy, turned.permute(2, 0, 1)]
        return [nn.Parameter(t) for t in ([empty, *rows] if beside == "no elements" else rows)]

    params, others = laid_out(), [nn.Parameter(p.detach().contiguous()) for p in laid_out()]
    optimizers = [FusedAdam(row, lr=0.01, weight_decay=0.1) for row in (params, others)]
    for t in range(3):
        draw(t, params, others)
        for p in params:
            p.grad = torch.empty_like(p).copy_(p.grad)
        if beside == "lazy zeros" and t == 1:
            params[2].grad = torch._efficientzerotensor(2, 4, 4, 3).permute(0, 3, 1, 2)
            others[2].grad = torch.zeros(2, 3, 4, 4)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(params, others)


@pytest.mark.invariant(11)
@contract.LRS
def test_tensor_lr(lr: torch.Tensor, kernels: str) -> None:
    contract.test_tensor_lr(lr, FusedAdam, {})


def _resize(row: Any, owner: Any) -> None:
    row[0].data, row[0].grad = row[0].data[:3], None
    for name in MOMENTS:
        owner.state[row[0]][name] = owner.state[row[0]][name][:3]


def _swap(row: Any, owner: Any) -> None:  # the same states and keys, of other parameters
    owner.state[row[1]], owner.state[row[3]] = owner.state[row[3]], owner.state[row[1]]


def _transpose(row: Any, owner: Any) -> None:
    state = owner.state.pop(row[2])
    row[2] = owner.param_groups[0]["params"][2] = nn.Parameter(row[2].detach().t())
    owner.state[row[2]] = state


def _add_group(row: Any, owner: Any) -> None:
    row.append(nn.Parameter(torch.ones(5, dtype=row[0].dtype)))
    owner.add_param_group({"params": row[-1:], "lr": 0.02})


def _replace(row: Any, owner: Any) -> None:
    row[2] = owner.param_groups[0]["params"][2] = nn.Parameter(torch.ones(2, 2, dtype=row[2].dtype))


#: What happens to parameters, and to the state of their optimizer, before the fourth of six steps.
CHANGES: dict[str, Any] = {
    "gradient": lambda row, owner: None,
    "data": lambda row, owner: setattr(row[0], "data", row[0].data * 2),
    "smaller": _resize,
    "swapped": _swap,
    "emptied": lambda row, owner: owner.state.update({row[1]: {}}),
    "order": lambda row, owner: owner.state.update({row[1]: owner.state.pop(row[1])}),
    # the states in their order, the last one of no parameter any more
    "key": lambda row, owner: owner.state.update({nn.Parameter(torch.ones(5)): owner.state.pop(row[3])}),
    "dtype": lambda row, owner: setattr(row[1], "data", row[1].data.double()),
    "parameter": _replace,
    "group": _add_group,
    "step": lambda row, owner: owner.state[row[1]].update({"step": torch.full((), 100.0)}),
    "transposed": _transpose,
    "data transposed": lambda row, owner: setattr(row[2], "data", row[2].data.t()),  # at the same address
}
for _name in MOMENTS:
    CHANGES |= {
        f"{_name} replaced": lambda row, owner, n=_name: owner.state[row[2]].update({n: torch.ones_like(row[2])}),
        f"{_name} moved": lambda row, owner, n=_name: setattr(owner.state[row[2]][n], "data", torch.ones_like(row[2])),
        # at the same address
        f"{_name} transposed": lambda row, owner, n=_name: owner.state[row[2]].update({n: owner.state[row[2]][n].t()}),
    }


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_remembered_that_has_changed(change: str, kernels: str) -> None:
    """Caches from step to step notice new tensors, of the same shape or another, wherever they come from."""
    shapes = [(6, 4), (5,), (3, 3), (5,)]
    params, exact = parameters(shapes), parameters(shapes, torch.float64)
    optimizer, reference = FusedAdam(params, lr=0.01), torch.optim.AdamW(exact, lr=0.01, weight_decay=0.0)
    for t in range(6):
        for row, owner in ((params, optimizer), (exact, reference)) if t == 3 else ():
            CHANGES[change](row, owner)
        for row in (params, exact):
            for p in row:
                p.grad = None
        draw(t, params, exact)
        if change == "gradient":
            params[0].grad = params[0].grad.t().contiguous().t() if t % 2 else params[0].grad
        optimizer.step()
        reference.step()
    assert_close(params, exact)


#: What happens to copies and masters before the third step.
COPY_CHANGES: dict[str, Any] = {
    "dropped": lambda row, owner: owner.copies.pop(row[0]),
    "all dropped": lambda row, owner: setattr(owner, "copies", {}),
    "replaced": lambda row, owner: owner.copies.update({row[0]: torch.zeros(5)}),
    "moved": lambda row, owner: setattr(owner.copies[row[0]], "data", torch.zeros(5, dtype=torch.float16)),
    "another dtype": lambda row, owner: owner.copies.update({row[0]: owner.copies[row[0]].view(torch.bfloat16)}),
    "added": lambda row, owner: owner.copies.update({row[2]: torch.zeros(3)}),
    "master": lambda row, owner: owner.state[row[0]].update(master_param=torch.zeros(5)),
    "master moved": lambda row, owner: setattr(owner.state[row[0]]["master_param"], "data", torch.zeros(5)),
}


@pytest.mark.parametrize("change", COPY_CHANGES)
def test_masters_and_copies_that_have_changed(change: str, kernels: str) -> None:
    """A tensor that is no longer a copy or a master is left alone; a new one is written."""
    params = parameters([(5,), (7,), (3,)], torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.01, master_weights=True)
    copies = optimizer.copies
    copies.update({p: torch.zeros_like(p, dtype=torch.float32) for p in params[1:2]})
    copies[params[0]] = torch.zeros(5, dtype=torch.float16)
    run((params, optimizer), steps=range(2))
    kept = [copies[params[0]].detach(), optimizer.state[params[0]]["master_param"].detach()]
    COPY_CHANGES[change](params, optimizer)
    before = [tensor.clone() for tensor in kept]
    run((params, optimizer), steps=[2])
    assert torch.equal(kept[0], before[0]) == (change in ("dropped", "all dropped", "replaced", "moved"))
    assert torch.equal(kept[1], before[1]) == change.startswith("master")
    for p in params:
        master = optimizer.state[p]["master_param"]
        low = optimizer.copies.get(p, master)
        assert torch.equal(p, master.to(p.dtype)) and torch.equal(low, master.to(low.dtype))
    assert not change.startswith("master") or params[0].abs().max() < 0.02


def test_parameters_of_another_dtype_at_the_same_address(kernels: str) -> None:
    params = parameters([(5,), (3, 4)], torch.float16)
    optimizer = FusedAdam(params, lr=0.01)
    run((params, optimizer), steps=range(2))
    for p in params:
        p.grad, p.data = None, p.data.view(torch.bfloat16)
    others = twins(params)
    other = FusedAdam(others)
    other.load_state_dict(optimizer.state_dict())
    run((params, optimizer), (others, other), steps=[2])
    assert_same(params, others)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_state_of_another_shape_is_refused(name: str, kernels: str) -> None:
    params = parameters([(6, 4)])
    optimizer = FusedAdam(params, lr=0.01)
    run((params, optimizer), steps=range(2))
    optimizer.state[params[0]][name] = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=rf"{name} .* \(6, 4\) .* got \(3, 4\)"):
        optimizer.step()
    optimizer = FusedAdam(params, lr=0.01)
    optimizer.step()
    params[0].data = params[0].data[:2]
    params[0].grad = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"exp_avg .* \(2, 4\) .* got \(6, 4\)"):
        optimizer.step()


def test_versions_count_up(kernels: str) -> None:
    """Autograd notices that a parameter which it has saved was changed."""
    params = parameters([(4,)])
    optimizer = FusedAdam(params, lr=0.01)
    draw(0, params)
    loss = (params[0] * params[0].detach().exp()).sum() + params[0].exp().mul(params[0]).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- scaling, clipping, masters, copies -------------------------------------------------------------------------------


@pytest.mark.invariant(13)
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale: bool, kernels: str) -> None:
    """With an overflow in between: the numbers of AdamW with a scaler of its own, and no change at the skip."""
    params = parameters()
    others = twins(params)
    optimizer, reference = FusedAdam(params, lr=0.01), torch.optim.AdamW(others, lr=0.01, weight_decay=0.0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=96.0, growth_interval=2) for _ in range(2)]
    for t in range(STEPS):
        before = snapshot(params, optimizer)
        for scaler, row, owner in ((scalers[0], params, optimizer), (scalers[1], others, reference)):
            scaler.scale(torch.ones(()))
            draw(t, row, scale=scaler.get_scale())
            if t == 4:
                row[1].grad[2, 2] = math.inf
            if unscale:
                scaler.unscale_(owner)
                nn.utils.clip_grad_norm_(row, 1.0, foreach=False)
            scaler.step(owner)
            scaler.update()
        if t == 4:
            assert_same(snapshot(params, optimizer), before)
        else:
            assert_close([p.grad for p in params], [p.grad for p in others])
        assert optimizer.step_was_skipped == (t == 4)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    assert_close(params, others)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
def test_max_grad_norm(max_grad_norm: float, scaled: bool, kernels: str) -> None:
    params = parameters()
    others = twins(params)
    groups = [{"params": params[:3], "lr": 0.02}, {"params": params[3:]}]
    optimizer = FusedAdam(groups, lr=0.01, weight_decay=0.1, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(
        [{"params": others[:3], "lr": 0.02}, {"params": others[3:]}], lr=0.01, weight_decay=0.1
    )
    for t in range(STEPS):
        draw(t, params, scale=64.0 if scaled else 1.0, missing={1})
        draw(t, others, missing={1})
        if scaled:
            optimizer.grad_scale = torch.tensor(64.0)
        optimizer.step()
        nn.utils.clip_grad_norm_(others, max_grad_norm)
        reference.step()
    assert_close(params, others)
    before = snapshot(params, optimizer)
    optimizer.found_inf = torch.tensor(2.0)  # that of several devices, added
    optimizer.step()
    assert_same(snapshot(params, optimizer), before)


def test_gradients_need_not_be_written(native_kernels: None) -> None:
    params = parameters()
    others = twins(params)
    optimizers = FusedAdam(params, max_grad_norm=0.5), FusedAdam(others, max_grad_norm=0.5, write_grads=False)
    for t in range(3):
        draw(t, params, others, scale=96.0)
        given = [p.grad.clone() for p in others]
        for optimizer in optimizers:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(96.0), torch.zeros(())
            optimizer.step()
        assert_same([p.grad for p in others], given)
        assert_same(snapshot(params, optimizers[0]), snapshot(others, optimizers[1]))
        assert float(nn.utils.get_total_norm([p.grad for p in params])) < 0.51
        optimizers = optimizers[0], copy.deepcopy((others, optimizers[1]))[1]
        others = optimizers[1].param_groups[0]["params"]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_master_weights(dtype: torch.dtype, kernels: str) -> None:
    """Small updates, which the parameters alone would round away, add up."""
    params = parameters(dtype=dtype) + parameters([(3,)], seed=9)
    exact = twins(params, torch.float64)
    optimizer = FusedAdam(params, lr=1e-5, weight_decay=0.1, master_weights=True)
    reference = torch.optim.AdamW(exact, lr=1e-5, weight_decay=0.1)
    run((params, optimizer), (exact, reference))
    masters = [optimizer.state[p]["master_param"] for p in params[:-1]]
    assert {master.dtype for master in masters} == {torch.float32}
    assert "master_param" not in optimizer.state[params[-1]]
    assert_close(masters, exact[:-1])
    assert_same(params[:-1], [master.to(dtype) for master in masters])
    fresh_params = twins(params)
    fresh = FusedAdam(fresh_params, lr=1e-5, weight_decay=0.1, master_weights=True)
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    plain_params = twins(params)
    plain = FusedAdam(plain_params, lr=1e-5, weight_decay=0.1)
    plain.load_state_dict(optimizer.state_dict())
    assert not any("master_param" in plain.state[p] for p in plain_params)
    run((params, optimizer), (fresh_params, fresh), steps=[STEPS])
    assert_same(snapshot(params, optimizer), snapshot(fresh_params, fresh))


def test_copies(kernels: str) -> None:
    params = parameters() + parameters([(5, 2)], torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.01, master_weights=True)
    for p, dtype in zip(params, [torch.bfloat16, torch.float16, torch.float32] * 3, strict=True):
        optimizer.copies[p] = torch.empty_like(p, dtype=dtype)
    del optimizer.copies[params[0]]
    for t in range(3):
        run((params, optimizer), steps=[t])
        for p, low in optimizer.copies.items():
            full = optimizer.state[p].get("master_param", p)
            assert torch.equal(low, full.to(low.dtype))
    assert len(optimizer.state_dict()["state"][0]) == 3
    optimizer.copies[params[1]] = torch.empty(3, 4)
    with pytest.raises(ValueError, match=r"copy .* \(3, 5\) .* got \(3, 4\)"):
        optimizer.step()


# -- an ordinary optimizer --------------------------------------------------------------------------------------------


def test_zero_grad() -> None:
    for default in (True, False):
        params = parameters()
        optimizer = FusedAdam(params, set_grad_none=default)
        for given in (None, True, False):
            draw(0, params)
            optimizer.zero_grad() if given is None else optimizer.zero_grad(set_to_none=given)
            for p in params:
                assert p.grad is None if (default if given is None else given) else not p.grad.any()


@pytest.mark.invariant(20)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_deepcopy_pickle_and_repr(how: Any, kernels: str) -> None:
    params = parameters([(5,), (2, 3)], torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.01, master_weights=True, max_grad_norm=0.5, set_grad_none=False)
    optimizer.copies[params[0]] = torch.zeros(5)
    run((params, optimizer), steps=range(2))
    others, other = how((params, optimizer))
    run((params, optimizer), (others, other), steps=range(2, 4))
    assert_same(snapshot(params, optimizer), snapshot(others, other))
    assert_same([optimizer.copies[params[0]]], [other.copies[others[0]]])
    assert other.copies[others[0]] is not optimizer.copies[params[0]]
    other.zero_grad()
    assert others[0].grad is not None
    assert "FusedAdam" in repr(optimizer) and "adam_w_mode: True" in repr(optimizer)


def test_compiled_step(kernels: str) -> None:
    """torch.compile around a whole training step breaks its graph at the optimizer, and nothing else changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    other = copy.deepcopy(model)
    optimizers = [FusedAdam(m.parameters(), lr=0.01) for m in (model, other)]

    def train(m: nn.Module, optimizer: FusedAdam, x: torch.Tensor) -> None:
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(train, backend="aot_eager")
    for t in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(t))
        compiled(model, optimizers[0], x)
        train(other, optimizers[1], x)
    assert_close(model.parameters(), other.parameters(), rtol=1e-6, atol=1e-7)
    torch._dynamo.reset()


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_refused_group_leaves_no_trace() -> None:
    optimizer = FusedAdam(parameters())
    with pytest.raises(ValueError, match="eps must be >= 0"):
        optimizer.add_param_group({"params": parameters(seed=1), "eps": -1})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradient(kernels: str) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = FusedAdam(table.parameters())
    draw(0, [table.weight])
    optimizer.step()
    table.weight.grad = None
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="gradients must be dense, got torch.sparse_coo"):
        optimizer.step()


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_old_arguments_of_step(name: str) -> None:
    params = parameters()
    draw(0, params)
    before = [p.detach().clone() for p in params]
    with pytest.raises(TypeError, match=rf"step\(\) takes no {name}.*GradScaler"):
        FusedAdam(params).step(**{name: [torch.ones(1)]})
    assert_same(params, before)


# -- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(2)
@pytest.mark.parametrize("mode", ["adamw", "l2", "maximize", "other_numbers"])
@pytest.mark.parametrize("fused", [False, True])
def test_state_crosses_over_both_ways(mode: str, fused: bool, kernels: str) -> None:
    cls, options = MODES[mode]
    params = parameters()
    others = twins(params)
    optimizer, reference = ours(params, cls, lr=0.01, **options), cls(others, lr=0.01, fused=fused, **options)
    run((params, optimizer), (others, reference), steps=range(4))
    states = through_a_file(optimizer.state_dict()), through_a_file(reference.state_dict())
    new_optimizer, new_reference = ours(params, cls, lr=0.5), cls(others, lr=0.5, fused=fused)
    new_optimizer.load_state_dict(states[1])
    new_reference.load_state_dict(states[0])
    run((params, new_optimizer), (others, new_reference), steps=range(4, 8))
    assert_close(params, others)
    group = new_optimizer.param_groups[0]
    assert all(group[name] == value for name, value in {"lr": 0.01, **options}.items())
    assert set(group) == set(optimizer.param_groups[0])
    assert float(new_optimizer.state[params[0]]["step"]) == float(new_reference.state[others[0]]["step"]) == 8


def test_adams_state_dict_tells_its_kind_of_decay() -> None:
    """A recent torch says it in the state dict; an older one does not, and the optimizer's own mode stays."""
    params = parameters()
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        state = cls(params, weight_decay=0.1).state_dict()
        optimizer = FusedAdam(params)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["adam_w_mode"] == (cls is torch.optim.AdamW)
        del state["param_groups"][0]["decoupled_weight_decay"]
        optimizer = FusedAdam(params, adam_w_mode=False, capturable=True)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["adam_w_mode"] is False and optimizer.param_groups[0]["capturable"] is True


def test_nothing_is_kept_alive(kernels: str) -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=0.01, master_weights=True)
    run((params, optimizer), steps=[0])
    kept = [weakref.ref(params[1].grad), *(weakref.ref(optimizer.state[params[1]][name]) for name in MOMENTS)]
    optimizer.zero_grad()
    for name in MOMENTS:
        optimizer.state[params[1]][name] = optimizer.state[params[1]][name].clone()
    assert all(tensor() is None for tensor in kept)


def test_a_parameter_in_a_group_twice_steps_twice(kernels: str) -> None:
    params = parameters()
    others = twins(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of it, and goes on
        optimizer = FusedAdam([*params, params[5]], lr=0.01)
        reference = torch.optim.AdamW([*others, others[5]], lr=0.01, weight_decay=0.0, foreach=False)
    run((params, optimizer), (others, reference), steps=range(3))
    assert_close(params, others)
    assert float(optimizer.state[params[5]]["step"]) == 6


def test_the_plan_of_a_step_is_used_again(kernels: str) -> None:
    """The plan serves as long as the tensors stay, also if gradients are made anew; otherwise a new plan is made."""
    params = parameters(SHAPES[:4])
    optimizer = FusedAdam(params, lr=0.01)
    plans: list[adam.AdamPlan] = []
    for t in range(4):
        run((params, optimizer), steps=[t], missing=lambda t: {1} if t == 3 else ())
        plans.append(optimizer._plans[0])
    assert (plans[0] is plans[1] is plans[2]) == (kernels != "reference") and plans[2] is not plans[3]
