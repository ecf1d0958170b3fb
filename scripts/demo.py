"""Train a small language model twice, with adamw_torch and with onebit_adam, and compare loss and bytes on the wire.

Both runs start recipes/causal_lm/train.py on two CPU processes with the same seed, data and number of steps. Writes
loss.png and results.json to the output folder and prints one table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _common import COLOURS, MB, REPOSITORY, check_least, print_table, pyplot

RECIPE = REPOSITORY / "recipes" / "causal_lm" / "train.py"
BASELINE, COMPRESSED = "adamw_torch", "onebit_adam"
FLAGS = """--tiny --use_cpu --ddp_backend gloo --ddp_find_unused_parameters false --block_size 128
    --learning_rate 1e-3 --lr_scheduler_type cosine --max_grad_norm 1.0
    --eval_strategy steps --save_strategy no --report_to none"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
TAIL_LINES = 60
FOOTNOTE = f"""
* {COMPRESSED}: counted by the optimizer. {BASELINE}: computed for a ring all-reduce of float32 gradients,
  2 (W-1)/W * 4 n bytes with W = {{ranks}} ranks and n = {{parameters:,}} parameters.
  Bytes cost next to nothing between processes of one machine: the times show what compressing costs here, and
  whatever else the machine was doing, not what a slower network would save."""
#: Where a run keeps what Trainer logs, by step.
LOGGED = {"loss": "train_loss", "eval_loss": "eval_loss"}
LOGGED |= {f"compressopt/{name}": name for name in ("stage", "bytes_sent", "bytes_sent_step", "compression_ratio")}
Run = dict[str, Any]  # optim, parameters, wall_seconds, train_seconds, and the values of LOGGED by step

# -- the runs ---------------------------------------------------------------------------------------------------------


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


def command(optim: str, directory: Path, arguments: argparse.Namespace) -> list[str]:
    """The recipe's command line; it logs some thirty times, the last step too, and evaluates some eight times."""
    steps = arguments.steps
    interval = max(divisor for divisor in range(1, max(1, steps // 30) + 1) if steps % divisor == 0)
    ranks = f"--nproc_per_node={arguments.processes}"
    options: dict[str, object] = {
        "optim": optim,
        "output_dir": directory,
        "max_steps": steps,
        "seed": arguments.seed,
        "data_seed": arguments.seed,
        "per_device_train_batch_size": arguments.batch_size,
        "per_device_eval_batch_size": arguments.batch_size,
        "warmup_steps": max(1, steps // 10),
        "logging_steps": interval,
        "eval_steps": interval * math.ceil(steps / (8 * interval)),
    }
    if optim == "onebit_adam":  # a run of fewer than 1,000 steps would stay in the warmup stage
        options["optim_args"] = f"max_freeze_step={max(1, steps // 5)}"
    flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, str(RECIPE), *FLAGS.split(), *flags]


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
    environment = {**os.environ, **ENVIRONMENT, "COLUMNS": str(shutil.get_terminal_size().columns)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(words, env=environment, cwd=REPOSITORY, start_new_session=True, **pipes)
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


def train(optim: str, number: int, arguments: argparse.Namespace) -> Run:
    directory = arguments.output_dir / optim
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    where = f"{arguments.steps} steps on {arguments.processes} CPU processes"
    print(f"\n== run {number} of 2: --optim {optim}, {where}", flush=True)
    start, log = time.monotonic(), directory / "output.log"
    if code := run_and_show(command(optim, directory, arguments), log):
        sys.exit(f"\n== the run with --optim {optim} failed (exit status {code}); the end of {log}:\n{tail(log)}")
    return read_result(optim, directory, time.monotonic() - start)


# -- the results ------------------------------------------------------------------------------------------------------


def read_result(optim: str, directory: Path, wall_seconds: float) -> Run:
    parameters = json.loads((directory / "train_results.json").read_text())["parameters"]
    run: Run = {"optim": optim, "parameters": parameters, "wall_seconds": wall_seconds, "train_seconds": math.nan}
    run |= {name: {} for name in LOGGED.values()}
    for entry in json.loads((directory / "trainer_state.json").read_text())["log_history"]:
        for key in LOGGED.keys() & entry.keys():
            run[LOGGED[key]][entry["step"]] = entry[key]
        run["train_seconds"] = entry.get("train_runtime", run["train_seconds"])
    return run


def measure_traffic(run: Run, ranks: int) -> dict[str, Any]:
    """Bytes that a rank sends: as onebit_adam counts them, and of adamw_torch by the formula of a ring."""
    warmup_logs = [step for step, stage in run["stage"].items() if stage == 0.0]
    compressed_logs = [step for step, stage in run["stage"].items() if stage == 1.0]
    if not warmup_logs:
        sys.exit(f"the log of {run['optim']} does not show the warmup stage: {sorted(set(run['stage'].values()))}")
    before = max(warmup_logs)
    warmup, compressed, switch = run["bytes_sent_step"][before], None, None
    if compressed_logs:
        after = min(compressed_logs)
        compressed = run["bytes_sent_step"][after]
        sent = run["bytes_sent"][after] - run["bytes_sent"][before]
        # by the bytes between the logs around it
        switch = before + round((sent - (after - before) * compressed) / (warmup - compressed))
    baseline = 2 * (ranks - 1) / ranks * 4 * run["parameters"]
    return {
        "baseline_step": baseline,
        "warmup_step": warmup,
        "compressed_step": compressed,
        "switch_step": switch,
        "baseline": {step: step * baseline for step in run["bytes_sent"]},
        "compressed": run["bytes_sent"],
    }


def percent(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.2f} %"


def print_results(runs: dict[str, Run], traffic: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the losses by step, and what the runs cost."""
    base, ours = runs[BASELINE], runs[COMPRESSED]
    optims = (BASELINE, COMPRESSED, "difference")
    rows = [["step", "stage", f"training: {BASELINE}", *optims[1:], f"evaluation: {BASELINE}", *optims[1:]]]
    for step in sorted(base["eval_loss"].keys() & ours["eval_loss"].keys() & base["train_loss"].keys()):
        cells = [f"{step}", "warmup" if step <= (traffic["switch_step"] or step) else "compressed"]
        for kind in ("train_loss", "eval_loss"):
            theirs, mine = base[kind][step], ours[kind][step]
            cells += [f"{theirs:.4f}", f"{mine:.4f}", percent(mine, theirs)]
        rows.append(cells)
    print_table("Loss", rows)
    rows, step, last = [["", *optims]], traffic["baseline_step"], max(traffic["compressed"])
    for title, reference, value in (
        ("sent per rank and step, warmup*", step, traffic["warmup_step"]),
        ("... compressed stage*", step, traffic["compressed_step"]),
        ("sent per rank in the whole run*", traffic["baseline"][last], traffic["compressed"][last]),
    ):
        if value is not None:
            fewer = f"{reference / value:.1f}x fewer" if value < reference else percent(value, reference)
            rows.append([title, f"{reference / MB:,.2f} MB", f"{value / MB:,.2f} MB", fewer])
    for title, name in (("training and evaluation", "train_seconds"), ("wall time of the run", "wall_seconds")):
        rows.append([title, f"{base[name]:.0f} s", f"{ours[name]:.0f} s", percent(ours[name], base[name])])
    print_table("Cost", rows)
    print(FOOTNOTE.format(ranks=arguments.processes, parameters=base["parameters"]))


def plot(path: Path, runs: dict[str, Run], traffic: dict[str, Any], ranks: int) -> None:
    """Evaluation loss against steps and against megabytes sent."""
    plt = pyplot()
    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    sent = {BASELINE: traffic["baseline"], COMPRESSED: traffic["compressed"]}
    for optim, colour, marker in ((BASELINE, COLOURS["ddp"], "o"), (COMPRESSED, COLOURS["onebit_adam"], "s")):
        steps = sorted(runs[optim]["eval_loss"].keys() & sent[optim].keys())
        losses = [runs[optim]["eval_loss"][step] for step in steps]
        megabytes = [sent[optim][step] / MB for step in steps]
        for panel, places in ((by_step, steps), (by_bytes, megabytes)):
            panel.plot(places, losses, label=optim, color=colour, marker=marker)
        by_bytes.annotate(f"{megabytes[-1]:,.0f} MB", (megabytes[-1], losses[-1]), (0, 8), textcoords="offset points")
    if traffic["switch_step"] is not None:
        by_step.axvline(traffic["switch_step"], color=COLOURS["baseline"], ls=":", label="end of the warmup stage")
    title = f"GPT-2 of {runs[BASELINE]['parameters'] / 1e6:.1f}M parameters, {ranks} ranks"
    by_step.set(title=title, xlabel="optimizer steps", ylabel="evaluation loss (nats per token)")
    by_bytes.set(title="the same by what a rank has sent", xlabel="megabytes (logarithmic)", xscale="log")
    by_step.legend()
    figure.savefig(path, dpi=110)


# -- main -------------------------------------------------------------------------------------------------------------


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
    print_results(runs, traffic, arguments)
    given = {**vars(arguments), "output_dir": arguments.output_dir.name}
    found = {"arguments": given, "traffic": traffic, "runs": runs}
    results_file.write_text(json.dumps(found, indent=2) + "\n")
    plot(plot_file, runs, traffic, arguments.processes)
    print(f"wrote {plot_file} and {results_file}")


if __name__ == "__main__":
    main()
