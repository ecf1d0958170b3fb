"""Run small cases of all kernels on the emulated GPU of a folder, whose library ThreadSanitizer watches.

Usage: LD_PRELOAD=libtsan.so emulated_races.py FOLDER [sums]
"""

import sys
from pathlib import Path

import torch

from hf_compressopt.kernels import IntegerFormat, LambOptions, SignFormat, library, native
from tests.support import kernel_cases as cases

library._DIRECTORY = Path(sys.argv[1])
native._new_scratch = lambda device, nbytes: torch.empty(nbytes, dtype=torch.uint8)
device = torch.device("cpu")
torch.set_num_threads(1)
options = LambOptions(0.9, 0.999, 1e-6, 0.1, False)

cases.check_square_sums(device, [1, 5000, 7])
cases.check_lamb(device, 5003, 3, chunks=2, options=options)
if "sums" not in sys.argv:
    for block in (None, 24, 512, 4096, 8192):
        numel = 1003 if block == 24 else 5003  # ThreadSanitizer takes 8128 threads
        for compact in (False, True):
            cases.check_compress(device, SignFormat(block), numel, 2, segments=3, compact=compact)
            cases.check_average_compress(device, SignFormat(block), 1003, 6, compact=compact)
    cases.check_compress(device, SignFormat(512), 1003, 2, segments=800, compact=True)
    for compact in (False, True):
        cases.check_apply_adam(device, 1003, 3, chunks=2, log=compact)
        for bits in (4, 8):
            cases.check_compress(device, IntegerFormat(bits), 1003, 2, segments=3, compact=compact)
            cases.check_average_compress(device, IntegerFormat(bits), 5003, 6, compact=compact)
    cases.check_adam(device, [3, 1500], steps=1)
    cases.check_sketch(device, 9001, 3, offset=5, seed=1)
