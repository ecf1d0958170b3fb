"""The options of the hosts: ``--optim_args`` of Trainer, the plug-in of Accelerate, environment variables."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_compressopt.grad_compression import FORMATS, FULL, GradientCompression, MessageOptions
from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES, saves_shards
from hf_compressopt.optim.onebit_adam import OnebitAdam
from hf_compressopt.optim.options import NO_STATE, check_zero_stage
from hf_compressopt.options import ACCEPTED, Option, did_you_mean, options_of, parse
from hf_compressopt.zero.config import EXACT, check_optimizer_class, check_stage
from hf_compressopt.zero.optimizer import ZeroOptimizer

# Trainer has flags of its own for these.
_TRAINER_FLAGS = {
    "lr": "--learning_rate",
    "betas": "--adam_beta1 and --adam_beta2",
    "eps": "--adam_epsilon",
    "weight_decay": "--weight_decay",
    "max_grad_norm": "--max_grad_norm",
}
_COMPRESSIONS = ("grad_compression", "param_compression")


@dataclass
class OptimArgs:
    """The options of one ``--optim_args``, by their owners."""

    optimizer: dict[str, Any] = field(default_factory=dict)  # of an optimizer of this package
    zero: dict[str, Any] = field(default_factory=dict)  # of ZeroOptimizer, with ``stage``; empty without ZeRO
    async_save: bool = False
    grad_compression: str = ""  # "" if it is not given; under ZeRO it is in ``zero``
    param_compression: str = ""  # likewise, of models that FSDP2 shards
    messages: dict[str, Any] = field(default_factory=dict)  # of grad_compression
    others: str = ""  # the rest of the text, for Trainer's own optimizer


def read_optim_args(name: str, text: str | None) -> OptimArgs:
    """Read ``--optim_args`` for the optimizer that ``--optim`` names."""
    ours = name in OPTIMIZERS or name in ZERO_NAMES
    if (text or "").strip() == "help":
        if os.environ.get("RANK", "0") == "0":
            print(*_list_options(name), sep="\n", flush=True)
        raise SystemExit(0)
    if not ours and not any(option in (text or "") for option in ("zero_stage", "async_save", *_COMPRESSIONS)):
        return OptimArgs(others=text or "")
    pairs = _pairs(text)
    stage = _take_stage(name, pairs)
    found = OptimArgs(zero={} if stage is None else {"stage": stage})
    found.async_save = parse("async_save", pairs.pop("async_save", "false"), (bool,))
    if found.async_save and stage is None and name not in ALGORITHMS:
        raise ValueError(
            f"optim_args: async_save=true is not supported with {name}, because Trainer saves its state: use it with "
            f"one of {[*ALGORITHMS, *ZERO_NAMES]}, or with zero_stage"
        )
    if stage is None and (value := pairs.pop("grad_compression", "")):  # ZeroOptimizer has an option of that name
        check_grad_compression(value, name if name in ALGORITHMS else "")
        found.grad_compression = value
    if not ours:
        check_param_compression(pairs.get("param_compression", AUTO), stage, found.grad_compression or "none")
        if stage is None:
            found.param_compression = pairs.pop("param_compression", "")
    if found.grad_compression in (*FORMATS, FULL):
        legal_here = _of_messages()
        found.messages = {key: parse(key, pairs.pop(key), legal_here[key].kinds) for key in legal_here.keys() & pairs}
        MessageOptions(**found.messages)
    own = text_options(OPTIMIZERS[name]) if name in OPTIMIZERS else {}
    zero = {} if stage is None else _of_zero()
    for key, value in pairs.items():
        if key in own:
            found.optimizer[key] = parse(key, value, own[key].kinds)
        elif key in zero:
            found.zero[key] = parse(key, value, zero[key].kinds)
        elif ours:
            raise ValueError(_unknown(name, key, _legal(name, zero=stage is not None)))
        else:
            found.others += f"{',' if found.others else ''}{key}={value}"
    return found


def _take_stage(name: str, pairs: dict[str, str]) -> int | None:
    """The stage of ZeroOptimizer, by the optimizer's name or by ``zero_stage``; None without ZeroOptimizer."""
    text = pairs.pop("zero_stage", None)
    if text is None:
        return ZERO_NAMES.get(name)
    if name in ZERO_NAMES:
        raise ValueError(f"optim_args: zero_stage is part of the optimizer's name ({name}): leave it out")
    stage: int = parse("zero_stage", text, (int,))
    if name in ALGORITHMS:
        check_takes_stage(name, stage)
        pairs["zero_stage"] = text  # the optimizer's own option
        return None
    check_stage(stage)
    return stage


def check_grad_compression(value: str, other: str) -> None:
    legal = [*FORMATS, FULL, "none"]
    if value not in legal:
        raise ValueError(f"grad_compression must be one of {legal}, got {value!r}")
    if value != "none" and other:
        raise ValueError(
            f"grad_compression={value} is for ordinary optimizers, such as adamw_torch: {other} sends gradients in a "
            "way of its own. Leave grad_compression out, or choose an ordinary optimizer"
        )


def check_param_compression(value: str, stage: int | None, grad_compression: str) -> None:
    if value not in (legal := [*FORMATS, *EXACT, "none"]):
        raise ValueError(f"param_compression must be one of {legal}, got {value!r}")
    if stage or value in (AUTO, "none") or (value == "exact" and grad_compression != "none"):
        return
    raise ValueError(
        f"param_compression={value} is an option of ZeRO, whose ranks send updated parameters: give zero_stage=1 or 2, "
        "or leave it out; DDP sends no parameters, and FSDP2 gathers them in full precision, or by "
        f"param_compression=exact beside grad_compression=int4 ({FULL} leaves gradients as they are)"
    )


def check_taken(name: str, args: OptimArgs, taken: dict[str, Any], source: str) -> None:
    """Check that Trainer's own optimizer takes every option that is left, since Trainer ignores others."""
    for key in _pairs(args.others):
        read_by_trainer = f'"{key}"' in source and not args.zero  # some options go to the param groups
        if key not in taken and not read_by_trainer:
            raise ValueError(_unknown(name, key, _legal(name, zero=bool(args.zero))))


def _of_messages() -> dict[str, Option]:
    described = {name: _SHARED[name] for name in ("topology", "node_bits")}  # others refer to these
    known = text_options(ZeroOptimizer) | text_options(GradientCompression) | described
    return {option.name: known[option.name] for option in fields(MessageOptions)}


def _of_zero() -> dict[str, Option]:
    return {key: option for key, option in text_options(ZeroOptimizer).items() if key != "stage"}


def _groups(name: str) -> Iterator[tuple[str, dict[str, Option]]]:
    """Yield the options that --optim_args may have for an optimizer, after the option that they go with, or ""."""
    plugin, defaults = options_of(CompressOptPlugin), {"grad_compression": "none", "zero_stage": 0, "async_save": False}
    common = {key: plugin[key]._replace(default=default) for key, default in defaults.items()}
    async_save = {"async_save": common.pop("async_save")}
    if name in OPTIMIZERS:
        yield "", text_options(OPTIMIZERS[name])
    if name in ALGORITHMS:
        yield "", async_save
        return
    if name not in ZERO_NAMES:
        yield "", {"grad_compression": common["grad_compression"]}
        yield "grad_compression", _of_messages()
        yield "", {"zero_stage": common["zero_stage"]}
    yield "zero_stage", _of_zero() | async_save


def _legal(name: str, *, zero: bool) -> list[str]:
    other = "grad_compression" if zero else "zero_stage"
    return list(dict.fromkeys(key for option, group in _groups(name) if option != other for key in group))


def _list_options(name: str) -> Iterator[str]:
    """Yield the options of an optimizer, one a line, with default and the first sentence of the description."""
    yield f'--optim {name} --optim_args "option=value,option=value"'
    for other, group in _groups(name):
        indent = "  " if other and name not in ZERO_NAMES else ""
        for key, option in group.items():
            if key not in ACCEPTED:
                meaning, default = option.help.split(". ")[0], option.default
                words = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", meaning).replace("``", "").rstrip(".")
                value = str(default).removeprefix("torch.")
                text = f"{key}={value if isinstance(default, (str, torch.dtype)) else value.lower()}"
                yield f"{indent}  {text:32} {words}"


def _unknown(name: str, key: str, legal: Collection[str]) -> str:
    if key in _TRAINER_FLAGS:
        return f"optim_args: {key} is set by Trainer's {_TRAINER_FLAGS[key]}"
    if key == "state":
        return f"optim_args: {NO_STATE}"
    what = OPTIMIZERS[name].__name__ if name in OPTIMIZERS else name
    owners = [other for other in ALGORITHMS if key in text_options(ALGORITHMS[other])]
    has = f", which {' and '.join(owners)} have." if owners else did_you_mean(key, legal)
    return f"optim_args: {what} has no option {key!r}{has or '.'} --optim_args help lists all options"


def _pairs(text: str | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(str.strip, (text or "").split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name or not value:
            raise ValueError(
                f"optim_args must be name=value pairs, separated by commas; got {part.strip()!r} in {text!r}"
            )
        if name in pairs:
            raise ValueError(f"optim_args: {name} is given twice in {text!r}")
        pairs[name] = value
    return pairs


def text_options(optimizer_class: type[Any]) -> dict[str, Option]:
    """Options that text can set, by name."""
    found = options_of(optimizer_class).items()  # type: ignore[arg-type]  # mypy: is type[Any] hashable?
    return {name: option for name, option in found if option.kinds and option.keyword and name not in _TRAINER_FLAGS}


def check_takes_stage(name: str, stage: Any) -> None:
    """Check that a compressed optimizer knows ZeRO; its constructor checks the stage."""
    if len(ALGORITHMS[name].zero_stages) > 1:
        return
    raise ValueError(
        f"zero_stage={stage} is not supported with {name}, whose ranks need whole moments. Use onebit_adam with "
        f'zero_stage={stage}, or an ordinary optimizer (--optim zero{stage}_adamw; in a plugin optimizer="none", '
        f"zero_stage={stage})"
    )


def partitioned(optimizer: torch.optim.Optimizer, stage: int, **options: Any) -> torch.optim.Optimizer:
    """Replace a fresh optimizer by a partitioned one, with the same param group objects."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer
    kept_apart = getattr(optimizer, "args", None)  # where bitsandbytes keeps optim_bits
    check_optimizer_class(type(optimizer), vars(kept_apart) if hasattr(kept_apart, "__dict__") else {})
    if any(float(row.get("step", 1)) > 0 for row in optimizer.state.values() if row):  # Adagrad's begins at 0
        raise ValueError(
            f"{type(optimizer).__name__} has taken steps already: prepare it before the first one, so that its state "
            "can be partitioned"
        )
    given = {**vars(optimizer), **optimizer.defaults}
    names = [name for name in inspect.signature(type(optimizer).__init__).parameters if name in given]
    inner = {name: given[name] for name in names if name not in ("self", "params")}
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether it ever steps
    return ZeroOptimizer(optimizer.param_groups, type(optimizer), stage=stage, **options, **inner)


#: Fields that all compressed optimizers take as they are, if they are not None; and those of ZeroOptimizer.
_COMMON = (
    *("warmup_bits", "scale_block", "variance_floor", "max_update", "clip", "bucket_cap_mb", "communicator"),
    *("topology", "node_bits", "zero_stage"),
)
_ZERO = ("bucket_cap_mb", "communicator", "grad_compression", "param_compression", "topology")
AUTO = "auto"
_OF_THE_BUILD = ("COMPRESSOPT_CUDA_ARCHITECTURES", "COMPRESSOPT_PORTABLE_ONLY")
_SHARED = options_of(OnebitAdam)


def _own(name: str, default: Any, *kinds: type) -> Any:
    """A field that defaults from the environment variable COMPRESSOPT_<NAME>, if that is set."""

    def read() -> Any:
        variable = f"COMPRESSOPT_{name.upper()}"
        text = os.environ.get(variable)
        return default if text is None else parse(variable, text, kinds)

    return field(default_factory=read)


def _shared(name: str) -> Any:
    """A field that is an option of the compressed optimizers, with its default and types."""
    return _own(name, _SHARED[name].default, *_SHARED[name].kinds)


def check_variables() -> None:
    """Check that every COMPRESSOPT_... variable is one that the package reads."""
    legal = _variables()
    for name in sorted(os.environ):
        if name.startswith("COMPRESSOPT_") and name not in (*legal, *_OF_THE_BUILD):
            if name == "COMPRESSOPT_STATE":
                raise ValueError(f"{name}: {NO_STATE}")
            hint = did_you_mean(name, [*legal, "HF_COMPRESSOPT_KERNELS"])
            raise ValueError(f"no option has the environment variable {name}{hint}")


def _variables() -> list[str]:
    return [f"COMPRESSOPT_{name}" for name in ("OPTIM", *(f.name.upper() for f in fields(CompressOptPlugin)))]


#: Variables of a program that hf_compressopt.run has started, until a Trainer or an Accelerator has taken them.
UNREAD: list[str] = []
_READ_ANYWAY = ("COMPRESSOPT_ASYNC_SAVE", "COMPRESSOPT_GRADIENT_AS_BUCKET_VIEW")


def watch_variables() -> None:
    """Raise an error at the first step of an optimizer on several ranks if nothing has read the variables that are set.

    A plain loop reads none of them, and would train in full precision without a word.
    """
    UNREAD[:] = [name for name in _variables() if name in os.environ and name not in _READ_ANYWAY]
    if UNREAD:
        register_optimizer_step_pre_hook(lambda *_: check_read())


def check_read() -> None:
    """Raise an error if variables are set that nothing has read; on all ranks, whose programs are the same."""
    if UNREAD and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(why_unread())


def why_unread() -> str:
    """Say which variables nothing has read, and what to do; "" if there are none."""
    if not UNREAD:
        return ""
    given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in UNREAD)
    return (
        f"nothing in this program has read {given}: Trainer reads such variables with an optimizer of this package, "
        "and Accelerate with COMPRESSOPT_OPTIM, COMPRESSOPT_GRAD_COMPRESSION or COMPRESSOPT_ZERO_STAGE. A loop needs "
        "hf_compressopt.OnebitAdam with attach_ddp, GradientCompression or ZeroOptimizer in the script; else remove "
        "the variables"
    )


@dataclass
class CompressOptPlugin:
    """Options for plain Accelerate: the optimizer that replaces an Adam or AdamW given to ``prepare``.

    Every field defaults from the environment variable ``COMPRESSOPT_<FIELD>``, in capitals; ``COMPRESSOPT_OPTIM`` is
    another name for that of ``optimizer``. ``freeze_step``, ``warmup_bits``, ``scale_block``, ``variance_floor``,
    ``max_update``, ``clip``, ``topology`` and ``node_bits`` are options of the compressed optimizers.

    Attributes:
        optimizer: "onebit_adam" (the default without zero_stage and grad_compression), "zero_one_adam" or
            "onebit_lamb"; "none" leaves every optimizer as it is.
        grad_compression: "int4" or "int8": average the gradients of ordinary optimizers in 4 or 8 bits per element. Not
            supported with the optimizers above, so ``optimizer`` is "none" then. With zero_stage it is ZeroOptimizer's
            option. "float32" is for models that FSDP2 shards: trainable parameters beside the shards, such as adapters
            that came later, are averaged in full precision, and the others by FSDP2.
        param_compression: How updated parameters are sent, with zero_stage; see ZeroConfig. "exact" beside
            grad_compression is also for models that FSDP2 shards over all ranks; see compress_fsdp.
        total_steps: Optimizer steps of the run, for freeze_step="auto"; None takes the steps of a learning-rate
            scheduler given to ``prepare``.
        bucket_cap_mb: MiB of float32 values that are sent together, > 0. None is the size of DDP's buckets with
            grad_compression, else 100 on CUDA devices and 25 on others.
        communicator: "auto", or the name of a torch.distributed backend.
        zero_stage: 1 or 2: partition every fresh element-wise optimizer by ZeroOptimizer; ``optimizer`` is "none" then,
            unless it is given. With "onebit_adam" it is that optimizer's option, and with 2 models get no DDP. Not
            supported with the other two. 0 is off.
        gradient_as_bucket_view: Keep gradients that this package sends in DDP's buckets only, by DDP's option of that
            name, which saves a copy of all gradients. False leaves DDP's option as it is.
        async_save: Write the optimizers' states in the background in ``save_state``. The next save, a load,
            ``end_training`` and the end of the process wait for it.

    Raises:
        ValueError: For an unknown name, a freeze_step or total_steps that is not legal, or an environment variable of
            a wrong type.
    """

    optimizer: str = field(default_factory=lambda: CompressOptPlugin.optimizer_from_env())
    freeze_step: int | str = _shared("freeze_step")
    scale_block: int | None = _shared("scale_block")
    variance_floor: float = _shared("variance_floor")
    max_update: float | None = _shared("max_update")
    clip: str = _shared("clip")
    bucket_cap_mb: float | None = _own("bucket_cap_mb", None, float, type(None))
    communicator: str = _own("communicator", AUTO, str)
    zero_stage: int = _shared("zero_stage")
    async_save: bool = _own("async_save", False, bool)
    grad_compression: str = _own("grad_compression", "none", str)
    total_steps: int | None = _own("total_steps", None, int, type(None))
    warmup_bits: int = _shared("warmup_bits")
    param_compression: str = _own("param_compression", AUTO, str)
    topology: str = _shared("topology")
    node_bits: int = _shared("node_bits")
    gradient_as_bucket_view: bool = _own("gradient_as_bucket_view", True, bool)

    def __post_init__(self) -> None:
        """Check the names, the messages and the schedule; the optimizer checks the other options."""
        check_variables()
        self.message_options()
        if self.zero_stage not in (0, 1, 2):
            raise ValueError(f"zero_stage must be 0, 1 or 2, got {self.zero_stage!r}")
        ordinary = self.zero_stage or self.grad_compression != "none"
        self.optimizer = self.optimizer or ("none" if ordinary else "onebit_adam")
        if self.optimizer not in (*ALGORITHMS, "none"):
            raise ValueError(f"optimizer must be one of {[*ALGORITHMS, 'none']}, got {self.optimizer!r}")
        if self.freeze_step != AUTO and not _is_count(self.freeze_step):
            raise ValueError(f"freeze_step must be an int >= 1, or 'auto', got {self.freeze_step!r}")
        if self.total_steps is not None and not _is_count(self.total_steps):
            raise ValueError(f"total_steps must be an int >= 1, or None, got {self.total_steps!r}")
        check_grad_compression(self.grad_compression, "" if self.optimizer == "none" else self.optimizer)
        stage = self.zero_stage if self.partitions else None
        check_param_compression(self.param_compression, stage, self.grad_compression)
        if self.zero_stage and not self.partitions:
            check_takes_stage(self.optimizer, self.zero_stage)
            cls = ALGORITHMS[self.optimizer]
            check_zero_stage(self.zero_stage, cls.__name__, cls.zero_stages, self.warmup_bits, self.clip)

    @property
    def partitions(self) -> bool:
        """True if ordinary optimizers become a ZeroOptimizer of them."""
        return self.zero_stage > 0 and self.optimizer == "none"

    def message_options(self) -> MessageOptions:
        """The options of ``grad_compression``'s messages, checked."""
        return MessageOptions(self.topology, None, self.node_bits, self.bucket_cap_mb)

    @staticmethod
    def optimizer_from_env() -> str:
        """The value of COMPRESSOPT_OPTIM, or of its longer form COMPRESSOPT_OPTIMIZER; "" if neither is set."""
        short, long = (os.environ.get(f"COMPRESSOPT_{name}", "") for name in ("OPTIM", "OPTIMIZER"))
        if short and long and short != long:
            raise ValueError(f"COMPRESSOPT_OPTIM={short} and COMPRESSOPT_OPTIMIZER={long} differ: set one of them")
        return short or long

    def convert(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace a fresh Adam or AdamW by the compressed optimizer, or any optimizer by ZeRO's.

        The param groups are the same objects, so that a scheduler made for the old optimizer drives the new one.

        Raises:
            ValueError: If the optimizer has taken steps, or Adam has a weight decay (its L2 is not decoupled).
        """
        if self.partitions:
            return partitioned(optimizer, self.zero_stage, **self.zero_options())
        if self.optimizer == "none" or not _is_plain_adam(optimizer):
            return optimizer
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} has taken steps already: prepare it before the first one, so that "
                f"{self.optimizer} can replace it"
            )
        decays = any(group["weight_decay"] for group in optimizer.param_groups)
        if decays and not isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(
                f"Adam with weight_decay is L2 regularization, which {self.optimizer} does not support: use AdamW"
            )
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether it ever steps
        cls: Any = ALGORITHMS[self.optimizer]
        given: dict[str, Any] = {"freeze_step": self.freeze_step, **self.common_options()}
        for name in given.keys() - options_of(cls).keys():
            if given.pop(name) != _SHARED[name].default:
                raise ValueError(f"{self.optimizer} has no {name}, got {name}={getattr(self, name)!r}: leave it out")
        replacement: torch.optim.Optimizer = cls(optimizer.param_groups, **given)
        return replacement

    @property
    def ddp_compression(self) -> str:
        """The compression of gradients that DDP averages; "none" under ZeRO, which averages them itself."""
        return "none" if self.partitions else self.grad_compression

    def common_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _COMMON}
        if self.bucket_cap_mb is None:
            del given["bucket_cap_mb"]
        return given

    def zero_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ZERO}

    def options_from_env(self) -> dict[str, Any]:
        """The options of a compressed optimizer that are set in the environment, by the names of its constructor."""
        options = self.common_options()
        if self.freeze_step != AUTO:
            options["freeze_step"] = self.freeze_step
        return {name: value for name, value in options.items() if f"COMPRESSOPT_{name.upper()}" in os.environ}

    def leaves_alone(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the reason why an optimizer is not replaced by the compressed one that the plugin names, or ""."""
        if self.optimizer == "none" or _is_plain_adam(optimizer) or saves_shards(optimizer):
            return ""
        name = type(optimizer).__name__
        return (
            f"{name} stays as it is, and the gradients of its parameters are not compressed: "
            f"CompressOptPlugin(optimizer={self.optimizer!r}) replaces Adam and AdamW, not other optimizers and not "
            f"subclasses with a step of their own. Give AdamW to prepare, or set optimizer='none' to keep {name}"
        )


def _is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True for Adam, AdamW, and subclasses that do not change the step."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return False
    own = {inspect.unwrap(cls.step) for cls in (torch.optim.Adam, torch.optim.AdamW)}  # torch wraps steps to profile
    return inspect.unwrap(type(optimizer).step) in own


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
