"""Write docs/comparison.md: this package's methods beside others, by loss, bytes, memory, and the time of a run.

Losses and bytes are those of docs/convergence.json, which scripts/compare_convergence.py wrote (`--only rivals`). The
time of a run is calculated from them, for a larger model: see the page. Measured steps are those of docs/rivals.json,
by scripts/benchmark_network.py. Only the text between `<!-- table NAME -->` and `<!-- end of table -->` changes, and
the two pictures.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import REPOSITORY, parser_of, pyplot
from _convergence_runs import MB, PARTNER, RUNS, Run
from _network_methods import METHODS

from hf_compressopt.flat import bucket_numel_of
from hf_compressopt.planner.report import COMPACT_FIRST, FLOAT32, Buckets

#: The model and the machines of the times: a step that exchanges nothing, and what of a link payload reaches.
NUMEL, COMPUTE_SECONDS, EFFICIENCY = 29_381_632, 0.685, 0.9
LINKS = {"1 Gbit/s": 1e9 / 8, "100 Mbit/s": 1e8 / 8}
RANKS = (2, 4, 8)
#: The loss that all are timed to: AdamW's last one with the same seed, times this.
NEAR = 1.01
#: Bytes of state per parameter of what is not this package's, on each rank.
ADAMW, ONE_BUFFER = 8.0, 4.0
#: Bytes of an error in 8 bits, with its share of a scale.
ERROR = 1 + 2 / 128


@dataclass(frozen=True)
class Line:
    """One method at one number of ranks.

    Attributes:
        run: The method.
        ranks: Number of ranks.
        losses: Evaluation losses, by seed.
        excess: How far the mean loss lies above AdamW's at the same seeds, in per cent; None if that has not run.
        nbytes: What a rank sent in the run.
        ring: What an all-reduce in float32 would have sent.
        steps: Steps of the run.
        reached: The mean step at which the runs were as good as AdamW, nearly (NEAR); None if one of them never was.
    """

    run: Run
    ranks: int
    losses: list[float]
    excess: float | None
    nbytes: float
    ring: float
    steps: int
    reached: float | None

    @property
    def ratio(self) -> float:
        """The bytes of an all-reduce in float32, over those of this run."""
        return self.ring / self.nbytes

    def seconds(self, rate: float) -> float:
        """Seconds of a step of the larger model, by the formula of the page."""
        per_step = 2 * (self.ranks - 1) / self.ranks * 4 * NUMEL / self.ratio
        return COMPUTE_SECONDS + per_step / (rate * EFFICIENCY)


def state_bytes(run: Run, ranks: int) -> float:
    """Bytes of state per parameter on each rank: the most that a run takes."""
    if run.optimizer in PARTNER:
        import hf_compressopt

        cls = getattr(hf_compressopt, run.optimizer)
        forms = Buckets(NUMEL, ranks, bucket_numel_of(25.0)).states(cls)
        return forms[COMPACT_FIRST if run.options.get("state") == "compact" else FLOAT32] / NUMEL
    if run.zero:  # moments and masters of a part; errors of all elements, twice
        return (ADAMW + ONE_BUFFER) / ranks + 2 * ERROR
    if run.gradients:
        return ADAMW + (ERROR if run.options.get("state") == "compact" else 4.0) * (1 + 1 / ranks)
    more = {"PowerSGD": ONE_BUFFER, "DiLoCo": 2 * ONE_BUFFER}  # the error; the parameters together, and their momentum
    return ONE_BUFFER if run.optimizer in ("DeMo", "SignSGD") else ADAMW + more.get(run.rival, 0.0)


def lines_of(rows: Sequence[dict[str, Any]], ranks: int) -> list[Line]:
    """The runs of a number of ranks, those with the lowest losses first."""
    found = []
    partner = {row["seed"]: row["eval_loss"] for row in reversed(at(rows, "AdamW", 2))}
    partner |= {row["seed"]: row["eval_loss"] for row in at(rows, "AdamW", ranks)}
    for run in RUNS["rivals"].values():
        mine = at(rows, run.name, ranks) or (at(rows, "AdamW", 2) if run.name == "AdamW" else [])
        if not mine:
            continue
        losses = {row["seed"]: row["eval_loss"] for row in mine}
        shared = sorted(losses.keys() & partner.keys())
        means = [statistics.fmean(values[seed] for seed in shared) for values in (losses, partner)] if shared else []
        steps = mine[0]["steps"]
        ring = 2 * (ranks - 1) / ranks * 4 * mine[0]["parameters"] * steps
        sent = statistics.fmean(row["bytes"] for row in mine) if run.name != "AdamW" else ring
        excess = 100 * (means[0] / means[1] - 1) if means and run.name != "AdamW" else None
        places = [step_of(row["curve"], NEAR * partner[row["seed"]]) for row in mine if row["seed"] in partner]
        reached = None if None in places else statistics.fmean(place for place in places if place is not None)
        found.append(Line(run, ranks, list(losses.values()), excess, sent, ring, steps, reached))
    return sorted(found, key=lambda line: statistics.fmean(line.losses))


def step_of(curve: Sequence[dict[str, Any]], loss: float) -> float | None:
    """The step at which a run had this evaluation loss, by interpolation; None if it never had it."""
    before = curve[0]
    for point in curve:
        if point["eval"] is not None and point["eval"] <= loss:
            if point is before:
                return float(point["step"])
            share = (before["eval"] - loss) / (before["eval"] - point["eval"])
            return float(before["step"] + share * (point["step"] - before["step"]))
        before = point
    return None


def at(rows: Sequence[dict[str, Any]], name: str, ranks: int) -> list[dict[str, Any]]:
    """The rows of 1,000 steps of a run at a number of ranks, with the seeds of the results."""
    kept = (row for row in rows if row["name"] == name and row["world_size"] == ranks and row["steps"] == 1000)
    return [row for row in kept if row["seed"] < 10 and row["eval_loss"] is not None]


def table(lines: Sequence[Line]) -> str:
    """The lines as Markdown."""
    head = ["method", "ranks", "seeds", "evaluation loss", "above AdamW, %", "MB sent per rank", "fewer than float32"]
    head += ["state, bytes per parameter", *(f"step at {link}, s" for link in LINKS)]
    body = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for line in lines:
        name = line.run.name
        cells = [f"**{name}**" if ours(line.run) else name, str(line.ranks), str(len(line.losses))]
        cells += [f"{statistics.fmean(line.losses):.3f}", "" if line.excess is None else f"{line.excess:+.2f}"]
        cells += [f"{line.nbytes / MB:,.1f}", f"{line.ratio:.1f}x", f"{state_bytes(line.run, line.ranks):.1f}"]
        body.append([*cells, *(f"{line.seconds(rate):.2f}" for rate in LINKS.values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)


def times(lines: Sequence[Line]) -> str:
    """Time to nearly AdamW's loss as Markdown, those that are there first at 100 Mbit/s at the top."""
    body = [["method", "steps", *(f"seconds at {link}" for link in LINKS)], ["---"] + ["---:"] * (1 + len(LINKS))]
    there = [(line, line.reached) for line in lines if line.reached is not None]
    for line, steps in sorted(there, key=lambda pair: pair[1] * pair[0].seconds(min(LINKS.values()))):
        name = f"**{line.run.name}**" if ours(line.run) else line.run.name
        body.append([name, f"{steps:.0f}", *(f"{steps * line.seconds(rate):,.0f}" for rate in LINKS.values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)


def measured(rows: Sequence[dict[str, Any]]) -> str:
    """Measured steps as multiples of one that exchanges nothing, as Markdown."""
    seconds = {(row["method"], row["link"], row["ranks"]): statistics.median(row["seconds"]) for row in rows}
    places = [(link, ranks) for link in LINKS for ranks in RANKS]
    body = [["method", *(f"{link}, {ranks} ranks" for link, ranks in places)], ["---"] + ["---:"] * len(places)]
    alone = [seconds["compute", link, ranks] for link, ranks in places]
    body.append(["seconds of a step that exchanges nothing", *(f"{value:.3f}" for value in alone)])
    for name, method in METHODS.items():
        if name != "compute" and all((name, *place) in seconds for place in places):
            mine = [seconds[name, link, ranks] for link, ranks in places]
            body.append([method.title, *(f"{value / base:.2f}x" for value, base in zip(mine, alone, strict=True))])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)


def rates(rows: Sequence[dict[str, Any]]) -> str:
    """The runs by which rates were chosen, as Markdown."""
    losses = {row["name"]: row["eval_loss"] for row in rows}
    body = [["run", "evaluation loss"], ["---", "---:"]]
    for run in RUNS["rivals, rates"].values():
        if run.name in losses:
            body.append([run.name, f"{losses[run.name]:.3f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)


def ours(run: Run) -> bool:
    """True for a method of this package."""
    return run.optimizer in PARTNER or bool(run.gradients or run.zero)


def plot(path: Path, lines: Sequence[Line]) -> None:
    """Loss against bytes: low and left is best."""
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(10, 6), layout="constrained")
    best = min(statistics.fmean(line.losses) for line in lines)
    for line in lines:
        loss, mine = statistics.fmean(line.losses), ours(line.run)
        panel.plot(line.nbytes / MB, loss, "o" if mine else "s", color="#1f6fb4" if mine else "#8a8a8a", markersize=9)
        style = {"fontweight": "bold" if mine else "normal", "fontsize": 9}
        panel.annotate(line.run.name, (line.nbytes / MB, loss), xytext=(7, 5), textcoords="offset points", **style)
    panel.set(xscale="log", xlabel="megabytes that a rank sent in the run (logarithmic)")
    panel.set(ylabel="evaluation loss (nats per token)", ylim=(best - 0.05, None))
    panel.set(title=f"1,000 steps, {lines[0].ranks} ranks: lower is better, further left is cheaper")
    panel.margins(x=0.18)
    panel.grid(True, which="both", alpha=0.2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_times(path: Path, lines: Sequence[Line]) -> None:
    """Time to nearly AdamW's loss, a bar for each method: short is best."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(LINKS), figsize=(11, 3.8), layout="constrained")
    for panel, (link, rate) in zip(panels, LINKS.items(), strict=True):
        found = [(line.reached * line.seconds(rate), line.run) for line in lines if line.reached is not None]
        found.sort(key=lambda pair: -pair[0])
        colours = ["#1f6fb4" if ours(run) else "#8a8a8a" for _, run in found]
        bars = panel.barh([run.name for _, run in found], [seconds for seconds, _ in found], color=colours)
        panel.bar_label(bars, [f"{seconds:,.0f} s" for seconds, _ in found], padding=3, fontsize=9)
        panel.set(title=f"{link}, {lines[0].ranks} ranks", xlabel="seconds to AdamW's loss + 1 %")
        panel.margins(x=0.18)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    docs = REPOSITORY / "docs"
    parser.add_argument("--rows", type=Path, default=docs / "convergence.json", help="the runs (%(default)s)")
    parser.add_argument("--steps", type=Path, default=docs / "rivals.json", help="measured steps (%(default)s)")
    parser.add_argument("--report", type=Path, default=docs / "comparison.md", help="the page (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks of the picture (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rows, steps = (json.loads(path.read_text()) for path in (arguments.rows, arguments.steps))
    arguments.report.write_text(rendered(arguments.report.read_text(), rows, steps))
    lines = lines_of(rows, arguments.ranks)
    plot(arguments.report.with_suffix(".png"), lines)
    plot_times(arguments.report.with_name(f"{arguments.report.stem}_time.png"), lines)
    print(f"wrote {arguments.report}, and its pictures beside it")


def rendered(text: str, rows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    """The page with its tables anew."""
    tables = {"rates": rates(rows), "steps": measured(steps)}
    tables |= {f"{ranks} ranks": table(lines_of(rows, ranks)) for ranks in RANKS}
    tables |= {f"time, {ranks} ranks": times(lines_of(rows, ranks)) for ranks in RANKS}
    for name, lines in tables.items():
        place = re.compile(f"(?<=<!-- table {name} -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
        text = place.sub(lambda _, lines=lines: f"{lines}\n", text, count=1)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    main()
