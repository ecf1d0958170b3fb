"""The command that measures the ranks' link and ranks the optimizers: its fit, its ranking, and its words."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from hf_compressopt import advise
from hf_compressopt.planner import advice, link, report
from hf_compressopt.planner.cost import Cluster, Model, Training
from hf_compressopt.planner.link import Link, Timing
from hf_compressopt.planner.memory import memory_rows
from tests.support.launching import accelerate_launch, run, run_python, torchrun

SIZES = [4096 * 4**power for power in range(8)]
MODULE = ["-m", "hf_compressopt.advise"]
LINK = ["--bandwidth", "1Gbit", "--latency", "20us", "--host-bandwidth", "1GB/s"]
GIVEN = ["--params", "1e6", "--compute-seconds", "0.1", "--memory-bandwidth", "10GB/s"]


# -- the fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 1), (3, 1), (2, 2), (4, 8)])
def test_the_fit_finds_the_rates_that_made_the_times(nodes: int, gpus: int) -> None:
    ranks, rate, hop = nodes * gpus, 1.25e8, 3e-4  # 1 Gbit/s, of which 0.9 are payload
    share = (ranks - 1) / ranks
    expected = {
        "all_reduce": lambda size: 2 * share * size / (0.9 * rate) + 2 * (nodes - 1) * hop,
        "all_gather": lambda size: share * size / (0.9 * rate) + (nodes - 1) * hop,
        "all_to_all": lambda size: gpus * (ranks - gpus) / ranks * size / (0.9 * rate) + hop,
    }
    sent = {"all_reduce": 2 * share, "all_gather": share, "all_to_all": share}
    for collective, seconds in expected.items():
        timings = [Timing(size, seconds(size), host=sent[collective] * size / 2e9) for size in SIZES]
        found = link.fit(collective, nodes, gpus, timings)
        assert found.bandwidth == pytest.approx(rate, rel=1e-9)
        assert found.latency == pytest.approx(hop, rel=1e-6)
        assert found.host_bandwidth == pytest.approx(2e9, rel=1e-9)


def test_a_burst_that_passes_at_once_does_not_change_the_rate() -> None:
    """A shaper lets 256 kB pass at once: small messages take the latency alone, large ones that much less."""
    timings = [Timing(size, 1e-4 + max(0, size - 256_000) / 1.2e8, 0.0) for size in SIZES]
    found = link.fit("all_to_all", 2, 1, timings)
    assert found.bandwidth == pytest.approx(1.2e8 / 2 / 0.9, rel=0.01) and 0 < found.latency < 2e-4


def test_times_that_do_not_grow_tell_no_rate() -> None:
    with pytest.raises(ValueError, match="so the rate is unknown: try again, or give --bandwidth and --latency"):
        link.fit("all_reduce", 2, 1, [Timing(size, 1e-3, 0.0) for size in SIZES])


def test_the_middle_of_several_links() -> None:
    links = [Link(3.0, 0.1, 5.0), Link(1.0, 0.3, 9.0), Link(2.0, 0.2, 1.0)]
    assert link.middle(links) == Link(2.0, 0.2, 5.0)


# -- the ranking ------------------------------------------------------------------------------------------------------


def found_on(bandwidth: float, itemsize: int = 4, bits: int | None = None) -> dict[str, Any]:
    model = Model(Training(100_000_000, 0.5, itemsize=itemsize), Cluster(4, 1, bandwidth))
    memory = memory_rows(100_000_000, 4, torch.float32 if itemsize == 4 else torch.bfloat16, 2, 25.0)
    return advice.as_json(model, 10_000, memory, bits)


@pytest.mark.parametrize("itemsize", [4, 2])
def test_every_way_to_train_is_ranked_by_its_run_and_has_flags(itemsize: int) -> None:
    found = found_on(1.25e8, itemsize)
    choices, runs = found["ranking"], found["run"]
    assert [choice["name"] for choice in choices] == sorted(runs, key=lambda name: runs[name]["seconds"])
    flags = {choice["name"]: choice["flags"].removeprefix("--optim ") for choice in choices}
    assert len(set(flags.values())) == len(flags)
    expected = {
        "ZeRO-2": "zero2_adamw",
        "OnebitAdam": "onebit_adam",
        f"DDP, {8 * itemsize}-bit gradients": "adamw_torch",
    }
    expected["OnebitAdam, ZeRO-1"] = "onebit_adam --optim_args zero_stage=1"
    expected["grad_compression=int4"] = "adamw_torch --optim_args grad_compression=int4"
    params = ",param_compression=int4" if itemsize == 4 else ""  # of 16 bits: their changes, bit for bit
    expected["zero2_adamw, int4"] = f"zero2_adamw --optim_args grad_compression=int4{params}"
    assert expected.items() <= flags.items()
    memory = {choice["name"]: choice["memory_bytes"] for choice in choices}
    assert memory["OnebitAdam, ZeRO-1"] < memory["OnebitAdam"]
    assert memory["ZeRO-2"] < memory[f"DDP, {8 * itemsize}-bit gradients"] < memory["ZeroOneAdam"]


def test_the_advice_changes_no_more_than_the_link_asks_for() -> None:
    fast, slow = found_on(1e13), found_on(1.25e6, bits=32)
    assert fast["advised"] == "--optim adamw_torch"
    assert slow["advised"] == slow["ranking"][0]["flags"] == "--optim zero_one_adam --optim_args warmup_bits=32"
    for found in (fast, slow):
        choices, table = found["ranking"], report.ranking_table(found["ranking"])
        (mine,) = [choice for choice in choices if choice["flags"] == found["advised"]]
        assert mine["run_seconds"] <= choices[0]["run_seconds"] * (1 + advice.ALIKE)
        assert found["verdict"].startswith(f"use {mine['flags']}")
        assert f"{len(choices):2} " in table and mine["flags"] in table


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_flags_name_a_topology_that_auto_would_not_take(gpus: int) -> None:
    model = Model(Training(100_000_000, 0.5), Cluster(4, gpus, 1.25e8, topology="flat"))
    for way in advice.ways(model, 10_000, None):
        exchanged = "int" in way.flags or "zero" in way.flags or "onebit" in way.flags
        assert way.flags.endswith("topology=flat") == (exchanged and gpus > 1), way.flags


# -- the command ------------------------------------------------------------------------------------------------------


def test_two_ranks_count_a_model_and_advise(tmp_path: Path) -> None:
    GPT2Config(vocab_size=256, n_layer=1, n_embd=8, n_head=1, n_positions=16).save_pretrained(tmp_path)
    done = run_python([*MODULE, "--model", str(tmp_path), "--compute-seconds", "0.1", *LINK], ranks=2)
    assert done.stdout.startswith("use --optim ") and "2 ranks on 1 machine(s), gloo on cpu" in done.stdout
    assert "measured the link" not in done.stdout and "measured memory of a rank: " in done.stdout
    assert "; 3,064 float32 parameters" in done.stdout
    assert done.stdout.count("DDP, 32-bit gradients  ") == 1 and len(done.stdout.splitlines()) < 25


def test_only_trainable_parameters_travel() -> None:
    model = ["--params", "10040", "--compute-seconds", "0.1", "--trainable", "500", "--json"]
    done = run_python([*MODULE, *model, *LINK], ranks=2)
    found = json.loads(done.stdout)
    row = found["bytes_per_rank"]["no ZeRO"]
    assert row["parameters"] == 10_040 * 4 and row["states"] == 500 * 8
    assert found["steps"]["DDP, 32-bit gradients"]["every step"]["sent"] == 500 * 4


JSON_OF_FOUR = f"""
import os, sys
os.environ["LOCAL_WORLD_SIZE"] = "2"
from hf_compressopt import advise
from hf_compressopt.planner import link
link._SIZES = (4096, 16384, 2**24)  # the largest would take most of the time
sys.exit(advise.main({[*GIVEN, "--json", "--steps", "1000"]!r}))
"""


def test_links_between_and_inside_machines_are_measured_apart() -> None:
    done = run_python(["-c", JSON_OF_FOUR], ranks=4)
    found = json.loads(done.stdout)
    assert (found["ranks"], found["assumptions"]["nodes"], found["assumptions"]["gpus_per_node"]) == (4, 2, 2)
    assert found["assumptions"]["compute_seconds"] == 0.1 and found["assumptions"]["memory_bandwidth"] == 1e10
    for name, rate in (("link", "bandwidth"), ("local_link", "local_bandwidth")):
        rows = found["measured"][name]
        assert set(rows) == {"all_reduce", "all_to_all", "all_gather"}
        rates = sorted(row["bandwidth"] for row in rows.values())
        assert found["assumptions"][rate] == pytest.approx(rates[1]) or name == "local_link"
        assert all(row["times"][-1]["nbytes"] > row["times"][0]["nbytes"] for row in rows.values())
    flat, hierarchical = found["measured"]["topology"]
    assert (found["assumptions"]["topology"] == "flat") == (hierarchical > 1.25 * flat > 0)
    assert found["assumptions"]["local_bandwidth"] > 0 and "step" not in found["measured"]
    assert found["advised"] in [choice["flags"] for choice in found["ranking"]]
    assert found["run"][found["ranking"][0]["name"]]["seconds"] == found["ranking"][0]["run_seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compute-seconds", "0.1"], "one of the arguments --model --params is required"),
        (["--params", "-1"], "argument --params: must be a whole number"),
        ([*GIVEN, *LINK, "--trainable", "2e6"], "--trainable must be at most the model's 1000000, got 2000000"),
        ([*GIVEN, *LINK, "--timeout", "soon"], "argument --timeout"),
        (["--model", "no/such", "--compute-seconds", "1"], "--model 'no/such' cannot be counted"),
        (["--params", "1e6"], "the following arguments are required: --compute-seconds"),
        ([*GIVEN, *LINK, "--update-seconds", "0.2"], "update_seconds must be >= 0 and less than compute_seconds"),
    ],
)
def test_bad_input_is_said_on_all_ranks(words: list[str], said: str) -> None:
    done = run_python([*MODULE, *words], ranks=2, code=2, HF_HUB_OFFLINE="1")
    assert done.stderr.count(said) >= 2, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


OTHER_THAN_RANK_0 = """
import os, sys
from hf_compressopt import advise
from hf_compressopt.planner import link
first = os.environ["RANK"] == "0"
prepared = link._prepared
def die(channel, collective, size):
    if collective == "all_to_all":
        os._exit(9)
    return prepared(channel, collective, size)
if sys.argv[1] == "dies" and not first:
    link._prepared = die
if sys.argv[1] == "never comes" and not first:
    sys.exit(0)
words = sys.argv[2:] + (["--steps", "100"] if sys.argv[1] == "differs" and not first else [])
sys.exit(advise.main(words))
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("dies", 9, "rank 0: the link or another rank failed: "),
        pytest.param("never comes", 1, "rank 0: the ranks did not find each other: ", marks=pytest.mark.full),
        ("differs", 2, "differ from rank 0 in the arguments"),
    ],
)
def test_a_rank_that_fails_leaves_nobody_waiting(what: str, code: int, said: str) -> None:
    done = run_python(["-c", OTHER_THAN_RANK_0, what, *GIVEN, "--timeout", "4s"], ranks=2, code=code, timeout=60)
    assert said in done.stderr and not done.stdout, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count(said) == (2 if what == "differs" else 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set, which a launcher does"),
        ({"WORLD_SIZE": "1"}, "one rank sends nothing"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number of at least 1, got 'two'"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE must divide WORLD_SIZE=4, got 3"),
    ],
)
def test_a_launch_that_cannot_be_is_said(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if variables else {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**place, **variables}.items():
        monkeypatch.setenv(name, value)
    assert advise.main(GIVEN) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


@pytest.mark.full
@pytest.mark.parametrize("launcher", [torchrun, accelerate_launch])
def test_real_launchers(launcher: Callable[[int], list[str]]) -> None:
    done = run([*launcher(2), *MODULE, "--params", "1e5", "--compute-seconds", "0.1"])
    assert done.stdout.count("use --optim ") == 1
    for collective in link.COLLECTIVES:
        assert f"measured the link, {collective}: " in done.stdout
    help_text = run([sys.executable, *MODULE, "--help"]).stdout
    assert "--compute-seconds" in help_text and "(default: measured)" in help_text
