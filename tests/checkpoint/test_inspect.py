"""`hf-compressopt inspect`: what a checkpoint holds, and whether it is whole, with an exit code for scripts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import GradientCompression, OnebitAdam, ZeroOptimizer, cli, save_state
from hf_compressopt.checkpoint.portable import find_index
from hf_compressopt.format.index import sealed
from tests.checkpoint.test_checkpoint import INDEX, flip, in_shard, index_text, remove_a_shard
from tests.support.harness import run_ranks
from tests.support.launching import environment, run

CLI = [sys.executable, "-m", "hf_compressopt.cli", "inspect"]


def save_two(rank: int, world_size: int, folder: str) -> None:
    p, q = nn.Parameter(torch.zeros(30, 7)), nn.Parameter(torch.zeros(11))
    save_state(OnebitAdam([("p", p), ("q", q)], lr=0.5), folder)
    optimizer = ZeroOptimizer([{"params": [("p", p)]}, {"params": [("q", q)]}], torch.optim.AdamW)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    save_state(optimizer, folder, prefix="compressopt_1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_two, str(folder))
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copied")


def inspect(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["inspect", *arguments])
    return code, capsys.readouterr().out


def as_json(folder: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    code, text = inspect(str(folder), "--json", *arguments, capsys=capsys)
    return code, json.loads(text)


def test_the_folder_of_a_run_points_to_its_last_checkpoint(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (9, 10):
        shutil.copytree(saved, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-11").mkdir()  # one that holds nothing
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert f"its last one is {tmp_path / 'checkpoint-10'}\n" in capsys.readouterr().err


def test_a_compression_has_no_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_state(GradientCompression([nn.Parameter(torch.zeros(3))]), tmp_path)
    code, text = inspect(str(tmp_path), capsys=capsys)
    assert code == 0 and "GradientCompression" in text and "stage" not in text


def test_it_tells_what_is_inside(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (onebit, zero) = as_json(saved, capsys=capsys)
    assert code == 0 and onebit["problems"] == zero["problems"] == []
    assert (onebit["optimizer"], onebit["step"], onebit["stage"], onebit["ranks"]) == ("OnebitAdam", 0, "warmup", 2)
    assert (zero["optimizer"], zero["step"], zero["stage"], zero["ranks"]) == ("ZeroOptimizer(AdamW)", 1, 2, 2)
    for facts in (onebit, zero):
        assert (facts["parameters"], facts["elements"]) == (2, 221)
        assert [shard["bytes"] for shard in facts["shards"]] == [
            (saved / s["file"]).stat().st_size for s in facts["shards"]
        ]
        assert facts["bytes"] == sum(shard["bytes"] for shard in facts["shards"])
        assert all(shard["whole"] for shard in facts["shards"])
    assert (onebit["groups"], zero["groups"]) == (1, 2)
    assert onebit["header"]["param_groups"][0]["lr"] == 0.5
    moment = {"dtype": "float32", "shape": [30, 7], "bytes": 840}
    assert zero["tensors"]["exp_avg/p"] == {**moment, "shards": [0, 1]}
    assert {**onebit["tensors"]["exp_avg/p"], "shards": None} == {**moment, "shards": None}
    assert onebit["tensors"]["server_error/group0"]["shards"] == [0, 1]


def test_it_says_the_same_to_people(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = inspect(str(saved), capsys=capsys)
    first, second = text.split("\n\n")
    assert code == 0
    assert first.startswith(f"{saved}/compressopt.index.json: whole (sizes and headers; --verify reads every byte)\n")
    for line in (
        "  optimizer   OnebitAdam",
        "  saved by    2 rank(s)",
        "  parameters  2 in 1 group(s), 221 elements",
        "    exp_avg       float32               884 bytes in 2 tensor(s)",
        "    worker_error  uint8                 512 bytes in 2 tensor(s)",
    ):
        assert line in first.splitlines(), first
    assert "  stage       2" in second.splitlines()
    assert (
        inspect(str(saved), "--verify", "--prefix", "compressopt_1", capsys=capsys)[1].count("every byte was read") == 1
    )


def test_it_needs_no_torch(saved: Path) -> None:
    code = (
        "import sys; from hf_compressopt import cli; code = cli.main(sys.argv[1:]); "
        "print([name for name in ('torch', 'safetensors', 'numpy') if name in sys.modules], file=sys.stderr); "
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "inspect", str(saved), "--verify"]
    assert run(command).stderr.strip() == "[]"


def renamed(data: bytearray) -> None:
    data[:] = data.replace(b"exp_avg/", b"exp_abc/")


@pytest.mark.parametrize(
    ("damage", "verify", "said"),
    [
        (in_shard(0, flip), True, "is damaged: the checksum of"),
        (in_shard(0, flip), False, None),
        (in_shard(0, renamed), False, "has no tensor 'exp_avg/"),
        (in_shard(0, lambda data: data.extend(b"0")), False, "the index says"),
        (lambda folder: remove_a_shard(folder, 0), False, "is missing"),
        (index_text(lambda text: text[:-30]), False, "compressopt.index.json is not readable as JSON"),
    ],
)
def test_damage_is_told_with_exit_code_1(
    damage: Any, verify: bool, said: str | None, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = damage(copied)
    options = ["--verify"] if verify else []
    code, (facts, other) = as_json(copied, *options, capsys=capsys)
    assert other["problems"] == [] and code == (0 if said is None else 1)
    text = inspect(str(copied), *options, capsys=capsys)[1]
    if said is not None:
        (problem,) = facts["problems"]
        assert said in problem and file in problem and f"  PROBLEM: {problem}" in text.splitlines()
        assert "DAMAGED" in text
        assert file == INDEX or [entry["whole"] for entry in facts["shards"]] == [False, True]


def test_what_is_no_checkpoint_has_exit_code_2(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")  # Trainer's, of a big model
    for arguments in ([], [str(tmp_path / "nowhere")], [str(saved), "--prefix", "other"], [str(tmp_path)]):
        done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, env=environment())
        assert done.returncode == 2 and "inspect" in done.stderr, done.stderr
    assert "holds no checkpoint of hf_compressopt" in done.stderr


def test_checkpoints_of_every_prefix_are_found(
    saved: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, or damaged beside their shards; an index of a big model is none."""
    save_state(GradientCompression([nn.Parameter(torch.ones(300))]), copied, prefix="gradients")
    (copied / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    code, found = as_json(copied, capsys=capsys)
    names = [Path(facts["index"]).name for facts in found]
    assert code == 0 and names == ["compressopt.index.json", "compressopt_1.index.json", "gradients.index.json"]
    assert find_index(copied, "gradients") == copied / "gradients.index.json"
    for kept in copied.glob("compressopt*"):
        kept.unlink()
    assert find_index(copied) == copied / "gradients.index.json"
    (copied / "gradients.index.json").write_text("{")
    code, (facts,) = as_json(copied, capsys=capsys)
    assert code == 1 and "gradients.index.json" in facts["problems"][0]


def test_names_in_a_file_cannot_change_what_a_terminal_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = "\x1b[2J\x1b[H\u202e\x9b1mAdamW\nwhole (every byte was read)\r"
    optimizer = torch.optim.AdamW([(forged, nn.Parameter(torch.ones(3)))])
    save_state(optimizer, tmp_path)
    file = tmp_path / "compressopt.index.json"
    index = json.loads(file.read_text())
    index["header"] |= {"class": forged, "stage": forged, "step": forged, "world_size": forged}
    index["tensors"][forged] = {"dtype": "float32", "shape": [0], "pieces": []}
    file.write_bytes(sealed(index))
    lines = inspect(str(tmp_path), capsys=capsys)[1].splitlines()
    assert "DAMAGED" in lines[0] and sum(r"\x1b[2J\x1b[H\u202e\x9b1mAdamW\nwhole" in line for line in lines) >= 4
    assert all(line.isprintable() for line in lines)
    assert cli.main(["consolidate", str(tmp_path), str(tmp_path / "out.pt")]) == 1
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())
