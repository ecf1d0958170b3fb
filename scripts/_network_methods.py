"""The models, the ways to exchange gradients, and the rows of benchmark_network.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from _slow_network import RATES

#: Layers, width, vocabulary, and the tokens of an example: few of them compute as little as a faster device would.
MODELS = {
    "10M": (6, 320, 8000, 128),
    "30M": (8, 512, 8000, 128),
    "100M": (12, 768, 20000, 128),
    "100M, 16 tokens": (12, 768, 20000, 16),
    "tiny": (1, 32, 256, 128),
}
SWITCH = 3  # steps before a compressed optimizer's last stage, in which DDP also settles its buckets
ADAMW = "adamw_torch_fused"  # Trainer's default
LONGEST_INTERVAL = 16  # 0/1 Adam: every window of this many steps has one sync


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients.

    Attributes:
        title: Its name in tables.
        optim: Trainer's ``--optim``.
        optim_args: Trainer's ``--optim_args``; ``{per_node}`` stands for the ranks of a node.
        hook: DDP communication hook: "none" exchanges nothing at all, "fp16", "powersgd", or "" for DDP's own.
        ddp_bucket_cap_mb: MiB of a bucket of DDP.
        partitioned: Whether the optimizer is torch's ZeroRedundancyOptimizer of AdamW.
        between: What FSDP2 sends between the nodes, in the nodes of which it shards the model: "bfloat16" or "int4";
            "" without FSDP2.
        rival: A method of scripts/rivals, in place of Trainer's; or "".
        rival_options: Its options.
        period: Of so many steps one exchanges what the others do not.
        bytes_per_parameter: What a rank sends in a step, by the formula; of W ranks.
    """

    title: str
    optim: str
    optim_args: str = ""
    hook: str = ""
    ddp_bucket_cap_mb: int = 25
    partitioned: bool = False
    between: str = ""
    rival: str = ""
    rival_options: Mapping[str, Any] = field(default_factory=dict)
    period: int = 1
    bytes_per_parameter: Callable[[int], float] | None = None

    @property
    def needs_nodes(self) -> bool:
        """True if the method needs several ranks on a node."""
        return bool(self.between) or "{per_node}" in self.optim_args

    @property
    def in_plain_loop(self) -> bool:
        """True if Trainer does not train it."""
        return bool(self.between or self.rival)


def ring(itemsize: float) -> Callable[[int], float]:
    """Bytes that a rank sends per parameter in an all-reduce of values of this size."""
    return lambda world_size: 2 * (world_size - 1) / world_size * itemsize


def local_steps(title: str, rival: str, interval: int, **options: Any) -> Method:
    """A method whose ranks step alone, and average parameters every ``interval`` steps."""
    options = {"interval": interval, **options}
    sent = ring(4 / interval)
    return Method(title, "", rival=rival, rival_options=options, period=interval, bytes_per_parameter=sent)


SIGN_BYTES = 1 / 8 + 4 / 4096  # a bit, and its share of a block's scale
INT4_BYTES, INT8_BYTES = (bits / 8 + 2 / 128 for bits in (4, 8))  # and their share of a block's scale
METHODS = {
    "compute": Method("compute only", ADAMW, hook="none"),
    "ddp": Method("DDP fp32", ADAMW, bytes_per_parameter=ring(4)),
    "fp16": Method("DDP, 16-bit gradients", ADAMW, hook="fp16", bytes_per_parameter=ring(2)),
    "powersgd": Method(  # it needs one bucket on gloo
        "DDP, PowerSGD rank 1", ADAMW, hook="powersgd", ddp_bucket_cap_mb=1000
    ),
    "int4": Method("AdamW, int4 gradients", ADAMW, "grad_compression=int4", bytes_per_parameter=ring(INT4_BYTES)),
    "int4_12": Method(
        "AdamW, int4 gradients, buckets of 12 MiB",
        ADAMW,
        "grad_compression=int4,bucket_cap_mb=12",
        ddp_bucket_cap_mb=12,
        bytes_per_parameter=ring(INT4_BYTES),
    ),
    "int8": Method("AdamW, int8 gradients", ADAMW, "grad_compression=int8", bytes_per_parameter=ring(INT8_BYTES)),
    "zero2": Method("ZeRO-2", "zero2_adamw", bytes_per_parameter=ring(4)),
    "zero2_int4": Method(
        "ZeRO-2, int4 both ways",
        "zero2_adamw",
        "grad_compression=int4,param_compression=int4",
        bytes_per_parameter=ring(INT4_BYTES),
    ),
    "zero_torch": Method("DDP, torch's ZeroRedundancyOptimizer", ADAMW, partitioned=True),
    "zero2_levels": Method("ZeRO-2, two levels", "zero2_adamw", "node_size={per_node}"),
    "onebit_adam": Method("OnebitAdam", "onebit_adam", f"freeze_step={SWITCH}", bytes_per_parameter=ring(SIGN_BYTES)),
    "onebit_adam_zero2": Method(
        "OnebitAdam, zero_stage=2",
        "onebit_adam",
        f"freeze_step={SWITCH},zero_stage=2",
        bytes_per_parameter=ring(SIGN_BYTES),
    ),
    "zero2_int4_levels": Method(
        "ZeRO-2, int4 both ways, two levels",
        "zero2_adamw",
        "grad_compression=int4,param_compression=int4,node_size={per_node}",
    ),
    "int4_levels": Method("AdamW, int4 gradients, two levels", ADAMW, "grad_compression=int4,node_size={per_node}"),
    "onebit_adam_levels": Method(
        "OnebitAdam, two levels", "onebit_adam", f"freeze_step={SWITCH},node_size={{per_node}}"
    ),
    "onebit_adam_late": Method(
        "OnebitAdam, clip=late",
        "onebit_adam",
        f"freeze_step={SWITCH},clip=late",
        bytes_per_parameter=ring(SIGN_BYTES),
    ),
    "onebit_adam_late_16": Method(
        "OnebitAdam, clip=late, buckets of 16 MiB",
        "onebit_adam",
        f"freeze_step={SWITCH},clip=late,bucket_cap_mb=16",
        ddp_bucket_cap_mb=16,
        bytes_per_parameter=ring(SIGN_BYTES),
    ),
    "hsdp_16": Method("HSDP of FSDP2, 16-bit gradients", ADAMW, between="bfloat16"),
    "hsdp_int4": Method("HSDP of FSDP2, int4 gradients between nodes", ADAMW, between="int4"),
    "first_stage": Method(
        "OnebitAdam, first stage",
        "onebit_adam",
        "freeze_step=100000,warmup_bits=4",
        bytes_per_parameter=ring(INT4_BYTES),
    ),
    "zero_one_adam": Method(
        "ZeroOneAdam",
        "zero_one_adam",
        f"var_freeze_step={SWITCH},local_step_scaler=1,local_step_clipper={LONGEST_INTERVAL}",
        period=LONGEST_INTERVAL,
        bytes_per_parameter=lambda world_size: ring(SIGN_BYTES)(world_size) / LONGEST_INTERVAL,
    ),
    "onebit_lamb": Method("OnebitLamb", "onebit_lamb", f"freeze_step={SWITCH}", bytes_per_parameter=ring(SIGN_BYTES)),
    "powersgd_1": Method("PowerSGD rank 1", "", rival="PowerSGD", rival_options={"rank": 1, "start": 2}),
    "powersgd_4": Method("PowerSGD rank 4", "", rival="PowerSGD", rival_options={"rank": 4, "start": 2}),
    "local_sgd_8": local_steps("LocalSGD, 8 steps", "LocalSGD", 8),
    "diloco_8": local_steps("DiLoCo, 8 steps", "DiLoCo", 8),
    "diloco_32": local_steps("DiLoCo, 32 steps", "DiLoCo", 32),
    "diloco_128": local_steps("DiLoCo, 128 steps", "DiLoCo", 128),
    "demo_8": Method("DeMo, k=8", "", rival="DeMo", rival_options={"k": 8}),
    "demo_32": Method("DeMo, k=32", "", rival="DeMo", rival_options={"k": 32}),
    "sign_sgd": Method("signSGD, majority vote", "", rival="SignSGD", bytes_per_parameter=ring(1 / 8)),
}


@dataclass
class Row:
    """The cost of one method on one link.

    Attributes:
        model: Name of the model.
        ranks: How many trained.
        link: Name of the link.
        method: Key of METHODS.
        numel: Parameters.
        seconds: Of a step: the mean of each window of steps, one window per round.
        sent: Bytes that left one rank's interface per step, the mean over ranks and rounds; ranks may share one.
        per_node: Ranks that share a link.
    """

    model: str
    ranks: int
    link: str
    method: str
    numel: int
    seconds: list[float]
    sent: float
    per_node: int = 1

    @property
    def place(self) -> tuple[int, ...]:
        """The place among all rows."""
        columns = (list(MODELS).index(self.model), self.ranks, self.per_node, list(RATES).index(self.link))
        return *columns, list(METHODS).index(self.method)
