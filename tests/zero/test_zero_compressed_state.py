"""State dicts and checkpoints of ZeRO with small messages: masters, what the parameters lag behind, errors."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_compressopt import ZeroOptimizer, load_state, save_state
from hf_compressopt.checkpoint.partitioned import error_tensors
from hf_compressopt.format.index import CheckpointError
from tests.support.harness import on_ranks, run_ranks
from tests.support.trainer_runs import same_on_all_ranks
from tests.support.zero_runs import INT4, Case, Net, averaged, bits, different, gradients, loss_of, run_steps
from tests.zero.test_zero_state import fresh


def masters_of(model: Net, optimizer: ZeroOptimizer) -> list[Tensor]:
    return [optimizer.get_full_param(p) for p in model.parameters() if p.requires_grad]


def trained(model: Net) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def errors_of(optimizer: ZeroOptimizer) -> list[Tensor]:
    names = [known.name for known in optimizer.partition.known]
    return [tensor.local.detach() for tensor in error_tensors(optimizer.partition, names)]


def continue_from(rank: int, world_size: int, options: dict[str, Any], load: str, save: str) -> tuple[Any, ...]:
    """Load, if there is something, and return what was loaded; then train, save, and return what was saved."""
    model, optimizer = fresh(Case("adamw", {**INT4, **options}))
    loaded: Any = None
    if load:
        model.load_state_dict(torch.load(f"{load}/model.pt"))  # the masters, as a saved model has
        load_state(optimizer, load)
        assert same_on_all_ranks(model.parameters())
        loaded = trained(model), masters_of(model, optimizer), errors_of(optimizer)
    steps = range(optimizer.steps, optimizer.steps + 3)
    run_steps(rank, Case(), model, optimizer, steps)
    save_state(optimizer, save)
    with optimizer.masters_in_parameters():
        torch.save(model.state_dict(), f"{save}/model.pt") if rank == 0 else None
        torch.distributed.barrier()
    return loaded, (trained(model), masters_of(model, optimizer), errors_of(optimizer))


@pytest.mark.invariant(22)
def test_another_number_of_ranks_goes_on_from_the_same_masters_and_parameters(tmp_path: Path) -> None:
    plan = [(2, {"reduce_bucket_size": 600}), (3, {"reduce_bucket_size": 900, "stage": 1}), (2, {}), (1, {})]
    folders = ["", *(str(tmp_path / str(number)) for number in range(len(plan)))]
    saved: list[Any] = []
    for (world_size, options), load, save in zip(plan, folders[:-1], folders[1:], strict=True):
        results = run_ranks(world_size, continue_from, options, load, save)
        for loaded, _ in results if load else ():
            replicas, masters, errors = loaded
            assert list(different(saved[0][1], masters)) == []
            if world_size > 1:
                assert list(different(saved[0][0], replicas)) == [] != list(different(masters, replicas))
                means = [torch.stack(old).mean(0) for old in zip(*(row[2] for row in saved), strict=True)]
                largest = max(float(mean.abs().max()) for mean in means)
                assert largest > 0
                for error, mean in zip(errors, means, strict=True):  # rounded to 8 bits once more, in other blocks
                    assert (error - mean).abs().max() <= largest / 250
            else:
                assert errors == [] and list(different(masters, replicas)) == []
        saved = [result for _, result in results]
    assert all(math.isfinite(float(master.sum())) for master in saved[0][1])


@pytest.mark.invariant(2)
@on_ranks(2)
def test_masters_cross_over_to_adamw_and_back(rank: int, world_size: int, tmp_path: Path) -> None:
    """From small messages to AdamW, and to ZeRO without them, and back."""
    case = Case("adamw", {**INT4, "reduce_bucket_size": 600})
    model, optimizer = fresh(case)
    run_steps(rank, case, model, optimizer, range(3))
    masters, replicas = masters_of(model, optimizer), trained(model)
    save_state(optimizer, tmp_path)
    with optimizer.masters_in_parameters(), pytest.raises(RuntimeError, match="save_state.. inside masters_in"):
        save_state(optimizer, tmp_path)
    state = optimizer.state_dict()
    with optimizer.masters_in_parameters():
        with pytest.raises(CheckpointError, match="load_state.. inside masters_in"):
            load_state(optimizer, tmp_path)
        with pytest.raises(RuntimeError, match="load_state_dict.. inside masters_in"):
            optimizer.load_state_dict(state)

    plain_model, zero_model = Net(), Net()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, weight_decay=0.1)
    zero = ZeroOptimizer(zero_model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    for other_model, other in ((plain_model, plain), (zero_model, zero)):
        other_model.load_state_dict(model.state_dict())  # the replicas, which the masters of the checkpoint replace
        load_state(other, tmp_path)
        assert list(different(masters, trained(other_model))) == [] != list(different(replicas, trained(other_model)))
    with pytest.raises(ValueError, match="with masters that are ahead of the parameters: make the optimizer with it"):
        zero.load_state_dict(optimizer.state_dict())
    run_steps(rank, Case(), zero_model, zero, range(3, 5))
    params = [p for p in plain_model.parameters() if p.requires_grad]
    for step in range(3, 5):
        for p, grad in zip(
            params, averaged(gradients(plain_model, loss_of(plain_model, rank, step)), params), strict=True
        ):
            p.grad = grad
        plain.step()
    assert list(different(bits(plain_model), bits(zero_model))) == []

    for saved in (plain, zero):
        save_state(saved, f"{tmp_path}/back")
        again, small = fresh(case)
        run_steps(rank, case, again, small, range(2))  # errors and masters that have to go
        again.load_state_dict(plain_model.state_dict())
        load_state(small, f"{tmp_path}/back")
        assert list(different(masters_of(again, small), [p.detach() for p in params])) == [] and small.steps == 5
        assert all(float(error.abs().sum()) == 0 for error in errors_of(small))
        run_steps(rank, case, again, small, range(5, 7))
        assert same_on_all_ranks(again.parameters())

    half = Case("adamw", {**INT4, "reduce_bucket_size": 600}, dtype=torch.bfloat16)
    model, optimizer = fresh(half)
    run_steps(rank, half, model, optimizer, range(3))
    save_state(optimizer, f"{tmp_path}/half")
    other_model, other = fresh(Case("adamw", dtype=torch.bfloat16))
    other_model.load_state_dict(model.state_dict())
    load_state(other, f"{tmp_path}/half")
    masters = masters_of(model, optimizer)
    assert list(different(masters, masters_of(other_model, other))) == []
    assert list(different([m.bfloat16() for m in masters], trained(other_model))) == []
