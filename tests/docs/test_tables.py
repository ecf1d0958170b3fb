"""Every measured number of README and docs/ is what scripts/results says."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from hf_compressopt import cli
from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

import make_tables as made  # noqa: E402
from _convergence import GLUE_RATES, GLUE_TASKS, TRAINED_QUANTIZERS  # noqa: E402

README = REPO_ROOT / "README.md"


def text_of(page: str) -> str:
    """A page on one line, without marks of emphasis and code."""
    return " ".join(re.sub(r"[*`]", "", (REPO_ROOT / page).read_text()).split())


def test_the_tables_are_those_of_the_results() -> None:
    pages = {page: page.read_text() for page in made.pages()}
    assert [str(page) for page, text in pages.items() if made.rendered(text) != text] == []
    used = re.findall(r"<!-- table ([^>]*) -->", "".join(pages.values()))
    assert sorted(used) == sorted(made.TABLES)
    assert sorted(re.findall(r"<!-- text ([^>]*) -->", "".join(pages.values()))) == sorted(made.TEXTS)


def test_pages_follow_from_the_results_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    assert "nothing has run on a GPU" in made.status() and "make gpu-proof" in made.gpu_losses()
    step = {
        "model": "124M",
        "ranks": 8,
        "bucket_mb": 25.0,
        "gpu_ms": 1.5,
        "host_ms": 8.25,
        "waits": 1.0,
        "launched": 310.0,
    }
    lines: list[dict[str, Any]] = [
        {"what": "environment", "environment": {"gpu": {"devices": ["NVIDIA H100"]}}},
        {"what": "kernel", "parameters": "torch.bfloat16", "kernel": "compress", "numel": 100, "ms": 0.5}
        | {"gb_per_s": 2500.0, "of_roofline": 0.9},
        {"what": "step", "step": "OnebitAdam", "bytes_per_parameter": 10.5, **step},
        {"what": "path", "ok": False},
        {"what": "ncu", "ok": None},
    ]
    row = {"model": "10M", "steps": 1000, "tokens_per_step": 16384, "parameters": 10**7, "device": "NVIDIA H100"}
    losses = [
        {**row, "name": "AdamW", "world_size": 1, "seed": 0, "eval_loss": 3.0, "bytes": 0},
        {**row, "name": "OnebitAdam", "world_size": 8, "seed": 0, "eval_loss": 3.03, "bytes": 7 * 10**9},
    ]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "proof.jsonl").write_text("\n".join(json.dumps({"ok": True, **line}) for line in lines))
    (tmp_path / "gpu" / "convergence.jsonl").write_text("\n".join(map(json.dumps, losses)))
    assert "GPU (NVIDIA H100): 3 of 4 checks passed there." in made.status()
    assert "| OnebitAdam | 124M | 8 | 25 | 1.50 | 8.25 | 1 | 310 | 10.5 |" in made.gpu_benchmarks()
    assert "| compress | 0.500 | 2500 | 0.90 |" in made.gpu_benchmarks()
    assert "| 10M | 8 | 1,000 | OnebitAdam | 1 | 3.0300 | +1.00 % | 10.0x |" in made.gpu_losses()


def test_the_results_say_how_they_were_made() -> None:
    other = json.loads((made.RESULTS / "other.json").read_text())
    assert all(entry["command"] and entry["machine"] and entry["rows"] for entry in other.values())


def losses(name: str, partner: str = "AdamW", counts: tuple[int, ...] = (2, 4, 8)) -> list[float]:
    """The mean difference in per cent at each number of ranks, the least first."""
    found = (made.against(name, partner, ranks) for ranks in counts)
    return sorted(difference[0] for difference in found if difference)


def tuned(name: str, ranks: int = 4) -> float:
    """The difference of a run whose seeds are not those of the results, in per cent."""
    partner = re.sub(r"^.*, (?=\d+ steps)", "AdamW, ", name)
    ((mean, _, _),) = [found for found in [made.against(name, partner, ranks)] if found]
    return mean


def accuracies(task: str) -> str:
    """Name the accuracies of int4 gradients and of AdamW, means over seeds."""
    names = (f"AdamW, int4 gradients, {task}", f"AdamW, {task}")
    mine, adamw = (fmean(row["accuracy"] for row in made.losses(name, 2).values()) for name in names)
    return f"{mine:.3f} against {adamw:.3f}"


def of_nanogpt() -> str:
    """Say how far int4 gradients and 1-bit Adam end from AdamW on 2 and 4 ranks."""
    names = ("AdamW, int4 gradients, nanoGPT", "OnebitAdam, nanoGPT")
    found = {name: [by[0] for ranks in (2, 4) if (by := made.above_one_rank(name, ranks))] for name in names}
    int4, onebit = ([f"{abs(value):.1f}" for value in sorted(values, key=abs)] for values in found.values())
    fewer = [made.fewer(name, 4) for name in names]
    first = f"int4 gradients {' to '.join(dict.fromkeys(int4))} % higher for {fewer[0]:.1f} times fewer bytes"
    return f"{first}, onebit_adam {' to '.join(dict.fromkeys(onebit))} % lower for {fewer[1]:.0f} times fewer"


def fitted(name: str) -> str:
    """The training loss at the end of a run on CoLA."""
    return f"{made.losses(f'{name}, CoLA', 2)[0]['curve'][-1]['train']:.3f}"


def sentences() -> Iterator[tuple[str, str]]:
    """What pages say in words, with its numbers from the results: the page, and the words."""
    yield "README.md", f"ends with AdamW at {made.mean_loss('AdamW, nanoGPT', 1)}; {of_nanogpt()}"
    yield "docs/choosing.md", f"nanoGPT's recipe ended with {of_nanogpt()}"
    names = ("OnebitAdam, BERT", "OnebitAdam, variance_interval=0, BERT")
    well, spoiled = (made.percent(made.against(name, "AdamW, BERT", 2)) for name in names)
    yield "README.md", f"A BERT, 3 seeds: {well} with onebit_adam, {spoiled} with variance_interval=0"
    int4, onebit, zero_one = (
        made.percent(made.against(f"{name}, 10M", "AdamW, 10M", 4))
        for name in ("AdamW, int4 gradients", "OnebitAdam", "ZeroOneAdam")
    )
    gpt2 = "A GPT-2 of 10M parameters, 4 ranks, one seed"
    yield "README.md", f"{gpt2}: int4 {int4}, onebit_adam {onebit}, zero_one_adam {zero_one}"
    best, low, large = (
        losses(f"AdamW, int4 gradients, {run}", f"AdamW, {run}", (ranks,))[0] for run, ranks in made.FINE_TUNED.values()
    )
    said = f"{best:.2f} % above AdamW at the rate that is AdamW's best, and {low:.2f} % at an eighth of it"
    yield "README.md", f"After 300 steps int4 gradients end {said}"
    yield "docs/choosing.md", f"for 300 steps with int4 gradients ended {said}"
    within = max(abs(large), abs(losses("OnebitAdam, SmolLM2", "AdamW, SmolLM2", (2,))[0]))
    yield "README.md", f"within {within:.2f} % of AdamW"
    films = losses("AdamW, int4 gradients, MiniLM", "AdamW, MiniLM", (2,))[0]
    yield "README.md", f"a pretrained MiniLM {films:.1f} % above it at an accuracy of {accuracies('MiniLM')}"
    scores = [row["accuracy"] for row in made.losses("AdamW, MRPC", 2).values()]
    error = f"{made.standard_error('MRPC', scores):.2f}"
    yield "README.md", f"{accuracies('MRPC')} on MRPC, where one standard error is {error}"
    rte = sorted(made.losses(f"AdamW, RTE, lr {rate}", 2)[10]["accuracy"] for rate in ("5e-05", "0.0001", "0.0002"))
    yield "docs/fine_tuning.md", f"(AdamW {rte[0]:.3f} to {rte[-1]:.3f} at three rates"
    early = "OnebitAdam, frozen at 20%"
    every_step = fitted(f"{early}, variance_interval=1")
    said = f"CoLA's training loss (seed 0) was {fitted(early)} frozen, AdamW's {fitted('AdamW')}"
    yield "docs/fine_tuning.md", f"{said}; with variance_interval=1 {every_step}"
    quantized = [made.against(f"AdamW, {name}", "AdamW", 2)[0] for name in TRAINED_QUANTIZERS]
    yield "docs/convergence.md", f"six of them ended at {min(quantized):+.2f} to {max(quantized):+.2f} % of AdamW"
    alone = [f"OnebitAdam, {step}variance_interval=0, BERT" for step in ("", "freeze_step=500, ")]
    frozen, later = (f"{made.losses(name, 1)[0]['eval_loss']:.3f}" for name in alone)
    yield "docs/convergence.md", f"that alone ends at {frozen}, and frozen at step 500 at {later}"
    ends = [run["eval_loss"]["300"] for run in made.rows("demo")["runs"].values()]
    sent = "{:,.0f} and {:,.0f} MB sent per rank".format(*made.demo_megabytes())
    yield "README.md", f"evaluation loss of {ends[0]:.3f} and {ends[1]:.3f}, and {sent}"

    memory = made.memory(4)
    warmup, later = memory["onebit_adam, warmup stage"], memory["onebit_adam, compressed stage"]
    state = [row["moments"] + row["errors"] for row in (warmup, later, memory["AdamW, DDP"])]
    yield (
        "README.md",
        f"{state[0]:.1f}, then {state[1]:.1f} bytes of state per parameter on 4 ranks, AdamW {state[2]:.0f}",
    )
    yield "README.md", f"int4 gradients add {warmup['errors']:.1f}, and {2 * warmup['errors']:.1f} during backward"
    zero, ddp = (sum(memory[name].values()) for name in ("onebit_adam, zero_stage=2", "AdamW, DDP"))
    yield "README.md", f"fits in {zero:.1f} bytes, parameters and gradients included, where AdamW takes {ddp:.0f}"
    peak = [row["bytes"] for row in made.rows("other")["peak"]["rows"]]
    yield "docs/memory_and_zero.md", f"peaks at {zero:.1f} bytes per parameter"
    yield "docs/memory_and_zero.md", f"was {peak[0]} against {peak[1]}"
    _, first, last = (row["perplexity"] for row in made.rows("other")["fine_tuning"]["rows"])
    yield "docs/fine_tuning.md", f"in 200 steps the perplexity falls from {first} to {last}"

    (_, base, _), (_, plain, slow), (_, _, half), (_, low, int4_slow), (_, run, run_slow) = made.whole_runs().values()
    yield "README.md", f"int4 gradients cost {100 * (low / base - 1):.0f} % over a step without"
    yield "README.md", f"where DDP costs {100 * (plain / base - 1):.0f} %"
    yield (
        "docs/choosing.md",
        f"took {low / base:.2f} times as long as one without communication; DDP took {plain / base:.2f}",
    )
    yield (
        "docs/benchmarks.md",
        f"{run:.0f} ms per step in the mean with unlimited bandwidth, {run_slow:.0f} ms at 1 Gbit/s",
    )
    said = (
        "{:.1f} times as fast as DDP in float32 at 1 Gbit/s, {:.1f} times as fast as 16-bit gradients, and {:.1f} times"
    )
    yield "docs/benchmarks.md", said.format(*(ms / run_slow for ms in (slow, half, int4_slow)))

    def tied(name: str) -> list[float]:
        return losses(name, "AdamW, tied", (2, 4))

    blocks, scale = (tied(name) for name in ("blocks of 4096, floor 0.01", "one scale per message"))
    largest = [max(row["largest_step"] for row in made.losses(name, 2).values()) for name in ("floor 0, tied",)]
    largest += [max(row["largest_step"] for row in made.losses("blocks of 4096, floor 0.01", 2).values())]
    yield "docs/deepspeed.md", f"was {largest[1]:.0f} learning rates, not {largest[0]:,.0f}"
    more = sum(a - b for a, b in zip(sorted(scale), sorted(blocks, reverse=True), strict=True)) / 2
    yield "docs/deepspeed.md", f"one scale ended {more:.1f} % higher"
    short = tuned("OnebitAdam, frozen at 20%, 200 steps")
    yield "docs/choosing.md", f"freezing the variance at 20 % of 200 steps cost {short:.1f} % of loss"


@pytest.mark.parametrize("task", ["CoLA", "MRPC", "SST-2"])
def test_the_rate_of_a_task_is_within_half_a_standard_error_of_the_best(task: str) -> None:
    tried = [row for rate in GLUE_RATES for row in made.losses(f"AdamW, {task}, lr {rate:g}", 2).values()]
    scores = {row["lr"]: made.score_of(row) for row in tried}
    rate = GLUE_TASKS[task].rate
    assert min(scores) < rate < max(scores)
    assert max(scores.values()) - scores[rate] < made.standard_error(task, [scores[rate]]) / 2


@pytest.mark.parametrize(("page", "words"), [*sentences()], ids=lambda value: value[:40])
def test_numbers_in_sentences_are_those_of_the_results(page: str, words: str) -> None:
    assert words in text_of(page)


#: Numbers that are names or settings, and no measurement.
SETTINGS = (
    r"0/1 Adam|ZeRO-1/2|GPT-2|SmolLM2-135M|seq2seq|b?float(32|16)|AVX-512|FSDP[12]|Apache-2\.0|Python 3\.10|"
    r"zero_stage=2|\d+-bit|int[48]|[\d.]+ (to [\d.]+ )?[GM]bit/s|take 1 /"
    r"|\b[\d,]+ (steps|ranks|seeds|GPUs|machines|CPU|idle|million|parameters)|2 and 4 ranks|0\.6 s"
    r"|about 9 minutes|on 2 cores"
)


def test_every_number_of_the_readme_is_found_in_the_results() -> None:
    text = re.sub(
        r"```.*?```|\]\([^)]*\)|<!-- table .*?<!-- end of table -->|<!-- text .*?<!-- end of text -->",
        " ",
        README.read_text(),
        flags=re.DOTALL,
    )
    text = " ".join(re.sub(r"[*`]", "", text).split())
    for page, words in sentences():
        text = text.replace(words, " ") if page == "README.md" else text
    ratio = f"{made.fewer('AdamW, int4 gradients', 4):.1f}"
    assert set(re.findall(r"\d[\d.,]*", re.sub(SETTINGS, " ", text))) <= {ratio}


@pytest.mark.parametrize(
    ("link", "row"), [("100G", 0), ("40G", 0), ("10G", 1), ("5G", 1), ("2.5G", 2), ("1G", 2), ("100M", 3)]
)
@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md"])
def test_the_choices_are_those_of_the_planner(
    page: str, link: str, row: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (REPO_ROOT / page).read_text()
    (command,) = re.findall(r"^hf-compressopt (estimate .*)$", text, re.MULTILINE)
    words = command.split()
    assert cli.main(words) == 0
    answer = capsys.readouterr().out.split("\n\n")[0]
    shown = re.findall(r"```text\n(use .*?)\n```", text, re.DOTALL)
    assert shown == ([answer] if page == "docs/choosing.md" else [])
    words[words.index("--bandwidth") + 1] = link
    assert cli.main([*words, "--json"]) == 0
    _, optim, *options = json.loads(capsys.readouterr().out)["advised"].split()
    table = text.split("| network between the machines | `--optim`")[1].splitlines()[2:]
    assert f"`{optim}`" in table[row]
    assert all(f"`{option}`" in table[row] for option in options[1:])
