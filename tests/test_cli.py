"""`hf-compressopt env`: what it says of this machine, and that nothing missing stops it."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch

import hf_compressopt
from hf_compressopt import cli
from tests.support.launching import run, run_python

PACKAGE = Path(hf_compressopt.__file__).parent
CLI = ["-m", "hf_compressopt.cli"]


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
    """bfloat16 with float32 masters: 16, 4 + 12/N and 2 + 14/N bytes per parameter, and two buckets."""
    words = ["estimate", "--params", "7e9", "--nodes", "4", "--gpus-per-node", "8", "--dtype", "bfloat16"]
    words += ["--topology", "flat"]
    assert cli.main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 32
    without_buckets = {name: row["total"] - row["buckets"] for name, row in facts["bytes_per_rank"].items()}
    assert {name: value for name, value in without_buckets.items() if "ZeRO" in name} == {
        "no ZeRO": 112e9,
        "ZeRO-1": 7e9 * (4 + 12 / 32),
        "ZeRO-2": 7e9 * (2 + 14 / 32),
    }
    assert all(row["buckets"] == 50 * 2**20 for name, row in facts["bytes_per_rank"].items() if "ZeRO" in name)
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "7,000,000,000 bfloat16 parameters, 32 rank(s); GB (1e9 bytes) on each rank"
    rows = {line[: line.index("  ")]: line.split()[-1] for line in lines[2 : lines.index("")]}
    assert lines[-1].startswith("for times and advice give ")
    assert rows["ZeRO-2"] == "17.115" and rows["OnebitAdam, float32"] == f"{7 * (2 + 2 + 12 + 4 / 32):.3f}"
    errors, messages = 65 / 64 * 33 / 32, 1 / 8 + 4 / 4096
    for form, states in (("warmup stage", 8 + errors), ("then", 1 + messages + errors)):
        assert float(rows[f"OnebitAdam, compact, {form}"]) == pytest.approx(7 * (2 + 2 + states), rel=1e-3)
    shared_out = float(rows["OnebitAdam, zero_stage=1, warmup stage"])
    assert shared_out == pytest.approx(7 * (2 + 2 + 8 / 32 + errors), rel=1e-3)
    freed = float(rows["OnebitAdam, zero_stage=2, warmup stage"])
    assert freed == pytest.approx(7 * (2 + 4 / 32 + 8 / 32 + errors + 65 / 64), rel=3e-3)  # and a bucket
