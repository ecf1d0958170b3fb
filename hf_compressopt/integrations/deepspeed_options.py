"""What becomes of the options of DeepSpeed 0.19.6, the last release with the 1-bit optimizers.

Of the rules that fit an option, the first translates it. In a remark, or in a value that is set, {fact} stands for a
fact of :func:`~hf_compressopt.integrations.deepspeed.facts_of`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

#: The kinds of rows of a translation.
BECOMES, SAME, DIFFERS, LOST = KINDS = ("becomes", "same", "differs", "lost")
ANY = object()

Condition = Callable[[Any], Any]  # of the facts
#: What to set (see Translation.set), alone with the option's value, or with another value or what makes it of both.
Target = str | tuple[str, Any]


def shares_moments(f: Any) -> bool:
    """True for a compressed optimizer that takes a ZeRO stage."""
    return bool(f.optim == "onebit_adam" and f.stage in (1, 2) and not f.as_deepspeed)


def always(_: Any) -> bool:
    return True


class Rule(NamedTuple):
    """What becomes of some options, if the condition holds."""

    when: Condition
    section: str  # before each of the options
    options: str | Condition  # names with spaces between them, or what makes these of the facts; "x.*" is all in x
    kind: str
    targets: tuple[Target, ...]
    remark: str
    value: Any  # the rule is for this value only
    default: Any  # what DeepSpeed takes if the option is left out: it has a row then, too


def _rule(
    kind: str,
    options: str | Condition,
    *targets: Target,
    when: Condition = always,
    value: Any = ANY,
    default: Any = ANY,
    remark: str = "",
) -> Rule:
    return Rule(when, "", options, kind, targets, remark, value, default)


becomes, same, differs, lost = (partial(_rule, kind) for kind in KINDS)


def in_section(section: str, when: Condition, *rules: Rule) -> list[Rule]:
    """Return rules for the options of a section, where another condition holds too."""

    def both(rule: Rule) -> Condition:
        return lambda facts: when(facts) and rule.when(facts)

    return [rule._replace(section=section, when=both(rule)) for rule in rules]


# -- values, made of an option and its value ---------------------------------------------------------------------------


def as_given(option: str, value: Any) -> Any:
    return value


def number(option: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise ValueError(f'{option} must be a finite number or "auto", got {value!r}')
    return value


def integer(option: str, value: Any) -> int:
    return int(number(option, value))  # 5e8 is an int too


def floating(option: str, value: Any) -> float:
    return float(number(option, value))


def first_beta(option: str, value: Any) -> Any:
    return _pair(option, value)[0]


def second_beta(option: str, value: Any) -> Any:
    return _pair(option, value)[1]


def _pair(option: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{option} must be 2 numbers, got {value!r}")
    return [number(option, each) for each in value]


def power(option: str, value: Any) -> float:
    if not 0 <= number(option, value) <= 126:
        raise ValueError(f"{option} must be from 0 to 126, got {value!r}")
    return float(2.0**value)


def min_lr_rate(option: str, value: Any) -> str:
    return json.dumps({"min_lr_rate": value})


# -- the table ---------------------------------------------------------------------------------------------------------

RULES: list[Rule] = [
    *in_section(
        "",
        always,
        same("train_batch_size", value="auto", remark="Trainer's flags decide, as before"),
        same(
            "train_batch_size",
            when=lambda f: not f.missing,
            remark="it follows from the two others and the number of ranks",
        ),
        same("train_batch_size", when=lambda f: f.size, remark="{missing} is {size} with {ranks} rank(s)"),
        lost("train_batch_size", remark="{missing} follows from it and the number of ranks: give --ranks"),
        becomes("train_micro_batch_size_per_gpu", "--per_device_train_batch_size"),
        becomes(
            "gradient_accumulation_steps", "--gradient_accumulation_steps", "Accelerator:gradient_accumulation_steps"
        ),
        lost(
            "optimizer.type",
            when=lambda f: f.unknown,
            remark="the optimizers here are {known}; Trainer's own --optim may have it",
        ),
        lost("optimizer.*", when=lambda f: f.unknown, remark="an option of {unknown}"),
        becomes("optimizer.type optimizer.params.torch_adam", ("--optim", "{optim}"), when=lambda f: f.optim),
        lost(
            "scheduler.type",
            when=lambda f: f.unscheduled,
            remark=("Trainer has no flag for it: give a torch scheduler to Trainer(optimizers=(optimizer, scheduler))"),
        ),
        lost("scheduler.*", when=lambda f: f.unscheduled, remark="an option of {unscheduled}"),
        becomes("scheduler.type", ("--lr_scheduler_type", "{schedule}"), when=lambda f: f.schedule),
    ),
    *in_section(
        "optimizer.params.",
        lambda f: f.optim,
        same("lr", when=lambda f: f.schedule and not f.cosine, remark="the scheduler's warmup_max_lr overrides it"),
        becomes("lr", "--learning_rate", default=0.001),
        becomes("betas", ("--adam_beta1", first_beta), ("--adam_beta2", second_beta)),
        becomes("eps", "--adam_epsilon"),
        becomes("weight_decay", "--weight_decay"),
        same(
            "max_grad_norm",
            when=lambda f: f.unclipped,
            remark="had no effect in DeepSpeed; gradient_clipping clips there",
        ),
        becomes(
            "max_grad_norm",
            "--max_grad_norm",
            remark="had no effect in DeepSpeed, but clips here: leave it out to train as before",
        ),
        becomes(
            "comm_backend_name",
            "communicator",
            when=lambda f: f.compressed and f.mpi,
            remark="or leave it out: auto; it needs pip install 'hf-compressopt[mpi]' and mpirun",
        ),
        becomes("comm_backend_name", "communicator", when=lambda f: f.compressed, remark="or leave it out: auto"),
        lost("comm_backend_name", remark="{optim} sends nothing by itself"),
        becomes("cuda_aware", when=lambda f: f.compressed and f.mpi),
        same("cuda_aware", remark="it matters only with comm_backend_name=mpi"),
        same("amsgrad", value=False, remark="off"),
        lost("amsgrad", remark="refused, as in DeepSpeed"),
        differs(
            "exp_avg_mask non_freeze", remark="it belongs to a param group, with the same name: set it in the script"
        ),
        lost(
            "adam_w_mode",
            when=lambda f: f.optim != "fused_adam",
            value=False,
            remark="L2 regularization is not supported",
        ),
        same("adam_w_mode", when=lambda f: f.optim != "fused_adam", remark="decay is decoupled"),
        becomes(
            "scale_block", ("scale_block", None), when=lambda f: f.as_deepspeed, remark="had no effect in DeepSpeed"
        ),
        becomes(
            "variance_floor", ("variance_floor", 0), when=lambda f: f.as_deepspeed, remark="had no effect in DeepSpeed"
        ),
        becomes(
            "bias_correction",
            ("bias_correction", False),
            when=lambda f: f.as_deepspeed,
            remark="had no effect in DeepSpeed",
        ),
        becomes(
            "eps_inside_sqrt",
            ("eps_inside_sqrt", False),
            when=lambda f: f.as_deepspeed,
            remark="had no effect in DeepSpeed",
        ),
        becomes(lambda f: f.heeded),
        becomes(
            "bias_correction eps_inside_sqrt",
            when=lambda f: f.compressed,
            remark="had no effect in DeepSpeed, but has one here",
        ),
        becomes(
            "freeze_step",
            when=lambda f: f.compressed and f.optim != "zero_one_adam",
            default=100000,
            remark="DeepSpeed's default; leave it out to fit it to the length of the run",
        ),
        becomes(
            "var_freeze_step",
            when=lambda f: f.optim == "zero_one_adam",
            default=100000,
            remark="DeepSpeed's default; leave it out to fit it to the length of the run",
        ),
        becomes(
            "var_update_scaler",
            when=lambda f: f.optim == "zero_one_adam",
            default=16,
            remark="DeepSpeed's default; leave it out to fit it to the length of the run",
        ),
        becomes(
            "local_step_scaler",
            when=lambda f: f.optim == "zero_one_adam",
            default=32678,
            remark="DeepSpeed's default; leave it out to fit it to the length of the run",
        ),
        becomes(
            "local_step_clipper",
            when=lambda f: f.optim == "zero_one_adam",
            default=16,
            remark="DeepSpeed's default; leave it out to fit it to the length of the run",
        ),
        becomes("scale_block", when=lambda f: f.as_deepspeed, default=None, remark="what DeepSpeed computed"),
        becomes("variance_floor", when=lambda f: f.as_deepspeed, default=0, remark="what DeepSpeed computed"),
        becomes(
            "bias_correction eps_inside_sqrt",
            when=lambda f: f.as_deepspeed,
            default=False,
            remark="what DeepSpeed computed",
        ),
        becomes("warmup_bits", when=lambda f: f.as_deepspeed, default=32, remark="what DeepSpeed computed"),
        becomes("max_update", when=lambda f: f.as_deepspeed, default=0, remark="what DeepSpeed computed"),
        becomes("variance_interval", when=lambda f: f.as_deepspeed, default=0, remark="what DeepSpeed computed"),
        becomes("trust_ratio", when=lambda f: f.frozen_ratio, default="frozen", remark="what DeepSpeed computed"),
        differs(
            "trust_ratio",
            when=lambda f: f.optim == "onebit_lamb",
            default="frozen",
            remark=(
                "DeepSpeed kept averages of the warmup stage's trust ratios, as trust_ratio=frozen does; measured, the "
                "default, lets them follow the norms of tensors and updates, and reaches a lower loss"
            ),
        ),
        differs(
            "scale_block",
            when=lambda f: f.compressed and not f.as_deepspeed,
            default=None,
            remark=(
                "here scale_block=4096: DeepSpeed had one scale for a whole message, no variance floor and no "
                "bias correction; the defaults here reach a lower loss. Its arithmetic is "
                "scale_block=none,variance_floor=0,bias_correction=false (--same-arithmetic)"
            ),
        ),
        differs(
            "warmup_bits",
            when=lambda f: f.compressed and not f.as_deepspeed,
            default=32,
            remark=(
                "DeepSpeed averaged the gradients of the first stage in full precision, as warmup_bits=32 does "
                "here; 4 and 8 send integers with error feedback"
            ),
        ),
        differs(
            "state",
            when=lambda f: f.optim in ("onebit_adam", "zero_one_adam"),
            default="float32",
            remark="DeepSpeed kept its state in float32; here errors and the frozen variance lie in 8 bits",
        ),
    ),
    *in_section(
        "zero_optimization.",
        lambda f: f.zero,
        becomes("stage", ("--optim", "zero{stage}_adamw"), when=lambda f: f.adamw),
        becomes("stage", "zero_stage"),
        becomes("reduce_bucket_size", ("reduce_bucket_size", integer)),
        becomes("allgather_bucket_size", ("allgather_bucket_size", integer)),
        becomes("overlap_comm"),
        same(
            "contiguous_gradients round_robin_gradients ignore_unused_parameters",
            remark="without effect here: no bit changes",
        ),
        becomes("offload_optimizer.device", ("offload_optimizer", "cpu"), value=True),
        becomes("offload_optimizer.device", ("offload_optimizer", "cpu"), value="cpu"),
        becomes("cpu_offload", ("offload_optimizer", "cpu"), value=True),
        becomes("cpu_offload", ("offload_optimizer", "cpu"), value="cpu"),
        same("offload_optimizer.device", value=False, remark="off"),
        same("offload_optimizer.device", value="none", remark="off"),
        same("cpu_offload", value=False, remark="off"),
        same("cpu_offload", value="none", remark="off"),
        lost(
            "offload_optimizer.device cpu_offload",
            remark="state is offloaded to host memory only: offload_optimizer=cpu",
        ),
        same("offload_optimizer.pin_memory", value=True, remark="offloaded memory is page-locked"),
        same("reduce_scatter", value=True, remark="as it is here"),
        same("reduce_scatter", value="auto", remark="as it is here"),
        same("allgather_partitions", value=True, remark="as it is here"),
        same("allgather_partitions", value="auto", remark="as it is here"),
        lost("reduce_scatter", remark="an all-reduce would send twice as much and change nothing"),
        lost("allgather_partitions", remark="broadcasts instead of the all-gather would change nothing"),
        same(
            "elastic_checkpoint load_from_fp32_weights",
            remark="checkpoints hold the float32 weights, and load on any number of ranks",
        ),
        same(
            "legacy_stage1 use_multi_rank_bucket_allreduce",
            remark="there is one stage 1; each rank's part of a bucket goes to its owner at once",
        ),
        same("*", value=False, remark="off"),
        lost("offload_param.*", remark="parameters stay where the model is; FSDP offloads them"),
        lost("sub_group_size stage3_* zero_* mics_*", remark="an option of stage 3"),
        lost("*", remark="no such option here"),
    ),
    *in_section(
        "",
        lambda f: f.zero,
        becomes("communication_data_type"),
        becomes("data_types.grad_accum_dtype", "gradient_accumulation_dtype"),
        same(
            "gradient_predivide_factor prescale_gradients",
            when=lambda f: f.prescaled,
            remark="gradients are divided by the number of ranks before the sum",
        ),
        same(
            "gradient_predivide_factor", value=1, remark="gradients are divided by the number of ranks before the sum"
        ),
        becomes(
            "gradient_predivide_factor",
            ("postscale_gradients", True),
            "gradient_predivide_factor",
            remark="with postscale_gradients",
        ),
        differs("prescale_gradients", remark="gradients are divided before the sum"),
    ),
    *in_section(
        "zero_optimization.",
        always,
        lost(
            "stage",
            value=3,
            remark=("parameters are not partitioned here: use FSDP for that, or stage 2, which keeps parameters whole"),
        ),
        becomes("stage", "zero_stage", when=shares_moments, remark="the moments of its warmup stage are partitioned"),
        lost("offload_optimizer.device cpu_offload", when=shares_moments, remark="{optim} offloads nothing"),
        same("*", when=shares_moments, remark="{optim} sends in buckets of its own, of bucket_cap_mb"),
        lost(
            "stage",
            when=lambda f: f.stage,
            remark=("{optim} cannot be partitioned, as in DeepSpeed: use it without ZeRO, or zero{stage}_adamw"),
        ),
        lost("*", when=lambda f: f.stage, remark="no ZeRO without a stage"),
        same("*", remark="no effect in stage 0"),
    ),
    *in_section(
        "scheduler.params.",
        lambda f: f.schedule,
        becomes("warmup_num_steps", "--warmup_steps", default=1000),
        becomes("total_num_steps", "--max_steps"),
        becomes("warmup_max_lr", "--learning_rate"),
        becomes("warmup_max_lr", "--learning_rate", when=lambda f: not f.cosine, default=0.001),
        becomes("cos_min_ratio", ("--lr_scheduler_kwargs", min_lr_rate), when=lambda f: f.cosine, default=0.0001),
        same("warmup_type", value="linear", remark="the rate rises linearly"),
        lost("warmup_type", remark="the rate rises linearly; DeepSpeed's default is log"),
        lost(
            "warmup_type",
            when=lambda f: not f.cosine,
            default="log",
            remark="the rate rises linearly; DeepSpeed's default is log",
        ),
        same("warmup_min_lr warmup_min_ratio", value=0, remark="the rate rises from 0"),
        same("*", value="auto", remark="as it is here"),
        lost("warmup_min_lr warmup_min_ratio", remark="the rate rises from 0"),
    ),
    *in_section(
        "",
        always,
        lost("optimizer.*", when=lambda f: f.optim, remark="{optim} has no such option"),
        same(lambda f: f.off, remark="its section is off"),
        differs(
            "fp16.enabled",
            ("--fp16", as_given),
            ("Accelerator:mixed_precision", "fp16"),
            remark="autocast over float32 parameters; DeepSpeed had a 16-bit model and float32 copies",
        ),
        differs(
            "bf16.enabled",
            ("--bf16", as_given),
            ("Accelerator:mixed_precision", "bf16"),
            remark="autocast over float32 parameters; DeepSpeed had a 16-bit model and float32 copies",
        ),
        same("fp16.loss_scale", value=0, remark="the scale is dynamic"),
        lost(
            "fp16.loss_scale",
            ("GradScalerKwargs:init_scale", floating),
            ("GradScalerKwargs:growth_interval", 2147483647),
            remark="only in Accelerate: Trainer has no flag for it",
        ),
        same("fp16.initial_scale_power", value=16, remark="as it is here"),
        same("fp16.loss_scale_window", value=2000, remark="as it is here"),
        same("fp16.hysteresis", value=1, remark="as it is here"),
        lost(
            "fp16.initial_scale_power",
            ("GradScalerKwargs:init_scale", power),
            remark="only in Accelerate: Trainer has no flag for it",
        ),
        lost(
            "fp16.loss_scale_window",
            ("GradScalerKwargs:growth_interval", integer),
            remark="only in Accelerate: Trainer has no flag for it, and uses 2000 steps",
        ),
        lost("fp16.hysteresis", remark="the scale is halved at every overflow"),
        lost("fp16.min_loss_scale", remark="the scale has no lower bound"),
        becomes("gradient_clipping", "--max_grad_norm", value=0),
        becomes(
            "gradient_clipping",
            "--max_grad_norm",
            when=lambda f: f.compressed,
            remark="in the compressed stage, by an estimate of the norm of the mean gradient (clip=sketch)",
        ),
        becomes("gradient_clipping", "--max_grad_norm"),
        becomes(
            "gradient_clipping",
            "--max_grad_norm",
            when=lambda f: not f.norm,
            default=0.0,
            remark="DeepSpeed's default; Trainer's is 1.0",
        ),
        becomes("tensorboard.enabled", ("--report_to", "tensorboard")),
        becomes("wandb.enabled", ("--report_to", "wandb")),
        differs("tensorboard.* wandb.*", remark="the reporter reads it from its own environment variables"),
        becomes("steps_per_print", ("--logging_strategy", "no"), value=math.inf),
        becomes("steps_per_print", "--logging_steps"),
        becomes("dataloader_drop_last", ("--dataloader_drop_last", as_given)),
        same("prescale_gradients", value=True, remark="off"),
        same("gradient_predivide_factor", value=1, remark="off"),
        same("*", value=False, remark="off"),
        same("zero_allow_untested_optimizer.*", remark="any element-wise optimizer may be partitioned"),
        same("zero_force_ds_cpu_optimizer.*", remark="offloaded state is updated by the same native kernels"),
        same("wall_clock_breakdown.*", remark="every log line has compressopt/seconds_communication"),
        same("memory_breakdown.*", remark="hf_compressopt.zero.memory.memory_report measures it"),
        same("dump_state.*", remark="optimizer.metrics() and the log have the state"),
        same("checkpoint.*", remark="checkpoints are written by every rank at once, and load on any number of ranks"),
        lost(
            "activation_checkpointing.*",
            remark=(
                "Trainer's --gradient_checkpointing recomputes activations; partitioning and offloading them are "
                "not supported"
            ),
        ),
        lost(
            "aio.* pipeline.* tensor_parallel.*",
            remark="NVMe offload, pipeline and tensor parallelism are not supported",
        ),
        lost("amp.*", remark="apex's mixed precision: Trainer has --fp16 and --bf16"),
        lost("autotuning.*", remark="hf-compressopt estimate predicts memory and time instead"),
        lost("comms_logger.*", remark="bytes and seconds are in every log line, but not of single messages"),
        lost("communication_data_type.*", remark="DDP sends the gradients' own dtype; under ZeRO it is an option"),
        lost("compression_training.*", remark="it compresses models, not messages"),
        lost("csv_monitor.*", remark="no CSV writer: trainer_state.json has every log line"),
        lost("curriculum_learning.* data_efficiency.*", remark="the script owns the data"),
        lost("disable_allgather.*", remark="parameters are always gathered after a step"),
        lost("elasticity.*", remark="checkpoints load on any number of ranks; torchrun restarts a run"),
        lost("flops_profiler.*", remark="torch.profiler"),
        lost(
            "gradient_predivide_factor.* prescale_gradients.*",
            remark=(
                "DDP divides gradients by the number of ranks before it sums them; the factor is an option under ZeRO"
            ),
        ),
        lost("sparse_attention.*", remark="the model owns its attention"),
        lost("sparse_gradients.*", remark="sparse gradients are not supported: make embeddings with sparse=False"),
        lost("*", remark="no such option here"),
    ),
]
