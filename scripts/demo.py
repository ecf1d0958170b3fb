"""Train a small language model twice, with adamw_torch and with onebit_adam, and compare loss and bytes on the wire.

Both runs start recipes/causal_lm/train.py on two CPU processes with the same seed, data and number of steps. Writes
loss.png and results.json to the output folder and prints one table.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from _common import REPOSITORY, check_least
from _demo_report import BASELINE, COMPRESSED, Result, measure_traffic, plot, print_table, read_result, write_json

RECIPE = REPOSITORY / "recipes" / "causal_lm" / "train.py"
LEARNING_RATE = 1e-3
TAIL_LINES = 60


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--processes", type=int, default=2, help="CPU processes (ranks) of each run")
    parser.add_argument("--batch_size", type=int, default=8, help="examples of 128 tokens per rank and step")
    parser.add_argument("--seed", type=int, default=42, help="seed of model and data order, the same in both runs")
    parser.add_argument("--output_dir", type=Path, default=Path("demo"), help="folder to (over)write")
    arguments = parser.parse_args()
    check_least(parser, arguments, {"steps": 10, "processes": 2, "batch_size": 1})
    return arguments


def logging_interval(steps: int) -> int:
    """A divisor of `steps`, about a thirtieth of it, so that the last step is logged too."""
    return max(divisor for divisor in range(1, max(1, steps // 30) + 1) if steps % divisor == 0)


def evaluation_interval(steps: int) -> int:
    """A multiple of the logging interval, about an eighth of `steps`."""
    logging_steps = logging_interval(steps)
    return logging_steps * math.ceil(steps / (8 * logging_steps))


def command(optim: str, directory: Path, arguments: argparse.Namespace) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", str(arguments.processes)]
    options: dict[str, object] = {
        "optim": optim,
        "output_dir": directory,
        "max_steps": arguments.steps,
        "seed": arguments.seed,
        "data_seed": arguments.seed,
        "block_size": 128,
        "per_device_train_batch_size": arguments.batch_size,
        "per_device_eval_batch_size": arguments.batch_size,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, arguments.steps // 10),
        "max_grad_norm": 1.0,
        "logging_steps": logging_interval(arguments.steps),
        "eval_strategy": "steps",
        "eval_steps": evaluation_interval(arguments.steps),
        "save_strategy": "no",
        "report_to": "none",
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": "false",
    }
    flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return [*launcher, str(RECIPE), "--tiny", "--use_cpu", *flags]


def child_environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }


def stop(child: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks; if it does not, its process group."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_and_show(words: list[str], log: Path) -> int:
    """Run a command, pass its output through as it comes and keep it in `log`."""
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=child_environment(),
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        with log.open("wb") as file:
            while chunk := os.read(child.stdout.fileno(), 65536):
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
                file.write(chunk)
        return child.wait()
    finally:
        stop(child)


def tail(log: Path) -> str:
    """The last lines of a log; of a progress bar its last state."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in log.read_bytes().decode(errors="replace").split("\n"))
    return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])


def train(optim: str, number: int, arguments: argparse.Namespace) -> Result:
    directory = arguments.output_dir / optim
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    print(
        f"\n== run {number} of 2: --optim {optim}, {arguments.steps} steps on {arguments.processes} CPU processes",
        flush=True,
    )
    start = time.monotonic()
    log = directory / "output.log"
    code = run_and_show(command(optim, directory, arguments), log)
    if code != 0:
        sys.exit(f"\n== the run with --optim {optim} failed (exit status {code}); the end of {log}:\n{tail(log)}")
    return read_result(optim, directory, time.monotonic() - start)


def main() -> None:
    arguments = parse_arguments()
    arguments.output_dir = arguments.output_dir.resolve()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    plot_file, results_file = arguments.output_dir / "loss.png", arguments.output_dir / "results.json"
    for old in (plot_file, results_file):
        old.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        runs = {optim: train(optim, i, arguments) for i, optim in enumerate((BASELINE, COMPRESSED), start=1)}
    except KeyboardInterrupt:
        print("\n== stopped; the processes of the run have ended", flush=True)
        sys.exit(130)
    traffic = measure_traffic(runs[COMPRESSED], arguments.processes)
    print_table(runs, traffic, arguments)
    write_json(results_file, runs, traffic, arguments)
    plot(plot_file, runs, traffic, arguments.processes)
    print(f"wrote {plot_file} and {results_file}")


if __name__ == "__main__":
    main()
