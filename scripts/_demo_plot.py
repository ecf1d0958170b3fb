"""The picture of the demo: loss against steps and against bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from _common import pyplot
from _demo_report import BASELINE, COMPRESSED, MB, Result, Traffic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {BASELINE: "#1f6fb4", COMPRESSED: "#d1495b"}


def plot(path: Path, runs: dict[str, Result], traffic: Traffic, ranks: int) -> None:
    plt = pyplot()
    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(13, 5.4), sharey=True, layout="constrained")
    sent = {BASELINE: traffic.baseline, COMPRESSED: traffic.compressed}
    for optim, run in runs.items():
        draw_losses(by_step, run, {step: step for step in run.train_loss})
        draw_losses(by_bytes, run, {step: in_all / MB for step, in_all in sent[optim].items()})
        annotate_end(by_bytes, run, sent[optim])
    if traffic.switch_step is not None:
        mark_switch(by_step, traffic.switch_step)
        mark_switch(by_bytes, traffic.switch_step * traffic.warmup_step / MB)
    by_step.set(title="Loss against steps", xlabel="optimizer steps", ylabel="cross-entropy loss (nats per token)")
    by_step.set_xlim(left=0)
    by_bytes.set(title="Loss against bytes", xlabel="megabytes sent by each rank so far (logarithmic)")
    logarithmic(by_bytes)
    for panel in (by_step, by_bytes):
        panel.grid(True, alpha=0.25)
    by_step.legend()
    full, sent_by_ours = traffic.totals
    figure.suptitle(
        f"GPT-2 of {runs[BASELINE].parameters / 1e6:.1f}M parameters from scratch on {ranks} ranks\nin the whole run "
        f"each rank sends {full / MB:,.0f} MB with {BASELINE}, {sent_by_ours / MB:,.0f} MB with {COMPRESSED}, "
        f"{full / sent_by_ours:.1f} times fewer"
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
