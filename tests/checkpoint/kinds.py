"""One small checkpoint of each kind of optimizer, which tests load, damage and convert."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_compressopt
from hf_compressopt import ZeroOptimizer, load_state, save_state
from hf_compressopt.checkpoint.portable import consolidate, import_state
from tests.support.forms import in_form
from tests.support.harness import run_ranks
from tests.support.made_once import made_once
from tests.support.zero_runs import INT4, Lion

#: Options of a param group whose loaded values are compared.
GROUP_OPTIONS = ("lr", "betas", "eps", "weight_decay", "exp_avg_mask")


class Kind(NamedTuple):
    """A checkpoint to write: its optimizer, the number of ranks, and the steps before the save."""

    optimizer: str
    options: dict[str, Any]
    ranks: int
    steps: int
    dtype: torch.dtype = torch.float32
    own_group: bool = False
    loads_on: tuple[int, ...] = (1, 2)
    shapes: tuple[tuple[int, ...], ...] = ((5, 7), (11,), (0, 4), ())


ONEBIT: dict[str, Any] = {"freeze_step": 2, "bucket_cap_mb": 0.0001, "scale_block": 16, "variance_interval": 2}
ZERO_ONE = {"var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4}
ZERO_ONE |= {"bucket_cap_mb": 0.0001, "scale_block": 16, "variance_interval": 1}
ZERO = {"reduce_bucket_size": 40}
BF16 = torch.bfloat16

KINDS: dict[str, Kind] = {
    "onebit_adam_warmup_1": Kind("OnebitAdam", ONEBIT, 1, 1),
    "onebit_adam_warmup_2": Kind("OnebitAdam", ONEBIT, 2, 1),
    "onebit_adam_compressed_1": Kind("OnebitAdam", ONEBIT, 1, 4),
    "onebit_adam_compressed_2": Kind("OnebitAdam", ONEBIT, 2, 4),
    "onebit_adam_auto_2": Kind("OnebitAdam", {**ONEBIT, "freeze_step": "auto"}, 2, 2),
    "onebit_adam_float32_2": Kind("OnebitAdam", {**ONEBIT, "form": "float32"}, 2, 4),
    "onebit_adam_own_group_2": Kind("OnebitAdam", ONEBIT, 2, 4, own_group=True, loads_on=(2,)),
    "zero_one_adam_variance_2": Kind("ZeroOneAdam", ZERO_ONE, 2, 2),
    "zero_one_adam_local_1": Kind("ZeroOneAdam", ZERO_ONE, 1, 9),
    "zero_one_adam_local_2": Kind("ZeroOneAdam", ZERO_ONE, 2, 9),
    "onebit_lamb_compressed_1": Kind("OnebitLamb", ONEBIT, 1, 4),
    "onebit_lamb_compressed_2": Kind("OnebitLamb", ONEBIT, 2, 4),
    "zero1_adamw_2": Kind("AdamW", {"stage": 1, **ZERO}, 2, 2),
    "zero2_adamw_2": Kind("AdamW", {"stage": 2, **ZERO}, 2, 2),
    "zero2_adamw_bf16_1": Kind("AdamW", {"stage": 2, **ZERO}, 1, 2, BF16),
    "zero2_adamw_bf16_2": Kind("AdamW", {"stage": 2, **ZERO}, 2, 2, BF16),
    "zero2_fused_adam_2": Kind("FusedAdam", {"stage": 2, **ZERO}, 2, 2),
    "zero2_nadam_2": Kind("NAdam", {"stage": 2, **ZERO}, 2, 2),
    "adamw_1": Kind("AdamW", {"amsgrad": True}, 1, 2),
    "adamw_2": Kind("AdamW", {}, 2, 2),
    "fused_adam_1": Kind("FusedAdam", {}, 1, 2),
    "lamb_1": Kind("Lamb", {}, 1, 2),
    "imported_torch_file": Kind("AdamW", {}, 1, 2),
}
SCALED = {"loss_scale": "dynamic", "initial_loss_scale": 64.0, "loss_scale_window": 2}
LARGE = ((37, 19), (11,), (0, 4), (), (19, 7))
#: More that a run resumes from, by more ranks.
RESUMED = {
    "onebit_adam_start_2": Kind("OnebitAdam", ONEBIT, 2, 0),
    "onebit_adam_switching_2": Kind("OnebitAdam", ONEBIT, 2, 2),
    "onebit_adam_compressed_3": Kind("OnebitAdam", ONEBIT, 3, 4),
    "onebit_adam_warmup_3": Kind("OnebitAdam", ONEBIT, 3, 1),
    "onebit_adam_8_bits_3": Kind("OnebitAdam", {**ONEBIT, "warmup_bits": 8}, 3, 1),
    "onebit_adam_zero1_warmup_2": Kind("OnebitAdam", {**ONEBIT, "zero_stage": 1}, 2, 1),
    "onebit_adam_zero1_switching_3": Kind("OnebitAdam", {**ONEBIT, "zero_stage": 1}, 3, 2),
    "onebit_adam_zero1_3": Kind("OnebitAdam", {**ONEBIT, "zero_stage": 1}, 3, 4),
    "onebit_adam_zero2_warmup_3": Kind("OnebitAdam", {**ONEBIT, "zero_stage": 2}, 3, 1),
    "onebit_adam_zero2_2": Kind("OnebitAdam", {**ONEBIT, "zero_stage": 2}, 2, 4),
    "onebit_adam_nodes_warmup_4": Kind("OnebitAdam", {**ONEBIT, "node_size": 2}, 4, 1),
    "onebit_adam_nodes_4": Kind("OnebitAdam", {**ONEBIT, "node_size": 2}, 4, 4),
    "onebit_adam_zero1_nodes_4": Kind("OnebitAdam", {**ONEBIT, "zero_stage": 1, "node_size": 2}, 4, 4),
    "onebit_lamb_nodes_4": Kind("OnebitLamb", {**ONEBIT, "node_size": 2}, 4, 4),
    "zero_one_adam_nodes_4": Kind("ZeroOneAdam", {**ZERO_ONE, "node_size": 2}, 4, 9),
    "onebit_adam_own_group_warmup_3": Kind("OnebitAdam", ONEBIT, 3, 1, own_group=True),
    "onebit_lamb_own_group_3": Kind("OnebitLamb", ONEBIT, 3, 4, own_group=True),
    "zero_one_adam_own_group_3": Kind("ZeroOneAdam", ZERO_ONE, 3, 9, own_group=True),
    "zero_one_adam_clipped_2": Kind("ZeroOneAdam", {**ZERO_ONE, "max_grad_norm": 0.5}, 2, 9),
    "onebit_lamb_warmup_1": Kind("OnebitLamb", ONEBIT, 1, 1),
    "onebit_lamb_switching_3": Kind("OnebitLamb", ONEBIT, 3, 2),
    "onebit_lamb_compressed_3": Kind("OnebitLamb", ONEBIT, 3, 5),
    "zero_one_adam_variance_3": Kind("ZeroOneAdam", ZERO_ONE, 3, 2),
    "zero_one_adam_switching_1": Kind("ZeroOneAdam", ZERO_ONE, 1, 3),
    "zero_one_adam_local_3": Kind("ZeroOneAdam", ZERO_ONE, 3, 8),
    "lamb_bf16_1": Kind("Lamb", {}, 1, 3, BF16),
    "fused_adam_bf16_1": Kind("FusedAdam", {"master_weights": True}, 1, 3, BF16),
    "fused_adam_fp16_1": Kind("FusedAdam", {}, 1, 3, torch.float16),
    "zero2_adamw_3": Kind("AdamW", {"stage": 2, "reduce_bucket_size": 500}, 3, 3),
    "zero1_lion_3": Kind("Lion", {"stage": 1}, 3, 3),
    "zero2_lamb_3": Kind("Lamb", {"stage": 2, "reduce_bucket_size": 700, "round_robin_gradients": True}, 3, 3),
    "zero2_sgd_bf16_3": Kind("SGD", {"stage": 2, "momentum": 0.9, "reduce_bucket_size": 700}, 3, 3, BF16),
    "zero2_nadam_scaled_3": Kind("NAdam", {"stage": 2, **SCALED}, 3, 3, torch.float16),
    "zero2_state_bf16_3": Kind("AdamW", {"stage": 2, "state_dtype": "bf16"}, 3, 3),
    "zero2_int4_3": Kind("AdamW", {"stage": 2, **INT4, "reduce_bucket_size": 600}, 3, 3),
    "zero2_int4_scaled_3": Kind("SGD", {"stage": 2, **INT4, **SCALED, "reduce_bucket_size": 900}, 3, 3, BF16),
    "zero1_int8_3": Kind("AdamW", {"stage": 1, "grad_compression": "int8"}, 3, 3),
    "zero2_lamb_int8_3": Kind("Lamb", {"stage": 2, "param_compression": "int8"}, 3, 3, torch.float16),
    "zero2_nodes_4": Kind("AdamW", {"stage": 2, **INT4, "node_size": 2, "reduce_bucket_size": 600}, 4, 3),
}
#: Schedules that a loaded state replaces.
OTHER_SCHEDULES: dict[str, dict[str, Any]] = {
    "OnebitLamb": {"freeze_step": 7},
    "ZeroOneAdam": {"var_freeze_step": 9, "local_step_clipper": 2},
}
RESUMED = {name: kind._replace(shapes=LARGE) for name, kind in RESUMED.items()}


def make(kind: Kind) -> tuple[list[nn.Parameter], Any]:
    """The parameters and the optimizer of a kind, alike on every rank; all ranks call it."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(kind.dtype) for shape in kind.shapes]
    values[0] = values[0].t().contiguous().t()  # its elements lie in another order
    named = [(f"layer.{i}", nn.Parameter(value)) for i, value in enumerate(values)]
    groups: list[dict[str, Any]] = [
        {"params": named[:1]},
        {"params": named[1:-1], "weight_decay": 0.1},
        {"params": named[-1:]},
    ]
    cls = getattr(hf_compressopt, kind.optimizer, None) or getattr(torch.optim, kind.optimizer, Lion)
    if kind.optimizer.startswith(("Onebit", "ZeroOne")):
        groups[0]["exp_avg_mask"] = (torch.arange(kind.shapes[0][-1]) < 5).float()
        groups[2]["non_freeze"] = True
    if kind.own_group:
        halves = [dist.new_group([r for r in range(dist.get_world_size()) if r % 2 == half]) for half in (0, 1)]
        groups[1]["process_group"] = halves[dist.get_rank() % 2]
    params = [param for _, param in named]
    if "stage" in kind.options:
        return params, hf_compressopt.ZeroOptimizer(groups, cls, lr=0.01, **kind.options)
    options = dict(kind.options)
    return params, in_form(cls, options.pop("form", None))(groups, lr=0.01, **options)


def train(rank: int, world_size: int, params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    """Steps with another lr each, and gradients that differ where the optimizer averages them; one comes at times."""
    for step in steps:
        compressed = hasattr(optimizer, "plan")
        local = compressed or isinstance(optimizer, ZeroOptimizer)
        generator = torch.Generator().manual_seed(1000 * (rank + 1) * local + step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for number, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            if number == 1 and step % 3 == 1:
                param.grad = None
        if compressed:
            hf_compressopt.average_gradients(optimizer)
        optimizer.step()


def observe(params: list[nn.Parameter], optimizer: Any) -> dict[str, str]:
    """A digest of everything that this rank holds, by the names of the state dict, and of the parameters."""
    packed = optimizer.state_dict()
    if packed.get("compressopt", {}).get("rank"):
        del packed["compressopt"]["bytes_sent"]  # a checkpoint has rank 0's
    groups = [{key: group[key] for key in GROUP_OPTIONS if key in group} for group in packed["param_groups"]]
    found: dict[str, list[str]] = {}
    for name, value in _leaves({**packed, "param_groups": groups, "params": [p.detach() for p in params]}):
        found.setdefault(name, []).append(value)
    return {name: hashlib.sha256("\n".join(values).encode()).hexdigest()[:12] for name, values in found.items()}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, key if isinstance(key, str) else name)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, name)
    elif isinstance(value, Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        yield name, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    else:
        yield name, repr(value)


def load_in_form(form: str | None, kind: Kind, folder: str) -> tuple[list[nn.Parameter], Any]:
    """Load a checkpoint into a new optimizer of this kind, of this form of the state, or of its own."""
    options = {**kind.options, "form": form} if form else kind.options
    params, optimizer = make(kind._replace(options=options))
    load_state(optimizer, folder)
    return params, optimizer


def save_all(rank: int, world_size: int, folder: str) -> None:
    """Save every kind of this number of ranks."""
    for name, kind in KINDS.items():
        if kind.ranks != world_size:
            continue
        params, optimizer = make(kind)
        train(rank, world_size, params, optimizer, range(kind.steps))
        if name == "imported_torch_file":
            files = Path(folder, "files")
            files.mkdir()
            torch.save(optimizer.state_dict(), files / "optimizer.pt")
            import_state(files / "optimizer.pt", Path(folder, name))
            consolidate(Path(folder, "adamw_1", "compressopt.index.json"), files / "adamw_1.safetensors")
        else:
            save_state(optimizer, f"{folder}/{name}")


def written(factory: pytest.TempPathFactory) -> Path:
    """The folder with a checkpoint of each kind, by its name; those of one rank first: files are made of them."""
    return made_once(factory, "kinds", lambda folder: [run_ranks(n, save_all, str(folder)) for n in (1, 2)] and None)
