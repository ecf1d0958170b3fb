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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = REPOSITORY / "recipes" / "causal_lm" / "train.py"
BASELINE, COMPRESSED = "adamw_torch", "onebit_adam"
LEARNING_RATE = 1e-3
COLOURS = {BASELINE: "#1f6fb4", COMPRESSED: "#d1495b"}
TAIL_LINES = 60
MB = 1e6
FOOTNOTE = f"""\
* {COMPRESSED}: counted by the optimizer. {BASELINE}: computed for a ring all-reduce of float32 gradients,
  2 (W-1)/W * 4 n bytes with W = {{ranks}} ranks and n = {{parameters:,}} parameters.
  Bytes cost next to nothing between processes of one machine: the times show what compressing costs here, and
  whatever else the machine was doing, not what a slower network would save."""


# ------------------------------------------------------------------------------------------------ the runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--processes", type=int, default=2, help="CPU processes (ranks) of each run")
    parser.add_argument("--batch_size", type=int, default=8, help="examples of 128 tokens per rank and step")
    parser.add_argument("--seed", type=int, default=42, help="seed of model and data order, the same in both runs")
    parser.add_argument("--output_dir", type=Path, default=Path("demo"), help="folder to (over)write")
    arguments = parser.parse_args()
    for name, least in {"steps": 10, "processes": 2, "batch_size": 1}.items():
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be >= {least}, got {getattr(arguments, name)}")
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


# --------------------------------------------------------------------------------------------- the results


@dataclass
class Result:
    """What one run logged, by step."""

    optim: str
    parameters: int
    wall_seconds: float
    train_seconds: float = math.nan
    train_loss: dict[int, float] = field(default_factory=dict)
    eval_loss: dict[int, float] = field(default_factory=dict)
    stage: dict[int, float] = field(default_factory=dict)
    bytes_sent: dict[int, float] = field(default_factory=dict)
    bytes_sent_step: dict[int, float] = field(default_factory=dict)
    compression_ratio: dict[int, float] = field(default_factory=dict)


LOGGED = {
    "loss": "train_loss",
    "eval_loss": "eval_loss",
    "compressopt/stage": "stage",
    "compressopt/bytes_sent": "bytes_sent",
    "compressopt/bytes_sent_step": "bytes_sent_step",
    "compressopt/compression_ratio": "compression_ratio",
}


def read_result(optim: str, directory: Path, wall_seconds: float) -> Result:
    parameters = json.loads((directory / "train_results.json").read_text())["parameters"]
    result = Result(optim, parameters, wall_seconds)
    for entry in json.loads((directory / "trainer_state.json").read_text())["log_history"]:
        for key, name in LOGGED.items():
            if key in entry:
                getattr(result, name)[entry["step"]] = entry[key]
        result.train_seconds = entry.get("train_runtime", result.train_seconds)
    return result


@dataclass
class Traffic:
    """Bytes that one rank sends: those of onebit_adam as it counts them, those of adamw_torch by the formula."""

    baseline_step: float
    warmup_step: float
    compressed_step: float
    switch_step: int
    baseline: dict[int, float]
    compressed: dict[int, float]

    @property
    def totals(self) -> tuple[float, float]:
        last = max(self.compressed)
        return self.baseline[last], self.compressed[last]


def ring_all_reduce_bytes(parameters: int, ranks: int) -> float:
    """What each rank sends when 4-byte gradients are averaged by a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * 4 * parameters


def measure_traffic(result: Result, ranks: int) -> Traffic:
    """Bytes per step by stage; the step of the switch follows from the bytes between the logs around it."""
    warmup_logs = [step for step, stage in result.stage.items() if stage == 0.0]
    compressed_logs = [step for step, stage in result.stage.items() if stage == 1.0]
    if not warmup_logs or not compressed_logs:
        sys.exit(f"the log of {result.optim} shows only one stage: {sorted(set(result.stage.values()))}")
    before, after = max(warmup_logs), min(compressed_logs)
    warmup, compressed = result.bytes_sent_step[before], result.bytes_sent_step[after]
    sent = result.bytes_sent[after] - result.bytes_sent[before]
    warmup_steps_between = round((sent - (after - before) * compressed) / (warmup - compressed))
    baseline = ring_all_reduce_bytes(result.parameters, ranks)
    return Traffic(
        baseline_step=baseline,
        warmup_step=warmup,
        compressed_step=compressed,
        switch_step=before + warmup_steps_between,
        baseline={step: step * baseline for step in result.bytes_sent},
        compressed=result.bytes_sent,
    )


def write_json(path: Path, runs: dict[str, Result], traffic: Traffic, arguments: argparse.Namespace) -> None:
    content = {
        "arguments": {**vars(arguments), "output_dir": arguments.output_dir.name},
        "traffic": asdict(traffic),
        "runs": {optim: asdict(result) for optim, result in runs.items()},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------ the table


def percent(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.2f} %"


def megabytes(value: float) -> str:
    return f"{value / MB:,.2f} MB"


def loss_rows(runs: dict[str, Result], traffic: Traffic) -> list[list[str]]:
    base, ours = runs[BASELINE], runs[COMPRESSED]
    rows = []
    for step in sorted(base.eval_loss.keys() & ours.eval_loss.keys() & base.train_loss.keys()):
        rows.append(
            [
                f"{step}",
                "warmup" if step <= traffic.switch_step else "compressed",
                *(f"{run.train_loss[step]:.4f}" for run in (base, ours)),
                percent(ours.train_loss[step], base.train_loss[step]),
                *(f"{run.eval_loss[step]:.4f}" for run in (base, ours)),
                percent(ours.eval_loss[step], base.eval_loss[step]),
            ]
        )
    return rows


def cost_rows(runs: dict[str, Result], traffic: Traffic) -> list[list[str]]:
    base, ours = runs[BASELINE], runs[COMPRESSED]
    total_base, total_ours = traffic.totals

    def row(title: str, reference: float, value: float, show: Callable[[float], str], last: str) -> list[str]:
        return [title, show(reference), show(value), last]

    def seconds(value: float) -> str:
        return f"{value:.0f} s"

    def fewer(reference: float, value: float) -> str:
        return f"{reference / value:.1f}x fewer" if value < reference else percent(value, reference)

    step = traffic.baseline_step
    return [
        ["", BASELINE, COMPRESSED, ""],
        row(
            "sent per rank and step, warmup*", step, traffic.warmup_step, megabytes, percent(traffic.warmup_step, step)
        ),
        row("... compressed stage*", step, traffic.compressed_step, megabytes, fewer(step, traffic.compressed_step)),
        row("sent per rank in all*", total_base, total_ours, megabytes, fewer(total_base, total_ours)),
        row(
            "training and evaluation",
            base.train_seconds,
            ours.train_seconds,
            seconds,
            percent(ours.train_seconds, base.train_seconds),
        ),
        row(
            "wall time of the run",
            base.wall_seconds,
            ours.wall_seconds,
            seconds,
            percent(ours.wall_seconds, base.wall_seconds),
        ),
    ]


def print_table(runs: dict[str, Result], traffic: Traffic, arguments: argparse.Namespace) -> None:
    head = ["step", "stage", "train", "train", "difference", "evaluation", "evaluation", "difference"]
    optims = ["", "of onebit_adam", *[BASELINE, COMPRESSED, ""] * 2]
    widths = [6, 14, *[11, 12, 10] * 2]

    def line(cells: list[str], sizes: list[int]) -> str:
        first, *others = (f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
        return "  ".join([first.lstrip().ljust(sizes[0]), *others])

    rule = "-" * len(line([""] * len(widths), widths))
    print(f"\n{rule}")
    for cells in (head, optims):
        print(line(cells, widths))
    print(rule)
    for cells in loss_rows(runs, traffic):
        print(line(cells, widths))
    print(rule)
    for cells in cost_rows(runs, traffic):
        print(line(cells, [32, 22, 22, 12]))
    print(rule)
    print(FOOTNOTE.format(ranks=arguments.processes, parameters=runs[BASELINE].parameters))


# ------------------------------------------------------------------------------------------------- the plot


def plot(path: Path, runs: dict[str, Result], traffic: Traffic, ranks: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(13, 5.4), sharey=True, layout="constrained")
    sent = {BASELINE: traffic.baseline, COMPRESSED: traffic.compressed}
    for optim, run in runs.items():
        draw_losses(by_step, run, {step: step for step in run.train_loss})
        draw_losses(by_bytes, run, {step: in_all / MB for step, in_all in sent[optim].items()})
        annotate_end(by_bytes, run, sent[optim])
    mark_switch(by_step, traffic.switch_step)
    mark_switch(by_bytes, traffic.switch_step * traffic.warmup_step / MB)
    by_step.set(title="Loss against steps", xlabel="optimizer steps", ylabel="cross-entropy loss (nats per token)")
    by_step.set_xlim(left=0)
    by_bytes.set(title="Loss against bytes", xlabel="megabytes sent by each rank so far (logarithmic)")
    logarithmic(by_bytes)
    for panel in (by_step, by_bytes):
        panel.grid(True, alpha=0.25)
    by_step.legend()
    figure.suptitle(
        f"GPT-2 of {runs[BASELINE].parameters / 1e6:.1f}M parameters from scratch on {ranks} ranks: "
        f"{traffic.baseline_step / MB:.1f} MB per step with {BASELINE}, "
        f"{traffic.compressed_step / MB:.2f} MB in the compressed stage of {COMPRESSED}"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_losses(panel: Axes, run: Result, position: dict[int, float]) -> None:
    """Training thin, evaluation bold; the compressed run is dashed, so that the other shows where they coincide."""
    compressed = run.optim == COMPRESSED
    style = {"color": COLOURS[run.optim], "linestyle": (0, (4, 1.5)) if compressed else "-"}
    curves = (
        (run.train_loss, "training", {"linewidth": 1.2, "alpha": 0.8}),
        (run.eval_loss, "evaluation", {"linewidth": 2.2, "marker": "s" if compressed else "o", "markersize": 5}),
    )
    for losses, label, extra in curves:
        steps = sorted(losses.keys() & position.keys())
        x, y = [position[step] for step in steps], [losses[step] for step in steps]
        panel.plot(x, y, label=f"{run.optim}, {label}", **style, **extra)


def annotate_end(panel: Axes, run: Result, sent: dict[int, float]) -> None:
    last = max(run.eval_loss.keys() & sent.keys())
    panel.annotate(
        f"{run.eval_loss[last]:.3f} after\n{sent[last] / MB:,.0f} MB",
        (sent[last] / MB, run.eval_loss[last]),
        xytext=(-24, -4) if run.optim == COMPRESSED else (4, 24),
        textcoords="offset points",
        ha="right",
        va="center",
        color=COLOURS[run.optim],
    )


def mark_switch(panel: Axes, position: float) -> None:
    panel.axvline(position, color="#555555", linestyle=":", linewidth=1.3)
    panel.annotate(
        f"{COMPRESSED}:\nwarmup → compressed",
        (position, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color="#333333",
    )


def logarithmic(panel: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


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
