"""The recipes and the demo through the real launchers, with settings that take seconds."""

import json
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_compressopt.kernels import messages
from tests.support.harness import run_ranks
from tests.support.launching import REPO_ROOT, environment, free_port, run, run_python, torchrun
from tests.support.trainer_runs import equal_params, small_llama, use_accelerate

RECIPES = REPO_ROOT / "recipes"
CONFIGS = RECIPES / "causal_lm" / "configs"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
STEPS = {"max_steps": 4, "logging_steps": 1, "save_steps": 3, "per_device_train_batch_size": 2, "report_to": "none"}
TRAINER = {**STEPS, "optim": "onebit_adam", "optim_args": "freeze_step=2", "ddp_find_unused_parameters": "false"}
CAUSAL_LM = {**TRAINER, "tokenizer_vocab_size": 300, "block_size": 16, "max_eval_samples": 4}


def words(recipe: str, directory: Path, settings: dict[str, Any], script: str = "train") -> list[str]:
    given = {**settings, "output_dir": directory}
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [str(RECIPES / recipe / f"{script}.py"), "--use_cpu", *options]


def two_processes() -> list[str]:
    """`accelerate launch` with the configuration for two CPU processes."""
    config = str(CONFIGS / "cpu_2_processes.yaml")
    return [*ACCELERATE, "--config_file", config, "--main_process_port", str(free_port())]


def run_in_ranks(world_size: int, command: list[str]) -> None:
    """Run a script as a launcher does, in ranks that have imported torch and transformers already."""
    run_ranks(world_size, run_script, command, timeout=120)


def run_script(rank: int, world_size: int, command: list[str]) -> None:
    use_accelerate(rank, world_size)
    messages.OWN_BLOCKS = 2  # as it is in the package, and in launched ranks
    before, sys.argv = sys.argv, command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.argv = before


def small_pretrained(folder: Path) -> None:
    """Save a small Llama with a tokenizer, as a pretrained model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: n for n, word in enumerate(["<end>", "<unknown>", "word", "and", "of", "a", "text", *"0123456"])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    small_llama().save_pretrained(folder)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def logged(directory: Path, name: str) -> list[float]:
    return [row[name] for row in read(directory / "trainer_state.json")["log_history"] if "loss" in row]


def check_resumed(recipe: str, whole: Path, checkpoint: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Resume a run on two ranks, which must end with the same model and loss; returns the results."""
    resumed = whole.with_name("resumed")
    again = {**settings, "resume_from_checkpoint": whole / checkpoint}
    run_in_ranks(2, [*words(recipe, resumed, again), "--tiny"])
    (name,) = (name for name in ("eval_results.json", "results.json") if (whole / name).exists())
    one, other = (read(directory / name) for directory in (whole, resumed))
    assert one["eval_loss"] == other["eval_loss"] and one.get("step") == other.get("step")
    assert equal_params(*(load_file(directory / "model.safetensors") for directory in (whole, resumed)))
    return one


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.full)])
def test_causal_lm_trains_evaluates_and_resumes_with_two_processes(launched: bool, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    if launched:
        run([*two_processes(), *words("causal_lm", whole, CAUSAL_LM), "--tiny"])
    else:
        begin = {**CAUSAL_LM, "resume_from_checkpoint": "last"}  # there is none
        run_in_ranks(2, [*words("causal_lm", whole, begin), "--tiny"])
    assert logged(whole, "compressopt/stage") == [0.0, 0.0, 1.0, 1.0]
    assert logged(whole, "compressopt/compression_ratio")[-1] > 27
    assert check_resumed("causal_lm", whole, "checkpoint-3", CAUSAL_LM)["perplexity"] > 1


@pytest.mark.full
def test_text_classification_trains_on_files_as_two_machines(tmp_path: Path) -> None:
    train, valid = tmp_path / "train.csv", tmp_path / "valid.csv"
    for file, count in ((train, 24), (valid, 5)):  # 5: the ranks evaluate different numbers of rows
        rows = [f"a {n},b {n},{('even', 'odd')[n % 2]}" for n in range(count)]
        file.write_text("\n".join(["first,second,kind", *rows, ""]))
    settings = {**TRAINER, "train_file": train, "validation_file": valid, "label_column": "kind"}
    place = ["--config_file", str(CONFIGS / "several_machines.yaml"), "--num_processes", "2"]
    place += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    script = [*words("text_classification", tmp_path / "out", settings), "--tiny"]
    with ThreadPoolExecutor() as machines:
        list(machines.map(lambda rank: run([*ACCELERATE, *place, "--machine_rank", str(rank), *script]), range(2)))
    assert logged(tmp_path / "out", "compressopt/stage") == [0.0, 0.0, 1.0, 1.0]
    # the mean of all ranks' examples: nothing of it is multiplied by their number
    assert all(0.3 < loss < 1.2 for loss in logged(tmp_path / "out", "loss"))
    config, results = read(tmp_path / "out" / "config.json"), read(tmp_path / "out" / "eval_results.json")
    assert config["id2label"] == {"0": "even", "1": "odd"}
    assert results["eval_accuracy"] * 5 == pytest.approx(round(results["eval_accuracy"] * 5))


@pytest.mark.full
def test_seq2seq_generates_and_resumes_with_tied_weights(tmp_path: Path) -> None:
    rows = [{"question": f"{n}", "answer": f"{n + 1}"} for n in range(40)]
    (tmp_path / "train.json").write_text("\n".join(map(json.dumps, rows)))
    columns = {"train_file": tmp_path / "train.json", "source_column": "question", "target_column": "answer"}
    settings = {**TRAINER, **columns, "predict_with_generate": "true", "generation_max_length": 4}
    whole = tmp_path / "whole"
    run([*torchrun(2), *words("seq2seq", whole, settings), "--tiny"])
    assert logged(whole, "compressopt/stage") == [0.0, 0.0, 1.0, 1.0]
    assert 0 <= check_resumed("seq2seq", whole, "checkpoint-3", settings)["eval_exact_match"] <= 1
    names = load_file(whole / "model.safetensors")
    assert "shared.weight" in names and "lm_head.weight" not in names


@pytest.mark.full
def test_accelerate_loop_accumulates_and_resumes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n} of a text" for n in range(60)))
    sizes = {"train_file": text, "block_size": 16, "per_device_batch_size": 2, "gradient_accumulation_steps": 2}
    steps = {"max_steps": 20, "freeze_step": 3, "logging_steps": 1, "save_steps": 9}  # some 18 steps an epoch
    settings, whole = {**sizes, **steps}, tmp_path / "whole"
    said = run_python([*words("accelerate_loop", whole, settings), "--tiny"], ranks=2).stdout
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    sent = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert len(sent) == 20 and sent[2] / sent[3] > 3  # 4 bits, then signs and a sketch of the gradient
    for step in (9, 18):  # within an epoch, and near the end of one
        check_resumed("accelerate_loop", whole, f"step-{step}", settings)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Environment of a job on two nodes, which are this machine: `srun` and `scontrol` stand in for Slurm's own."""
    programs = {
        "scontrol": 'test "$*" = "show hostnames two-nodes" && printf "127.0.0.1\\nnobody\\n"',
        "srun": """
            while [[ $1 == --* ]]; do shift; done
            for node in 0 1; do SLURM_NODEID=$node "$@" & started[node]=$!; done
            for node in 0 1; do wait "${started[node]}" || failed=1; done
            exit "${failed:-0}" """,
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "two-nodes", "SLURM_JOB_NUM_NODES": "2"}
    return {**job, "PATH": path, "MASTER_PORT": str(free_port()), "NETWORK_INTERFACE": "lo", "PROCESSES_PER_NODE": "1"}


def lines_of(said: str) -> list[str]:
    """Without what the gloo of torch 2.8 writes to the standard output."""
    return re.sub(r"\[Gloo\] Rank .* peer ranks is : [0-9]+\n", "", said).splitlines()


SLURM_SCRIPT = ["bash", str(RECIPES / "multi_node" / "train.slurm")]


@pytest.mark.full
def test_the_slurm_script_joins_two_nodes(slurm: dict[str, str]) -> None:
    check = [str(RECIPES / "multi_node" / "check_link.py"), "--use_cpu", "--params", "1e5", "--repeats", "2"]
    said = run([*SLURM_SCRIPT, *check], **slurm).stdout
    assert "2 ranks over gloo, interface lo" in said
    sent = {line[:18].strip(): float(line[18:].split()[0]) for line in lines_of(said)[1:3]}
    assert sent == {"float32 gradients": 0.4, "1-bit messages": 0.01}  # MB: 2 (W-1)/W of 4 n, and of n/8 and scales


@pytest.mark.full
def test_torch_loop_resumes(tmp_path: Path) -> None:
    steps = {"max_steps": 5, "save_steps": 4, "logging_steps": 1, "freeze_step": 2}
    settings = {"block_size": 16, "batch_size": 2, **steps}
    said = run([*two_processes(), *words("torch_loop", tmp_path / "whole", settings)]).stdout
    assert lines_of(said)[0] == "2 ranks, from the start"
    assert [line.split(":")[0] for line in lines_of(said)[1:-1]] == [f"step {n}" for n in range(1, 6)]
    saved = tmp_path / "whole" / "step-4"
    assert len(list(saved.glob("compressopt-*-of-00002.safetensors"))) == 2
    again = {**settings, "resume_from_checkpoint": saved}
    resumed = run_python(words("torch_loop", tmp_path / "resumed", again), ranks=2).stdout
    assert lines_of(resumed) == [f"2 ranks, from {saved}", *lines_of(said)[-2:]]
    models = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "resumed")]
    assert equal_params(*models)


def test_the_slurm_script_says_how_it_is_used(slurm: dict[str, str]) -> None:
    done = subprocess.run(SLURM_SCRIPT, capture_output=True, text=True, env=environment(**slurm))
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


@pytest.mark.full
def test_the_demo_prints_its_table_and_draws_its_picture(tmp_path: Path) -> None:
    script = [sys.executable, str(REPO_ROOT / "scripts" / "demo.py")]
    done = run([*script, "--steps", "10", "--batch_size", "1", "--output_dir", str(tmp_path)])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "onebit_adam" in done.stdout and "sent per rank in the whole run" in done.stdout
    runs = read(tmp_path / "results.json")["runs"]
    losses = [list(runs[name]["eval_loss"].values()) for name in ("adamw_torch", "onebit_adam")]
    assert len(losses[0]) == len(losses[1]) > 0


@pytest.mark.full
def test_a_pretrained_folder_is_fine_tuned_on_docstrings(tmp_path: Path) -> None:
    text, pretrained, tuned = tmp_path / "docstrings.txt", tmp_path / "pretrained", tmp_path / "tuned"
    run([sys.executable, str(RECIPES / "fine_tuning" / "make_text.py"), str(text)])
    assert text.stat().st_size > 500_000
    given = {**CAUSAL_LM, "learning_rate": 1e-3}
    del given["optim_args"]
    run_in_ranks(2, [*words("causal_lm", pretrained, given), "--tiny"])
    del given["tokenizer_vocab_size"]
    given |= {"model_name_or_path": pretrained, "train_file": text, "max_steps": 20, "eval_on_start": "true"}
    run([*two_processes(), *words("causal_lm", tuned, given)])
    losses = [row["eval_loss"] for row in read(tuned / "trainer_state.json")["log_history"] if "eval_loss" in row]
    assert len(losses) == 2 and losses[-1] < losses[0]
    assert logged(tuned, "compressopt/stage") == [0.0] * 20  # a short run stays in the warmup stage
    assert logged(tuned, "compressopt/compression_ratio")[-1] > 7.5


@pytest.mark.full
@pytest.mark.parametrize("script", ["train", "sft"])
@pytest.mark.parametrize(
    ("optim", "options", "ratio"), [("adamw_torch", "grad_compression=int4", 7), ("onebit_adam", "freeze_step=2", 10)]
)
def test_lora_sends_and_saves_the_adapters_alone(
    script: str, optim: str, options: str, ratio: float, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    if script == "sft":
        pytest.importorskip("trl")
    (tmp_path / "text.txt").write_text("\n\n".join(f"word {n % 7} and {n % 5} of a text" for n in range(40)))
    small_pretrained(tmp_path / "model")
    files = {"model_name_or_path": tmp_path / "model", "train_file": tmp_path / "text.txt"}
    given = {**TRAINER, **files, "lora_rank": 16, "optim": optim, "optim_args": options, "save_strategy": "no"}
    run([*torchrun(2), *words("lora", tmp_path / "out", given, script)])
    assert logged(tmp_path / "out", "compressopt/compression_ratio")[-1] > ratio
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(adapters) == 28 and all(".lora_" in name for name in adapters)
    assert all(value.abs().max() > 0 for name, value in adapters.items() if ".lora_B" in name)


@pytest.mark.full
def test_lora_trains_beside_a_base_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "text.txt").write_text("\n\n".join(f"word {n % 7} and {n % 5} of a text" for n in range(40)))
    small_pretrained(tmp_path / "model")
    files = {"model_name_or_path": tmp_path / "model", "train_file": tmp_path / "text.txt", "save_strategy": "no"}
    given = {**TRAINER, **files, "optim": "adamw_torch", "optim_args": "grad_compression=int4"}
    told = run([*torchrun(2), *words("lora", tmp_path / "out", {**given, "shard_base": "true"})])
    assert "trainable parameters beside the shards are rank 0's on all ranks" in told.stderr + told.stdout
    assert logged(tmp_path / "out", "compressopt/compression_ratio")[-1] > 6
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(adapters) == 28 and all(value.abs().max() > 0 for name, value in adapters.items() if ".lora_B" in name)
