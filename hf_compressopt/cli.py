"""The command ``hf-compressopt``, also ``python -m hf_compressopt.cli``. The docstring of a subcommand is its help."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import hf_compressopt
from hf_compressopt import quantities, run_report
from hf_compressopt.planner import estimate


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand."""
    for stream in (sys.stdout, sys.stderr):  # arguments and files may hold names that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["advise"] and not {"-h", "--help"} & set(words):
        words.insert(1, "--")  # what follows are options of another program
    arguments = _parser().parse_args(words)
    try:
        with _as_one_process():
            code = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough; nothing is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        if not arguments.failed:
            raise
        _complain(arguments.name, error)
        return int(arguments.failed)
    return code


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Hide a launcher's WORLD_SIZE inside: every subcommand runs in one process, also on a machine of a cluster."""
    exported = os.environ.pop("WORLD_SIZE", None)
    try:
        yield
    finally:
        if exported is not None:
            os.environ["WORLD_SIZE"] = exported


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-compressopt", description=hf_compressopt.__doc__)
    parser.add_argument("--version", action="version", version=hf_compressopt.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], failed: int, text: str) -> argparse.ArgumentParser:
        """Add a subcommand; ``failed`` is the exit code of a ValueError or OSError, 0 if none is expected."""
        added = commands.add_parser(name, help=text, description=run.__doc__)
        added.set_defaults(run=run, name=name, failed=failed)
        return added

    text = "estimate the memory of each optimizer and, for a given network, its bytes and time, and advise"
    estimate.add_arguments(command("estimate", estimate.run, 2, text))

    text = "measure the network and advise: says how to start it on all ranks"
    command("advise", _advise, 0, text).add_argument("words", nargs="*", help="options of advise")

    text = "print versions, native libraries, GPUs, communicators, and which kernels are in use"
    env = command("env", _env, 0, text)
    env.add_argument("--json", action="store_true", help="print JSON")

    text = "test all kernels and each optimizer on this machine"
    selftest = command("selftest", _selftest, 0, text)
    selftest.add_argument("--json", action="store_true", help="print JSON, for an issue")
    selftest.add_argument(
        "--gpu", action="store_true", help="on the GPU; over NCCL where there are two, else over gloo"
    )

    text = "tell what a run of Trainer has sent, and what DDP would have sent, with a picture"
    report = command("report", run_report.run, 2, text)
    report.add_argument("directory", help="the --output_dir of the run, or a checkpoint in it")
    report.add_argument("--picture", help="the file of the picture (default: compressopt_report.png beside the log)")
    report.add_argument("--json", action="store_true", help="print JSON, with every line of the log")

    text = "translate a DeepSpeed configuration into Trainer's flags and Accelerate's call"
    translate = command("from-deepspeed", _from_deepspeed, 2, text)
    translate.add_argument("config", help="ds_config.json, for DeepSpeed or, with auto values, for Transformers")
    ranks = quantities.argument(partial(quantities.count, most=1e6))
    translate.add_argument("--ranks", type=ranks, help="number of ranks, to divide a train_batch_size by")
    text = "compute what DeepSpeed's optimizers did, except for their faults; the defaults here are better"
    translate.add_argument("--same-arithmetic", action="store_true", help=text)
    translate.add_argument("--json", action="store_true", help="print JSON")

    folder = "the folder: Trainer's checkpoint-<step>, or the one given to save_state"
    inspect = command("inspect", _inspect, 2, "list what a checkpoint holds, and check that it is complete")
    inspect.add_argument("directory", help=folder)
    inspect.add_argument("--prefix", type=_prefix, help="start of the file names (compressopt, compressopt_1, ...)")
    inspect.add_argument("--verify", action="store_true", help="read every tensor and compare its checksums")
    inspect.add_argument("--json", action="store_true", help="print JSON, with every tensor")

    text = "write a checkpoint as one file with the state of torch.optim.AdamW"
    consolidate = command("consolidate", _consolidate, 1, text)
    consolidate.add_argument("directory", help=folder)
    consolidate.add_argument("out", help="the file, .safetensors or .pt")
    text = "start of the file names, if the folder holds several checkpoints"
    consolidate.add_argument("--prefix", type=_prefix, help=text)
    consolidate.add_argument("--force", action="store_true", help="replace OUT if it exists")

    text = "write one file with the state of torch.optim.AdamW as a checkpoint"
    import_file = command("import", _import, 1, text)
    import_file.add_argument("source", help="the file: Trainer's optimizer.pt, or the output of consolidate")
    import_file.add_argument("directory", help="the folder, created if missing")
    text = "start of the file names (%(default)s)"
    import_file.add_argument("--prefix", type=_prefix, default="compressopt", help=text)
    import_file.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    return parser


def _env(arguments: argparse.Namespace) -> int:
    """Print the information to include in a bug report. Exit code 1 if something cannot work."""
    from hf_compressopt import environment

    facts = environment.collect()
    print(json.dumps(facts, indent=2) if arguments.json else environment.render(facts))
    return 1 if facts["problems"] else 0


def _selftest(arguments: argparse.Namespace) -> int:
    """Compare all native kernels with the reference at odd sizes and alignments, and train with each optimizer.

    It trains on two processes. Exit code 0 if all is well, 1 if something differs, 2 if there is no GPU to test.
    """
    from hf_compressopt import selftest

    try:
        results = selftest.run(arguments.gpu)
    except RuntimeError as error:
        return _complain("selftest", error)
    print(json.dumps(results, indent=2) if arguments.json else "\n".join(selftest.render(results)))
    return 0 if results["passed"] else 1


def _advise(arguments: argparse.Namespace) -> int:
    """Say how a launcher starts the command that measures the network. It takes one of the ranks on each machine."""
    words = " ".join(arguments.words) or "--params 350M --compute-seconds 0.6"
    print(
        "advise measures the network between the ranks, so a launcher starts it, on all machines like a training:\n\n"
        f"    torchrun --nproc_per_node 2 -m hf_compressopt.advise {words}\n\n"
        "`python -m hf_compressopt.advise --help` lists its options. If you know the network's rate, `hf-compressopt "
        "estimate` needs no launcher."
    )
    return 0


def _from_deepspeed(arguments: argparse.Namespace) -> int:
    """Translate every option of a DeepSpeed configuration.

    Exit code 0 if each has a counterpart, 1 if one has none, 2 if the file is not a valid configuration.
    """
    from hf_compressopt.integrations import deepspeed

    config = deepspeed.read_config(arguments.config)
    translation = deepspeed.translate(config, ranks=arguments.ranks, same_arithmetic=arguments.same_arithmetic)
    print(json.dumps(deepspeed.as_json(translation), indent=2) if arguments.json else deepspeed.render(translation))
    return 1 if translation.lost else 0


def _inspect(arguments: argparse.Namespace) -> int:
    """List the optimizers' checkpoints in a folder.

    Exit code 0 if all are complete, 1 if one is damaged, 2 if there is none.
    """
    from hf_compressopt.format import inspect

    checkpoints = inspect.collect(arguments.directory, prefix=arguments.prefix, verify=arguments.verify)
    if not checkpoints:
        last = inspect.last_checkpoint(arguments.directory)
        there = f": its last one is {last}" if last else ""
        return _complain("inspect", f"{arguments.directory} holds no checkpoint of hf_compressopt itself{there}")
    print(json.dumps(checkpoints, indent=2) if arguments.json else "\n\n".join(map(inspect.render, checkpoints)))
    return 1 if any(facts["problems"] for facts in checkpoints) else 0


def _consolidate(arguments: argparse.Namespace) -> int:
    """Write the checkpoint of any number of ranks as one file, in little memory.

    torch.load reads OUT.pt, for load_state_dict of an AdamW with the param groups of the run, in their order (Trainer
    has two, with and without weight decay). OUT.safetensors has the parameters' names. Exit code 0 if the
    file is written, 1 if it cannot be, 2 if there is no checkpoint.
    """
    from hf_compressopt.checkpoint import portable

    index = portable.find_index(arguments.directory, arguments.prefix)
    if index is None:
        return _complain("consolidate", f"{arguments.directory} holds no checkpoint of hf_compressopt")
    for note in portable.consolidate(index, arguments.out, force=arguments.force):
        _complain("consolidate", note)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    """Write a checkpoint that load_state of every optimizer here accepts.

    Exit code 0 if it is written, 1 if it cannot be, 2 if there is no such file.
    """
    from hf_compressopt.checkpoint import portable

    if not Path(arguments.source).is_file():
        return _complain("import", f"there is no file {arguments.source}")
    portable.import_state(arguments.source, arguments.directory, prefix=arguments.prefix, force=arguments.force)
    return 0


def _prefix(text: str) -> str:
    if not text or set(text) & set("/\\\0*?[]"):
        raise argparse.ArgumentTypeError(f"must be the start of a file name, such as compressopt_1, got {text!r}")
    return text


def _complain(command: str, what: object) -> int:
    """Print to stderr. Returns the exit code of a command that cannot begin."""
    from hf_compressopt.format.inspect import printable

    text = "\n".join(map(printable, str(what).splitlines()))  # names in a file may hold terminal sequences
    print(f"hf-compressopt {command}: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
