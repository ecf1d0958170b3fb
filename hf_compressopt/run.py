"""Run an unmodified script of Trainer or Accelerate with the compressed optimizers.

    torchrun --nproc_per_node 2 -m hf_compressopt.run script.py --optim onebit_adam ...
    COMPRESSOPT_OPTIM=onebit_adam accelerate launch -m hf_compressopt.run script.py ...
    COMPRESSOPT_GRAD_COMPRESSION=int4 accelerate launch -m hf_compressopt.run script.py ...

The first form is for scripts that take Trainer's arguments. The variables are for any script.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from time import time
from traceback import walk_tb

_USAGE = "usage: python -m hf_compressopt.run (script.py | -m module) [arguments of the script ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Register the optimizers, then run the script or module as ``__main__``. Returns 2 if something is refused."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__, _USAGE, sep="\n")
        return 0
    is_module = argv[:1] == ["-m"]
    target = argv[1:2] if is_module else argv[:1]
    if problem := _why_not(target[0], is_module) if target else "nothing to run":
        print(f"{_USAGE}; {problem}", file=sys.stderr)
        return 2
    if not is_module:
        _find_modules_beside(target[0])
    from hf_compressopt.collectives.torch_dist import announced
    from hf_compressopt.integrations.accelerate import adopt_accelerators
    from hf_compressopt.integrations.plugin import UNREAD
    from hf_compressopt.integrations.trainer import note_command_line, register

    try:
        announced("WORLD_SIZE")
        register()
        adopt_accelerators()
        UNREAD.watch_variables()
        note_command_line(argv[1 + is_module :])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    sys.argv = argv[1:] if is_module else argv
    try:
        if is_module:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target[0], run_name="__main__")
    except ValueError as error:
        if not _refuses_an_option(error):
            raise
        _tell(error)
        return 2
    except SystemExit as error:
        if error.code == 2 and (hint := _hint_of_optim(argv)):  # the script's own parser has refused an argument
            print(f"[hf_compressopt] {hint}", file=sys.stderr)
        raise
    if unread := UNREAD.describe_variables():
        print(f"[hf_compressopt] {unread}", file=sys.stderr)
    return 0


def _refuses_an_option(error: ValueError) -> bool:
    """Return whether the package raised the error where it reads options: the message alone tells what to do then."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    package = os.path.dirname(__file__) + os.sep
    ours = [code.co_name for code in codes if code.co_filename.startswith(package)]
    reads = {
        "__init__",
        "__post_init__",
        "_attach",
        "trainer_options",
        "check_variables",
        "_refuse_processes_apart",
        "_get_optimizer_cls_and_kwargs",
    }
    return codes[-1].co_filename.startswith(package) and (not reads.isdisjoint(ours) or ours[-1] == "_train")


def _hint_of_optim(words: Sequence[str]) -> str:
    """Return what to say of an --optim that is no optimizer, but nearly one of this package; "" for any other."""
    from hf_compressopt.integrations.algorithms import OPTIMIZERS, ZERO_NAMES
    from hf_compressopt.options import did_you_mean

    names = [after for word, after in zip(words, words[1:], strict=False) if word == "--optim"]
    names += [word.partition("=")[2] for word in words if word.startswith("--optim=")]
    legal = (*OPTIMIZERS, *ZERO_NAMES)
    hints = [f"--optim {name}{did_you_mean(name, legal)}" for name in names if name not in legal]
    return "; ".join(hint for hint in hints if "did you mean" in hint)


def _tell(error: ValueError) -> None:
    """Print a refusal, on rank 0 alone under torchrun, whose report at the end names it for each rank."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not report or os.environ.get("RANK", "0") == "0":
        print(f"[hf_compressopt] {error}", file=sys.stderr)
    if report:
        with open(report, "w") as file:
            told = {"py_callstack": str(error), "timestamp": str(int(time()))}
            json.dump({"message": {"message": str(error), "extraInfo": told}}, file)


def _find_modules_beside(script: str) -> None:
    """Have imports look where ``python script`` looks: in the script's folder, and not in the current one."""
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path[:1] in ([""], [os.getcwd()]):  # what ``python -m`` has put there
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))


def _why_not(target: str, is_module: bool) -> str:
    if not is_module:
        return "" if os.path.isfile(target) else f"{target!r} is no file"
    try:
        spec = find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{target}.__main__")
            return "" if spec else f"{target!r} is a package without a module __main__"
    except (ImportError, ValueError) as error:
        return f"{target!r} is no module: {error}"
    return "" if spec else f"{target!r} is no module that Python finds"


if __name__ == "__main__":
    sys.exit(main())
