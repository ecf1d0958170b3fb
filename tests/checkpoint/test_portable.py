"""Checkpoints that cross over: to and from one file of AdamW's state, and between ZeroOptimizer and what it wraps."""

import copy
import json
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_compressopt
from hf_compressopt import FusedAdam, Lamb, OnebitAdam, ZeroOneAdam, ZeroOptimizer, cli, load_state, save_state
from hf_compressopt.format.index import CheckpointError, sealed
from tests.support.family import assign
from tests.support.harness import on_ranks, run_ranks
from tests.support.memory import MIB, peak_beyond
from tests.support.trainer_runs import use_accelerate

SHAPES = [(37, 19), (61,), (), (0, 3), (5, 5)]
GROUPS: list[dict[str, Any]] = [{"weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0, "betas": (0.8, 0.95)}]
LR, RANKS = 0.01, 2
ZERO_ONE = {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4}
# optimizer, its options, steps before the save
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "AdamW": ("AdamW", {}, 3),
    "FusedAdam": ("FusedAdam", {}, 3),
    "Lamb": ("Lamb", {}, 3),
    "uncorrected": ("FusedAdam", {"bias_correction": False}, 3),
    "zero1": ("AdamW", {"stage": 1, "reduce_bucket_size": 300}, 3),
    "zero2": ("AdamW", {"stage": 2, "reduce_bucket_size": 500}, 3),
    "warmup": ("OnebitAdam", {"freeze_step": 100, "fused_warmup": False}, 3),
    "auto": ("OnebitAdam", {"freeze_step": "auto", "fused_warmup": False}, 3),
    "switching": ("OnebitAdam", {"freeze_step": 3}, 3),
    "compressed": ("OnebitAdam", {"freeze_step": 3}, 6),
    "onebit_lamb": ("OnebitLamb", {"freeze_step": 3}, 6),
    "variance": ("ZeroOneAdam", {**ZERO_ONE, "var_freeze_step": 100}, 7),
    "local": ("ZeroOneAdam", ZERO_ONE, 11),
}
UNCOMPRESSED = ["AdamW", "zero1", "zero2", "warmup", "auto"]
PER_RANK = ["local"]
MOMENTS = ("exp_avg", "exp_avg_sq")


def make(name: str, options: dict[str, Any]) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    named = [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(SHAPES)]
    groups = [{**group, "params": part} for group, part in zip(GROUPS, (named[:2], named[2:]), strict=True)]
    params = [p for _, p in named]
    cls = getattr(hf_compressopt, name, None) or getattr(torch.optim, name)
    if "stage" in options:
        return params, ZeroOptimizer(groups, cls, lr=LR, **options)
    return params, cls(groups, lr=LR, **options)


def train(rank: int, params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    """Gradients that differ between the ranks where they stay local, else the same."""
    for step in steps:
        local = hasattr(optimizer, "plan") and not optimizer.plan.reduce_grads
        generator = torch.Generator().manual_seed(1000 * rank * local + step)
        for p in params:
            grad = torch.randn(p.shape, generator=generator)
            p.grad = grad if p.requires_grad else None
        optimizer.step()


def divided(optimizer: Any, params: list[nn.Parameter]) -> dict[str, Tensor]:
    """The moments by which a run divides, and the steps, of every parameter."""
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.numel() == 0:
                continue  # a ZeroOptimizer has no state of it
            state = optimizer.state[p]
            number = next(i for i, other in enumerate(params) if other is p)
            t, n = float(state["step"]), float(state.get("variance_steps", state["step"]))
            folded = hasattr(optimizer, "plan") and optimizer.plan_at(optimizer._step + 1).stage.number > 0
            applied = group.get("bias_correction", True) and not folded
            found[f"exp_avg/p{number}"] = state["exp_avg"] / (1 - group["betas"][0] ** t if applied else 1)
            found[f"exp_avg_sq/p{number}"] = state["exp_avg_sq"] / (1 - group["betas"][1] ** n if applied else 1)
            found[f"step/p{number}"] = torch.tensor(t)
    return {name: value.clone() for name, value in found.items()}


def save_all(rank: int, world_size: int, folder: str) -> dict[str, tuple[list[Tensor], dict[str, Tensor]]]:
    """Save each case; its parameters then, and what it divides by."""
    found = {}
    for case, (name, options, steps) in CASES.items():
        params, optimizer = make(name, options)
        train(rank, params, optimizer, range(steps))
        if hasattr(optimizer, "plan"):
            assert (optimizer.plan.stage.number > 0) == (case in ("switching", "compressed", "onebit_lamb", "local"))
        save_state(optimizer, f"{folder}/{case}")
        found[case] = ([p.detach().clone() for p in params], {} if "stage" in options else divided(optimizer, params))
    return found


Saved = tuple[Path, list[dict[str, tuple[list[Tensor], dict[str, Tensor]]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(RANKS, save_all, str(folder), timeout=240)


def command(*arguments: object, expect: int = 0) -> None:
    assert cli.main([str(argument) for argument in arguments]) == expect


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def check(code: int, said: str, *arguments: object) -> None:
        command(*arguments, expect=code)
        assert re.search(said, text := capsys.readouterr().err), text

    return check


def fresh_adamw(file: Path, values: list[Tensor]) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    params, optimizer = make("AdamW", {})
    assign(params, values)
    optimizer.load_state_dict(torch.load(file, weights_only=True, mmap=True))
    return params, optimizer


@pytest.mark.parametrize("case", CASES)
def test_adamw_goes_on_by_the_moments_that_the_run_went_by(case: str, saved: Saved, tmp_path: Path) -> None:
    folder, ranks = saved
    command("consolidate", folder / case, tmp_path / "adam.pt")
    command("consolidate", folder / case, tmp_path / "adam.safetensors")
    values, expected = ranks[0][case]
    if case in PER_RANK:
        own = [rank[case][1] for rank in ranks]
        assert not torch.equal(own[0]["exp_avg/p0"], own[1]["exp_avg/p0"])
        expected = {name: (value + own[1][name]) / 2 for name, value in expected.items()}
    if CASES[case][1].get("stage"):
        expected = ranks[0]["AdamW"][1]
    params, optimizer = fresh_adamw(tmp_path / "adam.pt", values)
    found = divided(optimizer, params)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-6, atol=0)
        assert value.any()
    if case in UNCOMPRESSED:
        plain_params, plain = make("AdamW", {})
        train(0, plain_params, plain, range(3))
        for p, q in zip(params, plain_params, strict=True):
            for key, value in plain.state[q].items() if p.numel() else ():
                assert torch.equal(optimizer.state[p][key], value)
        train(0, plain_params, plain, range(3, 6))
        train(0, params, optimizer, range(3, 6))
        assert all(torch.equal(p, q) for p, q in zip(params, plain_params, strict=True))
    else:
        train(0, params, optimizer, range(3, 6))
        assert all(torch.isfinite(p).all() for p in params)
    assert [group["lr"] for group in optimizer.param_groups] == [LR, 0.02]
    assert [tuple(group["betas"]) for group in optimizer.param_groups] == [(0.9, 0.999), (0.8, 0.95)]
    by_name = load_file(tmp_path / "adam.safetensors")
    by_number = torch.load(tmp_path / "adam.pt", weights_only=True)["state"]
    assert by_name.keys() - {f"{key}/p3" for key in ("exp_avg", "exp_avg_sq", "step")} == expected.keys()
    for number, row in by_number.items():
        assert all(torch.equal(value, by_name[f"{key}/p{number}"]) for key, value in row.items())
    with safe_open(tmp_path / "adam.safetensors", framework="pt") as file:
        groups = json.loads(file.metadata()["param_groups"])
    assert [p["name"] for group in groups for p in group["params"]] == [f"p{i}" for i in range(5)]
    assert groups[1]["lr"] == 0.02 and groups[0]["params"][0] == {"name": "p0", "shape": [37, 19], "dtype": "float32"}


def test_the_file_is_a_sound_archive_with_aligned_storages(saved: Saved, tmp_path: Path) -> None:
    file = tmp_path / "adam.pt"
    command("consolidate", saved[0] / "zero2", file)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None, "a CRC is wrong"
    for row in torch.load(file, weights_only=True, mmap=True)["state"].values():
        for value in row.values():
            assert value.numel() == 0 or value.untyped_storage().data_ptr() % 64 == 0
            assert value.is_contiguous()
    again = tmp_path / "again.pt"
    torch.save(torch.load(file, weights_only=True), again)
    assert repr(torch.load(again)) == repr(torch.load(file))


def save_still(folder: Path) -> None:
    """A parameter that met no gradient in the warmup stage, and keeps still."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = OnebitAdam(params, freeze_step=1)
    params[0].grad = torch.ones(3)
    optimizer.step()
    params[1].grad = torch.ones(2)
    optimizer.step()
    assert not optimizer.state[params[1]]["exp_avg_sq"].any() and optimizer.state[params[1]]["step"] == 1
    save_state(optimizer, folder)


def test_a_parameter_without_a_variance_is_a_new_one_to_adamw(tmp_path: Path) -> None:
    save_still(tmp_path)
    command("consolidate", tmp_path, tmp_path / "adam.pt")
    state = torch.load(tmp_path / "adam.pt", weights_only=True)["state"]
    assert state[0]["step"] == 2 and state[0]["exp_avg"].all()
    assert state[1]["step"] == 0 and not state[1]["exp_avg"].any()


def test_parameters_called_like_what_is_each_ranks_own(tmp_path: Path) -> None:
    """Inside a local interval "exp_avg/rank0/w" is of "w", outside of it, of "rank0/w"."""
    names, params = ("w", "rank0/w", "rank0/rank0/w"), [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = ZeroOneAdam(list(zip(names, params, strict=True)), lr=0.1, var_freeze_step=2)
    for step in range(6):
        for number, p in enumerate(params):
            p.grad = torch.full((3,), 1.0 + number)
        optimizer.step()
        save_state(optimizer, tmp_path)
        command("consolidate", tmp_path, tmp_path / f"{step}.safetensors")
        found = load_file(tmp_path / f"{step}.safetensors")
        for name, expected in divided(optimizer, params).items():
            kind, number = name.split("/p")
            value, steps = found[f"{kind}/{names[int(number)]}"], found[f"step/{names[int(number)]}"]
            if kind != "step":
                value = value / (1 - optimizer.param_groups[0]["betas"][kind == "exp_avg_sq"] ** steps)
            torch.testing.assert_close(value, expected, check_dtype=False, rtol=1e-4, atol=0)


def halves(folder: Path) -> tuple[nn.Parameter, Any]:
    """A checkpoint with a master copy."""
    param = nn.Parameter(torch.full((4,), 1 / 3, dtype=torch.bfloat16))
    optimizer = ZeroOptimizer([("h", param)], torch.optim.AdamW)
    param.grad = torch.ones_like(param)
    optimizer.step()
    save_state(optimizer, folder)
    return param, optimizer


def test_what_is_left_out_is_told(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    halves(tmp_path / "halves")
    for case, said in (("local", "the mean over the ranks is taken"), ("compressed", "error feedback is left out")):
        command("consolidate", saved[0] / case, tmp_path / f"{case}.pt")
        assert said in capsys.readouterr().err
    command("consolidate", tmp_path / "halves", tmp_path / "halves.pt")
    assert "1 float32 master copies are left out" in capsys.readouterr().err
    command("consolidate", tmp_path / "halves", tmp_path / "halves.safetensors")
    assert capsys.readouterr().err == ""
    assert load_file(tmp_path / "halves.safetensors")["master/h"].dtype == torch.float32


def moments(optimizer: Any, params: list[nn.Parameter]) -> list[Tensor]:
    """Of every parameter that has elements, float32."""
    if isinstance(optimizer, ZeroOptimizer):
        return [optimizer.get_full_state(p, key) for p in params if p.numel() for key in MOMENTS]
    return [optimizer.state[p][key].float() for p in params if p.numel() for key in MOMENTS]


@pytest.mark.invariant(2)
@pytest.mark.parametrize("case", CASES)
def test_load_state_gives_adamw_and_its_like_what_consolidate_writes(case: str, saved: Saved, tmp_path: Path) -> None:
    folder, ranks = saved
    command("consolidate", folder / case, tmp_path / "adam.pt")
    wanted_params, wanted = fresh_adamw(tmp_path / "adam.pt", ranks[0][case][0])
    targets: list[tuple[str, dict[str, Any]]] = [("AdamW", {}), ("FusedAdam", {}), ("Lamb", {})]
    for name, options in [*targets, ("AdamW", {"stage": 2}), ("FusedAdam", {"stage": 1})]:
        if (case, name) == ("uncorrected", "FusedAdam"):
            continue  # to its own class it goes as it is
        params, optimizer = make(name, options)
        load_state(optimizer, folder / case)
        for mine, value in zip(moments(optimizer, params), moments(wanted, wanted_params), strict=True):
            assert torch.equal(mine, value)
        train(0, params, optimizer, range(3, 4))
        assert [group["lr"] for group in optimizer.param_groups] == [LR, 0.02]
        steps = optimizer.metrics()["step"] if options else optimizer.state[params[0]]["step"]
        assert steps == wanted.state[wanted_params[0]]["step"] + 1


# -- a ZeroOptimizer and the optimizer that it wraps -------------------------------------------------------------------

WRAPPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "FusedAdam": (FusedAdam, {"lr": 0.01}),
    "Lamb": (Lamb, {"lr": 0.01}),
}


def make_plain(name: str, zero: bool, **options: Any) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    named = [(f"p{i}", nn.Parameter(torch.randn(shape), requires_grad=i != 1)) for i, shape in enumerate(SHAPES)]
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.02}]
    cls, settings = WRAPPED[name]
    params = [p for _, p in named]
    return params, ZeroOptimizer(groups, cls, **settings, **options) if zero else cls(groups, **settings)


@pytest.mark.invariant(2)
@pytest.mark.parametrize("name", WRAPPED)
@on_ranks(2)
def test_the_next_steps_agree_after_crossing_over_either_way(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    """Three steps of one, then of both, bit for bit; in between ZeRO takes a checkpoint, or a state dict, or gives."""
    for number, (first_is_zero, in_files) in enumerate(((True, True), (False, True), (False, False))):
        params, optimizer = make_plain(name, first_is_zero)
        train(0, params, optimizer, range(3))
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        others, other = make_plain(name, not first_is_zero)
        assign(others, params)
        if in_files:
            save_state(optimizer, tmp_path / str(number))
            load_state(other, tmp_path / str(number))
        else:
            other.load_state_dict(optimizer.state_dict())
        assert [group["lr"] for group in other.param_groups] == [0.005, 0.01]
        for made, its in ((optimizer, params), (other, others)):
            train(0, its, made, range(3, 6))
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True)), number


OUT_OF_RANGE = [
    ("lr", "much", "lr must be of the kind of"),
    ("lr", math.nan, "lr of param group 1 must be >= 0, got nan"),
    ("lr", math.inf, "lr of param group 1 must be finite"),
    ("weight_decay", math.nan, "weight_decay of param group 1 must be >= 0, got nan"),
    ("eps", -1.0, "eps of param group 1 must be >= 0, got -1"),
    ("betas", [1.0, 0.9], r"betas\[0\] must be in \[0, 1\), got"),
    ("amsgrad", True, "amsgrad of param group 1 is True, and there is no max_exp_avg_sq/"),
]


@on_ranks(1)
def test_accelerates_wrapper_is_looked_into(rank: int, world_size: int, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    use_accelerate(rank, world_size)
    Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(OnebitAdam([nn.Parameter(torch.ones(3))]))
    save_state(optimizer, tmp_path)
    load_state(optimizer, tmp_path)
    assert json.loads((tmp_path / "compressopt.index.json").read_text())["header"]["optimizer"] == "OnebitAdam"


@pytest.mark.invariant(27)
def test_what_a_plain_optimizer_cannot_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    params, optimizer = make_plain("AdamW", zero=False)
    train(0, params, optimizer, range(2))
    before = [value.clone() for p in params for value in optimizer.state.get(p, {}).values()]
    halves = [("p", nn.Parameter(torch.ones(4, dtype=torch.bfloat16)))]
    for folder, other in (
        ("onebit", OnebitAdam([nn.Parameter(torch.ones(3))])),
        ("sgd", make_plain("SGD", zero=True)[1]),
    ):
        save_state(other, tmp_path / folder)
        with pytest.raises(CheckpointError, match="compressopt.index.json does not fit"):
            load_state(optimizer, tmp_path / folder)
    shapes = [torch.empty_like(p) for p in params]
    with pytest.raises(CheckpointError, match=r"saved by ZeroOptimizer\(SGD\), which keeps no moments of Adam"):
        load_state(OnebitAdam([nn.Parameter(shape) for shape in shapes]), tmp_path / "sgd")
    save_state(ZeroOptimizer(halves, torch.optim.AdamW), tmp_path / "halves")
    with pytest.raises(CheckpointError, match="master copy of p"):
        load_state(torch.optim.AdamW(halves), tmp_path / "halves")
    save_state(optimizer, tmp_path / "plain")
    file = tmp_path / "plain" / "compressopt.index.json"
    saved = json.loads(file.read_text())
    for key, value, said in OUT_OF_RANGE:
        index = copy.deepcopy(saved)
        index["header"]["param_groups"][1][key] = value
        file.write_bytes(sealed(index))
        with pytest.raises(CheckpointError, match=said):
            load_state(optimizer, tmp_path / "plain")
    after = [value for p in params for value in optimizer.state.get(p, {}).values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_the_optimizer_itself_refuses_changes_nothing(tmp_path: Path) -> None:
    params, optimizer = make_plain("AdamW", False)
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    train(0, params, optimizer, range(3))
    save_state(optimizer, tmp_path)
    others, fused = make_plain("FusedAdam", False)
    train(0, others, fused, range(2))
    before = {name: {p: state[name].clone() for p, state in fused.state.items()} for name in ("exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match="amsgrad must be False"):
        load_state(fused, tmp_path)
    for name, tensors in before.items():
        assert all(torch.equal(fused.state[p][name], tensor) for p, tensor in tensors.items())

    def refuse(*_: Any) -> None:
        raise ValueError("not today")

    _, again = make_plain("AdamW", False)
    train(0, _, again, range(2))
    kept = [state["exp_avg"].clone() for state in again.state.values()]
    again.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(ValueError, match="not today"):
        load_state(again, tmp_path)
    assert all(torch.equal(state["exp_avg"], old) for state, old in zip(again.state.values(), kept, strict=True))


# -- more ways in and out ----------------------------------------------------------------------------------------------

FREEZING: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 5, "fused_warmup": False},
    "OnebitLamb": {"freeze_step": 5},
    "ZeroOneAdam": {**ZERO_ONE, "var_freeze_step": 5},
}


def go_on_compressed(rank: int, world_size: int, folder: str) -> None:
    """Every compressed optimizer from three steps of AdamW's, by each way in."""
    for name, options in FREEZING.items():
        option = next(iter(options))
        for early in (False, True):  # the checkpoint is of a step at which the warmup stage should have ended
            for way in ("AdamW", "zero2", "imported", "adam.pt"):
                params, optimizer = make(name, {**options, option: 3 if early else 5})
                train(rank, params, optimizer, range(1))  # what it has of its own must go
                assign(params, torch.load(f"{folder}/params.pt"))
                if way == "adam.pt":
                    optimizer.load_state_dict(torch.load(f"{folder}/adam.pt", weights_only=True))
                else:
                    load_state(optimizer, f"{folder}/{way}", names=None if way != "imported" else list("abcde"))
                assert optimizer.metrics()["step"] == 3 and optimizer.plan.update_variance
                assert optimizer.freeze_step == (4 if early else 5)
                if way == "AdamW":
                    _, plain = make("AdamW", {})
                    plain.load_state_dict(torch.load(f"{folder}/adam.pt", weights_only=True))
                    first = moments(plain, plain.param_groups[0]["params"] + plain.param_groups[1]["params"])
                assert all(torch.equal(a, b) for a, b in zip(moments(optimizer, params), first, strict=True))
                train(rank, params, optimizer, range(3, 4))
                if name == "OnebitAdam" and not early:
                    others, plain = make("AdamW", {})
                    assign(others, torch.load(f"{folder}/params.pt"))
                    plain.load_state_dict(torch.load(f"{folder}/adam.pt", weights_only=True))
                    train(rank, others, plain, range(3, 4))
                    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
                assert (optimizer.plan.stage.number == 1) == early
                train(rank, params, optimizer, range(4, 12))
                assert all(torch.isfinite(p).all() for p in params)
                assert all(float(optimizer.state[p]["step"]) == 12 for p in params if p.numel())
                if way == "AdamW":
                    after = [p.detach().clone() for p in params]
                assert all(torch.equal(p, q) for p, q in zip(params, after, strict=True)), "another way, another run"


@pytest.mark.invariant(2)
def test_compressed_optimizers_go_on_from_adamw_by_every_way(saved: Saved, tmp_path: Path) -> None:
    folder, ranks = saved
    for case in ("AdamW", "zero2"):
        (tmp_path / case).symlink_to(folder / case)
    command("consolidate", folder / "AdamW", tmp_path / "adam.pt")
    command("import", tmp_path / "adam.pt", tmp_path / "imported")
    torch.save(ranks[0]["AdamW"][0], tmp_path / "params.pt")
    run_ranks(RANKS, go_on_compressed, str(tmp_path), timeout=240)


def test_import_goes_by_places_where_there_are_no_names(tmp_path: Path) -> None:
    """The file of a run with a frozen parameter and one that never met a gradient, as Trainer's optimizer.pt."""

    def model() -> list[nn.Parameter]:
        params = [nn.Parameter(torch.full((size,), 0.5, dtype=torch.bfloat16)) for size in (3, 4, 5, 6)]
        params[1].requires_grad_(False)
        return params

    def step(params: list[nn.Parameter], optimizer: Any) -> None:
        for p in (params[0], params[3]):
            p.grad = torch.full_like(p, 0.25)
        optimizer.step()

    params = model()
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.25)
    step(params, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    command("import", tmp_path / "optimizer.pt", tmp_path / "imported")
    expected = [value.float() for i in (0, 3) for value in map(optimizer.state[params[i]].get, MOMENTS)]
    for make_optimizer in (
        torch.optim.AdamW,
        FusedAdam,
        OnebitAdam,
        lambda groups: ZeroOptimizer(groups, torch.optim.AdamW),
    ):
        others = model()
        other = make_optimizer([{"params": others[:2]}, {"params": others[2:]}])
        load_state(other, tmp_path / "imported", names=["from", "the", "model"])
        assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
        found = moments(other, [others[0], others[3]])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        step(others, other)
        assert others[3].float().ne(0.5).all() and torch.equal(others[2], model()[2])
        save_state(other, tmp_path / "again", names=["from", "the", "model"])  # by their names again
        load_state(other, tmp_path / "again", names=["from", "the", "model"])
    with pytest.raises(ValueError, match=r"its parameter group1.1 has shape \[6\]"):
        load_state(OnebitAdam([{"params": params[:2]}, {"params": params[2:3]}]), tmp_path / "imported")


def test_what_consolidate_writes_comes_back_with_its_names(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved
    param, optimizer = halves(tmp_path / "halves")
    for case in ("halves", "zero2", "AdamW"):
        source = tmp_path if case == "halves" else folder
        command("consolidate", source / case, tmp_path / f"{case}.safetensors")
        command("import", tmp_path / f"{case}.safetensors", tmp_path / f"{case} again")
        command("consolidate", tmp_path / f"{case} again", tmp_path / "again.safetensors", "--force")
        again = tmp_path / "again.safetensors"
        assert again.read_bytes() == (tmp_path / f"{case}.safetensors").read_bytes()
    fresh = ZeroOptimizer([("h", nn.Parameter(param.detach().clone()))], torch.optim.AdamW)
    load_state(fresh, tmp_path / "halves again")
    master = fresh.get_full_param(fresh.param_groups[0]["params"][0])
    assert torch.equal(master, optimizer.get_full_param(param)) and master.ne(param).all()
    with pytest.raises(ValueError, match="parameter {'name': 'p0'"):
        load_state(make("AdamW", {})[1], tmp_path / "zero2 again", names=list("abcde"))


def test_import_refuses_what_is_no_state_of_adamw(saved: Saved, tmp_path: Path, refused: Any) -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(3))], momentum=0.9)
    sgd.param_groups[0]["params"][0].grad = torch.ones(3)
    sgd.step()
    _, onebit = make("OnebitAdam", {})
    with onebit.state_in_shards():
        stub = onebit.state_dict()
    files = {"sgd.pt": sgd.state_dict(), "stub.pt": stub, "own.pt": onebit.state_dict(), "model.pt": {"w": 1}}
    for name, contents in files.items():
        torch.save(contents, tmp_path / name)
    for name, value in {"wide": torch.ones(1).expand(10**9), "shared": torch.ones(1000)}.items():
        group = {**torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()["param_groups"][0], "params": [0]}
        moments = {"step": torch.tensor(1.0), "exp_avg": value, "exp_avg_sq": value.view(-1)}
        torch.save({"state": {0: moments}, "param_groups": [group]}, tmp_path / f"{name}.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    for name, said in {
        "sgd.pt": "has \\['momentum_buffer'\\], and must have step, exp_avg and exp_avg_sq",
        "stub.pt": "load the checkpoint in its folder with hf_compressopt.load_state",
        "own.pt": "load the checkpoint in its folder with hf_compressopt.load_state",
        "model.pt": "is not an optimizer's state dict",
        "wide.pt": "its tensors share memory: 4000000000 bytes of them lie in a storage of 4 bytes",
        "shared.pt": "its tensors share memory: 8000 bytes of them lie in a storage of 4000 bytes",
        "junk.pt": "junk.pt is not readable by torch.load",
        "junk.safetensors": "junk.safetensors is not readable as safetensors",
    }.items():
        refused(1, said, "import", tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    command("import", tmp_path / "nothing.pt", tmp_path / "out", expect=2)
    command("consolidate", saved[0] / "AdamW", tmp_path / "adam.pt")
    command("import", tmp_path / "adam.pt", tmp_path / "out")
    refused(1, "holds a checkpoint already", "import", tmp_path / "adam.pt", tmp_path / "out")
    command("import", tmp_path / "adam.pt", tmp_path / "out", "--force")


@pytest.mark.invariant(27)
def test_refusals_name_the_file_and_leave_nothing_behind(saved: Saved, tmp_path: Path, refused: Any) -> None:
    folder, _ = saved
    out = tmp_path / "adam.pt"
    refused(2, "holds no checkpoint", "consolidate", tmp_path, out)
    refused(1, "must end in .safetensors", "consolidate", folder / "zero1", tmp_path / "adam.zip")
    refused(1, "No such file or directory", "consolidate", folder / "zero1", tmp_path / "nowhere" / "adam.pt")
    out.write_text("mine")
    refused(1, f"{out} exists: give another name, or --force", "consolidate", folder / "zero1", out)
    assert out.read_text() == "mine"
    command("consolidate", folder / "zero1", out, "--force")
    assert torch.load(out, weights_only=True)["state"]
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(3))], momentum=0.9)
    save_state(sgd, tmp_path / "sgd")
    save_state(sgd, tmp_path / "sgd", prefix="compressopt_1")
    refused(1, "give --prefix, one of compressopt, compressopt_1", "consolidate", tmp_path / "sgd", out, "--force")
    said = r"compressopt_1.index.json does not fit: it was saved by ZeroOptimizer\(SGD\), which keeps no moments"
    refused(1, said, "consolidate", tmp_path / "sgd", out, "--force", "--prefix", "compressopt_1")
    save_still(tmp_path / "damaged")
    shard = next((tmp_path / "damaged").glob("*.safetensors"))
    refused(1, "is a shard of the checkpoint itself", "consolidate", tmp_path / "damaged", shard, "--force")
    data = bytearray(shard.read_bytes())
    data[-2] ^= 1  # of the steps
    shard.write_bytes(bytes(data))
    for suffix in (".pt", ".safetensors"):
        kept = out.read_bytes()
        refused(1, f"{shard.name} is damaged", "consolidate", tmp_path / "damaged", out.with_suffix(suffix), "--force")
        assert out.read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["adam.pt"]


def consolidate_one(rank: int, world_size: int, folder: str) -> float:
    """By how many MiB a process grows at most."""
    return peak_beyond(lambda: command("consolidate", folder, f"{folder}/adam.safetensors"))


@pytest.mark.full
@pytest.mark.usefixtures("fresh_ranks")
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A state of 320 MB, whose moments are all scaled, within 64 MB."""
    named = [("a", nn.Parameter(torch.ones(25_000_000))), ("b", nn.Parameter(torch.ones(15, 10**6)))]
    optimizer = OnebitAdam(named, freeze_step=3)
    optimizer._step = 3
    for state in optimizer._states:
        state.exp_avg.fill_(0.5)
        state.exp_avg_sq.fill_(0.25)
        state.steps.fill_(3)
    save_state(optimizer, tmp_path)
    assert run_ranks(1, consolidate_one, str(tmp_path), timeout=240)[0] < 64e6 / MIB
    with safe_open(tmp_path / "adam.safetensors", framework="pt") as file:
        value = file.get_tensor("exp_avg_sq/b")
    assert value.shape == (15, 10**6) and value[-1, -1] == pytest.approx(0.25 * (1 - 0.999**3))
