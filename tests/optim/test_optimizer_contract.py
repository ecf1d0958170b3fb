"""The contract of torch optimizers, held by OnebitAdam in each of its stages, and by FusedAdam and Lamb."""

import copy
import logging
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_compressopt import FusedAdam, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, average_gradients
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.oracles.cases import Case, Problem, flat_params, make_optimizer, make_params, set_gradients
from tests.oracles.steps import same, tensors_in
from tests.support.family import FAMILY, optimizer_of, through_a_file
from tests.support.family import draw as set_random_gradients
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.logs import log_lines, log_to

FREEZE_STEP = 3
STEPS = 8
MASK = [1.0, 0, 1, 1, 0]
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
GROUPS = [
    {"shapes": [(7,), (3, 5), (2, 3, 4), (0,)]},
    {"shapes": [(4, 5), (5,)], "mask": MASK, "lr": 0.02},
    {"shapes": [(6,)], "non_freeze": True},
]
CASE = Case("contract", GROUPS, {"lr": 0.01, "weight_decay": 0.05, "scale_block": 8}, FREEZE_STEP, STEPS)


KINDS = pytest.mark.parametrize("kind", [OnebitAdam, FusedAdam, Lamb])
LRS = pytest.mark.parametrize("lr", [torch.tensor(0.0625), torch.full((1,), 0.0625), torch.tensor(0.0625).double()])


def options_of(kind):
    return {} if kind in (FusedAdam, Lamb) else {"freeze_step": FREEZE_STEP}


def make_one(shapes=((6,), (3, 4)), kind=OnebitAdam, **kwargs):
    """One rank alone: its parameters and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return params, kind(params, **{"lr": 0.01, **options_of(kind), **kwargs})


def draw(params, t):
    generator = torch.Generator().manual_seed(1000 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def train(params, optimizer, first=1, last=STEPS):
    for t in range(first, last + 1):
        draw(params, t)
        optimizer.step()
    return [p.detach().clone() for p in params]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


# -- step -------------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.invariant(10)
def test_closure(kind):
    params, optimizer = make_one(kind=kind)
    others, reference = make_one(kind=kind)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        calls.append(loss.detach())
        return loss

    for t in range(1, STEPS + 1):
        result = optimizer.step(closure)
        assert len(calls) == t and torch.equal(result.detach(), calls[-1])
        for p in others:
            p.grad = 2 * p.detach()
        assert reference.step() is None
    assert_same(params, others)
    assert all(p.requires_grad and p.grad_fn is None for p in params)


@pytest.mark.invariant(11)
@LRS
@pytest.mark.parametrize(
    ("kind", "options"), [(OnebitAdam, {}), (OnebitAdam, {"eps_inside_sqrt": True}), (FusedAdam, {})]
)
def test_tensor_lr(lr, kind, options):
    """A tensor lr gives a float's numbers, and stays the tensor that a scheduler writes to and a CUDA graph reads."""
    lr = lr.clone()
    runs = [make_one(kind=kind, lr=rate, **options) for rate in (lr, 0.0625)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in runs]
    for t in range(1, STEPS + 1):
        (params, optimizer), (others, reference) = runs
        for run, scheduler in zip(runs, schedulers, strict=True):
            train(*run, t, t)
            scheduler.step()
        for p, q in zip(params, others, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["lr"] is lr and float(lr) == 0.0625 * 0.5**STEPS


def test_grads_argument():
    """Flat, nested per group, with None; p.grad is not looked at."""
    results = []
    for form in ("attribute", "flat", "nested"):
        problem = Problem(CASE, 1, 0)
        optimizer, params = make_optimizer(problem)
        for t in range(1, STEPS + 1):
            set_gradients(problem, optimizer, params, 0, t)
            params[0][1].grad = None if t in (2, 6) else params[0][1].grad
            nested = [[p.grad for p in group] for group in params]
            if form == "attribute":
                optimizer.step()
                continue
            for p in (p for group in params for p in group):
                p.grad = torch.full_like(p, math.nan)
            optimizer.step(grads=nested if form == "nested" else [grad for group in nested for grad in group])
        results.append(torch.from_numpy(flat_params(params)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert results[0].isfinite().all()


def test_wrong_number_of_grads_is_named():
    params, optimizer = make_one()
    with pytest.raises(ValueError, match="2 in all, got 1"):
        optimizer.step(grads=[torch.zeros(6)])
    with pytest.raises(ValueError, match=r"\(5,\).*\(6,\)"):
        optimizer.step(grads=[torch.zeros(5), None])
    assert optimizer.plan.step == 1


@KINDS
@pytest.mark.invariant(19)
def test_hooks_fire_in_order(kind):
    params, optimizer = make_one(kind=kind)
    seen = []
    start = params[0].detach().clone()
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", torch.equal(params[0], start))))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", torch.equal(params[0], start))))
    train(params, optimizer, 1, 2)
    assert seen == [("before", True), ("after", False), ("before", False), ("after", False)]
    seen.clear()
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda opt, saved: seen.append("saved") or {**saved, "note": 7})
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, loaded: seen.append(("before loading", loaded["note"])) or changed(loaded)
    )
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["note"] == 7 and "state" in saved
    before = optimizer.state[params[1]]["exp_avg"].clone()
    optimizer.load_state_dict(saved)
    assert seen == ["before saving", "saved", ("before loading", 7), "loaded"]
    assert optimizer.param_groups[0]["lr"] == 0.5 and saved["param_groups"][0]["lr"] == 0.01
    assert before.any() and torch.equal(optimizer.state[params[1]]["exp_avg"], 2 * before)


def changed(state):
    """A copy with another lr, and twice the momentum of the second parameter."""
    state = copy.deepcopy(state)
    state["param_groups"][0]["lr"] = 0.5
    state["state"][1]["exp_avg"] *= 2
    return state


@KINDS
@pytest.mark.invariant(20, 25)
@pytest.mark.parametrize("at", [0, 2, FREEZE_STEP, 6])
def test_copies_are_independent_and_go_on_alike(at, kind):
    """Deep copies, and optimizers that have loaded the state dict, which stays as it was."""
    params, optimizer = make_one(kind=kind)
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # which gives the optimizer a step of its own
    train(params, optimizer, 1, at)
    copied_params, copied = copy.deepcopy((params, optimizer))
    loaded_params = copy.deepcopy(params)
    state = copy.deepcopy(optimizer.state_dict())
    keys, before = repr(sorted(state)), tensors_in(state)
    loaded = kind(loaded_params, **options_of(kind))
    loaded.load_state_dict(state)
    expected = train(copied_params, copied, at + 1)
    assert_same(train(loaded_params, loaded, at + 1), expected)
    assert repr(sorted(state)) == keys
    assert_same(tensors_in(state), before)
    assert_same(tensors_in(optimizer.state_dict()), before)
    assert_same(train(params, optimizer, at + 1), expected)
    assert not hasattr(kind, "plan") or copied.plan == optimizer.plan
    assert kind.__name__ in repr(copied) and "lr: 0.01" in repr(copied)


def steps_of(problem, run, rank, first=1, last=STEPS):
    for t in range(first, last + 1):
        set_gradients(problem, *run, rank, t)
        run[0].step()


def test_state_holds_torchs_names_as_views():
    params, optimizer = make_one()
    for p in params:
        row = optimizer.state[p]
        assert {"exp_avg", "exp_avg_sq", "step"} <= row.keys(), "allocated at construction"
        assert row["exp_avg"].shape == row["exp_avg_sq"].shape == p.shape
    row = optimizer.state[params[0]]
    train(params, optimizer)
    assert row is optimizer.state[params[0]] and bool(row["exp_avg"].any()), "a view must follow the buffers"
    assert float(row["step"]) == STEPS
    row["exp_avg"].fill_(7.0)
    draw(params, 0)
    params[0].grad.zero_()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], torch.full((6,), 6.3))


# -- parameters of every kind -----------------------------------------------------------------------------------------


@KINDS
@pytest.mark.invariant(7)
def test_input_forms_agree(kind):
    forms = [
        lambda ps: ps,
        lambda ps: iter(ps),
        lambda ps: [{"params": ps}],
        lambda ps: [("weight", ps[0]), ("bias", ps[1])],
        lambda ps: [{"params": [("weight", ps[0]), ("bias", ps[1])]}],
    ]
    results = []
    for form in forms:
        params, _ = make_one()
        results.append(train(params, kind(form(params), lr=0.01, **options_of(kind))))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.invariant(7)
def test_refused_input_forms():
    with pytest.raises(TypeError):
        OnebitAdam(torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="empty parameter list"):
        OnebitAdam([])
    with pytest.raises(TypeError):
        OnebitAdam(["not a tensor"])


@pytest.mark.invariant(4)
def test_frozen_parameters_are_left_alone():
    params, _ = make_one()
    frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    optimizer = OnebitAdam([params[0], frozen, params[1]], lr=0.01, freeze_step=FREEZE_STEP, weight_decay=0.1)
    others, reference = make_one(weight_decay=0.1)
    assert_same(train(params, optimizer), train(others, reference))
    assert torch.equal(frozen, torch.ones(5))
    loaded = through_a_file(optimizer.state_dict())
    OnebitAdam([params[0], frozen, params[1]], freeze_step=FREEZE_STEP).load_state_dict(loaded)


@pytest.mark.invariant(4)
def test_tied_parameter_counts_once():
    tied = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.Sequential(tied, torch.nn.ReLU(), tied, torch.nn.Linear(4, 1))
    params = list(model.parameters())
    optimizer = OnebitAdam(params, lr=0.01, freeze_step=FREEZE_STEP)
    assert len(params) == 3 and len(optimizer.state) == 3
    train(params, optimizer)
    with pytest.raises(ValueError, match="more than one"):
        OnebitAdam([{"params": params}, {"params": [tied.weight]}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of duplicates in one group, and goes on
        twice = OnebitAdam([tied.weight, tied.weight], lr=0.01, freeze_step=FREEZE_STEP)
    train([tied.weight], twice)
    assert tied.weight.isfinite().all()


@KINDS
def test_memory_layout_does_not_matter(kind):
    base = torch.randn(6, 4, 5, 3, generator=torch.Generator().manual_seed(0))
    channels_last, contiguous = torch.channels_last, torch.contiguous_format
    views = [
        base[:, :, 0, 0].clone().t(),
        base.contiguous(memory_format=channels_last),
        base.clone()[:, ::2],
        *(base[0, :, :, 0].clone() for _ in range(2)),
    ]
    strange = [torch.nn.Parameter(view) for view in views]
    plain = [torch.nn.Parameter(view.clone(memory_format=contiguous)) for view in views]
    runs = [kind(params, **{"lr": 0.01, "weight_decay": 0.1, **options_of(kind)}) for params in (strange, plain)]
    assert not strange[0].is_contiguous()
    for t in range(1, STEPS + 1):
        draw(plain, t)
        plain[3].grad = plain[3].grad[:1].expand(4, 5).contiguous()
        strange[0].grad, strange[4].grad = (plain[i].grad.t().contiguous().t() for i in (0, 4))
        strange[1].grad = plain[1].grad.contiguous(memory_format=channels_last if t % 2 else contiguous)
        strange[2].grad, strange[3].grad = plain[2].grad.clone(), plain[3].grad[:1].expand(4, 5)
        for optimizer in runs:
            optimizer.step()
    for one, other in zip(strange, plain, strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if kind is OnebitAdam else CLOSE))


def test_scalar_and_empty_parameters():
    params, optimizer = make_one(shapes=((), (0,), (1,), (0, 4)))
    train(params, optimizer)
    assert all(p.isfinite().all() for p in params)
    assert all(value.isfinite().all() for value in tensors_in(optimizer.state_dict()))


@pytest.mark.invariant(5)
def test_process_group_of_some_ranks():
    """Ranks 0 and 2 of three train as two ranks do; rank 1 takes no part and is told so."""
    alone, message, _ = results = run_ranks(3, train_in_subgroup)
    assert "not a member" in message
    assert torch.equal(results[0], results[2])
    assert torch.equal(alone, run_ranks(2, train_everywhere)[0])


def train_in_subgroup(rank, world_size):
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError) as caught:
            OnebitAdam([torch.nn.Parameter(torch.zeros(3))], process_group=group)
        return str(caught.value)
    return train_everywhere(rank // 2, 2, group)


def train_everywhere(rank, world_size, group=None):
    problem = Problem(CASE, world_size, 0)
    optimizer, params = make_optimizer(problem, process_group=group)
    steps_of(problem, (optimizer, params), rank)
    return torch.from_numpy(flat_params(params))


# -- param groups -----------------------------------------------------------------------------------------------------


@pytest.mark.invariant(3)
def test_group_added_before_the_first_step_equals_group_given_up_front():
    problem = Problem(CASE, 1, 0)
    results = []
    for late in (False, True):
        params, groups = make_params(problem)
        optimizer = OnebitAdam(groups[:1] if late else groups, freeze_step=FREEZE_STEP, **CASE.kwargs)
        for group in groups[1:] if late else ():
            optimizer.add_param_group(group)
        steps_of(problem, (optimizer, params), 0)
        results.append(torch.from_numpy(flat_params(params)))
    assert torch.equal(*results)


@pytest.mark.invariant(3)
@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2)
def test_groups_are_taken_in_every_step_of_the_first_stage_and_refused_after_it(rank, world_size, name):
    schedule = {"var_freeze_step": 8} if name == "ZeroOneAdam" else {"freeze_step": 8}
    params, learning = [torch.nn.Parameter(torch.ones(11))], []
    optimizer = optimizer_of(name, params[:], **schedule)
    for step in range(1, 11):
        new = torch.nn.Parameter(torch.ones(5))
        if step <= 8:
            optimizer.add_param_group({"params": [new], "lr": 0.02})
            params.append(new)
            learning.append(optimizer.plan.update_variance)
        else:
            with pytest.raises(ValueError, match="stage has no variance"):
                optimizer.add_param_group({"params": [new]})
        set_random_gradients(params, optimizer, rank, step)
        optimizer.step()
    assert True in learning and (False in learning) == (name == "ZeroOneAdam")
    assert all(bool(param.isfinite().all()) for param in params)
    assert not any(bool((param == 1).all()) for param in params[:6]), "a parameter that saw a variance step moves"
    assert name == "ZeroOneAdam" or [int(optimizer.state[p]["step"]) for p in params] == [10, *range(10, 2, -1)]
    assert name == "ZeroOneAdam" or same_on_all_ranks(params)


def test_parameters_that_were_frozen_move_into_a_group_of_their_own():
    """As the error says that a gradient of theirs raises; after an error they are where they were."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    params[1].requires_grad_(False)
    optimizer = OnebitAdam([(f"p{number}", param) for number, param in enumerate(params)], freeze_step=8)
    params[1].requires_grad_(True)
    for param in params:
        param.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"call add_param_group\({'params': \[parameter\]}\)"):
        optimizer.step()
    with pytest.raises(ValueError, match="lr must be >= 0, got -1"):
        optimizer.add_param_group({"params": [("p1", params[1])], "lr": -1.0})
    assert optimizer.param_groups[0]["params"] == params
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("p0", params[0])]})
    optimizer.add_param_group({"params": [("p1", params[1])]})
    assert [group["param_names"] for group in optimizer.param_groups] == [["p0", "p2"], ["p1"]]
    optimizer.step()
    assert all(bool((param < 1).all()) for param in params)


def test_group_added_in_the_compressed_stage():
    """A new group has no variance, so only a non_freeze group is accepted; a refused group leaves no trace."""
    params, optimizer = make_one()
    train(params, optimizer, 1, FREEZE_STEP)
    new = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="non_freeze=True"):
        optimizer.add_param_group({"params": [new]})
    with pytest.raises(ValueError, match="lr must be >= 0, got -1"):
        optimizer.add_param_group({"params": [new], "non_freeze": True, "lr": -1.0})
    with pytest.raises(ValueError, match="must be on one device, got cpu and, in param group 1, meta"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(new.to("meta"))], "non_freeze": True})
    assert len(optimizer.param_groups) == 1 and new not in optimizer.state
    optimizer.add_param_group({"params": [new], "non_freeze": True, "lr": 0.1})
    new.grad = torch.tensor([1.0, -1, 2, -2])
    train(params, optimizer, FREEZE_STEP + 1, FREEZE_STEP + 1)
    torch.testing.assert_close(new.detach(), torch.tensor([0.9, 1.1, 0.9, 1.1]))
    assert float(optimizer.state[new]["step"]) == 1


# -- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OnebitAdam, ZeroOneAdam, OnebitLamb])
def test_loading_the_state_of_before_the_first_step_changes_nothing(kind):
    """Accelerate does so in prepare(): there is no variance yet, and still each parameter moves in the first step."""
    params, optimizer = make_one(kind=kind)
    optimizer.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in params]
    for p, old in zip(train(params, optimizer, last=1), before, strict=True):
        assert not (p == old).any()
    others, plain = make_one(kind=kind)
    assert_same(train(params, optimizer, first=2), train(others, plain))


def test_load_copies_into_the_buffers():
    params, optimizer = make_one()
    train(params, optimizer)
    fresh_params, fresh = make_one()
    views = [fresh.state[p]["exp_avg"] for p in fresh_params]
    group = fresh.param_groups[0]
    fresh.load_state_dict(optimizer.state_dict())
    assert_same(views, [optimizer.state[p]["exp_avg"] for p in params])
    assert fresh.param_groups[0] is group, "schedulers keep hold of it"


@pytest.mark.invariant(26)
@on_ranks(2, timeout=30)
def test_state_dict_makes_no_collective_call(rank, world_size):
    """Rank 0 alone calls it, in every stage, while rank 1 goes on to the next step."""
    problem = Problem(CASE, world_size, 0)
    optimizer, params = make_optimizer(problem)
    for t in range(1, STEPS + 1):
        steps_of(problem, (optimizer, params), rank, t, t)
        assert rank != 0 or optimizer.state_dict()["state"]


@on_ranks(3)
def test_state_of_another_rank(rank, world_size):
    """Rank 0's warmup state, as torch scripts load it everywhere, is every rank's; later it is not, and refused."""
    problem = Problem(CASE, world_size, 0)
    optimizer, params = make_optimizer(problem)
    steps_of(problem, (optimizer, params), rank, 1, 2)
    fresh, _ = make_optimizer(problem)
    fresh.load_state_dict(from_rank_zero(optimizer.state_dict()))
    own, loaded = optimizer.state_dict(), fresh.state_dict()
    assert fresh.plan == optimizer.plan and all(same(tensors_in(own[key]), tensors_in(loaded[key])) for key in own)
    steps_of(problem, (optimizer, params), rank, 3, 6)
    before, state = tensors_in(fresh.state_dict()), from_rank_zero(optimizer.state_dict())
    if rank:
        with pytest.raises(ValueError, match="(?s)rank 0.*save_state"):
            fresh.load_state_dict(state)
        assert same(before, tensors_in(fresh.state_dict()))
    else:
        fresh.load_state_dict(state)


def from_rank_zero(state_dict):
    box = [state_dict]
    dist.broadcast_object_list(box, src=0)
    return box[0]


#: Changes to a state dict, the classes that refuse it, and what they say.
FAULTS = {
    "groups": (lambda state: state["param_groups"][0].update(params=[0]), (OnebitAdam, FusedAdam), "param groups of"),
    "shape": (lambda state: state["state"][1].update(exp_avg=torch.zeros(4, 3)), (OnebitAdam, FusedAdam), "shape"),
    "amsgrad": (lambda state: state["param_groups"][0].update(amsgrad=True), (FusedAdam,), "amsgrad must be False"),
    "another optimizer": (
        lambda state: state["state"].update({1: {"momentum_buffer": torch.ones(3)}}),
        (FusedAdam,),
        "not one of Adam",
    ),
    "another world size": (
        lambda state: state["compressopt"].update(world_size=3),
        (OnebitAdam,),
        "world_size=3, this one has 1",
    ),
    "freeze_step missing": (lambda state: state["compressopt"].clear(), (OnebitAdam,), "world_size"),
    "nothing": (dict.clear, (OnebitAdam,), "param_groups"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_state_dict_that_does_not_fit_changes_nothing(fault):
    change, kinds, said = FAULTS[fault]
    for kind in kinds:
        params, optimizer = make_one(kind=kind)
        train(params, optimizer, 1, 2)
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        fresh_params, fresh = make_one(kind=kind)
        train(fresh_params, fresh, 1, 1)
        fresh.param_groups[0]["lr"] = 0.25
        before = tensors_in(fresh.state_dict())
        with pytest.raises(ValueError if kind is FusedAdam else (ValueError, KeyError), match=said):
            fresh.load_state_dict(state)
        assert_same(tensors_in(fresh.state_dict()), before)
        assert fresh.param_groups[0]["lr"] == 0.25 and (kind is FusedAdam or fresh.plan.step == 2)


@pytest.mark.invariant(2)
def test_state_crosses_over_from_and_to_adamw():
    """In the warmup stage, where both are the same algorithm."""
    options = {"lr": 0.01, "weight_decay": 0.1}
    params, optimizer = make_one(freeze_step=100, weight_decay=0.1)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    adamw = torch.optim.AdamW(others, **options)
    assert_same(train(params, optimizer, 1, 4), train(others, adamw, 1, 4))
    new_optimizer = OnebitAdam(params, freeze_step=100, **options)
    new_optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    new_adamw = torch.optim.AdamW(others, **options)
    new_adamw.load_state_dict(through_a_file(optimizer.state_dict()))
    assert new_optimizer.plan.step == 5
    assert_same(train(params, new_optimizer, 5, 8), train(others, new_adamw, 5, 8))


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in FAMILY), *(("OnebitAdam", o) for o in ({"zero_stage": 2}, {"clip": "late"}))],
)
@on_ranks(2)
def test_a_plain_state_in_a_run_that_has_clipped_is_that_of_a_new_run(rank, world_size, name, options):
    adam_params = [nn.Parameter(torch.ones(20, 17)), nn.Parameter(torch.ones(8))]
    adamw = torch.optim.AdamW(adam_params)
    train(adam_params, adamw, 1, 1)
    found = []
    for steps in (4, 0):
        params = [nn.Parameter(p.detach().clone()) for p in adam_params]
        optimizer = optimizer_of(name, params, max_grad_norm=1.0, **options)
        for step in range(100, 100 + steps):
            take_own_step(params, optimizer, rank, step)
        optimizer.load_state_dict(adamw.state_dict())
        with torch.no_grad():
            for param, value in zip(params, adam_params, strict=True):
                param.copy_(value)
        for step in range(5):
            take_own_step(params, optimizer, rank, step)
        found.append(params)
    assert_same(*found)


def take_own_step(params, optimizer, rank, step):
    """Take a step with gradients of the rank's own, as a loop without DistributedDataParallel does."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    sum((param * torch.randn(param.shape, generator=generator)).sum() for param in params).backward()
    if optimizer.zero_stage != 2:
        average_gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()


# -- settings of torch and of the surroundings that must not matter: default dtypes and devices, a log that fails ------


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def train_under_defaults(name: str, dtype: torch.dtype, device: str | None) -> list[torch.Tensor]:
    params = [nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    grads = [
        [torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + i)) for i in range(3)]
        for step in range(7)
    ]
    mask = torch.ones(4)
    with defaults(dtype, device):
        groups = [{"params": params[:1], "exp_avg_mask": mask}, {"params": params[1:2]}]
        optimizer = optimizer_of(name, [*groups, {"params": params[2:], "non_freeze": True}])
        for step in range(7):
            for param, grad in zip(params, grads[step], strict=True):
                param.grad = grad
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
        plain = torch.optim.AdamW([{"params": [param]} for param in params])
        optimizer.load_state_dict(plain.state_dict())
    return params


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_torchs_defaults_do_not_matter(
    rank: int, world_size: int, name: str, dtype: torch.dtype, device: str | None
) -> None:
    assert same(train_under_defaults(name, dtype, device), train_under_defaults(name, torch.float32, None))


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2)
def test_a_log_that_fails_does_not_stop_a_step(rank: int, world_size: int, name: str) -> None:
    def fail(record: logging.LogRecord) -> None:
        raise ValueError("I/O operation on closed file")

    handler = logging.Handler()
    handler.emit = fail  # type: ignore[method-assign]
    with log_to(handler):
        used, unused = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(4))
        freeze = {"ZeroOneAdam": "var_freeze_step"}.get(name, "freeze_step")
        optimizer = optimizer_of(name, [used, unused], **{freeze: "auto", "max_freeze_step": 3, "min_freeze_step": 1})
        for step in range(7):
            used.grad = torch.full((20,), float("nan") if step == 1 else 1.0 + step)
            optimizer.step()
    assert optimizer.metrics()["step"] == 6.0


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(1, 2)
def test_one_rank_alone_is_told_that_nothing_is_compressed(rank: int, world_size: int, name: str) -> None:
    with log_lines() as lines:
        optimizer = optimizer_of(name, [nn.Parameter(torch.ones(20))])
        for step in range(4):
            optimizer.step(grads=[torch.full((20,), 1.0 + step)])
    said = [line for line in lines if "ends, the variance is frozen" in line]
    assert len(said) == (rank == 0)
    for line in said:
        assert ("nothing is compressed" in line and "signs" not in line) == (world_size == 1)
        assert ("is sent as signs" in line) == (world_size == 2)


@pytest.mark.parametrize("bound", [10, 13])
@on_ranks(2)
def test_the_search_sends_only_what_it_can_compare(rank: int, world_size: int, bound: int) -> None:
    """D = 10 steps; gradients are averaged already, so that only the search sends anything."""
    param = nn.Parameter(torch.ones(20))
    search = {"freeze_step": "auto", "max_freeze_step": bound, "min_freeze_step": 1}
    optimizer = optimizer_of("OnebitAdam", [param], betas=(0.5, 0.9), **search)
    for step in range(1, bound + 1):
        param.grad = torch.ones(20)
        optimizer.step()
        sends = optimizer.metrics()["bytes_sent_step"] > 0
        assert sends == (bound == 13 and (step <= 3 or step > 10))  # of 10 steps never two norms to compare


@pytest.mark.parametrize("name", FAMILY)
def test_a_pickled_optimizer_shows_the_state_that_it_trains_with(name):
    params = [nn.Parameter(torch.ones(8, 5)), nn.Parameter(torch.ones(16))]
    optimizer = optimizer_of(name, params)
    for step in range(6):
        set_random_gradients(params, optimizer, 0, step)
        optimizer.step()
        if step in (1, 4):
            optimizer = pickle.loads(pickle.dumps(optimizer))
            params = optimizer.trainable_parameters
    saved = optimizer.state_dict()["state"]
    for index, param in enumerate(params):
        shown, held = dict(optimizer.state[param]), dict(optimizer._states[0].torch_state(index))
        assert int(shown["step"]) == 6
        assert all(torch.equal(shown[key], held[key]) and torch.equal(shown[key], saved[index][key]) for key in held)


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2)
def test_a_pickled_optimizer_saves_the_errors_that_it_trains_with(rank, world_size, name):
    params = [nn.Parameter(torch.ones(64, 5)), nn.Parameter(torch.ones(600))]
    original = optimizer_of(name, params)
    for step in range(7):
        if step == 5:
            pickled, others = pickle.loads(pickle.dumps((original, params)))
        for optimizer, mine in ((original, params), (pickled, others)) if step > 4 else ((original, params),):
            set_random_gradients(mine, optimizer, rank, step)
            optimizer.step()
    saved, expected = (optimizer.state_dict()["compressopt"] for optimizer in (pickled, original))
    for key in ("worker_error", "server_error"):
        assert_same(saved[key], expected[key])
    assert any(bool(error.any()) for error in saved["worker_error"])


@pytest.mark.parametrize("name", FAMILY)
def test_param_groups_that_are_taken_out_are_refused(name):
    """Their state would go on moving the parameters."""
    for way in ("a group", "another group", "a parameter"):
        params = [nn.Parameter(torch.ones(8, 5)), nn.Parameter(torch.ones(16))]
        optimizer = optimizer_of(name, [{"params": params[:1]}, {"params": params[1:]}])
        set_random_gradients(params, optimizer, 0, 0)
        optimizer.step()
        groups = optimizer.param_groups
        if way == "a group":
            del groups[1]
        elif way == "another group":
            groups[1] = dict(groups[1])
        else:
            groups[1]["params"].pop()
        with pytest.raises(ValueError, match="requires_grad_"):
            optimizer.step()


@on_ranks(2)
def test_a_communicator_serves_two_optimizers(rank, world_size):
    """Each has its own counters."""
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(80))]
    communicator = TorchCommunicator()
    both = [optimizer_of("OnebitAdam", [param], communicator=communicator) for param in params]
    alone = [optimizer_of("OnebitAdam", [nn.Parameter(torch.ones_like(param))]) for param in params]
    for step in range(4):
        for optimizer in (*both, *alone):
            set_random_gradients(optimizer.trainable_parameters, optimizer, rank, step)
            optimizer.step()
    sent, expected = ([optimizer.metrics()["bytes_sent"] for optimizer in each] for each in (both, alone))
    assert sent == expected and all(sent)
