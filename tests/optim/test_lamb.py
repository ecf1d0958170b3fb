"""Lamb, and the warmup stage of OnebitLamb: their coefficients; one process without a group."""

import pytest
import torch

from hf_compressopt import Lamb, OnebitLamb

KINDS = pytest.mark.parametrize("kind", [Lamb, OnebitLamb])


@KINDS
def test_coefficients_are_clamped_and_copied(kind):
    """They have an entry for each trainable tensor, one without elements included."""
    values = (torch.full((4,), 3.0), torch.full((4,), 5.0), torch.full((4,), 0.2), torch.zeros(0), torch.ones(8))
    params = [torch.nn.Parameter(value) for value in values]
    params[1].requires_grad_(False)
    optimizer = kind(params, lr=0.0, max_coeff=1.2, min_coeff=0.9)
    for p in params:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    coeffs = optimizer.get_lamb_coeffs()
    assert coeffs == pytest.approx([1.2, 0.9, 1.0, 1.0]) and all(isinstance(value, float) for value in coeffs)
    coeffs[0] = 5.0
    assert optimizer.get_lamb_coeffs()[0] == pytest.approx(1.2)


@KINDS
def test_coefficient_is_one_where_a_norm_is_zero(kind):
    zero, idle = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.ones(8))
    frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    optimizer = kind([zero, frozen, idle], lr=0.1)
    zero.grad, idle.grad = torch.ones(8), torch.zeros(8)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]
    torch.testing.assert_close(zero.detach(), torch.full((8,), -0.1))
    assert torch.equal(idle.detach(), torch.ones(8)) and torch.equal(frozen.detach(), torch.ones(8))


@KINDS
def test_coefficients_keep_the_order_of_the_parameters(kind):
    """The first tensor has its first gradient later than the second."""
    p, q = torch.nn.Parameter(torch.full((4,), 3.0)), torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = kind([p, q], lr=0.0)
    for grad in (None, torch.ones(4)):
        p.grad, q.grad = grad, torch.ones(4)
        optimizer.step()
    assert optimizer.get_lamb_coeffs() == pytest.approx([3.0, 2.0])
