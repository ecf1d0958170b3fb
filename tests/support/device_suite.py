"""Training on one device, by one process or two: a test file inherits the suite, and gives a fixture `device`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from tests.support.launching import REPO_ROOT
from tests.support.trainer_runs import small_model, tokens, trainer_arguments

sys.path.append(str(REPO_ROOT / "scripts"))

from _paths import PATHS as PATHS  # noqa: E402
from _paths import run_paths as run_paths  # noqa: E402

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"freeze_step": 3}) for name in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")),
    ("FusedAdam", {}),
    ("Lamb", {}),
]
#: Of the paths of scripts/_paths.py, those that `make test` and `make test-gpu` run; part C of gpu_proof.py runs all.
PATHS_BETWEEN_RANKS = ["OnebitAdam", "int4 hook", "FSDP2, int4 over all ranks"]


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 129), nn.Tanh(), nn.Linear(129, 7)).to(device)


def batch(device: torch.device, step: int) -> torch.Tensor:
    return torch.randn(16, 33, generator=torch.Generator().manual_seed(step)).to(device)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, steps: int, *, same: bool = False
) -> list[float]:
    """Train the model, always on the same batch if asked. Returns the loss of each step."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(device, 0 if same else step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class DeviceSuite:
    @pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
    def test_an_optimizer_trains_as_on_the_cpu(self, device: torch.device, name: str, options: dict[str, Any]) -> None:
        finals = []
        for place in (device, torch.device("cpu")):
            model = net(place)
            optimizer = getattr(hf_compressopt, name)(model.parameters(), lr=1e-3, **options)
            train(model, optimizer, place, 8)
            finals.append([p.detach().cpu() for p in model.parameters()])
        for got, expected in zip(*finals, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=8e-3)  # a sign may differ: 8 steps of 1e-3

    def test_grad_scaler_skips_a_step_and_takes_the_next(self, device: torch.device) -> None:
        model = net(device)
        optimizer = hf_compressopt.OnebitAdam(model.parameters(), lr=1e-3, freeze_step=2)
        scaler = hf_compressopt.GradScaler(device.type, init_scale=1024.0)
        for step in range(5):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
            with torch.autocast(device.type, dtype):
                loss = model(batch(device, step)).float().square().mean()
            scaler.scale(loss).backward()
            if step == 3:
                next(model.parameters()).grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            kept = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            assert kept == (step == 3)

    def test_a_compiled_model_trains_as_the_model_does(self, device: torch.device) -> None:
        losses: list[list[float]] = []
        for compiles in (False, True):
            model = net(device)
            backend = "inductor" if device.type == "cuda" else "aot_eager"
            forward = torch.compile(model, backend=backend) if compiles else model
            optimizer = hf_compressopt.OnebitAdam(model.parameters(), lr=1e-3, freeze_step=2)
            losses.append(train(forward, optimizer, device, 6))
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)

    def test_paths_between_two_ranks(self, device: torch.device) -> None:
        """Two processes share the device; messages travel, and backward waits for nothing."""
        rows: list[dict[str, Any]] = []
        run_paths(2, device, rows.append, PATHS_BETWEEN_RANKS)
        assert [row for row in rows if not row["ok"]] == []
        assert [row["path"] for row in rows] == PATHS_BETWEEN_RANKS

    @pytest.mark.parametrize("optim", ["onebit_adam", "fused_adam"])
    def test_trainer_in_bf16(self, device: torch.device, optim: str, tmp_path: Path) -> None:
        from transformers import Trainer

        hf_compressopt.register()
        own = {"optim": optim, **({"optim_args": "freeze_step=3"} if optim == "onebit_adam" else {})}
        own |= {"bf16": True, "use_cpu": device.type == "cpu", "per_device_train_batch_size": 4, "learning_rate": 1e-2}
        arguments = trainer_arguments(output_dir=str(tmp_path), max_steps=6, **own)
        trainer = Trainer(
            model=small_model(dropout=0.0), args=arguments, train_dataset=tokens(4)
        )  # the same in each step
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 6 and losses[-1] < losses[0]
