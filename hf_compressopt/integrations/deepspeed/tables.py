"""The options of DeepSpeed 0.19.6 by their names here, their defaults, and remarks on those without a counterpart."""

from __future__ import annotations

from typing import Any

#: The kinds of rows of a translation.
BECOMES, SAME, DIFFERS, LOST = "becomes", "same", "differs", "lost"
#: DeepSpeed's optimizers, in lower case, and Trainer's ``--optim`` here.
NAMES = {
    "onebitadam": "onebit_adam",
    "zerooneadam": "zero_one_adam",
    "onebitlamb": "onebit_lamb",
    "adam": "fused_adam",
    "adamw": "fused_adam",
    "fusedadam": "fused_adam",
    "cpuadam": "fused_adam",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "sgd": "sgd",
    "adagrad": "adagrad",
}
#: DeepSpeed's defaults of options that Trainer would otherwise fit to the length of the run.
DEFAULTS: dict[str, dict[str, Any]] = {
    "onebit_adam": {"freeze_step": 100_000},
    "onebit_lamb": {"freeze_step": 100_000},
    "zero_one_adam": {
        "var_freeze_step": 100_000,
        "var_update_scaler": 16,
        "local_step_scaler": 32_678,
        "local_step_clipper": 16,
    },
}
#: Options with which the optimizers here compute what DeepSpeed's did, whatever the configuration says.
SAME_ARITHMETIC = {"scale_block": None, "variance_floor": 0, "bias_correction": False, "eps_inside_sqrt": False}
IGNORED_THERE = ("bias_correction", "eps_inside_sqrt")
DEFAULT_LR = 1e-3
INITIAL_SCALE_POWER = 16  # of torch's GradScaler
GROWTH_INTERVAL = 2000  # likewise

FLAGS = {  # options of the optimizer that are Trainer's own flags
    "lr": ("--learning_rate",),
    "betas": ("--adam_beta1", "--adam_beta2"),
    "eps": ("--adam_epsilon",),
    "weight_decay": ("--weight_decay",),
}
ZERO_OPTIONS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "round_robin_gradients",
    "ignore_unused_parameters",
)
NOT_NEEDED: dict[str, str] = {
    "zero_allow_untested_optimizer": "any element-wise optimizer may be partitioned",
    "zero_force_ds_cpu_optimizer": "offloaded state is updated by the same native kernels",
    "wall_clock_breakdown": "every log line has compressopt/seconds_communication",
    "memory_breakdown": "hf_compressopt.zero.memory.memory_report measures it",
    "dump_state": "optimizer.metrics() and the log have the state",
    "zero_optimization.elastic_checkpoint": "a checkpoint loads on any number of ranks",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the float32 weights, and they are loaded",
    "zero_optimization.legacy_stage1": "there is one stage 1",
    "zero_optimization.use_multi_rank_bucket_allreduce": "each rank's part of a bucket goes to its owner at once",
    "checkpoint": "checkpoints are written by every rank at once, and load on any number of ranks",
}
NO_COUNTERPART: dict[str, str] = {
    "activation_checkpointing": "Trainer's --gradient_checkpointing recomputes activations; partitioning and "
    "offloading them are not supported",
    "aio": "NVMe offload is not supported",
    "amp": "apex's mixed precision: Trainer has --fp16 and --bf16",
    "autotuning": "hf-compressopt estimate predicts memory and time instead",
    "comms_logger": "bytes and seconds are in every log line, but not of single messages",
    "communication_data_type": "DDP sends the gradients' own dtype; under ZeRO it is an option",
    "compression_training": "it compresses models, not messages",
    "csv_monitor": "no CSV writer: trainer_state.json has every log line",
    "curriculum_learning": "the script owns the data",
    "data_efficiency": "the script owns the data",
    "disable_allgather": "parameters are always gathered after a step",
    "elasticity": "checkpoints load on any number of ranks; torchrun restarts a run",
    "flops_profiler": "torch.profiler",
    "gradient_predivide_factor": "DDP divides gradients by the number of ranks before it sums them; under ZeRO it is "
    "an option",
    "pipeline": "pipeline parallelism is not supported",
    "prescale_gradients": "DDP always divides gradients before it sums them",
    "sparse_attention": "the model owns its attention",
    "sparse_gradients": "sparse gradients are not supported: make embeddings with sparse=False",
    "tensor_parallel": "tensor parallelism is not supported",
    "zero_optimization.sub_group_size": "it is an option of stage 3",
    "zero_optimization.reduce_scatter": "an all-reduce would send twice as much and change nothing",
    "zero_optimization.allgather_partitions": "broadcasts instead of the all-gather would change nothing",
    "zero_optimization.offload_param": "parameters stay where the model is; FSDP offloads them",
}
#: Values, other than 0 and false, that mean what happens here in any case.
ZERO_NEUTRAL: dict[str, Any] = {"reduce_scatter": True, "allgather_partitions": True, "offload_param.device": "none"}
NEUTRAL: dict[str, Any] = {"prescale_gradients": True, "gradient_predivide_factor": 1.0}
