"""CompressOptPlugin: its fields, given by name or in the environment, what it converts, and what it refuses."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import CompressOptPlugin, OnebitAdam

NAMES = ("onebit_adam", "zero_one_adam", "onebit_lamb")


def adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(8))], lr=0.5, weight_decay=0.1)


def make(name: str, **options: Any) -> Any:
    return CompressOptPlugin(optimizer=name, **options).convert(adamw())


ONEBIT: dict[str, Any] = {"optimizer": "onebit_adam"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "zwei_bit"}, "optimizer must be one of"),
        ({"freeze_step": "soon"}, "freeze_step must be an int >= 1, or 'auto', got 'soon'"),
        ({"freeze_step": 0}, "freeze_step must be an int >= 1"),
        ({"total_steps": 0}, "total_steps must be an int >= 1"),
        ({"total_steps": 1.5}, "total_steps must be an int >= 1"),
        ({"grad_compression": "4bit"}, "grad_compression must be one of"),
        ({"grad_compression": "int4", "bucket_cap_mb": 0.0}, "bucket_cap_mb must be > 0"),
        ({"optimizer": "onebit_lamb", "grad_compression": "int4"}, "onebit_lamb sends gradients in a way of its own"),
        ({"param_compression": "int4"}, "param_compression=int4 is an option of ZeRO and of"),
        ({**ONEBIT, "zero_stage": 1, "param_compression": "int4"}, "param_compression=int4 is an option of ZeRO"),
        ({"zero_stage": 3}, "zero_stage must be 0, 1 or 2, got 3"),
        ({"optimizer": "zero_one_adam", "zero_stage": 2}, "zero_stage=2 is not supported with zero_one_adam"),
        ({**ONEBIT, "zero_stage": 2, "clip": "local"}, "zero_stage=2 needs clip='late'"),
        ({**ONEBIT, "zero_stage": 1, "warmup_bits": 16}, "warmup_bits to be one of"),
    ],
)
def test_what_is_not_legal_is_refused(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CompressOptPlugin(**options)
    for name, value in options.items():
        monkeypatch.setenv(f"COMPRESSOPT_{name.upper()}", str(value))
    with pytest.raises(ValueError, match=list(options)[-1] if "1.5" not in str(options) else "TOTAL_STEPS"):
        CompressOptPlugin()


def test_fields_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CompressOptPlugin()
    assert (plain.optimizer, plain.freeze_step, plain.total_steps) == ("onebit_adam", "auto", None)
    settings = {"FREEZE_STEP": "77", "SCALE_BLOCK": "none", "VARIANCE_FLOOR": "0.5", "TOTAL_STEPS": "70"}
    for name, value in {**settings, "OPTIMIZER": "none"}.items():
        monkeypatch.setenv(f"COMPRESSOPT_{name}", value)
    plugin = CompressOptPlugin()
    assert (plugin.freeze_step, plugin.scale_block, plugin.variance_floor) == (77, None, 0.5)
    assert (plugin.optimizer, plugin.total_steps) == ("none", 70) and CompressOptPlugin(freeze_step=5).freeze_step == 5
    monkeypatch.setenv("COMPRESSOPT_FREEZE_STEP", "auto")
    assert CompressOptPlugin().freeze_step == "auto"
    monkeypatch.setenv("COMPRESSOPT_OPTIM", "zero_one_adam")
    with pytest.raises(ValueError, match="differ: set one of them"):
        CompressOptPlugin()


def test_ordinary_optimizers_stay_under_zero_and_with_compressed_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"zero_stage": 1}, {"grad_compression": "int4"}, {"zero_stage": 2, "grad_compression": "int8"}):
        plugin = CompressOptPlugin(**options)  # type: ignore[arg-type]
        assert plugin.optimizer == "none" and (plugin.ddp_compression != "none") == ("zero_stage" not in options)
    monkeypatch.setenv("COMPRESSOPT_OPTIM", "onebit_adam")
    for stage in (1, 2):
        monkeypatch.setenv("COMPRESSOPT_ZERO_STAGE", str(stage))
        plugin = CompressOptPlugin()
        assert not plugin.partitions and plugin.convert(adamw()).zero_stage == stage  # type: ignore[attr-defined]


def test_options_reach_the_optimizer_that_the_plugin_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        plain = adamw()
        made: Any = CompressOptPlugin(optimizer=name, freeze_step=7).convert(plain)
        assert made.freeze_step == 7 and made.param_groups[0] is plain.param_groups[0]
        assert type(made).__name__.lower() == name.replace("_", "")
        assert [make(name, state=form).compact for form in ("compact", "float32")] == [True, False]
        assert make(name).compact == make(name, state=None).compact == (name == "onebit_adam")
    for name in NAMES[:2]:
        assert make(name, max_update=3.0).max_update == 3.0 and not make(name, max_update=None).max_update
    with pytest.raises(ValueError, match="max_update is not supported with OnebitLamb, got 3.0"):
        make("onebit_lamb", max_update=3.0)
    with pytest.raises(ValueError, match="state must be one of .*'compact', 'float32'.*, got 'small'"):
        make("onebit_adam", state="small")
    for text, given in (("none", {}), ("compact", {"state": "compact"}), ("float32", {"state": "float32"})):
        monkeypatch.setenv("COMPRESSOPT_STATE", text)
        assert CompressOptPlugin().options_from_env() == given
        assert make("onebit_adam").compact == (text != "float32")
    monkeypatch.setenv("COMPRESSOPT_MAX_UPDATE", "2.5")
    assert make("onebit_adam").max_update == 2.5


def test_what_it_can_take_over() -> None:
    class Named(torch.optim.AdamW):
        """An optimizer with defaults of its own, and AdamW's step."""

    plugin, params = CompressOptPlugin(freeze_step=3), [nn.Parameter(torch.ones(8))]
    assert isinstance(plugin.convert(Named(params)), OnebitAdam)
    sgd = torch.optim.SGD(params, lr=0.1)
    assert plugin.convert(sgd) is sgd
    with pytest.raises(ValueError, match="use AdamW"):
        plugin.convert(torch.optim.Adam(params, weight_decay=0.1))
    used = torch.optim.AdamW(params)
    params[0].sum().backward()
    used.step()
    with pytest.raises(ValueError, match="before the first"):
        plugin.convert(used)
