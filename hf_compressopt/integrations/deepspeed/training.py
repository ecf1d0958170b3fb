"""Translate the sections of precision, batches, clipping and the learning rate, and all other options."""

from __future__ import annotations

import json
import math
from typing import Any

from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.integrations.deepspeed import tables
from hf_compressopt.integrations.deepspeed.tables import BECOMES, DIFFERS, LOST, SAME
from hf_compressopt.integrations.deepspeed.translation import AUTO, Options, number, whole_number

_SCHEDULER = "scheduler.params."
_SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine_with_min_lr"}


def precision(options: Options) -> None:
    """Translate the sections ``fp16`` and ``bf16``."""
    for name in ("fp16", "bf16"):
        enabled = options.take(f"{name}.enabled")
        if enabled == AUTO:
            options.flag(f"{name}.enabled", AUTO, f"--{name}")
        elif enabled:
            options.translation.flags[f"--{name}"] = True
            options.translation.accelerate["mixed_precision"] = name
            remark = "autocast over float32 parameters; DeepSpeed had a 16-bit model and float32 copies"
            options.say(f"{name}.enabled", enabled, DIFFERS, f"--{name}", remark)
        elif enabled is not None:
            options.say(f"{name}.enabled", enabled, SAME, "", "off")
        for option, value in options.take_section(name):
            if not enabled:
                options.say(option, value, SAME, "", f"no effect: {name} is off")
            elif name == "fp16":
                _loss_scale(options, option, value)
            else:
                options.say(option, value, LOST if value else SAME, "", "no such option here" if value else "off")


def _loss_scale(options: Options, option: str, value: Any) -> None:
    """Translate an option of the loss scale into Accelerate's GradScalerKwargs. Trainer has no flags for them."""
    key, scaler = option.removeprefix("fp16."), options.translation.scaler
    remark = "only in Accelerate: Trainer has no flag for it"
    if key == "loss_scale" and not value:
        options.say(option, value, SAME, "", "the scale is dynamic")
    elif key == "loss_scale":
        scaler |= {"init_scale": float(number(option, value)), "growth_interval": 2**31 - 1}
        options.say(option, value, LOST, f"GradScalerKwargs(init_scale={value}, growth_interval={2**31 - 1})", remark)
    elif key == "initial_scale_power" and value != tables.INITIAL_SCALE_POWER:
        if not 0 <= number(option, value) <= 126:
            raise ValueError(f"{option} must be from 0 to 126, got {value!r}")
        scaler["init_scale"] = 2.0**value
        options.say(option, value, LOST, f"GradScalerKwargs(init_scale={2.0**value})", remark)
    elif key == "loss_scale_window" and value != tables.GROWTH_INTERVAL:
        scaler.setdefault("growth_interval", number(option, value))
        remark += f", and uses {tables.GROWTH_INTERVAL} steps"
        options.say(option, value, LOST, f"GradScalerKwargs(growth_interval={value})", remark)
    elif key == "hysteresis" and value != 1:
        options.say(option, value, LOST, "", "the scale is halved at every overflow")
    elif key == "min_loss_scale":
        options.say(option, value, LOST, "", "the scale has no lower bound")
    elif value and key not in ("initial_scale_power", "loss_scale_window", "hysteresis"):
        options.say(option, value, LOST, "", "no such option here")
    else:
        options.say(option, value, SAME, "", "as it is here" if value else "off")


def batches(options: Options, ranks: int | None) -> None:
    """Translate the three batch sizes. The third one follows from two of them and the number of ranks."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, sizes = options.take("train_batch_size"), {name: options.take(name) for name in names}
    given = {name for name, value in sizes.items() if value is not None}
    known = {name: whole_number(name, value) for name, value in sizes.items() if value not in (None, AUTO)}
    missing = next((name for name in names if name not in known), "")
    if total == AUTO:
        options.say("train_batch_size", total, SAME, "", "Trainer's flags decide, as before")
    elif total is not None and not missing:
        remark = "it follows from the two others and the number of ranks"
        options.say("train_batch_size", total, SAME, "", remark)
    elif total is not None and ranks is None:
        remark = f"{missing} follows from it and the number of ranks: give --ranks"
        options.say("train_batch_size", total, LOST, "", remark)
    elif total is not None and ranks is not None:
        divisor = ranks * next(iter(known.values()), 1)
        if whole_number("train_batch_size", total) % divisor:
            raise ValueError(f"train_batch_size must be a multiple of {divisor}, by {ranks} rank(s), got {total}")
        sizes[missing] = int(total) // divisor
        remark = f"{missing} is {sizes[missing]} with {ranks} rank(s)"
        options.say("train_batch_size", total, SAME, "", remark)
    for name, flag in zip(names, ("--per_device_train_batch_size", "--gradient_accumulation_steps"), strict=True):
        if sizes[name] is not None:
            options.flag(name, sizes[name], flag, given=name in given)
    if sizes[names[1]] not in (None, AUTO):
        options.translation.accelerate["gradient_accumulation_steps"] = sizes[names[1]]


def clipping(options: Options) -> None:
    """Translate ``gradient_clipping``, which is off by default in DeepSpeed and 1.0 in Trainer."""
    given = "gradient_clipping" in options.rest
    if not given and "--max_grad_norm" in options.translation.flags:
        return
    value, remark = options.take("gradient_clipping", 0.0), "" if given else "DeepSpeed's default; Trainer's is 1.0"
    if value and options.translation.optim in ALGORITHMS:
        remark = "in the compressed stage, by the root of the mean of the ranks' squared norms"
    options.flag("gradient_clipping", value, "--max_grad_norm", remark=remark, given=given)


def scheduler(options: Options) -> None:
    """Translate the section ``scheduler``, if Trainer has such a schedule."""
    kind = options.take("scheduler.type")
    if kind is None:
        return
    name = _SCHEDULES.get(str(kind).lower())
    if name is None:
        remark = "Trainer has no flag for it: give a torch scheduler to Trainer(optimizers=(optimizer, scheduler))"
        options.say("scheduler.type", kind, LOST, "", remark)
        for option, value in options.take_section("scheduler"):
            options.say(option, value, LOST, "", f"an option of {kind}")
        return
    options.translation.flags["--lr_scheduler_type"] = name
    options.say("scheduler.type", kind, BECOMES, f"--lr_scheduler_type {name}")
    cosine = name == "cosine_with_min_lr"
    for key, flag, default in (
        ("warmup_num_steps", "--warmup_steps", 1000),
        ("total_num_steps", "--max_steps", None),
        ("warmup_max_lr", "--learning_rate", None if cosine else 1e-3),
    ):
        given = _SCHEDULER + key in options.rest
        value = options.take(_SCHEDULER + key, default)
        if value is not None:
            remark = "" if given else "DeepSpeed's default"
            options.flag(_SCHEDULER + key, value, flag, remark=remark, given=given)
    if cosine:
        given = f"{_SCHEDULER}cos_min_ratio" in options.rest
        text = json.dumps({"min_lr_rate": options.rest.get(f"{_SCHEDULER}cos_min_ratio", 1e-4)})
        options.translation.flags["--lr_scheduler_kwargs"] = text
        value = options.take(f"{_SCHEDULER}cos_min_ratio", 1e-4)
        remark = "" if given else "DeepSpeed's default"
        options.say(f"{_SCHEDULER}cos_min_ratio", value, BECOMES, f"--lr_scheduler_kwargs '{text}'", remark, given)
    _rise(options, cosine)


def _rise(options: Options, cosine: bool) -> None:
    """Translate the shape of the warmup, and the rest of the section."""
    option = f"{_SCHEDULER}warmup_type"
    given = option in options.rest
    value = options.take(option, "log")
    if value == "linear":
        options.say(option, value, SAME, "", "the rate rises linearly")
    elif not cosine or given:
        options.say(option, value, LOST, "", "the rate rises linearly; DeepSpeed's default is log", given)
    for option, value in options.take_section("scheduler"):
        kind = LOST if value and value != AUTO else SAME
        remark = "the rate rises from 0" if "warmup_min" in option else "no such option here"
        options.say(option, value, kind, "", remark)


def rest(options: Options) -> None:
    """Translate loggers and the data loader, and account for every option that is left."""
    for name in ("tensorboard", "wandb"):
        enabled = options.take(f"{name}.enabled")
        if enabled:
            options.translation.flags["--report_to"] = name
            options.say(f"{name}.enabled", enabled, BECOMES, f"--report_to {name}")
            for option, value in options.take_section(name):
                options.say(option, value, DIFFERS, "", f"{name} reads it from its own environment variables")
        elif enabled is not None:
            options.say(f"{name}.enabled", enabled, SAME, "", "off")
    value = options.take("steps_per_print")
    if value == math.inf:  # never, as Accelerate writes it
        options.translation.flags["--logging_strategy"] = "no"
        options.say("steps_per_print", value, BECOMES, "--logging_strategy no")
    elif value is not None:
        options.flag("steps_per_print", value, "--logging_steps")
    if (value := options.take("dataloader_drop_last")) is not None:
        options.translation.flags["--dataloader_drop_last"] = value
        options.say("dataloader_drop_last", value, BECOMES, f"--dataloader_drop_last {str(value).lower()}")
    for option, value in options.take_all():
        section = option.split(".")[0]
        neutral = value in (False, None) or tables.NEUTRAL.get(option) == value
        if section in options.off or neutral:
            options.say(option, value, SAME, "", "off")
        elif section in tables.NOT_NEEDED:
            options.say(option, value, SAME, "", tables.NOT_NEEDED[section])
        else:
            options.say(option, value, LOST, "", tables.NO_COUNTERPART.get(section, "no such option here"))
