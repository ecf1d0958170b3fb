"""A stock Trainer or Accelerator that is given a compressed optimizer; "unregistered" leaves out the registration."""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def data(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=generator), "labels": torch.zeros(8)} for _ in range(count)]


def gradients_differ(model: Any) -> bool:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    return not torch.equal(both[0], both[1])


def with_trainer() -> list[bool]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_compressopt import OnebitAdam

    found: list[bool] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            found.append(gradients_differ(model))

    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to="none"
    )
    model = Net()
    optimizer = OnebitAdam(model.parameters(), freeze_step=2)
    trainer = Trainer(model=model, args=args, train_dataset=data(64), optimizers=(optimizer, None), callbacks=[Watch()])
    trainer.train()
    return found


def with_accelerator() -> list[bool]:
    from accelerate import Accelerator

    from hf_compressopt import OnebitAdam

    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, OnebitAdam(model.parameters(), freeze_step=2))
    found = []
    for step in range(4):
        rows = data(16)[2 * step + accelerator.process_index :: 8]
        batch = {key: torch.stack([row[key] for row in rows]) for key in ("x", "labels")}
        accelerator.backward(model(**batch)["loss"])
        found.append(gradients_differ(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[2:] != ["unregistered"]:
        import hf_compressopt.auto  # noqa: F401
    found = {"trainer": with_trainer, "accelerator": with_accelerator}[sys.argv[1]]()
    print(f"\nrank {dist.get_rank()}: {found}\n", flush=True)
    dist.destroy_process_group()
