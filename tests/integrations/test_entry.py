"""The ways in: `-m hf_compressopt.run`, the registration with stock hosts, and functions for plain DDP and loops."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import GradientCompression, OnebitAdam, attach_ddp, average_gradients
from hf_compressopt.integrations.accelerate import wrap
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.launching import accelerate_launch, run, run_python, torchrun
from tests.support.trainer_runs import loss_of, network

PROGRAMS = Path(__file__).parents[1] / "support" / "programs"
SCRIPT, ACCELERATE_SCRIPT, STOCK_HOSTS = (
    str(PROGRAMS / f"{name}.py") for name in ("plain_trainer_script", "plain_accelerate_script", "stock_hosts")
)


def arguments(directory: Path) -> list[str]:
    given = {"output_dir": directory, "optim": "onebit_adam", "optim_args": "freeze_step=2,scale_block=64"}
    given |= {"max_steps": 5, "logging_steps": 1, "per_device_train_batch_size": 2}
    given |= {"save_strategy": "no", "report_to": "none"}
    return ["--use_cpu", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@pytest.mark.full
@pytest.mark.parametrize("launcher", [torchrun, accelerate_launch])
def test_an_unmodified_trainer_script_runs_with_two_processes(
    launcher: Callable[[int], list[str]], tmp_path: Path
) -> None:
    done = run([*launcher(2), "-m", "hf_compressopt.run", SCRIPT, *arguments(tmp_path)])
    for rank in (0, 1):
        assert f"rank {rank} of 2 ran {SCRIPT} as __main__" in done.stdout
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    stages = [row["compressopt/stage"] for row in history if "loss" in row]
    assert stages == [0.0, 0.0, 1.0, 1.0, 1.0]
    attached = [line for line in done.stderr.splitlines() if "attached OnebitAdam" in line]
    assert len(attached) == 1 and "2 rank(s) over gloo" in attached[0] and "freeze_step=2" in attached[0]
    assert done.stderr.count("step 2: the warmup stage ends") == 1


def test_a_script_imports_from_its_own_folder_and_not_from_the_current_one(tmp_path: Path) -> None:
    """As with `python script.py`: a stray xxhash.py in the current folder is imported neither here nor there."""
    script, here = tmp_path / "script" / "show.py", tmp_path / "here"
    here.mkdir()
    script.parent.mkdir()
    script.write_text("import json, sys, beside, xxhash; print(json.dumps(sys.path))")
    script.with_name("beside.py").touch()
    (here / "xxhash.py").write_text("raise RuntimeError('a stray module')")
    paths = []
    for words in ([], ["-m", "hf_compressopt.run"]):
        command = [sys.executable, *words, str(script)]
        paths.append(json.loads(run(command, cwd=here).stdout))
    added = paths[1][len(paths[0]) :]  # by the oldest libraries, which are imported here: folders of their own
    assert paths[0] + added == paths[1] and paths[0][0] == str(script.parent) and str(here) not in added


@pytest.mark.parametrize(
    "flags", [["--optim", "onebit_adam"], ["--optim_args=grad_compression=int4"], ["--optim_args", "zero_stage=2"]]
)
def test_flags_that_the_script_does_not_read_are_refused(flags: list[str], tmp_path: Path) -> None:
    """A script that builds its TrainingArguments itself would train in full precision without a word."""
    script = tmp_path / "script.py"
    arguments = "dict(output_dir=sys.argv[1], use_cpu=True, max_steps=1, report_to='none')"
    program = f"sys.argv[1:] = [a for k, v in {arguments}.items() for a in (f'--{{k}}', str(v))]"
    script.write_text(f"import runpy, sys\n{program}\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n")
    done = run_python(["-m", "hf_compressopt.run", str(script), str(tmp_path), *flags], ranks=2, code=None)
    assert done.returncode != 0 and "on the command line, but not in the script's TrainingArguments" in done.stderr


def test_a_world_size_that_is_no_number_is_named() -> None:
    done = run_python(["-m", "hf_compressopt.run", SCRIPT], code=2, WORLD_SIZE="abc")
    assert "WORLD_SIZE must be a whole number of at least 1, got 'abc'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("torchrun", [True, False])  # without its report a rank must not end in silence
def test_a_refused_option_is_told_without_a_traceback(torchrun: bool, tmp_path: Path) -> None:
    """torchrun ends with the first error that a rank has left in this file."""
    words, report = arguments(tmp_path), tmp_path / "error.json"
    words[words.index("freeze_step=2,scale_block=64")] = "frezze_step=2"
    given = {"TORCHELASTIC_ERROR_FILE": str(report)} if torchrun else {}
    done = run_python(["-m", "hf_compressopt.run", SCRIPT, *words], ranks=2, code=2, **given)
    assert "Traceback" not in done.stderr
    said = "OnebitAdam has no option 'frezze_step': did you mean 'freeze_step'"
    assert done.stderr.count(said) == 2 - torchrun
    if torchrun:
        told = json.loads(report.read_text())["message"]
        assert said in told["message"] and told["message"] == told["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("line", ["load_state; int('no number')", "OnebitAdam([1])"])
def test_an_error_of_the_script_keeps_its_traceback(line: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from hf_compressopt import OnebitAdam, load_state\n{line}")
    done = run_python(["-m", "hf_compressopt.run", str(script)], code=None)
    assert done.returncode != 0 and "Traceback" in done.stderr and line in done.stderr


def test_help_ends_all_ranks_before_the_script_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('it has started')")
    words = ["-m", "hf_compressopt.run", str(script), "--optim", "onebit_adam", "--optim_args", "help"]
    done = run_python(words, ranks=2)
    assert not done.stderr and done.stdout.count("  warmup_bits=4 ") == 1


def test_a_misspelt_optimizer_gets_the_nearest_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--optim', choices=['x'])\np.parse_args()"
    )
    done = run_python(["-m", "hf_compressopt.run", str(script), "--optim", "onebitadam"], code=2)
    assert "--optim onebitadam: did you mean 'onebit_adam'" in done.stderr


def test_processes_that_accelerate_takes_for_one_each_are_refused(tmp_path: Path) -> None:
    """As `accelerate launch --multi_gpu` starts them on a machine without a GPU."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\nmodel = torch.nn.Linear(2, 2)\n"
        "Accelerator().prepare(model, torch.optim.AdamW(model.parameters()))"
    )
    words = ["-m", "hf_compressopt.run", str(script)]
    variables = {"COMPRESSOPT_GRAD_COMPRESSION": "int4", "ACCELERATE_USE_CPU": "false"}
    done = run_python(words, ranks=2, code=2, **variables)
    assert "WORLD_SIZE is 2, but Accelerate sees one process" in done.stderr


def test_neither_the_package_nor_an_optimizer_loads_what_it_does_not_need() -> None:
    code = """
import sys, hf_compressopt
print([name for name in ("torch", "transformers", "accelerate") if name in sys.modules])
import torch
hf_compressopt.OnebitAdam([torch.zeros(3, requires_grad=True)])
print([name for name in ("transformers", "accelerate") if name in sys.modules])
"""
    assert run([sys.executable, "-c", code]).stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize(
    ("variables", "expected", "log"),
    [
        ({"COMPRESSOPT_OPTIM": "onebit_adam"}, "OnebitAdam, alike True, stage 0.0", "attached OnebitAdam"),
        (
            {"COMPRESSOPT_OPTIM": "onebit_adam", "COMPRESSOPT_WARMUP_BITS": "32"},
            "OnebitAdam, alike True, stage 1.0",
            "attached OnebitAdam",
        ),
        ({"COMPRESSOPT_GRAD_COMPRESSION": "int4"}, "AdamW, alike True, stage None", "travel as int4"),
        ({}, "AdamW, alike True, stage None", ""),
    ],
)
def test_an_unmodified_accelerate_script_follows_the_environment(
    variables: dict[str, str], expected: str, log: str
) -> None:
    done = run_python(["-m", "hf_compressopt.run", ACCELERATE_SCRIPT, "12"], ranks=2, **variables)
    for rank in (0, 1):
        assert f"rank {rank}: {expected}" in done.stdout
    assert done.stderr.count(log or "hf_compressopt] attached") == (1 if log else 0)


def test_a_wrong_variable_is_said_before_the_script_starts() -> None:
    done = run_python(["-m", "hf_compressopt.run", ACCELERATE_SCRIPT, "2"], code=2, COMPRESSOPT_OPTIM="onebit_sgd")
    assert "optimizer must be one of" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("program", "variables"),
    [
        ("plain", {"COMPRESSOPT_GRAD_COMPRESSION": "int4"}),
        ("plain", {"COMPRESSOPT_OPTIM": "onebit_adam"}),
        ("plain", {"COMPRESSOPT_ZERO_STAGE": "2"}),
        ("accelerate", {"COMPRESSOPT_FREEZE_STEP": "2"}),
    ],
)
def test_variables_that_nothing_reads_are_refused(program: str, variables: dict[str, str], tmp_path: Path) -> None:
    """A loop of the user's with DistributedDataParallel, and Accelerate without a choice of what to compress."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\nmodel(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.step()\nprint('it has trained')\ndist.destroy_process_group()\n"
    )
    words = [str(script)] if program == "plain" else [ACCELERATE_SCRIPT, "2"]
    done = run_python(["-m", "hf_compressopt.run", *words], ranks=2, code=2, **variables)
    ((name, value),) = variables.items()
    assert f"nothing in this program has read {name}={value}" in done.stderr
    assert "it has trained" not in done.stdout and "Traceback" not in done.stderr


def test_a_trainer_script_follows_the_same_variables(tmp_path: Path) -> None:
    words = arguments(tmp_path)
    for option in ("--optim", "--optim_args"):
        place = words.index(option)
        del words[place : place + 2]
    variables = {"COMPRESSOPT_OPTIM": "onebit_adam", "COMPRESSOPT_FREEZE_STEP": "2", "COMPRESSOPT_SCALE_BLOCK": "64"}
    done = run_python(["-m", "hf_compressopt.run", SCRIPT, *words], ranks=2, **variables)
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["compressopt/stage"] for row in history if "loss" in row] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert "freeze_step=2" in done.stderr and "scale_block=64" in done.stderr


# -- stock hosts, plain DDP and plain loops ---------------------------------------------------------------------------

STEPS, FREEZE = 6, 2


@pytest.mark.parametrize("words", [[], ["unregistered"]])
@pytest.mark.parametrize("host", ["trainer", "accelerator"])
def test_a_stock_host_leaves_gradients_local_after_the_registration_alone(host: str, words: list[str]) -> None:
    """Construction changes no host; the optimizer says that it has no hook."""
    done = run_python([STOCK_HOSTS, host, *words], ranks=2)
    local = [False] * 4 if words else [False, False, True, True]
    for rank in (0, 1):
        assert f"rank {rank}: {local}" in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("is not in use") == len(words)
    assert not words or "hf_compressopt.register()" in done.stderr


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_ddp_with_the_hook_and_a_plain_loop_leave_gradients_local(rank: int, world_size: int) -> None:
    found = []
    for how in ("hook", "loop"):
        inner = network()
        optimizer = OnebitAdam(inner.parameters(), lr=1e-2, freeze_step=FREEZE, scale_block=64)
        model: Any = inner if how == "loop" else DistributedDataParallel(inner)
        if how == "hook":
            attach_ddp(model, OnebitAdam(inner.parameters(), freeze_step=1))  # one that is given up again
            assert attach_ddp(model, optimizer).optimizers == (optimizer,)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            if how == "loop":
                average_gradients(optimizer)
            assert same_on_all_ranks([inner[0].weight.grad]) == (step < FREEZE or world_size == 1)
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks(inner.parameters())
        found.append([p.detach() for p in inner.parameters()])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)  # DDP's buckets are others, and so are its sums


@on_ranks(2)
def test_average_gradients_takes_missing_gradients_for_zero(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    params[3].requires_grad_(False)
    for index in [0] if rank else [0, 1]:  # rank 0 alone has a gradient of the second; nobody has one of the third
        params[index].grad = torch.full((3,), 1.0 + rank + index)
    average_gradients(iter(params))
    assert [None if p.grad is None else p.grad.tolist() for p in params] == [[1.5] * 3, [1.0] * 3, None, None]
    half = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    half.grad = torch.full((5,), float(rank), dtype=torch.bfloat16)
    average_gradients([params[0], half])
    assert half.grad.float().tolist() == [0.5] * 5
    expert = nn.Parameter(torch.zeros(2))
    group = dist.new_group([0, 1])
    optimizer = OnebitAdam([{"params": [params[1]]}, {"params": [expert], "process_group": group}])
    expert.grad = torch.full((2,), float(rank))
    average_gradients(optimizer)
    assert expert.grad.tolist() == [float(rank)] * 2


@on_ranks(2)
def test_misuse_is_refused_on_all_ranks(rank: int, world_size: int) -> None:
    model, table = network(), nn.Embedding(3, 2, sparse=rank == 1)
    tables = nn.Embedding(3, 2, sparse=True)
    (table(torch.tensor([1])) + tables(torch.tensor([1]))).sum().backward()
    adam, sgd = OnebitAdam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    refused: list[tuple[Any, type[Exception], str]] = [
        (lambda: attach_ddp(model, adam), TypeError, "model must be a DistributedDataParallel"),
        (lambda: attach_ddp(DistributedDataParallel(model), sgd), TypeError, "optimizers must be compressed"),
        (lambda: average_gradients(adam, dist.group.WORLD), ValueError, "process_group belongs to parameters"),
        *(
            (call, TypeError, "sparse gradients are not supported")
            for call in (
                lambda: average_gradients(table.parameters()),
                GradientCompression(table.parameters()).average_gradients,
                GradientCompression(tables.parameters()).average_gradients,
            )
        ),
    ]
    for call, kind, said in refused:
        with pytest.raises(kind, match=f"^{said}"):
            call()


def test_a_method_that_a_host_has_no_longer_is_named() -> None:
    from transformers import Trainer, __version__

    with pytest.raises(RuntimeError, match=rf"transformers {__version__} has no Trainer._gone, .* an older transf"):
        wrap(Trainer, "_gone", print)
