"""Checkpoints saved by N ranks and loaded by M: what stays exact, what is averaged, the memory; training goes on."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

import hf_compressopt
from hf_compressopt import OnebitAdam, ZeroOptimizer, load_state, save_state
from hf_compressopt.format.index import CheckpointError
from tests.oracles.stored import in_float32
from tests.support import harness
from tests.support.family import assign
from tests.support.forms import in_form
from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.made_once import made_once
from tests.support.memory import MIB, peak_beyond

SHAPES = [(15, 7), (11,), (0, 4), (5, 3, 2), (1,), (40,)]
SAVED_AT, STEPS = 13, 24
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 6, "form": "float32"},
    "compact": {"freeze_step": 6},  # OnebitAdam by default: its errors are rounded on another number of ranks
    "OnebitLamb": {"freeze_step": 6},
    # at SAVED_AT the interval is 4 steps, and the ranks are in the middle of one
    "ZeroOneAdam": {"var_freeze_step": 6, "var_update_scaler": 4, "local_step_scaler": 3, "local_step_clipper": 4},
    "zero1": {"stage": 1, "reduce_bucket_size": 128},
    "zero2": {"stage": 2, "reduce_bucket_size": 200},
}
# saved by, loaded by
GOING_ON = [(1, 3), (2, 1), (3, 2), (3, 4), (4, 2)]
GOING_BACK = [*GOING_ON, (4, 1)]
COMPRESSED = [name for name in OPTIMIZERS if not name.startswith("zero")]


def make(name: str, **options: Any) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "zero2" else torch.float32
    named = [(f"layer.{i}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for i, shape in enumerate(SHAPES)]
    options = {**OPTIMIZERS[name], **options}
    groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:-1], "weight_decay": 1e-3}]
    if name.startswith("zero"):
        groups.append({"params": named[-1:]})
        return [p for _, p in named], hf_compressopt.ZeroOptimizer(groups, torch.optim.AdamW, lr=0.05, **options)
    groups.append({"params": named[-1:], "non_freeze": True})
    name = "OnebitAdam" if name == "compact" else name
    groups[0]["exp_avg_mask"] = (torch.arange(7) < 6).float() if name == "OnebitAdam" else torch.ones(1)
    groups[0]["params"], groups[1]["params"] = named[:1], named[1:-1]
    settings = {"lr": 0.05, "bucket_cap_mb": 0.0002, "scale_block": 16, **options}
    cls = in_form(getattr(hf_compressopt, name), settings.pop("form", None))
    return [p for _, p in named], cls(groups, **settings)


def targets() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def loss_of(params: list[nn.Parameter]) -> float:
    return float(sum((p.detach().float() - t).square().sum() for p, t in zip(params, targets(), strict=True)))


def train(rank: int, world_size: int, params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        for p, target in zip(params, targets(), strict=True):
            p.grad = (p.detach().float() - target + 0.3 * torch.randn(p.shape, generator=generator)).to(p.dtype)
            if hasattr(optimizer, "plan") and optimizer.plan.reduce_grads:
                p.grad.mul_(1 / world_size)
                dist.all_reduce(p.grad)
        optimizer.step()


def whole(optimizer: Any, params: list[nn.Parameter]) -> list[Tensor]:
    if hasattr(optimizer, "averaged_parameters"):
        with optimizer.averaged_parameters():
            return [p.detach().clone() for p in params]
    return [p.detach().clone() for p in params]


def save_each(rank: int, world_size: int, folder: str) -> None:
    """Train, save, and go on; a file beside the checkpoint has the parameters at the save and the loss at the end."""
    for name in OPTIMIZERS:
        params, optimizer = make(name)
        train(rank, world_size, params, optimizer, range(SAVED_AT))
        save_state(optimizer, f"{folder}/{name}-{world_size}")
        weights = whole(optimizer, params)
        train(rank, world_size, params, optimizer, range(SAVED_AT, STEPS))
        assign(params, whole(optimizer, params))
        if rank == 0:
            torch.save((weights, loss_of(params)), f"{folder}/{name}-{world_size}.pt")


def load_each(rank: int, world_size: int, most: int, folder: str) -> None:
    """Load what each number of ranks has saved, save it again, and go on beside the uninterrupted run."""
    for name in OPTIMIZERS:
        for saved_by in range(1, most + 1):
            params, optimizer = make(name)
            weights, end = torch.load(f"{folder}/{name}-{saved_by}.pt")
            assign(params, weights)
            load_state(optimizer, f"{folder}/{name}-{saved_by}")
            save_state(optimizer, f"{folder}/{name}-{saved_by}-{world_size}")
            if (saved_by, world_size) in GOING_ON:
                at_save, ends = loss_of(params), (end, torch.load(f"{folder}/{name}-{world_size}.pt")[1])
                train(rank, world_size, params, optimizer, range(SAVED_AT, STEPS))
                assign(params, whole(optimizer, params))
                assert loss_of(params) < at_save
                assert 0.85 * min(ends) <= loss_of(params) <= 1.15 * max(ends), (saved_by, world_size, ends)


def load_back(rank: int, world_size: int, most: int, folder: str) -> None:
    """Load what others have saved again of the checkpoints of this number of ranks, and save it once more."""
    for name in OPTIMIZERS:
        for between in (to for saved_by, to in GOING_BACK if saved_by == world_size and to <= most):
            params, optimizer = make(name)
            load_state(optimizer, f"{folder}/{name}-{world_size}-{between}")
            save_state(optimizer, f"{folder}/{name}-{world_size}-{between}-{world_size}")


class Matrix:
    """Checkpoints in a folder, by up to so many ranks, whose runs went on as they must."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.ranks = folder, range(1, most + 1)

    @staticmethod
    def make(folder: Path, most: int) -> None:
        for work, arguments in ((save_each, ()), (load_each, (most,)), (load_back, (most,))):
            for ranks in range(1, most + 1):
                run_ranks(ranks, work, *arguments, str(folder), timeout=180.0)

    def contents(self, name: str, *ranks: int | str) -> dict[str, Tensor]:
        return contents(self.folder / "-".join([name, *map(str, ranks)]))

    def paths(self, saved_by: int) -> list[list[int]]:
        """N -> M, and N -> M -> N where that was tried."""
        there = [[saved_by, loaded_by] for loaded_by in self.ranks]
        return [*there, *([*path, saved_by] for path in there if tuple(path) in GOING_BACK)]


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.full)])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    most: int = request.param
    return Matrix(made_once(tmp_path_factory, f"matrix-{most}", partial(Matrix.make, most=most)), most)


def contents(folder: Path) -> dict[str, Tensor]:
    """The values of every tensor of a checkpoint; compact ones are decoded."""
    found = stored(folder)
    if not any(tensor.dtype == torch.uint8 for tensor in found.values()):
        return found
    index = json.loads((folder / "compressopt.index.json").read_text())
    arrays = in_float32({name: tensor.numpy() for name, tensor in found.items()}, index)
    return {name: torch.as_tensor(array) for name, array in arrays.items()}


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, put together by safetensors' own reader."""
    index = json.loads((folder / "compressopt.index.json").read_text())
    found = {}
    for name, entry in index["tensors"].items():
        parts = []
        for piece in entry["pieces"]:
            with safe_open(folder / index["shards"][piece["shard"]]["file"], framework="pt") as shard:
                parts.append(shard.get_tensor(piece["key"]).reshape(-1))
        found[name] = torch.cat(parts).view(entry["shape"])
    return found


RANK = r"(^|/)rank\d+(/|$)"


def families(tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Tensors of each rank's own, by the name without the rank, in the order of the ranks."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(tensors):
        if re.search(RANK, name):
            found.setdefault(re.sub(r"rank\d+", "rank*", name), []).append(tensors[name])
    return found


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


ERRORS = {"group0": 105, "group1": 42}  # of each group that is compressed: its elements


def resharded(name: str, tensors: dict[str, Tensor], saved_by: int, loaded_by: int) -> dict[str, Tensor]:
    """Contents of a checkpoint of some ranks that others have loaded and saved again."""
    if saved_by == loaded_by:
        return tensors
    own = families(tensors)
    found = {key: tensor for key, tensor in tensors.items() if not re.search(RANK, key)}
    if saved_by == 1 and name in COMPRESSED and "server_error/group0" not in tensors:  # it has no errors
        own |= {f"worker_error/{group}/rank*": [torch.zeros(numel)] for group, numel in ERRORS.items()}
        found |= {f"server_error/{group}": torch.zeros(numel) for group, numel in ERRORS.items()}
    for key, each in own.items():
        found |= {key.replace("*", str(rank)): mean(each).to(each[0].dtype) for rank in range(loaded_by)}
    return found


@pytest.mark.invariant(22)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_ranks_share_is_exact_and_what_each_has_of_its_own_becomes_the_mean(name: str, matrix: Matrix) -> None:
    for saved_by in matrix.ranks:
        original = matrix.contents(name, saved_by)
        own = families(original)
        assert any(tensor.any() for tensor in original.values())
        assert all(tensors[0].any() for key, tensors in own.items() if "layer.3" in key or "_error" in key)
        if name == "ZeroOneAdam":
            assert {"exp_avg/rank*/layer.0", "local_update/rank*/layer.3", "param/rank*/layer.1"} <= own.keys()
            assert saved_by == 1 or not torch.equal(*own["param/rank*/layer.0"][:2]), "the ranks are not apart"
        for path in matrix.paths(saved_by):
            expected, found = original, matrix.contents(name, *path)
            for ranks in zip(path, path[1:], strict=False):
                expected = resharded(name, expected, *ranks)
            assert found.keys() == expected.keys()
            assert all(are_equal(name, key, found[key], expected[key]) for key in found), path


def are_equal(name: str, key: str, found: Tensor, expected: Tensor) -> bool:
    """A compact state rounds its errors anew on another number of ranks, each time by half a step of a block."""
    if name in ("compact", "ZeroOneAdam") and "_error/" in key and expected.numel():
        return bool(((found - expected).abs() <= 2 * float(expected.abs().max()) / 253).all())
    return torch.equal(found, expected)


def one_step_of_one_rank(rank: int, world_size: int, name: str, folder: str) -> None:
    """A single rank sends the errors of two: with its first message, once; until then they are kept."""
    tensors = contents(Path(folder))
    params, optimizer = make(name)
    train(rank, world_size, params, optimizer, range(5))
    load_state(optimizer, folder)
    state_dict = optimizer.state_dict()
    assert [error.numel() for error in state_dict["compressopt"]["server_error"]] == [105, 42, 0]
    save_state(optimizer, folder + "-again")
    params, optimizer = make(name)
    load_state(optimizer, folder + "-again")
    others, other = make(name)
    other.load_state_dict(state_dict)
    for tensor, made in ((params, optimizer), (others, other)):
        for p in tensor:
            p.grad = torch.full_like(p, 0.5)
        made.step()
        residual = mean(families(tensors)["worker_error/group1/rank*"]) + tensors["server_error/group1"].double()
        offset = 0
        for number, p in list(enumerate(tensor))[1:-1]:
            part = residual[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
            expected = 0.9 * tensors[f"exp_avg/layer.{number}"].double() + 0.1 * 0.5 + part
            torch.testing.assert_close(made.state[p]["exp_avg"].double(), expected, atol=1e-6, rtol=1e-6)
        assert all(error.numel() == 0 for error in made.state_dict()["compressopt"]["worker_error"])
    made.load_state_dict(made.state_dict())
    load_state(made, folder + "-again")
    made.load_state_dict(make(name)[1].state_dict())  # of a run that has none
    assert all(error.numel() == 0 for error in made.state_dict()["compressopt"]["worker_error"])


@pytest.mark.invariant(23)
@pytest.mark.parametrize("name", ["OnebitAdam", "compact"])
def test_one_rank_keeps_the_errors_of_more_and_sends_them_once(name: str, matrix: Matrix) -> None:
    run_ranks(1, one_step_of_one_rank, name, str(matrix.folder / f"{name}-2"))


def save_compact(rank: int, world_size: int, name: str, folder: str) -> list[Tensor]:
    """Save a compact state, and what is loaded of it, as it is or with messages that are cut otherwise.

    Returns the tensors of the second group as they lie in memory.
    """
    params, optimizer = make(name)
    train(rank, world_size, params, optimizer, range(SAVED_AT))
    save_state(optimizer, f"{folder}/saved")
    for how, options in (("again", {}), ("decoded", {"scale_block": 8})):
        _, other = make(name, **options)
        load_state(other, f"{folder}/saved")
        save_state(other, f"{folder}/{how}")
    moments, errors = optimizer._states[1].moments, optimizer._states[1].errors
    momentum = [average.messages for average in moments.messages] or [moments.exp_avg]
    return [moments.codes, moments.tops, errors.worker, torch.cat(momentum)]


@pytest.mark.parametrize("name", ["compact", "ZeroOneAdam"])
def test_files_hold_the_bytes_that_memory_holds(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(3, save_compact, name, str(tmp_path))
    found, again = stored(tmp_path / "saved"), stored(tmp_path / "again")
    assert found.keys() == again.keys() and all(torch.equal(found[key], again[key]) for key in found)
    for rank, (codes, tops, worker_error, momentum) in enumerate(ranks):
        whole = torch.cat([found[f"exp_avg_sq_code/layer.{number}"].view(-1) for number in range(1, 5)])
        assert torch.equal(whole, codes) and "exp_avg_sq/layer.1" not in found
        assert torch.equal(found["exp_avg_sq_top/group1"], tops) and worker_error.dtype == torch.uint8
        assert torch.equal(found[f"worker_error/group1/rank{rank}"], worker_error)
        in_messages = found.get("exp_avg_message/group1")
        if name == "ZeroOneAdam":  # whose momentum is each rank's own at this moment
            own = [found[f"exp_avg/rank{rank}/layer.{number}"].view(-1) for number in range(1, 5)]
            assert torch.equal(torch.cat(own), momentum) and in_messages is None
        else:
            assert torch.equal(in_messages, momentum) and "exp_avg/layer.1" not in found
    decoded, values = contents(tmp_path / "decoded"), contents(tmp_path / "saved")
    assert decoded.keys() == values.keys() and all(torch.equal(decoded[key], values[key]) for key in values)


def load_in_another_stage(rank: int, world_size: int, folder: str) -> None:
    _, optimizer = make("zero1", stage=2, reduce_bucket_size=1000)
    load_state(optimizer, folder)
    save_state(optimizer, folder + "-other")


@pytest.mark.invariant(2)
def test_zero_changes_its_stage_and_its_buckets_with_the_number_of_ranks(matrix: Matrix) -> None:
    run_ranks(3, load_in_another_stage, str(matrix.folder / "zero1-2"))
    before, after = matrix.contents("zero1", 2), matrix.contents("zero1", "2-other")
    assert before.keys() == after.keys() and "exp_avg/layer.0" in before
    assert all(torch.equal(before[name], after[name]) for name in before)


LONG = 2_500_001  # elements, of 4 bytes: two whole blocks under a checksum, and a part of one


def save_long(rank: int, world_size: int, folder: str) -> None:
    p = nn.Parameter(torch.zeros(LONG))
    optimizer = ZeroOptimizer([("p", p)], torch.optim.SGD, lr=1.0, momentum=0.9)
    p.grad = torch.arange(LONG, dtype=torch.float32)
    optimizer.step()
    save_state(optimizer, f"{folder}/zero")
    compressed = in_form(OnebitAdam, "float32")([("p", p)], freeze_step=1)
    compressed.state_dict()["compressopt"]["worker_error"][0].copy_(torch.arange(LONG) * (1 - 2 * rank) + 1)
    save_state(compressed, f"{folder}/onebit")


def load_long(rank: int, world_size: int, folder: str) -> None:
    p = nn.Parameter(torch.zeros(LONG))
    optimizer = ZeroOptimizer([("p", p)], torch.optim.SGD, lr=1.0, momentum=0.9)
    load_state(optimizer, f"{folder}/zero")
    for piece in optimizer.state_dict()["state"][0]["pieces"]:
        expected = torch.arange(piece["start"], piece["stop"], dtype=torch.float32)
        assert torch.equal(piece["state"]["momentum_buffer"], expected)
    compressed = in_form(OnebitAdam, "float32")([("p", p)], freeze_step=1)
    load_state(compressed, f"{folder}/onebit")
    assert torch.equal(compressed.state_dict()["compressopt"]["worker_error"][0], torch.ones(LONG))


def test_tensors_of_many_blocks_are_read_in_parts(tmp_path: Path) -> None:
    run_ranks(2, save_long, str(tmp_path))
    run_ranks(3, load_long, str(tmp_path))


def make_with_experts(rank: int, world_size: int, zero: bool) -> Any:
    own = [dist.new_group([number]) for number in range(world_size)][rank]
    groups = [{"params": [("a", nn.Parameter(torch.zeros(9)))]}]
    groups.append({"params": [("b", nn.Parameter(torch.zeros(5)))], "process_group": own})
    return ZeroOptimizer(groups, torch.optim.AdamW) if zero else OnebitAdam(groups)


def save_experts(rank: int, world_size: int, folder: str) -> None:
    for zero in (False, True):
        save_state(make_with_experts(rank, world_size, zero), f"{folder}/{zero}")


def load_experts(rank: int, world_size: int, folder: str, zero: bool) -> None:
    load_state(make_with_experts(rank, world_size, zero), f"{folder}/{zero}")


def test_param_groups_with_a_process_group_of_their_own_want_as_many_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_experts, str(tmp_path))
    for zero in (False, True):
        run_ranks(2, load_experts, str(tmp_path), zero)
        for text in run_ranks_expecting_error(3, load_experts, str(tmp_path), zero).values():
            assert "saved by 2 rank(s) and this run has 3" in text and "param groups [1]" in text, text
    with pytest.raises(CheckpointError, match="process_group of its own"):
        load_state(torch.optim.AdamW([nn.Parameter(torch.zeros(n)) for n in (9, 5)]), tmp_path / "False")


SIDE, COUNT = 1024, 30  # 30 parameters of 4 MiB: with Adam's two moments a checkpoint of 240 MiB


def sharded() -> Any:
    params = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(COUNT)]
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, stage=1, lr=1e-3)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save(rank: int, world_size: int, directory: str) -> int:
    save_state(sharded(), directory)
    return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))


def load(rank: int, world_size: int, directory: str) -> tuple[int, float]:
    """Bytes of this rank's share, and by how many MiB it grew at most."""
    optimizer = sharded()
    states = (part.state for part in optimizer.partition.parts())
    held = sum(t.numel() * t.element_size() for state in states for key, t in state.items() if key != "step")
    return held, peak_beyond(lambda: load_state(optimizer, directory))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's /proc")
def test_a_load_grows_by_the_ranks_own_share_and_64_mb_at_most(tmp_path: Path) -> None:
    written = run_ranks(4, save, str(tmp_path / "checkpoint"), timeout=240)[0]
    assert written > COUNT * SIDE**2 * 8
    harness._pool.kill()  # allocators of fresh processes have kept nothing
    for held, grown in run_ranks(2, load, str(tmp_path / "checkpoint"), timeout=240):
        assert abs(held - written / 2) < 8 * MIB, "the share is not a half"
        assert grown <= held / MIB + 64, f"grew by {grown:.0f} MiB for a share of {held / MIB:.0f}"
