"""The sections of the optimizer and of ZeRO."""

from __future__ import annotations

from typing import Any

from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.deepspeed import tables
from hf_compressopt.integrations.deepspeed.tables import BECOMES, DIFFERS, LOST, SAME
from hf_compressopt.integrations.deepspeed.translation import AUTO, Options, as_text, number
from hf_compressopt.integrations.optim_args import text_options

_PARAMS = "optimizer.params."
_ZERO = "zero_optimization."


def optimizer(options: Options, *, same_arithmetic: bool) -> None:
    """Translate the section ``optimizer``. Sets ``translation.optim``, which :func:`zero` may change."""
    kind = options.take("optimizer.type")
    if kind is None:
        return
    name = tables.NAMES.get(str(kind).lower())
    if name is None:
        for option, value in options.take_section("optimizer"):
            options.say(option, value, LOST, "", f"an option of {kind}")
        legal = ", ".join([*OPTIMIZERS, *ZERO_NAMES])
        remark = f"the optimizers here are {legal}; Trainer's own --optim may have it"
        return options.say("optimizer.type", kind, LOST, "", remark)
    torch_adam = options.take(f"{_PARAMS}torch_adam")
    name = "adamw_torch" if torch_adam and name == "fused_adam" else name
    options.translation.optim = name
    options.say("optimizer.type", kind, BECOMES, f"--optim {name}")
    if torch_adam is not None:
        options.say(f"{_PARAMS}torch_adam", torch_adam, BECOMES, f"--optim {name}")
    for key, flags in tables.FLAGS.items():
        option = _PARAMS + key
        if option in options.rest:
            options.flag(option, options.take(option), *flags)
        elif key == "lr":
            options.flag(option, tables.DEFAULT_LR, *flags, remark="DeepSpeed's default", given=False)
    _clipping(options, same_arithmetic)
    _communicator(options, name)
    _own_options(options, name, dict(tables.SAME_ARITHMETIC) if same_arithmetic and name in ALGORITHMS else {})


def _clipping(options: Options, same_arithmetic: bool) -> None:
    option = f"{_PARAMS}max_grad_norm"
    norm = options.take(option)
    if norm is None:
        return
    if options.rest.get("gradient_clipping") or same_arithmetic or not norm:
        remark = "had no effect in DeepSpeed; gradient_clipping clips there"
        return options.say(option, norm, SAME, "", remark)
    remark = "had no effect in DeepSpeed, but clips here: leave it out to train as before"
    options.flag(option, norm, "--max_grad_norm", remark=remark)


def _communicator(options: Options, name: str) -> None:
    backend_option, aware_option = f"{_PARAMS}comm_backend_name", f"{_PARAMS}cuda_aware"
    backend, aware = options.take(backend_option), options.take(aware_option)
    if backend is not None and name in ALGORITHMS:
        needs = "; it needs pip install 'hf-compressopt[mpi]' and mpirun" if backend == "mpi" else ""
        options.optim_arg(backend_option, backend, "communicator", f"or leave it out: auto{needs}")
    elif backend is not None:
        options.say(backend_option, backend, LOST, "", f"{name} sends nothing by itself")
    if aware is not None and backend == "mpi" and name in ALGORITHMS:
        options.optim_arg(aware_option, aware, "cuda_aware")
    elif aware is not None:
        options.say(aware_option, aware, SAME, "", "it matters only with comm_backend_name=mpi")


def _own_options(options: Options, name: str, forced: dict[str, Any]) -> None:
    legal = text_options(OPTIMIZERS[name]) if name in OPTIMIZERS else {}
    given = options.take_section("optimizer")
    for option, value in given:
        key = option.removeprefix(_PARAMS)
        if key == "amsgrad":
            kind, remark = (LOST, "refused, as in DeepSpeed") if value else (SAME, "off")
            options.say(option, value, kind, "", remark)
        elif key in ("exp_avg_mask", "non_freeze"):
            remark = "it belongs to a param group: set it in the script"
            options.say(option, value, DIFFERS, f"param group key {key}", remark)
        elif key == "adam_w_mode" and name != "fused_adam":
            kind, remark = (SAME, "decay is decoupled") if value else (LOST, "L2 regularization is not supported")
            options.say(option, value, kind, "", remark)
        elif key not in legal:
            options.say(option, value, LOST, "", f"{name} has no such option")
        elif key in forced:
            options.say(option, value, SAME, "", f"had no effect in DeepSpeed: {key}={as_text(forced[key])}")
        else:
            late = key in tables.IGNORED_THERE and name in ALGORITHMS
            options.optim_arg(option, value, key, "had no effect in DeepSpeed, but has one here" if late else "")
    for key, value in tables.DEFAULTS.get(name, {}).items():
        if _PARAMS + key not in dict(given):
            remark = "DeepSpeed's default; leave it out to fit it to the length of the run"
            options.optim_arg(_PARAMS + key, value, key, remark, given=False)
    for key, value in forced.items():
        options.optim_arg(_PARAMS + key, value, key, "what DeepSpeed computed", given=False)
    if name in ALGORITHMS and not forced:
        remark = (
            "DeepSpeed had one scale for a whole message, no variance floor and no bias correction; the defaults here "
            "reach a lower loss. Its arithmetic is scale_block=none,variance_floor=0,bias_correction=false "
            "(--same-arithmetic)"
        )
        options.say(f"{_PARAMS}scale_block", None, DIFFERS, "--optim_args scale_block=4096", remark, given=False)


def zero(options: Options) -> None:
    """Translate the section ``zero_optimization``, and the options of other sections that belong to ZeRO here."""
    stage, name = options.take(f"{_ZERO}stage"), options.translation.optim
    if isinstance(stage, bool) or stage not in (None, 0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    partitioned = stage in (1, 2) and name not in ALGORITHMS
    if partitioned:
        _partition(options, name, stage)
    elif stage == 3:
        remark = "parameters are not partitioned here: use FSDP for that, or stage 2, which keeps parameters whole"
        options.say(f"{_ZERO}stage", stage, LOST, "", remark)
    elif stage:
        remark = f"{name} cannot be partitioned, as in DeepSpeed: use it without ZeRO, or zero{stage}_adamw"
        options.say(f"{_ZERO}stage", stage, LOST, "", remark)
    elif stage is not None:
        options.say(f"{_ZERO}stage", stage, SAME, "", "off")
    for option, value in options.take_section("zero_optimization"):
        if partitioned:
            _zero_option(options, option, value)
        elif stage:
            options.say(option, value, LOST, "", "no ZeRO without a stage")
        else:
            options.say(option, value, SAME, "", "no effect in stage 0")
    if partitioned:
        _scaling(options)


def _partition(options: Options, name: str, stage: int) -> None:
    if name in ("", "adamw_torch"):
        options.translation.optim = f"zero{stage}_adamw"
        options.say(f"{_ZERO}stage", stage, BECOMES, f"--optim {options.translation.optim}")
    else:
        options.optim_arg(f"{_ZERO}stage", stage, "zero_stage")


def _zero_option(options: Options, option: str, value: Any) -> None:
    key = option.removeprefix(_ZERO)
    if key in tables.ZERO_OPTIONS:
        elements = key.endswith("_size") and value != AUTO  # 5e8 is a number of elements too
        options.optim_arg(option, int(number(option, value)) if elements else value, key)
    elif key in ("offload_optimizer.device", "cpu_offload"):
        if value in (True, "cpu"):
            options.optim_arg(option, "cpu", "offload_optimizer")
        elif value in (False, None, "none"):
            options.say(option, value, SAME, "", "off")
        else:
            options.say(option, value, LOST, "", "state is offloaded to host memory only: offload_optimizer=cpu")
    elif key == "offload_optimizer.pin_memory" and value:
        options.say(option, value, SAME, "", "offloaded memory is page-locked")
    elif tables.ZERO_NEUTRAL.get(key, not value) == value:
        options.say(option, value, SAME, "", "as it is here" if value else "off")
    elif option in tables.NOT_NEEDED:
        options.say(option, value, SAME, "", tables.NOT_NEEDED[option])
    else:
        section = ".".join(option.split(".")[:2])
        of_stage3 = "an option of stage 3" if key.startswith(("stage3_", "zero_", "mics_")) else "no such option here"
        remark = tables.NO_COUNTERPART.get(section, of_stage3)
        options.say(option, value, LOST, "", remark)


def _scaling(options: Options) -> None:
    """Translate options of DeepSpeed's engine that ZeroOptimizer has here."""
    names = {
        "communication_data_type": "communication_data_type",
        "data_types.grad_accum_dtype": "gradient_accumulation_dtype",
    }
    for option, name in names.items():
        if (value := options.take(option)) is not None:
            options.optim_arg(option, value, name)
    first, factor = options.take("prescale_gradients"), options.take("gradient_predivide_factor")
    if factor not in (None, 1) and not first:
        options.translation.optim_args["postscale_gradients"] = True
        options.optim_arg("gradient_predivide_factor", factor, "gradient_predivide_factor", "with postscale_gradients")
    elif factor is not None:
        options.say(
            "gradient_predivide_factor", factor, SAME, "", "gradients are divided by the number of ranks before the sum"
        )
    if first is not None:
        kind = SAME if first else DIFFERS
        options.say("prescale_gradients", first, kind, "", "gradients are divided before the sum")
