"""The recipe and the demo through the real launchers, with settings that take seconds."""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.launching import REPO_ROOT, free_port, run

RECIPE = REPO_ROOT / "recipes" / "causal_lm"
TINY = {
    "optim": "onebit_adam",
    "optim_args": "freeze_step=2",
    "tokenizer_vocab_size": 300,
    "block_size": 16,
    "max_eval_samples": 4,
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "save_steps": 3,
    "report_to": "none",
    "ddp_find_unused_parameters": "false",
}


def launch(directory: Path, **more: object) -> dict[str, object]:
    """Run the recipe with accelerate's configuration for two CPU processes; what it measured at the end."""
    given = {**TINY, "output_dir": directory, **more}
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    config = RECIPE / "configs" / "cpu_2_processes.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--main_process_port", str(free_port())]
    run([*launcher, str(RECIPE / "train.py"), "--tiny", "--use_cpu", *options])
    return json.loads((directory / "eval_results.json").read_text())


def test_the_recipe_trains_evaluates_and_resumes_with_two_processes(tmp_path: Path) -> None:
    whole = launch(tmp_path / "whole")
    history = json.loads((tmp_path / "whole" / "trainer_state.json").read_text())["log_history"]
    rows = [row for row in history if "loss" in row]
    assert [row["compressopt/stage"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert rows[-1]["compressopt/compression_ratio"] > 30
    resumed = launch(tmp_path / "resumed", resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3")
    assert resumed["eval_loss"] == whole["eval_loss"] and float(str(whole["perplexity"])) > 1
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed")]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])


def test_the_demo_prints_its_table_and_draws_its_picture(tmp_path: Path) -> None:
    script = [sys.executable, str(REPO_ROOT / "scripts" / "demo.py")]
    done = run([*script, "--steps", "10", "--batch_size", "1", "--output_dir", str(tmp_path)])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "onebit_adam" in done.stdout and "compressed" in done.stdout
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    losses = [list(runs[name]["eval_loss"].values()) for name in ("adamw_torch", "onebit_adam")]
    assert len(losses[0]) == len(losses[1]) > 0
