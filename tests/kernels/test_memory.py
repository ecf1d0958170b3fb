"""Tensors whose memory does not hold their values: resolved wherever a kernel reads them, or refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_compressopt import FusedAdam, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, ZeroOptimizer, kernels
from hf_compressopt.kernels import library
from hf_compressopt.kernels.adam import AdamPlan, AdamStep, AdamTensors, adam_
from hf_compressopt.kernels.memory import in_memory
from tests.support.harness import on_ranks

CPU = torch.device("cpu")


def negated(tensor: Tensor) -> Tensor:
    """The same values, stored as their negatives."""
    return (-tensor)._neg_view()


# -- what lies in memory, and what does not ---------------------------------------------------------------------------


def test_values_in_memory_are_not_copied_and_others_are() -> None:
    plain = torch.rand(4, 5)
    assert in_memory("it", plain).data_ptr() == plain.data_ptr()
    kinds = {
        "negated": negated(plain),
        "strided": plain.t().contiguous().t(),
        "expanded": plain[:1].expand(4, 5),
        "conjugated": torch.complex(plain, plain).conj(),
        "imaginary part of a conjugate": torch.complex(plain, plain).conj().imag,
        "lazy zeros": torch._efficientzerotensor((4, 5)),
        "copy on write": torch._lazy_clone(plain),
    }
    for kind, tensor in kinds.items():
        got = in_memory("it", tensor)
        assert got.is_contiguous() and not got.is_neg() and not got.is_conj() and got.data_ptr() != 0, kind
        assert torch.equal(got, tensor), kind


def no_dense_memory() -> Iterator[tuple[str, Tensor]]:
    yield "torch.sparse_coo", torch.ones(4).to_sparse()
    yield "torch._mkldnn", torch.ones(4).to_mkldnn()
    yield "nested", torch.nested.nested_tensor([torch.ones(3), torch.ones(1)])
    yield "quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    yield "a Tensor without memory", torch._to_functional_tensor(torch.ones(4))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_values_that_lie_nowhere_are_refused() -> None:
    for problem, tensor in no_dense_memory():
        with pytest.raises(TypeError, match=f"^it must hold its values in dense memory, got .*{problem}"):
            in_memory("it", tensor)
    refused: list[str] = []

    def inside(x: Tensor) -> Tensor:
        with pytest.raises(TypeError, match="without memory of its own: give a plain dense tensor"):
            in_memory("it", x)
        refused.append("it")
        return x

    torch.func.vmap(inside)(torch.ones(3, 4))
    torch.func.grad(lambda x: inside(x).sum())(torch.ones(4))
    assert len(refused) == 2


def test_norms_and_copies_read_values() -> None:
    values = torch.rand(1 << 17) + 1
    out, expected = torch.empty_like(values), kernels.sum_of_squares([values], CPU)
    for same in (negated(values), values.flip(0).flip(0)[:], values.view(2, -1).t().contiguous().t().reshape(-1)):
        assert torch.equal(kernels.sum_of_squares([same], CPU), expected)
        kernels.copy_(out.zero_(), same)
        assert torch.equal(out, values)
    target = negated(torch.zeros_like(values))
    kernels.copy_(target, values)
    assert torch.equal(target, values)
    zeros = torch._efficientzerotensor(1 << 17)
    assert float(kernels.sum_of_squares([zeros, torch.ones(3)], CPU)) == 3


# -- Adam's plans -----------------------------------------------------------------------------------------------------


def adam_tensors(grad: Tensor) -> AdamTensors:
    numel = grad.numel()
    moments = [torch.zeros(numel)], [torch.zeros(numel)]
    return AdamTensors([grad], [torch.linspace(-1, 1, numel)], *moments, [torch.tensor(0.0)])


STEP = AdamStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def test_a_plan_is_kept_while_gradients_become_lazily_negated() -> None:
    grads = [torch.rand(50) for _ in range(4)]
    plain, turned = adam_tensors(grads[0]), adam_tensors(grads[0])
    plans: list[list[AdamPlan]] = [[], []]
    for k, grad in enumerate(grads):
        for tensors, given, seen in ((plain, grad, plans[0]), (turned, negated(grad) if k % 2 else grad, plans[1])):
            tensors.grads = [given]
            seen.append(adam_(tensors, STEP, seen[-1] if seen else None))
    assert torch.equal(plain.params[0], turned.params[0])
    assert all(plan is plans[1][0] for plan in plans[1]) or not library.available(CPU)


def test_scaled_gradients_are_written_back_to_lazily_negated_ones() -> None:
    four = torch.tensor(4.0)
    for grad, scale in ((negated(torch.full((8,), 2.0)), four), (torch.full((8,), 2.0), negated(four))):
        tensors = adam_tensors(grad)
        adam_(tensors, replace(STEP, grad_scale=scale, write_grads=True))
        assert torch.equal(grad, torch.full((8,), 0.5))
        torch.testing.assert_close(tensors.exp_avgs[0], torch.full((8,), 0.05))


class Copies(TorchDispatchMode):
    """Collects whether the host waits for each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.non_blocking.append(kwargs.get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_the_scalars_that_it_reads_itself() -> None:
    scalar = torch.tensor(0.5, dtype=torch.float64)
    step = replace(STEP, grad_scale=scalar, found_inf=scalar, clip_factor=scalar)
    for device, expected in ((CPU, [False] * 3), (torch.device("meta"), [True] * 3)):
        with Copies() as copies:
            step.on(device)
        assert copies.non_blocking == expected


@pytest.mark.parametrize("first", [True, False], ids=["planned with", "given later"])
def test_lazy_zeros_are_gradients_of_zero(first: bool) -> None:
    tensors, expected = adam_tensors(torch.ones(8)), adam_tensors(torch.ones(8))
    plan = None if first else adam_(tensors, STEP)
    if not first:
        adam_(expected, STEP)
    tensors.grads, expected.grads = [torch._efficientzerotensor(8)], [torch.zeros(8)]
    adam_(tensors, STEP, plan)
    adam_(expected, STEP)
    assert torch.equal(tensors.params[0], expected.params[0])


def test_a_gradient_without_memory_is_refused_and_nothing_changes() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(4)
    optimizer.step()
    before = param.detach().clone()
    param.grad = torch._to_functional_tensor(torch.ones(4))
    for _ in range(2):
        with pytest.raises(TypeError, match="gradient.* must hold its values in dense memory"):
            optimizer.step()
    assert torch.equal(param, before) and float(optimizer.state[param]["step"]) == 1


# -- the optimizers ---------------------------------------------------------------------------------------------------


def train_complex(rank: int, kind: type[Any], options: dict[str, Any], plain: bool) -> list[Tensor]:
    """Steps of a network with complex arithmetic, in which autograd makes lazily negated gradients."""
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.rand(())) for _ in range(2))
    c = nn.Parameter(torch.complex(torch.rand(24), torch.rand(24)).conj().imag)
    assert c.is_neg()
    if plain:
        c = nn.Parameter(c.detach().resolve_neg())
    w = torch.complex(torch.rand(()), torch.rand(()))
    optimizer = kind([a, b, c], lr=0.01, **options)
    for step in range(8):
        z = torch.complex(a, b)
        own = 1 + rank * (step >= 4)  # alike in the warmup stage, which wants averages
        ((z.conj() * own * w - 1).abs().square().sum() + (c**4).sum()).backward()
        if kind is not ZeroOptimizer:  # which takes the gradients away
            assert b.grad.is_neg()
            c.grad = negated(c.grad)
            for p in (b, c) if plain else ():
                p.grad = p.grad.resolve_neg()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().resolve_neg().clone() for p in (a, b, c)]


OPTIMIZERS = [
    (FusedAdam, {}),
    (FusedAdam, {"max_grad_norm": 1.0}),
    (Lamb, {}),
    (OnebitAdam, {"freeze_step": 2, "scale_block": 8}),
    (OnebitAdam, {"freeze_step": 2, "max_grad_norm": 1.0, "bias_correction": False}),
    (OnebitLamb, {"freeze_step": 2, "scale_block": 8}),
    (ZeroOneAdam, {"var_freeze_step": 3, "scale_block": 8}),
    (ZeroOptimizer, {"optimizer_class": FusedAdam}),
]


@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_lazily_negated_gradients_and_parameters_train_as_plain_ones(
    rank: int, world_size: int, kind: type[Any], options: dict[str, Any]
) -> None:
    expected, got = (train_complex(rank, kind, options, plain) for plain in (True, False))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_gradients_that_cannot_be_written_in_place_are_clipped() -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(4)]
    lazy = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))]
    optimizer = OnebitAdam([*params, *lazy], freeze_step=9)
    kinds = [negated(torch.ones(4)), torch.ones(1).expand(4), torch._efficientzerotensor(4), torch.ones(8)[::2]]
    for param, grad in zip(params, kinds, strict=True):
        param.grad = grad
    for param in lazy:
        param.grad = torch._efficientzerotensor(param.shape)
    norm = optimizer.clip_grad_norm_(1.0)
    assert float(norm) == pytest.approx(12**0.5)
    for param in (params[0], params[1], params[3]):
        torch.testing.assert_close(param.grad, torch.full((4,), 12**-0.5))
    optimizer.step()
    assert torch.equal(params[2], torch.ones(4)) and torch.equal(params[0], params[1])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [FusedAdam, OnebitAdam, OnebitLamb, ZeroOneAdam, ZeroOptimizer])
def test_parameters_that_cannot_be_updated_are_refused(kind: type[Any]) -> None:
    options = {"optimizer_class": torch.optim.AdamW} if kind is ZeroOptimizer else {}
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]).requires_grad_()
    with pytest.raises(TypeError, match="parameters must be dense, got a nested tensor in param group 0"):
        kind([nested], **options)
    expanded = torch.ones(1).expand(8).requires_grad_()
    with pytest.raises(ValueError, match=r"must not share memory, got shape \(8,\) with strides \(0,\).* \.clone\(\)"):
        kind([nn.Parameter(expanded)], **options)
    frozen = nn.Parameter(torch.ones(1).expand(8), requires_grad=False)
    empty = nn.Parameter(torch.empty_strided((0, 3), (0, 0)))
    kind([frozen, empty, nn.Parameter(torch.ones(2))], **options)
