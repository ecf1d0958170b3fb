"""Whoever asks for compression gets it, or an error that says what to do: nothing trains in full precision silently."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import hf_compressopt
from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam, ZeroOptimizer, attach, register
from hf_compressopt.integrations.models import why_not_loaded_in_shards
from tests.support import trainer_runs as hosts
from tests.support.harness import on_ranks, run_ranks, run_ranks_expecting_error


@pytest.mark.parametrize(
    ("variables", "optim", "said"),
    [
        ({"COMPRESSOPT_GRAD_COMPRESION": "int4"}, "adamw_torch", "did you mean 'COMPRESSOPT_GRAD_COMPRESSION'"),
        ({"COMPRESSOPT_KERNELS": "native"}, "adamw_torch", "did you mean 'HF_COMPRESSOPT_KERNELS'"),
        ({"COMPRESSOPT_ZERO_STAGE": "2"}, "adamw_torch", "ZeroOptimizer"),
        (
            {"COMPRESSOPT_GRAD_COMPRESSION": "int4", "COMPRESSOPT_PARAM_COMPRESSION": "int4"},
            "adamw_torch",
            "param_compression=int4 is an option of ZeRO",
        ),
        ({"COMPRESSOPT_ZERO_STAGE": "1", "COMPRESSOPT_GRAD_COMPRESSION": "int4"}, "fused_adam", "ZeroOptimizer"),
        ({"COMPRESSOPT_ZERO_STAGE": "1", "COMPRESSOPT_OPTIM": "onebit_adam"}, "adamw_torch", "OnebitAdam"),
        ({"COMPRESSOPT_OPTIM": "onebit_adam"}, "sgd", "COMPRESSOPT_OPTIM=onebit_adam was asked for, but SGD trains"),
    ],
)
@on_ranks(2)
def test_trainer_follows_the_environment_or_says_why_not(
    rank: int, world_size: int, variables: dict[str, str], optim: str, said: str, tmp_path: Path
) -> None:
    """The class of the optimizer, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            run = hosts.Run({"max_steps": 2, "output_dir": str(tmp_path), "optim": optim})
            assert said in hosts.train(rank, world_size, run)["optimizer"]
        except ValueError as error:
            assert said in str(error)


def test_an_ordinary_optimizer_of_the_users_in_the_place_of_a_compressed_one_is_refused(tmp_path: Path) -> None:
    run = hosts.Run({"output_dir": str(tmp_path), "optim": "onebit_adam"}, optimizer="adamw")
    for error in run_ranks_expecting_error(2, hosts.train, run).values():
        assert "--optim onebit_adam was asked for, but AdamW trains the model" in error
        assert "leave optimizers=(...) of the Trainer out" in error and "(AdamW)" not in error


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("late", "it is too late to attach it"),
        ("left alone", "CompressOptPlugin(optimizer='onebit_adam') was asked for, but SGD trains the model"),
        ("plain", ""),
    ],
)
@on_ranks(2)
def test_accelerate_trains_nothing_uncompressed_that_was_to_be_compressed(
    rank: int, world_size: int, how: str, said: str
) -> None:
    hosts.use_accelerate(rank, world_size)

    plugin = CompressOptPlugin(optimizer="onebit_adam") if how == "left alone" else None
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)
    model, kind = nn.Linear(4, 4), torch.optim.SGD if how == "left alone" else torch.optim.AdamW
    with pytest.raises(ValueError, match=re.escape(said)) if said else nullcontext():
        model, _ = accelerator.prepare(model, kind(model.parameters(), lr=0.1))
        if how == "late":
            attach(accelerator, CompressOptPlugin(grad_compression="int4"))
        accelerator.backward(model(torch.ones(2, 4)).sum())


@pytest.mark.skipif(hosts.OLD_HOST, reason="this transformers has no DistributedConfig")
@pytest.mark.parametrize("cut", ["tp_size", "pp_size", "ep_size"])
def test_tensor_pipeline_and_expert_parallelism_are_refused_by_name(cut: str) -> None:
    from transformers.distributed import DistributedConfig  # Accelerate refuses to run it on CPUs

    config = DistributedConfig(**{cut: 2}, fsdp_size=1 if cut == "pp_size" else 2)
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=config))
    assert f"{cut}=2 of DistributedConfig" in why_not_loaded_in_shards(model)


def registered_late(rank: int, world_size: int, directory: str, options: str | None, first: str) -> dict[str, Any]:
    """Register after a Trainer was made, as a notebook does: the classes are given back their methods first."""
    hosts.use_accelerate(rank, world_size)
    from transformers import Trainer

    class Stock(Trainer):
        """A Trainer whose accelerator was made before the registration."""

        def create_accelerator_and_postprocess(self) -> None:
            method = Trainer.create_accelerator_and_postprocess
            getattr(method, "__wrapped__", method)(self)

    saving = {"save_strategy": "steps", "save_steps": 3}
    args = hosts.trainer_arguments(output_dir=directory, max_steps=3, optim="adamw_torch", optim_args=options, **saving)
    trainer = Stock(model=hosts.small_model(), args=args, train_dataset=hosts.tokens(), eval_dataset=hosts.tokens(8))
    hf_compressopt.register()
    if first == "evaluate":
        trainer.evaluate()
    if first == "log":
        trainer.log({"loss": 1.0})
    trainer.train()
    return {"history": trainer.state.log_history, "model": type(trainer.model_wrapped).__name__}


@pytest.mark.parametrize("first", ["train", "evaluate", "log"])
@pytest.mark.parametrize("options", [None, "grad_compression=int4"])
def test_a_trainer_that_is_older_than_the_registration_trains(first: str, options: str | None, tmp_path: Path) -> None:
    found = run_ranks(2, registered_late, str(tmp_path), options, first, timeout=120)[0]
    ratios = [row.get("compressopt/compression_ratio") for row in found["history"] if "loss" in row][-3:]
    assert found["model"] == "DistributedDataParallel"
    assert ratios == [None] * 3 if options is None else all(ratio > 5.5 for ratio in ratios)


INSTEAD = {
    "DEEPSPEED": "from-deepspeed",
    "MEGATRON_LM": "Megatron-LM",
    "FSDP": "zero2_adamw",
    "XLA": "ordinary optimizer",
}


@pytest.mark.parametrize("kind", INSTEAD)
@on_ranks(2)
def test_accelerate_refuses_by_name(rank: int, world_size: int, kind: str) -> None:
    """Prepare under an accelerator whose state says that a launcher chose DeepSpeed or the like."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from accelerate.utils.deepspeed import DummyOptim

    def ours(plugin: Any = None) -> Any:
        return CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)

    register()
    rows: dict[str, tuple[Any, Any]] = {
        "optimizer": (ours, lambda params: OnebitAdam(params, freeze_step=2)),
        "plugin": (lambda: ours(CompressOptPlugin()), torch.optim.AdamW),
        "zero": (ours, lambda params: ZeroOptimizer(params, torch.optim.AdamW)),
        "stock": (lambda: Accelerator(cpu=True), lambda params: OnebitAdam(params, freeze_step=2)),
    }
    if kind == "DEEPSPEED":
        rows["dummy"] = (lambda: ours(CompressOptPlugin()), DummyOptim)
    for accelerator_of, optimizer_of in rows.values():
        hosts.use_accelerate(rank, world_size)
        accelerator, model = accelerator_of(), hosts.network()
        optimizer = optimizer_of(model.parameters())
        accelerator.state.distributed_type = DistributedType[kind]
        try:
            with pytest.raises(ValueError, match=f"(?s)(?=.*{kind}).*{INSTEAD[kind]}"):
                accelerator.prepare(model, optimizer)
        finally:
            accelerator.state.distributed_type = DistributedType.MULTI_CPU


@pytest.mark.parametrize("kind", INSTEAD)
@on_ranks(2)
def test_trainer_refuses_by_name(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    for optim in ("onebit_adam", "zero2_adamw", "instance", "adamw_torch"):
        arguments = {"optim": "adamw_torch" if optim == "instance" else optim, "output_dir": str(tmp_path)}
        run = hosts.Run(arguments, optimizer="instance" if optim == "instance" else None)
        trainer = hosts.make_trainer(rank, world_size, run)
        trainer.accelerator.state.distributed_type = DistributedType[kind]
        refused = pytest.raises(ValueError, match=f"(?s)(?=.*{kind}).*{INSTEAD[kind]}")
        try:
            with nullcontext() if optim == "adamw_torch" else refused:
                trainer.create_optimizer()
        finally:
            trainer.accelerator.state.distributed_type = DistributedType.MULTI_CPU


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(2)
def test_plain_fsdp_is_refused_at_construction(rank: int, world_size: int, version: int) -> None:
    model: nn.Module = hosts.network()
    if version == 2:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(TypeError, match="(?s)shards of FSDP.*ordinary optimizer with FSDP"):
        OnebitAdam(model.parameters(), freeze_step=2)
