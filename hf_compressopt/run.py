"""Run an unmodified Trainer script with the compressed optimizers registered.

``torchrun --nproc_per_node 2 -m hf_compressopt.run script.py --optim onebit_adam ...``
``accelerate launch -m hf_compressopt.run script.py --optim onebit_adam ...``
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

_USAGE = "usage: python -m hf_compressopt.run (script.py | -m module) [arguments of the script ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Register, then run the script or module as ``__main__`` with the rest of the arguments.

    Args:
        argv: Arguments; those of the command line where None.

    Returns:
        2 where the arguments name nothing to run, else 0.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__, _USAGE, sep="\n")
        return 0
    is_module = argv[:1] == ["-m"]
    target = argv[1:2] if is_module else argv[:1]
    if not target or (not is_module and not os.path.isfile(target[0])):
        found = f"; {target[0]!r} is no file" if target else ""
        print(_USAGE + found, file=sys.stderr)
        return 2
    from hf_compressopt.integrations.transformers import register

    register()
    if is_module:
        sys.argv = argv[1:]
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(target[0])))
        runpy.run_path(target[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
