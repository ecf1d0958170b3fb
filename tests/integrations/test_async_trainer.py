"""`--optim_args async_save=true`: Trainer rotates, pushes and resumes whole checkpoints only."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_compressopt import wait_for_saves
from tests.checkpoint.test_async_save import held_back
from tests.support.harness import on_ranks, run_ranks
from tests.support.trainer_runs import OLD_HOST, Run, equal_params, make_trainer

SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
OPTIONS = {"onebit_adam": "freeze_step=3,bucket_cap_mb=0.02,scale_block=256", "zero2_adamw": "bucket_cap_mb=0.02"}


def is_whole(checkpoint: Path) -> bool:
    return (checkpoint / "compressopt.index.json").is_file()


def watch(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """Train, and look at the folders whenever Trainer has saved; before that no shard is begun in the background."""
    trainer = make_trainer(rank, world_size, run)
    from transformers import TrainerCallback

    folder, seen = Path(run.arguments["output_dir"]), []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            dist.barrier()
            seen.append([(path.name, is_whole(path)) for path in sorted(folder.glob("checkpoint-*"))])
            dist.barrier()
            if state.global_step == state.max_steps:  # Trainer itself has to wait for this one
                threading.Timer(0.3, gate.set).start()
                return
            gate.set()
            wait_for_saves()
            gate.clear()

    trainer.add_callback(Look())
    with held_back() as gate:
        if "async_save" not in run.arguments["optim_args"]:
            gate.wait = lambda timeout: True
        torch.manual_seed(3)
        trainer.train(resume_from_checkpoint=run.resume)
        params = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        return {"params": params, "seen": seen, "whole": [is_whole(path) for path in folder.glob("checkpoint-*")]}


@pytest.mark.parametrize(
    ("name", "best"), [("onebit_adam", True), pytest.param("zero2_adamw", False, marks=pytest.mark.full)]
)
def test_what_is_replaced_goes_when_the_new_one_is_whole(name: str, best: bool, tmp_path: Path) -> None:
    arguments = {**SAVING, "optim": name, "save_total_limit": 1, "load_best_model_at_end": best, "learning_rate": 1e-3}

    def run(directory: str, async_save: str, **more: Any) -> dict[str, Any]:
        optim_args = f"{OPTIONS[name]},async_save={async_save}" if async_save else OPTIONS[name]
        given = {**arguments, "optim_args": optim_args, "output_dir": str(tmp_path / directory)}
        return run_ranks(2, watch, Run(given, **more), timeout=120)[0]

    usual, later = run("usual", "", dropout=0.0), run("later", "true", dropout=0.0)
    assert equal_params(usual["params"], later["params"])
    for number, seen in enumerate(later["seen"]):
        step = 2 * (number + 1)
        assert (f"checkpoint-{step}", False) in seen, "it was not written in the background"
        assert step == 2 or any(whole for _, whole in seen), "the only whole checkpoint is gone"
        assert len(seen) <= (3 if best else 2)
    kept = [sorted(path.name for path in (tmp_path / d).glob("checkpoint-*")) for d in ("usual", "later")]
    assert kept[0] == kept[1] and len(kept[1]) == 1
    assert later["whole"] == [True]
    checkpoint = tmp_path / "later" / kept[1][0]
    assert len(list(checkpoint.glob("compressopt-*.safetensors"))) == 2
    assert (checkpoint / "optimizer.pt").stat().st_size < 10_000


def best_on_a_slow_disk(rank: int, world_size: int, arguments: dict[str, Any]) -> str | None:
    """Train; rank 0 makes the folder of a checkpoint late, after the other rank has come out of save_model."""
    trainer = make_trainer(rank, world_size, Run(arguments, dropout=0.0))
    write = trainer._save

    def write_late(*args: Any, **kwargs: Any) -> None:
        time.sleep(1.0)
        write(*args, **kwargs)

    trainer._save = write_late
    trainer.train()
    return trainer.state.best_model_checkpoint


@pytest.mark.parametrize("async_save", [pytest.param("false", marks=pytest.mark.full), "true"])
def test_all_ranks_know_the_best_checkpoint(async_save: str, tmp_path: Path) -> None:
    """Each rank finds the best checkpoint by its folder, before all ranks load it behind a barrier."""
    optim = {"optim": "onebit_adam", "optim_args": f"{OPTIONS['onebit_adam']},async_save={async_save}"}
    arguments = {**SAVING, **optim, "output_dir": str(tmp_path), "max_steps": 4, "load_best_model_at_end": True}
    best = run_ranks(2, best_on_a_slow_disk, arguments, timeout=120)
    assert best[0] == best[1] == str(tmp_path / "checkpoint-4")


def resume(rank: int, world_size: int, run: Run) -> dict[str, torch.Tensor]:
    trainer = make_trainer(rank, world_size, run)
    torch.manual_seed(3)
    trainer.train(resume_from_checkpoint=True)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.invariant(21)
def test_a_run_resumes_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    optim = {"optim": "onebit_adam", "optim_args": OPTIONS["onebit_adam"] + ",async_save=true"}
    arguments = {**SAVING, **optim, "output_dir": str(tmp_path)}
    whole = run_ranks(2, watch, Run(arguments), timeout=120)[0]
    assert all(map(is_whole, tmp_path.glob("checkpoint-*"))) and len(list(tmp_path.glob("checkpoint-*"))) == 4
    for step, last in ((6, "trainer_state.json"), (8, "compressopt.index.json")):
        (tmp_path / f"checkpoint-{step}" / last).unlink()  # as a kill in the middle of their writing leaves them
    resumed = run_ranks(2, resume, Run(arguments), timeout=120)
    assert equal_params(resumed[0], whole["params"])


@on_ranks(1)
def test_a_checkpoint_that_was_cut_off_is_not_the_last_one(rank: int, world_size: int, tmp_path: Path) -> None:
    """Wherever its writing ends: in the model, the errors of gradients, the optimizer, before Trainer's state."""
    from transformers import trainer_utils

    import hf_compressopt.auto  # noqa: F401

    written = ["config.json", "model.safetensors", "training_args.bin"]
    written += [f"compressopt_gradients-0123456789abcdef-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    written += ["compressopt_gradients.index.json", "optimizer.pt", "trainer_state.json"]
    for count in range(len(written) + 1):
        for step, names in ((5, written), (20, written[:count])):
            folder = tmp_path / str(count) / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            for name in names:
                (folder / name).touch()
        last = trainer_utils.get_last_checkpoint(str(tmp_path / str(count)))
        assert last == str(folder if count == len(written) else folder.with_name("checkpoint-5")), written[:count]
    foreign = tmp_path / "foreign" / "checkpoint-3"  # of a program that writes no state of Trainer's
    foreign.mkdir(parents=True)
    (foreign / "config.json").touch()
    assert trainer_utils.get_last_checkpoint(str(foreign.parent)) == str(foreign)


def saved_at_a_signal(rank: int, world_size: int, arguments: dict[str, Any], while_waiting: bool) -> int:
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        """The signal, which comes to rank 0 at the end of the second step, and to rank 1 within the next one.

        Or it comes to rank 0 alone, while that waits for rank 1 at the end of the second step.
        """

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != 2:
                return
            if not while_waiting:
                manager.is_checkpoint_requested |= rank == 0
            elif rank == 0:
                threading.Timer(0.2, manager._enable_checkpoint).start()
            else:
                time.sleep(0.8)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            manager.is_checkpoint_requested |= not while_waiting and rank == 1 and state.global_step == 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda number, handler: signal.SIG_DFL)
        trainer = make_trainer(rank, world_size, Run(arguments))
        (manager,) = [c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager")]
        trainer.callback_handler.callbacks.insert(0, Signal())
        trainer.train()
    return int(trainer.state.global_step)


@pytest.mark.skipif(OLD_HOST, reason="this transformers saves at no signal")
def test_all_ranks_save_at_a_signal_after_the_same_step(tmp_path: Path) -> None:
    low_bit = {"optim": "adamw_torch", "optim_args": "grad_compression=int4"}
    for optim, while_waiting, step in (({"optim": "onebit_adam"}, True, 3), (low_bit, False, 2)):
        folder = tmp_path / optim["optim"]
        arguments = {**optim, "output_dir": str(folder), "max_steps": 6, "enable_jit_checkpoint": True}
        (last,) = {*run_ranks(2, saved_at_a_signal, arguments, while_waiting, timeout=60)}
        assert last == step
        assert [path.name for path in folder.iterdir()] == [f"checkpoint-{last}"]
        assert (folder / f"checkpoint-{last}" / "trainer_state.json").is_file()


def push(rank: int, world_size: int, arguments: dict[str, Any], strategy: str) -> list[tuple[str, bool]]:
    """Save with a hub in reach that tells what was whole when it was uploaded."""
    from transformers import trainer as trainer_module
    from transformers.trainer_utils import HubStrategy

    uploaded = []

    def upload_folder(folder_path: str, **_: Any) -> Any:
        uploaded.append((Path(folder_path).name, is_whole(Path(folder_path))))
        return type("Job", (), {"done": lambda self: True})()

    trainer = make_trainer(rank, world_size, Run(arguments))
    trainer.args.push_to_hub, trainer.args.hub_strategy = True, HubStrategy(strategy)
    trainer.hub_model_id, trainer.push_in_progress = "nobody/nothing", None
    slowly = os.posix_fallocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *args: time.sleep(0.3) or slowly(*args))
        if hasattr(trainer_module, "hf_api"):
            patch.setattr(trainer_module, "hf_api", lambda: SimpleNamespace(upload_folder=upload_folder))
        else:  # before transformers 5
            patch.setattr(trainer_module, "upload_folder", upload_folder)
        trainer.train()
    return uploaded


@pytest.mark.parametrize("strategy", ["checkpoint", "every_save"])
def test_a_checkpoint_is_uploaded_when_it_is_whole(strategy: str, tmp_path: Path) -> None:
    optim = {"optim": "onebit_adam", "optim_args": "freeze_step=2,async_save=true"}
    arguments = {**optim, "output_dir": str(tmp_path), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    uploaded = run_ranks(2, push, arguments, strategy, timeout=120)[0]
    checkpoints = [entry for entry in uploaded if entry[0].startswith("checkpoint-")]
    assert checkpoints == ([("checkpoint-2", True), ("checkpoint-4", True)] if strategy == "checkpoint" else [])
    assert len(uploaded) == 2 + len(checkpoints)
