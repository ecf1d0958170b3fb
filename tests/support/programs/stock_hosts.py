"""A stock Trainer or Accelerator that is given a compressed optimizer; "unregistered" leaves out the registration."""

import sys
import tempfile
from typing import Any

import torch.distributed as dist

from tests.support.trainer_runs import loss_of, network, same_on_all_ranks, small_model, tokens, trainer_arguments


def gradients_differ(model: Any) -> bool:
    return not same_on_all_ranks([p.grad for p in model.parameters()])


def with_trainer() -> list[bool]:
    from transformers import Trainer, TrainerCallback

    from hf_compressopt import OnebitAdam

    found: list[bool] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            found.append(gradients_differ(model))

    model, args = small_model(), trainer_arguments(output_dir=tempfile.mkdtemp(), max_steps=4)
    optimizer = OnebitAdam(model.parameters(), freeze_step=2)
    trainer = Trainer(model=model, args=args, train_dataset=tokens(), optimizers=(optimizer, None), callbacks=[Watch()])
    trainer.train()
    return found


def with_accelerator() -> list[bool]:
    from accelerate import Accelerator

    from hf_compressopt import OnebitAdam

    accelerator, model, found = Accelerator(cpu=True), network(), []
    model, optimizer = accelerator.prepare(model, OnebitAdam(model.parameters(), freeze_step=2))
    for step in range(4):
        accelerator.backward(loss_of(model, accelerator.process_index, step))
        found.append(gradients_differ(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


if __name__ == "__main__":
    if sys.argv[2:] != ["unregistered"]:
        import hf_compressopt.auto  # noqa: F401
    found = {"trainer": with_trainer, "accelerator": with_accelerator}[sys.argv[1]]()
    print(f"\nrank {dist.get_rank()}: {found}\n", flush=True)
    dist.destroy_process_group()
