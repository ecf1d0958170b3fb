"""Real Trainer runs on real ranks, for the tests of the integration: small GPT-2 models on fixed random tokens."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import OnebitAdam
from hf_compressopt.amp import innermost
from tests.support.harness import same_on_all_ranks as same_on_all_ranks

VOCAB, LENGTH, EXAMPLES = 61, 12, 96
#: An older host, such as transformers 4.50 with accelerate 1.3. On several CPU ranks it cannot load optimizer.pt,
#: for which it asks torch for the place "cpu:0"; and with accumulation it resumes at another example if the last window
#: of an epoch is short.
OLD_HOST = int(version("transformers").split(".")[0]) < 5
loads_optimizer_pt = pytest.mark.skipif(OLD_HOST, reason="this transformers loads no optimizer.pt on several CPU ranks")


@dataclass
class Run:
    """A run of Trainer, and how to disturb it. `arguments` go to TrainingArguments."""

    arguments: dict[str, Any]
    evaluate_first: bool = False
    resume: str | None = None
    overflow: tuple[int, int] | None = None  # (rank, step counted from 0): a gradient becomes inf there
    scaler: bool = False
    optimizer: str | None = None  # "cls_and_kwargs", "instance", "create_optimizer" or "layers": how Trainer gets it
    unused: bool = False
    dropout: float = 0.1
    frozen: bool = False
    twice: bool = False
    save_at: tuple[int, ...] = ()  # steps after which it saves, besides those of the arguments
    own_scheduler: bool = False  # a Trainer whose create_scheduler does not call the one it overrides
    extra: dict[str, Any] = field(default_factory=dict)


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
#: Further arguments of a Trainer, and options of its Run.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulation": ({"gradient_accumulation_steps": 3}, {}),
    "clipping": ({"max_grad_norm": 0.3}, {}),
    "no_clipping": ({"max_grad_norm": 0.0}, {}),
    "bf16_autocast": ({"bf16": True}, {}),
    "gradient_checkpointing": ({"gradient_checkpointing": True}, {}),
    "reentrant": ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}),
    "torch_compile": ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {}),
    "find_unused_parameters": ({"ddp_find_unused_parameters": True}, {"unused": True}),
    "no_find_unused_parameters": ({"ddp_find_unused_parameters": False}, {}),
    "evaluate_before_train": ({}, {"evaluate_first": True}),
    "evaluate_before_train_compiled": (COMPILED, {"evaluate_first": True}),
    "uneven_last_window": ({"gradient_accumulation_steps": 5}, {}),  # of 24 micro-batches an epoch: the 5th step has 4
    "partly_frozen": ({}, {"frozen": True}),
    "scaler": ({"max_grad_norm": 0.0}, {"scaler": True}),  # Accelerate itself clips before it unscales here
}


def use_accelerate(rank: int, world_size: int) -> None:
    """Make accelerate take the process group that is there, as if a launcher had started this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:  # what an earlier test's Trainer set
        del os.environ[name]
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update({"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"})


def small_model(unused: bool = False, dropout: float = 0.1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 24, "n_layer": 2, "n_head": 2}
    rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, use_cache=False))
    if unused:
        model.never_used = torch.nn.Linear(3, 3)
    return model


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, use_cache=False, **sizes))


def tokens(count: int = EXAMPLES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_arguments(**given: Any) -> Any:
    """TrainingArguments on CPUs that log every step and save nothing."""
    from transformers import TrainingArguments

    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(**{"per_device_train_batch_size": 2, **quiet, **given})


def make_trainer(rank: int, world_size: int, run: Run) -> Any:
    use_accelerate(rank, world_size)
    from transformers import Trainer, TrainerCallback

    import hf_compressopt.auto  # noqa: F401

    class Watch(TrainerCallback):
        """After every step: are the parameters alike on all ranks, which lr, was the step skipped?"""

        def __init__(self) -> None:
            self.alike: list[bool] = []
            self.rows: list[dict[str, Any]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            inner = innermost(kwargs["optimizer"])
            self.alike.append(same_on_all_ranks(model.parameters()))
            row = {"lr": inner.param_groups[0]["lr"], "skipped": getattr(inner, "step_was_skipped", False)}
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            self.rows.append({**row, "norm": flat.double().norm().item()})
            control.should_save |= state.global_step in run.save_at

    class TestTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()  # older Trainers call it again when the training starts
            if run.scaler:
                self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if not run.own_scheduler:
                return super().create_scheduler(num_training_steps, optimizer)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
            return self.lr_scheduler

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            overflow = run.overflow == (rank, self.state.global_step)
            bias = self.model.transformer.ln_f.bias
            handle = bias.register_hook(lambda grad: grad + float("inf")) if overflow else None
            loss = super().training_step(*args, **kwargs)
            if handle is not None:
                handle.remove()
            return loss

    args = trainer_arguments(
        **{"max_steps": 8, "learning_rate": 1e-2, "weight_decay": 0.05, "seed": 3, **run.arguments}
    )
    model = small_model(run.unused, run.dropout)
    if run.frozen:
        model.transformer.h[0].requires_grad_(False)
    options: dict[str, Any] = dict(run.extra)
    if run.optimizer == "cls_and_kwargs":
        options["optimizer_cls_and_kwargs"] = (OnebitAdam, {"lr": args.learning_rate})
    if run.optimizer == "instance":
        options["optimizers"] = (OnebitAdam(model.parameters(), lr=args.learning_rate, freeze_step=3), None)
    data = tokens()
    trainer = TestTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:8], callbacks=[watch := Watch()], **options
    )
    trainer.watch, own = watch, {"lr": args.learning_rate, "warmup_bits": 32}

    def create_optimizer(model: Any = None) -> Any:
        vectors, matrices = ([p for p in trainer.model.parameters() if (p.ndim == 1) == flat] for flat in (True, False))
        groups = [{"params": vectors}, {"params": matrices}]
        trainer.optimizer = torch.optim.AdamW(groups) if run.optimizer == "adamw" else OnebitAdam(groups, **own)
        return trainer.optimizer

    if run.optimizer in ("create_optimizer", "adamw"):
        trainer.create_optimizer = create_optimizer
    if run.optimizer == "layers":
        trainer.get_optimizer_cls_and_kwargs = lambda *_: (OnebitAdam, own)
    return trainer


def train(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """Train, and return what the tests compare."""
    trainer = make_trainer(rank, world_size, run)
    if run.evaluate_first:
        trainer.evaluate()
    torch.manual_seed(3)  # an evaluation draws random numbers
    trainer.train(resume_from_checkpoint=run.resume)
    if run.twice:
        trainer.train()
    inner = innermost(trainer.optimizer)
    params, masters = [p for p in trainer.model.parameters() if p.requires_grad], getattr(inner, "get_full_param", None)
    return {
        "params": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "settled": masters is None or all([torch.equal(p, masters(p)) for p in params]),
        "described": inner.describe() if hasattr(inner, "describe") else "",
        "alike": trainer.watch.alike,
        "rows": trainer.watch.rows,
        "history": trainer.state.log_history,
        "optimizer": type(inner).__name__,
        "fused": bool(inner.param_groups[0].get("fused")),
        "freeze_step": getattr(inner, "freeze_step", None),
        "metrics": inner.metrics() if hasattr(inner, "metrics") else {},
        "model_class": type(getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)).__name__,
        "best": trainer.state.best_model_checkpoint,
    }


def train_all(rank: int, world_size: int, *runs: Run) -> list[dict[str, Any]]:
    return [train(rank, world_size, run) for run in runs]


def logged(result: dict[str, Any], name: str) -> list[Any]:
    """The values of a name in the log lines of a run."""
    return [row[name] for row in result["history"] if name in row]


def losses(result: dict[str, Any]) -> list[float]:
    return logged(result, "loss")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 7))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 10, generator=generator), torch.randn(16, 7, generator=generator)


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def take_steps(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    rank: int,
    steps: Iterable[int],
    *,
    scheduler: Any = None,
    clip: float = 0.0,
) -> None:
    for step in steps:
        accelerator.backward(loss_of(model, rank, step))
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def params_of(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}


def equal_params(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
