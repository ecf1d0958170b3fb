"""The contract of torch optimizers, held by OnebitAdam in each of its stages, and by FusedAdam and Lamb."""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist

from hf_compressopt import FusedAdam, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam
from tests.oracles.cases import Case, Problem, flat_params, make_optimizer, make_params, set_gradients
from tests.oracles.steps import same, tensors_in
from tests.support.family import through_a_file
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks

FREEZE_STEP = 3
STEPS = 8
MASK = [1.0, 0, 1, 1, 0]
GROUPS = [
    {"shapes": [(7,), (3, 5), (2, 3, 4), (0,)]},
    {"shapes": [(4, 5), (5,)], "mask": MASK, "lr": 0.02},
    {"shapes": [(6,)], "non_freeze": True},
]
CASE = Case("contract", GROUPS, {"lr": 0.01, "weight_decay": 0.05, "scale_block": 8}, FREEZE_STEP, STEPS)


KINDS = pytest.mark.parametrize("kind", [OnebitAdam, FusedAdam, Lamb])


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
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("options", [{}, {"eps_inside_sqrt": True}], ids=["fast", "variant"])
def test_tensor_lr(shape, options):
    """A tensor lr gives a float's numbers, and stays the tensor that a scheduler writes to."""
    lr = torch.full(shape, 0.0625)
    (params, optimizer), (others, reference) = make_one(lr=lr, **options), make_one(lr=0.0625, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    other_scheduler = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    for t in range(1, STEPS + 1):
        draw(params, t)
        draw(others, t)
        optimizer.step()
        reference.step()
        scheduler.step()
        other_scheduler.step()
        for p, q in zip(params, others, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(0.0625 * 0.5**STEPS)


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
    optimizer.register_load_state_dict_pre_hook(lambda opt, loaded: seen.append(("before loading", loaded["note"])))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["note"] == 7 and "state" in saved
    optimizer.load_state_dict(saved)
    assert seen == ["before saving", "saved", ("before loading", 7), "loaded"]


@KINDS
@pytest.mark.invariant(20, 25)
@pytest.mark.parametrize("at", [0, 2, FREEZE_STEP, 6])
def test_copies_are_independent_and_go_on_alike(at, kind):
    """Deep copies, and optimizers that have loaded the state dict, which stays as it was."""
    params, optimizer = make_one(kind=kind)
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


def test_memory_layout_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, generator=generator)
    strange, plain = torch.nn.Parameter(values.t().contiguous().t()), torch.nn.Parameter(values.clone())
    assert not strange.is_contiguous()
    optimizers = [OnebitAdam([p], lr=0.01, freeze_step=FREEZE_STEP) for p in (strange, plain)]
    for t in range(1, STEPS + 1):
        grad = torch.randn(4, 1, generator=generator).expand(4, 6) if t % 2 else torch.randn(6, 4).t()
        strange.grad, plain.grad = grad, grad.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(strange, plain)


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
@on_ranks(2)
def test_group_added_in_warmup_on_two_ranks(rank, world_size):
    early, late = torch.nn.Parameter(torch.ones(11)), torch.nn.Parameter(torch.ones(3, 3))
    optimizer = OnebitAdam([early], lr=0.01, freeze_step=FREEZE_STEP)
    for t in range(1, STEPS + 1):
        if t == 2:
            optimizer.add_param_group({"params": [late], "lr": 0.02})
        seed = t if optimizer.plan.reduce_grads else 100 * t + rank
        for p in (early, late):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    assert same_on_all_ranks([early, late])
    assert [int(optimizer.state[p]["step"]) for p in (early, late)] == [STEPS, STEPS - 1]


def test_group_added_in_the_compressed_stage():
    """A new group has no variance, so only a non_freeze group is accepted; a refused group leaves no trace."""
    params, optimizer = make_one()
    train(params, optimizer, 1, FREEZE_STEP)
    new = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="non_freeze=True"):
        optimizer.add_param_group({"params": [new]})
    with pytest.raises(ValueError, match="lr must be >= 0, got -1"):
        optimizer.add_param_group({"params": [new], "non_freeze": True, "lr": -1.0})
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


def test_state_of_another_world_size_is_refused(tmp_path):
    run_ranks(1, save_compressed_state, tmp_path / "state")
    run_ranks(2, refuse_state, tmp_path / "state")


def save_compressed_state(rank, world_size, path):
    problem = Problem(CASE, world_size, 0)
    run = make_optimizer(problem)
    steps_of(problem, run, rank)
    torch.save(run[0].state_dict(), path)


def refuse_state(rank, world_size, path):
    optimizer, _ = make_optimizer(Problem(CASE, world_size, 0))
    before = tensors_in(optimizer.state_dict())
    with pytest.raises(ValueError, match="world_size=1, this one has 2"):
        optimizer.load_state_dict(torch.load(path))
    assert same(before, tensors_in(optimizer.state_dict()))


#: Changes to a state dict, and the classes that refuse it.
FAULTS = {
    "groups": (lambda state: state["param_groups"][0].update(params=[0]), (OnebitAdam, FusedAdam)),
    "shape": (lambda state: state["state"][1].update(exp_avg=torch.zeros(4, 3)), (OnebitAdam, FusedAdam)),
    "amsgrad": (lambda state: state["param_groups"][0].update(amsgrad=True), (FusedAdam,)),
    "another optimizer": (
        lambda state: state["state"].update({1: {"momentum_buffer": torch.ones(3)}}),
        (FusedAdam,),
    ),
    "freeze_step missing": (lambda state: state["compressopt"].clear(), (OnebitAdam,)),
    "nothing": (dict.clear, (OnebitAdam,)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_state_dict_that_does_not_fit_changes_nothing(fault):
    change, kinds = FAULTS[fault]
    for kind in kinds:
        params, optimizer = make_one(kind=kind)
        train(params, optimizer, 1, 2)
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        fresh_params, fresh = make_one(kind=kind)
        train(fresh_params, fresh, 1, 1)
        fresh.param_groups[0]["lr"] = 0.25
        before = tensors_in(fresh.state_dict())
        with pytest.raises(ValueError if kind is FusedAdam else (ValueError, KeyError)):
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
