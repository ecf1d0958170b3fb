"""MuonAdamW: which parameter goes to which of torch's optimizers, and its numbers, states and refusals."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import GradientCompression, ZeroOptimizer, compress_hook
from hf_compressopt.optim.muon import MuonAdamW
from tests.support.harness import on_ranks, run_ranks
from tests.support.logs import log_lines
from tests.support.trainer_runs import (
    OLD_HOST,
    Run,
    equal_params,
    loads_optimizer_pt,
    losses,
    make_trainer,
    small_model,
    train,
)

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
MUON = {"lr": 3e-3, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


def names_by_stepper(model: Any) -> dict[bool, list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = MuonAdamW(model).param_groups
    return {kind: [names[id(p)] for g in groups if g["muon"] is kind for p in g["params"]] for kind in (True, False)}


@needs_muon
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_heads_and_vectors_go_to_adamw(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, tie_word_embeddings=tied, num_labels=3, pad_token_id=0, **sizes)
    for cls in (LlamaForCausalLM, LlamaForSequenceClassification):
        model = cls(config)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        found = names_by_stepper(model)
        assert len(found[True]) == 6 and all("_proj.weight" in name for name in found[True])
        assert len(found[False]) == 4 + (not (tied and cls is LlamaForCausalLM))
        assert "model.layers.0.mlp.up_proj.weight" not in found[True] + found[False]
    groups = MuonAdamW(small_model(), weight_decay=0.1).param_groups
    assert [(g["muon"], g["weight_decay"]) for g in groups] == [(True, 0.1), (False, 0.1), (False, 0.0)]
    assert all(p.ndim == 1 for p in groups[2]["params"])


@needs_muon
def test_fused_experts_are_named_in_a_warning() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, **sizes))
    fused = [name for name, p in model.named_parameters() if p.ndim == 3]
    if not fused:
        pytest.skip("this transformers has a matrix per expert")
    with log_lines() as lines:
        found = names_by_stepper(model)
        MuonAdamW(small_model())
    assert set(fused) <= set(found[False]) and len(found[True]) == 5
    (line,) = lines
    assert re.search(rf"AdamW steps 2 tensors of more than two dimensions, 7\d %.*{fused[0]} of shape \[4, ", line)


@needs_muon
def test_what_peft_trains_beside_adapters_goes_to_adamw() -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=32, num_labels=3, pad_token_id=0, **sizes))
    adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "embed_tokens"])
    found = names_by_stepper(peft.get_peft_model(model, adapters))
    assert [name.split(".")[-3] for name in found[True]] == ["lora_A", "lora_B"]
    ends = ("lora_embedding_A.default", "lora_embedding_B.default", "score.modules_to_save.default.weight")
    assert len(found[False]) == 3 and all(map(str.endswith, found[False], ends))


@needs_muon
def test_its_steps_are_those_of_torchs_two_optimizers() -> None:
    mine, theirs = small_model(dropout=0.0), small_model(dropout=0.0)
    own = {key: value for key, value in MUON.items() if key != "adjust_lr_fn"}
    optimizer = MuonAdamW(mine, betas=(0.8, 0.99), eps=1e-6, **own)
    groups = MuonAdamW(theirs, **own).param_groups
    matrices, others = ([g for g in groups if g["muon"] is kind] for kind in (True, False))
    pair = [
        torch.optim.Muon(matrices[0]["params"], **MUON),
        torch.optim.AdamW(
            [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in others],
            lr=3e-3, betas=(0.8, 0.99), eps=1e-6,
        ),
    ]  # fmt: skip
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (optimizer, *pair)]
    for step in range(4):
        if step == 2:  # a copy, a pickle and a state dict go on
            optimizer_copy = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
            assert optimizer_copy.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
            fresh = MuonAdamW(mine)
            fresh.load_state_dict(optimizer.state_dict())
            optimizer, schedules[0].optimizer = fresh, fresh
        ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(step))
        for model, steppers in ((mine, [optimizer]), (theirs, pair)):
            model(input_ids=ids, labels=ids).loss.backward()
            for stepper in steppers:
                stepper.step()
            model.zero_grad()
        for schedule in schedules:
            schedule.step()
        assert equal_params(dict(mine.named_parameters()), dict(theirs.named_parameters()))


@needs_muon
def test_what_is_not_known_to_be_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="give the model without DistributedDataParallel"):
        MuonAdamW(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="must say muon=True or muon=False"):
        MuonAdamW(nn.Linear(3, 3).parameters())
    with pytest.raises(ValueError, match="2D parameters"):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(3))], "muon": True}])
    with pytest.raises(ValueError, match="Invalid learning rate"):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(3))], "muon": False}], lr=-1.0)
    with pytest.raises(ValueError, match="MuonAdamW cannot be partitioned: it needs whole matrices"):
        ZeroOptimizer(small_model().parameters(), MuonAdamW)


def test_a_torch_without_muon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match="needs torch.optim.Muon, which torch 2.9 has first"):
        MuonAdamW(small_model())


def run(tmp_path: Path, options: str | None, **more: Any) -> list[dict[str, Any]]:
    arguments = {"output_dir": str(tmp_path), "optim": "muon", "optim_args": options, "save_strategy": "steps"}
    arguments |= {"save_steps": 4, "learning_rate": 3e-3, "lr_scheduler_type": "linear"}
    return run_ranks(2, train, Run(arguments, **more), timeout=240)


@needs_muon
@loads_optimizer_pt
def test_trainer_trains_it_compressed_and_resumes_bitwise(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", None)[0]
    int4 = run(tmp_path / "int4", "grad_compression=int4,momentum=0.9")
    for result in int4:
        assert result["optimizer"] == "MuonAdamW" and all(result["alike"]) and len(result["alike"]) == 8
    assert losses(int4[0])[0] == losses(plain)[0] and losses(int4[0]) == pytest.approx(losses(plain), abs=0.06)
    assert [row for row in int4[0]["history"] if "loss" in row][-1]["compressopt/compression_ratio"] > 5.5
    again = run(tmp_path / "again", "grad_compression=int4,momentum=0.9", resume=str(tmp_path / "int4/checkpoint-4"))
    for mine, theirs in zip(again, int4, strict=True):
        assert equal_params(mine["params"], theirs["params"])


@needs_muon
@pytest.mark.skipif(OLD_HOST, reason="this transformers has no factories of optimizers")
@on_ranks(2, timeout=120)
def test_trainer_takes_it_by_a_factory(rank: int, world_size: int, tmp_path: Path) -> None:
    own = {"optimizer_cls_and_kwargs": (lambda: MuonAdamW, {"lr": 1e-3, "momentum": 0.5})}
    arguments = {"output_dir": str(tmp_path), "optim_args": "grad_compression=int4", "max_steps": 2}
    trainer = make_trainer(rank, world_size, Run(arguments, extra=own))
    trainer.train()
    groups = trainer.optimizer.optimizer.param_groups
    assert [g["muon"] for g in groups] == [True, False, False] and groups[0]["momentum"] == 0.5
    assert trainer.state.log_history[-2]["compressopt/compression_ratio"] > 5.5


@needs_muon
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("zero_stage=1", "MuonAdamW cannot be partitioned: it needs whole matrices"),
        ("momentun=0.9", "MuonAdamW has no option 'momentun': did you mean 'momentum'"),
    ],
)
@on_ranks(2)
def test_trainer_refuses_by_name(rank: int, world_size: int, options: str, said: str, tmp_path: Path) -> None:
    run = Run({"output_dir": str(tmp_path), "optim": "muon", "optim_args": options})
    with pytest.raises(ValueError, match=said):
        make_trainer(rank, world_size, run).train()


@needs_muon
@on_ranks(2)
def test_a_muon_of_the_users_own_takes_compressed_gradients(rank: int, world_size: int) -> None:
    losses: dict[str, list[float]] = {"": [], "int4": []}
    for compression, found in losses.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        ddp, optimizer = DistributedDataParallel(model), torch.optim.Muon(model.parameters(), lr=1e-2)
        if compression:
            ddp.register_comm_hook(state := GradientCompression(model.named_parameters(), compression), compress_hook)
        for step in range(20):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * rank + step))
            loss = (ddp(x) - x[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
    plain, int4 = losses.values()
    assert int4[0] == plain[0] and int4 != plain and int4 == pytest.approx(plain, rel=0.05)
    assert state.metrics()["compression_ratio"] > 7
