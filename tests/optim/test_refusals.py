"""What optimizers and compressed gradients refuse when they are made: the message names value, range and remedy."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from hf_compressopt import OnebitAdam
from hf_compressopt.optim.gradients import NOISE
from hf_compressopt.optim.overlap import LATE_CLIP
from hf_compressopt.optim.state import check_tensors
from hf_compressopt.schedules import Schedule
from tests.oracles.steps import same, tensors_in
from tests.support.harness import on_ranks

BITS = "warmup_bits must be one of [4, 8, 16, 32]"
CLIP = "clip must be one of ['sketch', 'local'], got 'late', which only OnebitAdam"
FAMILY = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
HERE, ELSEWHERE = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
ADAM: list[tuple[dict[str, Any], str]] = [
    ({"betas": (1.0, 0.999)}, "betas[0]|[0, 1)|1.0"),
    ({"betas": (0.9, -0.1)}, "betas[1]|[0, 1)|-0.1"),
    ({"betas": (0.9, math.nan)}, "betas[1]|[0, 1)|nan"),
    ({"betas": (0.9,)}, "betas|[0, 1)"),
    ({"lr": -1.0}, "lr|>= 0|-1.0"),
    ({"lr": math.nan}, "lr|>= 0|nan"),
    ({"eps": -1e-8}, "eps|>= 0|-1e-08"),
    ({"weight_decay": -0.5}, "weight_decay|>= 0|-0.5"),
    ({"max_grad_norm": -2.0}, "max_grad_norm|>= 0|-2.0"),
    ({"amsgrad": True}, "amsgrad must be False, got True"),
]
#: By class: options, and what the message has, between bars.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "OnebitAdam": [
        *ADAM,
        ({"freeze_step": 0}, "freeze_step|>= 1|0"),
        ({"freeze_step": -3}, "freeze_step|>= 1|-3"),
        ({"freeze_step": "soon"}, "freeze_step must be an int >= 1, or 'auto', got 'soon'"),
        ({"max_freeze_step": 0}, "max_freeze_step must be >= 1, got 0"),
        ({"min_freeze_step": 0}, "min_freeze_step must be >= 1, got 0"),
        ({"freeze_threshold": 1.5}, "freeze_threshold must be in (0, 1], got 1.5"),
        ({"total_steps": 0}, "total_steps must be >= 1, got 0"),
        ({"variance_floor": -0.5}, "variance_floor|>= 0|-0.5"),
        ({"scale_block": 0}, "scale_block|multiple of 8|0"),
        ({"scale_block": 12}, "scale_block|multiple of 8|12"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb|> 0|0"),
        ({"max_update": -1.0}, "max_update|>= 0|-1.0"),
        ({"max_update": math.inf}, "max_update|finite|inf"),
        ({"max_update": "5"}, "TypeError|max_update|number|'5'"),
        ({"variance_interval": -1}, "variance_interval|>= 0|-1"),
        ({"variance_interval": 1.5}, "TypeError|variance_interval|int >= 0|1.5"),
        ({"variance_interval": True}, "TypeError|variance_interval|int >= 0|True"),
        ({"communicator": "no-such-thing"}, "communicator|auto|no-such-thing"),
        ({"state": "float32"}, "TypeError|state is no option any more: OnebitAdam|variance, in 8 bits"),
        *(({"warmup_bits": bits}, BITS) for bits in (2, 0, 4.5, True, "int4")),
        ({"warmup_bits": 16, "communicator": "mpi"}, "warmup_bits=16 is not supported with MPI"),
        ({"zero_stage": 3}, "zero_stage must be one of [0, 1, 2], got 3"),
        ({"zero_stage": 2, "clip": "local"}, "zero_stage=2 needs clip='late'"),
        ({"zero_stage": 1, "warmup_bits": 32}, "warmup_bits to be one of [4, 8], got 32"),
    ],
    "OnebitLamb": [
        ({"freeze_step": 0}, "freeze_step|>= 1|0"),
        ({"state": "compact"}, "TypeError|state is no option any more|OnebitLamb keeps its state in float32"),
        ({"min_coeff": -0.5}, "min_coeff|>= 0|-0.5"),
        ({"max_coeff": 0.1, "min_coeff": 0.2}, "max_coeff|0.1"),
        ({"coeff_beta": 1.0}, "coeff_beta|[0, 1)|1.0"),
        ({"trust_ratio": "fresh"}, "trust_ratio|measured|frozen|'fresh'"),
        ({"factor_max": 3.0}, "factor_max=3.0|trust_ratio='frozen'"),
        ({"trust_ratio": "frozen", "variance_interval": 16}, "trust_ratio='frozen'|variance_interval=0, got 16"),
        ({"factor_min": 5.0}, "factor_m|5.0"),
        ({"factor_threshold": -0.1}, "factor_threshold|>= 0|-0.1"),
        ({"max_update": -1.0}, "max_update|>= 0|-1.0"),
        ({"clip": "late"}, CLIP),
        ({"zero_stage": 1}, "zero_stage=1 is not supported with OnebitLamb"),
    ],
    "ZeroOneAdam": [
        *(
            ({name: value}, f"{name}|>= 1|{value}")
            for name in ("freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
            for value in (0, -3)
        ),
        ({"freeze_step": 3, "var_freeze_step": 3}, "var_freeze_step=3 are two names of one option"),
        ({"clip": "late"}, CLIP),
        ({"zero_stage": 1}, "zero_stage=1 is not supported with ZeroOneAdam"),
    ],
    "Lamb": [
        ({"lr": -1.0}, "lr|-1.0"),
        ({"betas": (1.0, 0.9)}, "betas[0]|1.0"),
        ({"max_coeff": 0.1, "min_coeff": 0.2}, "max_coeff|0.1"),
    ],
    "FusedAdam": [
        *ADAM,
        ({"lr": torch.ones(2)}, "a tensor of one element, got one of 2"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"adam_w_mode": 1}, "TypeError|adam_w_mode must be True or False, got 1"),
        ({"params": [nn.Parameter(torch.zeros(2).to_sparse())]}, "TypeError|must be dense, got torch.sparse_coo"),
        ({"params": [torch.zeros(2, dtype=torch.complex64)]}, "TypeError|complex64 in param group 0"),
    ],
    "GradientCompression": [
        ({"state": "int8"}, "TypeError|unexpected keyword argument 'state'"),
        ({"compression": "int2"}, "compression must be one of"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb must be > 0"),
        ({"params": [nn.Parameter(torch.zeros(3).double())]}, "TypeError|must be float32, bfloat16 or float16"),
        ({"params": "int4"}, "TypeError|come first, got 'int4'"),
        ({"params": nn.Linear(2, 2)}, "TypeError|come first, got Linear"),
        ({"params": ["weight"]}, "TypeError|come first, got ['weight'"),
        ({"params": torch.zeros(3)}, "TypeError|come first, got tensor"),
    ],
}
for name in FAMILY:
    choices = "['sketch', 'local', 'late']" if name == "OnebitAdam" else "['sketch', 'local']"
    REFUSED[name] += [
        ({"clip": "mean"}, f"clip must be one of {choices}, got 'mean'"),
        ({"zero_stage": True}, "TypeError|zero_stage must be an int"),
        ({"topology": "ring"}, "topology|hierarchical|'ring'"),
        ({"node_size": 0}, "node_size|>= 1|0"),
        ({"node_size": 2.0}, "TypeError|node_size|int|2.0"),
        ({"node_size": 2, "topology": "flat"}, "node_size=2|'flat'|hierarchical"),
        ({"node_bits": 8}, "node_bits|32 or 16|8"),
        *(
            ({"params": [nn.Parameter(torch.zeros(3, dtype=dtype))]}, f"TypeError|{dtype}|torch.float32")
            for dtype in (torch.complex64, torch.float64)
        ),
        ({"params": [HERE, ELSEWHERE]}, "got cpu and, in param group 0, meta: make an optimizer"),
        (
            {"params": [{"params": [HERE]}, {"params": [ELSEWHERE]}]},
            "param group 1, meta: make an optimizer for each device",
        ),
        (
            {"params": [{"params": [nn.Parameter(torch.zeros(3, 5))], "exp_avg_mask": torch.ones(4)}]},
            "exp_avg_mask|(4,)|(3, 5)",
        ),
        (
            {"params": [{"params": [nn.Parameter(torch.zeros(3))], "exp_avg_mask": [1, 0, 1]}]},
            "TypeError|exp_avg_mask|list",
        ),
    ]


@pytest.mark.invariant(7)
@pytest.mark.parametrize("name", REFUSED)
def test_bad_options_are_named(name: str) -> None:
    for options, words in REFUSED[name]:
        kind = TypeError if words.startswith("TypeError") else ValueError
        with pytest.raises(kind) as caught:
            getattr(hf_compressopt, name)(**{"params": [nn.Parameter(torch.zeros(3))], **options})
        said = words.removeprefix("TypeError|").split("|")
        assert all(word in str(caught.value) for word in said), (options, str(caught.value))


@pytest.mark.parametrize(("name", "count"), [(LATE_CLIP, 4), (NOISE, 2)])
def test_tensors_that_no_run_has_saved_are_refused(name: str, count: int) -> None:
    for tensor in (torch.zeros(count), torch.zeros(count + 1, dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"'{name}' must be float64 \[{count}\]"):
            check_tensors({name: tensor}, Schedule(freeze_step=5))


BAD = {
    "complex": (lambda p: torch.zeros(p.shape, dtype=torch.complex64), "complex64; legal are real floating-point"),
    "float64": (lambda p: torch.zeros(p.shape, dtype=torch.float64), "torch.float64; legal are"),
    "sparse": (lambda p: torch.ones(p.shape).to_sparse(), "is sparse (torch.sparse_coo); only dense gradients"),
    "integer": (lambda p: torch.zeros(p.shape, dtype=torch.int32), "int32; legal are real floating-point"),
    "shape": (lambda p: torch.zeros(3), "has shape (3,); legal is the parameter's, (5, 4)"),
    "device": (lambda p: torch.zeros(p.shape, device="meta"), "is on meta, its parameter on cpu"),
    "memory": (lambda p: torch._to_functional_tensor(torch.ones(p.shape)), "must hold its values in dense memory"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("steps", [0, 3], ids=["warmup", "compressed"])
@on_ranks(2)
def test_a_bad_gradient_on_one_rank_is_an_error_on_all(rank: int, world_size: int, kind: str, steps: int) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 4))
    optimizer = OnebitAdam([("layer.weight", p)], freeze_step=2, scale_block=8)
    for step in range(steps):
        optimizer.step(grads=[torch.full_like(p, 1.0 + step)])
    before = tensors_in([p, optimizer.state_dict()])
    bad, words = BAD[kind]
    said = f"the gradient of layer.weight .*{re.escape(words)}" if rank else r"^1 other rank\(s\)"
    with pytest.raises((TypeError, ValueError) if rank else RuntimeError, match=said):
        optimizer.step(grads=[bad(p) if rank else torch.ones_like(p)])
    assert same(before, tensors_in([p, optimizer.state_dict()])) and optimizer.metrics()["step"] == steps
