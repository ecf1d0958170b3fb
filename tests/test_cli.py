"""The command `hf-compressopt`: what `env` and `estimate` say; and lines that make no sense end in a clear error."""

import importlib.metadata
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_compressopt
from hf_compressopt import cli, save_state
from hf_compressopt.run import main as run_main
from tests.support.launching import environment, run, run_python

PACKAGE = Path(hf_compressopt.__file__).parent
CLI = ["-m", "hf_compressopt.cli"]
ESTIMATE = ["estimate", "--params", "1e6", "--nodes", "4"]
TIMES = [*ESTIMATE, "--bandwidth", "1Gbit", "--compute-seconds", "1"]


def test_env_tells_versions_libraries_communicators_and_what_is_in_use() -> None:
    facts = json.loads(run_python([*CLI, "env", "--json"]).stdout)
    assert facts["problems"] == []
    assert facts["package"] == {"version": hf_compressopt.__version__, "path": str(PACKAGE)}
    for name in ("torch", "transformers", "accelerate", "safetensors"):
        assert facts["packages"][name] == importlib.metadata.version(name)
    for name, library in facts["libraries"].items():
        path = PACKAGE / "kernels" / "lib" / f"libcompressopt_{name}.so"
        assert library["path"] == str(path)
        assert (library["interface"] is not None) == path.exists()
        assert library["problem"] or path.exists()
    assert "gloo" in facts["communicators"]["torch"]
    assert len(facts["gpu"]["devices"]) == torch.cuda.device_count()
    instruction_set = facts["libraries"]["cpu"]["instruction_set"]
    assert facts["kernels"]["cpu"] == (f"native, {instruction_set}" if instruction_set else "reference")
    assert (facts["kernels"]["cuda"] == "no GPU") == (not torch.cuda.is_available())


def test_env_for_people_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"hf_compressopt {hf_compressopt.__version__}\n")
    for line in (f"  torch         {torch.__version__.partition('+')[0]}", "native libraries", "  CPU tensors   "):
        assert line in text
    assert "PROBLEM" not in text


def test_env_works_where_packages_are_missing_or_broken(tmp_path: Path) -> None:
    """The interpreter sees this folder and the standard library alone."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: file too short')")
    (tmp_path / "hf_compressopt").symlink_to(PACKAGE)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; from hf_compressopt.cli import main; sys.exit(main(['env']))"
    )
    with pytest.raises(AssertionError) as failed:
        run([sys.executable, "-I", "-S", "-c", code])
    text = str(failed.value)
    assert "transformers  not installed" in text and "hf_compressopt 0.1.0" in text
    assert "PROBLEM: torch cannot be imported, and nothing works without it: libtorch_cpu.so: file too short" in text


def test_a_library_that_does_not_load_is_named_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "libcompressopt_cpu.so"
    broken.write_bytes(b"no library" * 100)
    (tmp_path / "cuda.txt").write_text("not built: nvidia-smi finds no GPU here\n")
    code = f"""
import pathlib, sys
from hf_compressopt import cli
from hf_compressopt.kernels import library, native
library._DIRECTORY = pathlib.Path({str(tmp_path)!r})
sys.exit(cli.main(["env"]))
"""
    text = run_python(["-c", code]).stdout
    assert f"  cpu           {broken} cannot be loaded: {broken}: invalid ELF header" in text
    missing = f"{tmp_path / 'libcompressopt_cuda.so'} does not exist: not built: nvidia-smi finds no GPU here"
    assert f"  cuda          {missing}\n" in text
    assert "  CPU tensors   reference" in text
    done = run_python(["-c", code], code=1, HF_COMPRESSOPT_KERNELS="native")
    assert "PROBLEM: HF_COMPRESSOPT_KERNELS=native, but there are no native kernels" in done.stdout


@pytest.mark.parametrize(("setting", "code", "said"), [("reference", 0, "reference"), ("fast", 1, "an error")])
def test_the_choice_of_kernels_is_told_and_an_unknown_one_is_an_error(setting: str, code: int, said: str) -> None:
    facts = json.loads(run_python([*CLI, "env", "--json"], code=code, HF_COMPRESSOPT_KERNELS=setting).stdout)
    assert facts["kernels"]["setting"] == setting and facts["kernels"]["cpu"] == said
    assert bool(facts["problems"]) == bool(code)


def test_the_command_is_cheap_to_start() -> None:
    code = "import sys, hf_compressopt.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert run([sys.executable, "-c", code]).stdout.strip() == "[]"


def test_estimate_is_the_formula_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """bfloat16: 8, and with float32 masters 4 + 12/N and 2 + 14/N bytes per parameter, and two buckets."""
    words = ["estimate", "--params", "7e9", "--nodes", "4", "--gpus-per-node", "8", "--dtype", "bfloat16"]
    words += ["--topology", "flat"]
    assert cli.main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 32
    without_buckets = {name: row["total"] - row["buckets"] for name, row in facts["bytes_per_rank"].items()}
    assert {name: value for name, value in without_buckets.items() if "ZeRO" in name} == {
        "no ZeRO": 56e9,
        "ZeRO-1": 7e9 * (4 + 12 / 32),
        "ZeRO-2": 7e9 * (2 + 14 / 32),
    }
    buckets = {name: row["buckets"] / 2**20 for name, row in facts["bytes_per_rank"].items() if "ZeRO" in name}
    assert buckets == {"no ZeRO": 50, "ZeRO-1": 200, "ZeRO-2": 200}  # DDP's, and those of GPUs
    assert cli.main([*words, "--tables"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "7,000,000,000 bfloat16 parameters, 32 rank(s); GB (1e9 bytes) on each rank"
    rows = {line[: line.index("  ")]: line.split()[-1] for line in lines[2 : lines.index("")]}
    assert lines[-1].startswith("for times and advice give ")
    assert rows["ZeRO-2"] == "17.272" and rows["OnebitLamb"] == f"{7 * (2 + 2 + 16 + 4 / 32):.3f}"
    errors, messages = 65 / 64 * 33 / 32, 1 / 8 + 4 / 4096
    for form, states in (("warmup stage", 8 + errors), ("then", 1 + messages + errors)):
        assert float(rows[f"OnebitAdam, {form}"]) == pytest.approx(7 * (2 + 2 + states), rel=1e-3)
    shared_out = float(rows["OnebitAdam, zero_stage=1, warmup stage"])
    assert shared_out == pytest.approx(7 * (2 + 2 + 8 / 32 + errors), rel=1e-3)
    freed = float(rows["OnebitAdam, zero_stage=2, warmup stage"])
    assert freed == pytest.approx(7 * (2 + 4 / 32 + 8 / 32 + errors + 65 / 64), rel=3e-3)  # and a bucket


def history(steps: int, node_size: int = 1) -> list[dict[str, Any]]:
    """Log lines of a run whose compressed stage begins after half of its steps."""
    more = {"compressopt/node_size": float(node_size)} if node_size > 1 else {}
    rows, total = [], 0
    for step in range(1, steps + 1):
        sent = 2_000_000 if step <= steps // 2 else 500_000
        total += sent
        numbers = {"bytes_sent": total, "bytes_sent_step": sent, "compression_ratio": 16e6 / sent}
        row = {"step": step, "loss": 3 / step, **{f"compressopt/{name}": number for name, number in numbers.items()}}
        rows.append({**row, **more, "compressopt/stage": float(step > steps // 2)})
    return rows


def test_the_report_of_a_run_begins_with_its_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ending = {"step": 40, "train_runtime": 9.0}
    ending |= {"compressopt/bytes_on_link": 50_000_000, "compressopt/bytes_uncompressed": 640_000_000}
    for name, rows in (("checkpoint-4", history(4)), ("checkpoint-40", history(40)), (".", [*history(40), ending])):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    first = "sent 50 MB, DDP would have sent 640 MB (12.8x fewer): about 4.72 s less on a link of 1 Gbit/s"
    for folder in (tmp_path, tmp_path / "checkpoint-40"):  # which has no totals: they are the sum of its lines
        code, out, _ = call(["report", str(folder)], capsys)
        lines = out.splitlines()
        assert code == 0 and lines[0] == first and len(lines) == 25
        assert "8.0x" in lines[3] and lines[-3].endswith("32.0x  compressed stage")
        assert (folder / "compressopt_report.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads(call(["report", str(tmp_path), "--json"], capsys)[1])
    assert len(facts["lines"]) == 40 and facts["plain"] == 640e6
    resumed = {**ending, "compressopt/bytes_on_link": 5_000_000, "compressopt/bytes_uncompressed": 160_000_000}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*history(40), resumed]}))  # at step 30
    facts = json.loads(call(["report", str(tmp_path), "--json"], capsys)[1])
    assert (facts["sent"], facts["plain"]) == (50e6, 640e6)
    on_link = 4 * (5 * 2_000_000 + 20 * 500_000)
    resumed |= {"compressopt/bytes_on_link": on_link, "compressopt/bytes_uncompressed": 4 * 25 * 16_000_000}
    for ended in (True, False):  # all four ranks of a node send so much; resumed at step 15
        rows = [*history(40, node_size=4), *([resumed] if ended else [])]
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
        facts = json.loads(call(["report", str(tmp_path), "--json"], capsys)[1])
        assert (facts["sent"], facts["plain"]) == (200e6, 2560e6)
    (tmp_path / "trainer_state.json").unlink()
    assert json.loads(call(["report", str(tmp_path), "--json"], capsys)[1])["log"].endswith("40/trainer_state.json")
    for place, text, said in (
        ("none", None, "holds no trainer_state.json"),
        ("plain", '{"log_history": [{"loss": 1.0, "step": 1}]}', "has no numbers of hf_compressopt"),
        ("odd", "[]", "is no log of Trainer's"),
    ):
        (tmp_path / place).mkdir()
        if text:
            (tmp_path / place / "trainer_state.json").write_text(text)
        code, out, err = call(["report", str(tmp_path / place)], capsys)
        assert code == 2 and not out and said in err


def test_advise_says_how_a_launcher_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (([], "--params 350M"), (["--params", "1B", "--compute-seconds", "2"], "--params 1B")):
        code, out, _ = call(["advise", *words], capsys)
        assert code == 0 and f"torchrun --nproc_per_node 2 -m hf_compressopt.advise {said}" in out


def call(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command line."""
    try:
        code = cli.main(words)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*ESTIMATE, "--bucket-cap-mb", "0"], "--bucket-cap-mb: must be a number of MiB, at least one float32 value"),
        ([*ESTIMATE, "--bucket-cap-mb", "-3"], "--bucket-cap-mb"),
        ([*ESTIMATE, "--bucket-cap-mb", "nan"], "--bucket-cap-mb"),
        ([*TIMES, "--bucket-cap-mb", "inf"], "--bucket-cap-mb"),
        ([*ESTIMATE, "--states-per-parameter", "-3"], "--states-per-parameter"),
        (["estimate", "--params", "1e6", "--nodes", "1e17"], "--nodes"),
        (["estimate", "--params", "1e6", "--nodes", "1e6", "--gpus-per-node", "1e6"], "at most 1,000,000 ranks"),
        (["estimate", "--params", "nan"], "--params"),
        (["estimate", "--params", "inf"], "--params"),
        ([*TIMES, "--latency", "-1"], "--latency"),
        ([*TIMES, "--latency", "1e300"], "--latency"),
        ([*TIMES, "--memory-bandwidth", "1e300GB/s"], "--memory-bandwidth"),
        ([*TIMES, "--steps", "1e18"], "--steps"),
        (["from-deepspeed", "x.json", "--ranks", "1e18"], "--ranks"),
        ([*ESTIMATE, "--bandwidth", "10Gbit"], "--compute-seconds missing"),
        (["estimate", "--model", "no/such"], "--model 'no/such' cannot be counted"),
        ([*ESTIMATE, "--model", "x"], "argument --model: not allowed with argument --params"),
        ([*ESTIMATE, "--latency", "5us"], "--bandwidth and --compute-seconds missing"),
        ([*TIMES[:-1], "0"], "must be a number of seconds from 1e-12 to 1e7"),
        ([*TIMES[:-1], "nan"], "argument --compute-seconds: must be a number of seconds"),
        ([*TIMES, "--topology", "ring"], "argument --topology: invalid choice: 'ring'"),
        ([*TIMES, "--warmup-bits", "2"], "argument --warmup-bits: invalid choice: 2"),
        ([*TIMES, "--bandwidth", "fast"], "such as 25Gbit, 25Gbps, 25G, 100Mbit/s (bits) or 3.1GB/s (bytes)"),
        ([*TIMES, "--update-seconds", "1s"], "update_seconds must be >= 0 and less than compute_seconds=1.0"),
        ([*TIMES, "--memory-bandwidth", "10MB/s"], "give the seconds of a whole step, or the bandwidth"),
        (["estimate", "--params", "1e6", *TIMES[5:]], "one rank sends nothing"),
        (["environment"], "invalid choice: 'environment' (choose from"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_command_lines_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(words, capsys)
    assert code == 2 and not out and said in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gradient_accumulation_steps": 0, "train_batch_size": 8}, "gradient_accumulation_steps"),
        ({"train_micro_batch_size_per_gpu": 0, "train_batch_size": 8}, "train_micro_batch_size_per_gpu"),
        ({"train_batch_size": -8}, "train_batch_size"),
        ({"train_batch_size": math.nan}, "train_batch_size"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"betas": [2, 3]}}}, "betas"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [2, 3]}}, "zero_optimization": {"stage": 1}}, "betas"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": -1}}}, "lr"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1e6}}, "initial_scale_power"),
    ],
)
@pytest.mark.parametrize("world_size", ["1", "abc", "2"])
def test_configurations_out_of_range_are_refused(
    config: Any,
    said: str,
    world_size: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    code, out, err = call(["from-deepspeed", str(path), "--ranks", "2"], capsys)
    assert code == 2 and not out and said in err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, '{"a":' * 20 + "1" + "}" * 20])
def test_deeply_nested_configurations_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    code, _, err = call(["from-deepspeed", str(path)], capsys)
    assert code == 2 and "nested" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((words, "") for words in (["-m", "no_such_module"], ["-m", "no.such"], ["-m", "json"], ["-m"], [])),
        (["nope.py"], "'nope.py' is no file"),
    ],
)
def test_run_refuses_what_cannot_be_run(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(words) == 2
    err = capsys.readouterr().err
    assert "usage: python -m hf_compressopt.run" in err and said in err


@pytest.mark.parametrize("world_size", ["2", "abc"])
def test_import_works_under_a_launchers_variables(world_size: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    command = ["-m", "hf_compressopt.cli", "import", str(tmp_path / "optimizer.pt"), str(tmp_path)]
    run_python(command, WORLD_SIZE=world_size, RANK="1")
    assert (tmp_path / "compressopt.index.json").is_file()


NUMBERS = [*"0 1 -1 2 3.5 1e3 7e9 1e15 1e18 1e300 -0 nan inf -inf many ٣".split(), ""]
RATES = ["25Gbit", "1GB/s", "0Gbit", "-1Gbit", "nanGbit", "1e300GB/s", "10", "Gbit", "1 Tbit/s", "infGB/s", "1e-300b/s"]
TEXTS = ["float32", "bfloat16", "int7", "none", "--", "-", "\0", "\ud800", "../..", "/", "%s", "{}", "a\nb", "🜁", "@x"]
VALUES: list[Any] = [0, 1, -1, 2, 3.5, 1e9, 1e400, math.nan, True, False, None, "auto", "", "x"]
VALUES += [[], [1, 2], {}, {"a": 1}]
VALUES += ["OneBitAdam", "ZeroOneAdam", "OnebitLamb", "Adam", "Lamb", "SGD", "cpu", "mpi", "\ud800", "1,2", [0.9, 0.99]]
OPTIONS = {
    "optimizer": ["type", "params"],
    "params": ["lr", "betas", "eps", "weight_decay", "freeze_step", "var_freeze_step", "local_step_scaler", "amsgrad"]
    + ["comm_backend_name", "cuda_aware", "max_grad_norm", "torch_adam", "exp_avg_mask", "adam_w_mode", "max_coeff"],
    "scheduler": ["type", "params", "warmup_num_steps"],
    "zero_optimization": ["stage", "reduce_bucket_size", "offload_optimizer", "overlap_comm", "stage3_x"]
    + ["cpu_offload"],
    "fp16": ["enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"],
    "bf16": ["enabled", "x"],
    "": ["optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "train_batch_size", "gradient_clipping"]
    + ["gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "steps_per_print", "tensorboard", "amp", "x.y"],
}


SANE: dict[str, list[Any]] = {"betas": [[0.9, 0.99]], "stage": [0, 1, 2, 3], "torch_adam": [True, False]}
SANE |= {"type": ["OneBitAdam", "ZeroOneAdam", "OnebitLamb", "Adam", "Lamb", "SGD", "WarmupLR", "WarmupCosineLR"]}
SANE |= {"amsgrad": [False], "cuda_aware": [True, False], "comm_backend_name": ["nccl", "mpi"], "lr": [0.1, "auto"]}


def configuration(draw: random.Random, section: str = "") -> Any:
    names = draw.sample(OPTIONS[section], k=min(len(OPTIONS[section]), draw.randint(0, 5)))
    return {name: setting(draw, name) for name in names}


def setting(draw: random.Random, name: str) -> Any:
    if name in OPTIONS and draw.random() < 0.95:
        return configuration(draw, name)
    return draw.choice(SANE.get(name, [1, 2, 0.5, "auto"]) if draw.random() < 0.85 else VALUES)


def estimate(draw: random.Random, folder: Path) -> list[str]:
    words = ["estimate", "--json"] if draw.random() < 0.7 else ["estimate"]
    kinds = {"params": NUMBERS, "nodes": NUMBERS, "gpus-per-node": NUMBERS, "states-per-parameter": NUMBERS}
    kinds |= {"bucket-cap-mb": NUMBERS, "steps": NUMBERS[:9], "dtype": TEXTS, "bandwidth": RATES}
    kinds |= {name: NUMBERS for name in ("compute-seconds", "update-seconds", "latency")}
    kinds |= {name: RATES for name in ("local-bandwidth", "memory-bandwidth", "host-bandwidth")}
    for name in draw.sample(sorted(kinds), k=draw.randint(0, 6)) + (["params"] if draw.random() < 0.7 else []):
        sane = {"params": "7e9", "nodes": "4", "dtype": "bfloat16", "bandwidth": "10Gbit", "compute-seconds": "9"}
        words += [f"--{name}", sane.get(name, "2") if draw.random() < 0.85 else draw.choice(kinds[name])]
    return words


def translate(draw: random.Random, folder: Path) -> list[str]:
    path = folder / "ds_config.json"
    text = json.dumps(configuration(draw) if draw.random() < 0.9 else draw.choice(VALUES))
    damaged = draw.random() < 0.05
    path.write_text(text[: draw.randint(0, len(text))] + draw.choice(["", "}", "\0"]) if damaged else text)
    words = ["from-deepspeed", str(path) if draw.random() < 0.95 else draw.choice(TEXTS)]
    words += ["--ranks", draw.choice(NUMBERS)] if draw.random() < 0.4 else []
    return words + draw.sample(["--json", "--same-arithmetic"], k=draw.randint(0, 2))


def checkpoints(draw: random.Random, folder: Path) -> list[str]:
    command = draw.choice(["inspect", "consolidate", "import"])
    places = [*TEXTS, str(folder), str(folder / "ds_config.json"), str(folder / ("x" * 300)), ""]
    words = [command, draw.choice(places)]
    outputs = [*places, str(folder / "out.pt"), str(folder / "out.safetensors")]
    words += [draw.choice(outputs)] if command != "inspect" else []
    words += ["--prefix", draw.choice([*TEXTS, "[", "**", "../x", "compressopt"])] if draw.random() < 0.4 else []
    return words + (["--force"] if draw.random() < 0.2 else [])


def nonsense(draw: random.Random, folder: Path) -> list[str]:
    commands = ["env", "estimate", "from-deepspeed", "inspect", "consolidate", "import", "--version", "--help", "-h"]
    return [draw.choice([*commands, *TEXTS, *NUMBERS, "--json", "--params=3"]) for _ in range(draw.randint(0, 4))]


@pytest.mark.parametrize(("seed", "lines"), [(0, 120), pytest.param(1, 2000, marks=pytest.mark.full)])
def test_random_command_lines_end_in_an_exit_code(
    seed: int, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, codes = random.Random(seed), set()

    def number(text: str) -> float:
        assert 0 <= float(text) < math.inf
        return float(text)

    for _ in range(lines):
        words = draw.choices([estimate, translate, checkpoints, nonsense], weights=[4, 4, 2, 1])[0](draw, tmp_path)
        if words[:1] == ["env"]:
            continue
        try:
            code, out, err = call(words, capsys)
            if code == 0 and words[:2] == ["estimate", "--json"]:
                json.loads(out, parse_int=number, parse_float=number, parse_constant=number)
        except BaseException as error:
            raise AssertionError(f"{words!r} ended in {error!r}") from error
        assert code in (0, 1, 2) and "Traceback" not in err, (words, code, err)
        assert code != 2 or err, words
        codes.add(code)
    assert codes == {0, 1, 2}


def test_a_reader_that_has_read_enough_causes_no_traceback(tmp_path: Path) -> None:
    save_state(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]), tmp_path)
    command = [sys.executable, "-m", "hf_compressopt.cli", "inspect", str(tmp_path)]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(PYTHONUNBUFFERED="1")
    )
    assert started.stdout is not None
    started.stdout.close()  # before anything is printed
    _, errors = started.communicate(timeout=120)
    assert started.returncode == 1 and errors == ""
