"""A translated configuration as text, as code, and as JSON."""

from __future__ import annotations

import json
import shlex
from typing import Any

from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.deepspeed.translation import BECOMES, DIFFERS, LOST, SAME, Translation
from hf_compressopt.integrations.optim_args import text_options
from hf_compressopt.zero.optimizer import ZeroOptimizer

_TITLES = {BECOMES: "What becomes what", DIFFERS: "What is different", SAME: "Nothing to do", LOST: "No counterpart"}
_TORCH_CLASSES = {"sgd": "SGD", "adagrad": "Adagrad"}
_PLUGIN_FIELDS = ("freeze_step", "scale_block", "variance_floor", "bucket_cap_mb", "communicator")


def render(translation: Translation) -> str:
    """Render a translation as text: the flags, the code, and a remark on every option."""
    flags = [shlex.join(words) for words in translation.flags_as_words()]
    lines = ["Trainer: accelerate launch -m hf_compressopt.run script.py, with", *(f"    {flag}" for flag in flags)]
    lines += ["", "Accelerate:", *(f"    {line}" for line in accelerate_code(translation).splitlines())]
    for kind, title in _TITLES.items():
        rows = [row for row in translation.rows if row.kind == kind]
        lines += ["", f"{title}:"] if rows else []
        for row in rows:
            value = json.dumps(row.value) if row.given else f"not given: {json.dumps(row.value)}"
            here = f" -> {row.here}" if row.here else ""
            lines.append(f"    {row.option} ({value}){here}" + (f": {row.remark}" if row.remark else ""))
    return "\n".join(lines)


def as_json(translation: Translation) -> dict[str, Any]:
    """A translation for programs: the flags as words, the code, every option, and those without a counterpart."""
    return {
        "trainer": translation.arguments(),
        "accelerate": accelerate_code(translation),
        "options": [vars(row) for row in translation.rows],
        "lost": [row.option for row in translation.lost],
    }


def accelerate_code(translation: Translation) -> str:
    """Code for a training loop with Accelerate; the script has a ``model``."""
    name, imports, accelerate = translation.optim, ["CompressOptAccelerator"], _call(translation.accelerate)
    if translation.scaler:
        accelerate.append(f"kwargs_handlers=[GradScalerKwargs({', '.join(_call(translation.scaler))})]")
    made, became = _optimizer(translation, imports), "the loader and scheduler too"
    if plugin := _plugin(translation):
        imports[1:] = ["CompressOptPlugin"]
        accelerate.insert(0, f"compressopt_plugin=CompressOptPlugin({', '.join(_call(plugin))})")
        made = _make("torch.optim.AdamW", adam_options(translation))
        became = f"becomes {ALGORITHMS[name].__name__}" if name in ALGORITHMS else became
    lines = ["from accelerate.utils import GradScalerKwargs"] if translation.scaler else []
    lines += ["import torch"] if "torch." in made else []
    lines += [f"from hf_compressopt import {', '.join(imports)}", ""]
    lines += [f"accelerator = CompressOptAccelerator({', '.join(accelerate)})", f"optimizer = {made}"]
    lines.append(f"model, optimizer = accelerator.prepare(model, optimizer)  # {became}")
    if norm := translation.flags.get("--max_grad_norm"):
        lines.append(f"# before each step: accelerator.clip_grad_norm_(model.parameters(), {norm})")
    return "\n".join(lines)


def _plugin(translation: Translation) -> dict[str, Any]:
    """The plugin's fields, or nothing if the plugin has no field for an option."""
    name, stage = translation.optim, ZERO_NAMES.get(translation.optim)
    options = {"freeze_step" if key == "var_freeze_step" else key: v for key, v in translation.optim_args.items()}
    if not (stage or name in ALGORITHMS) or options.keys() - set(_PLUGIN_FIELDS):
        return {}
    return ({"zero_stage": stage} if stage else {"optimizer": name}) | options


def _optimizer(translation: Translation, imports: list[str]) -> str:
    """The expression that creates the optimizer, for :func:`accelerate_code`."""
    name, options, common = translation.optim, dict(translation.optim_args), adam_options(translation)
    cls = f"torch.optim.{_TORCH_CLASSES.get(name, 'AdamW')}"
    if name in OPTIMIZERS:
        cls = OPTIMIZERS[name].__name__
        imports.append(cls)
    if name in _TORCH_CLASSES:
        common = {key: value for key, value in common.items() if key in ("lr", "weight_decay")}
    if not (stage := ZERO_NAMES.get(name) or options.pop("zero_stage", 0)):
        return _make(cls, common | options)
    imports.append("ZeroOptimizer")
    zero = {key: options.pop(key) for key in list(options) if key in text_options(ZeroOptimizer)}
    return _make("ZeroOptimizer", {"stage": stage, **zero, **common, **options}, cls)


def adam_options(translation: Translation) -> dict[str, Any]:
    """Options that Trainer has flags for, by the names that every Adam has."""
    names = {"lr": "learning_rate", "betas": "adam_beta1", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
    flags = translation.flags
    found = {name: flags[f"--{flag}"] for name, flag in names.items() if f"--{flag}" in flags}
    return found | ({"betas": (found["betas"], flags["--adam_beta2"])} if "betas" in found else {})


def _make(cls: str, options: dict[str, Any], *wrapped: str) -> str:
    return f"{cls}({', '.join(['model.parameters()', *wrapped, *_call(options)])})"


def _call(values: dict[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in values.items()]
