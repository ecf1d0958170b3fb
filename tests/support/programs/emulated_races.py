"""Run small cases of all kernels on the emulated GPU of a folder, whose library ThreadSanitizer watches.

Usage: LD_PRELOAD=libtsan.so emulated_races.py FOLDER [sums]
"""

import sys
from pathlib import Path

import torch

from hf_compressopt.kernels import library
from hf_compressopt.kernels.updates import LambOptions
from tests.support import compact_cases, integer_cases, kernel_cases, sketch_cases

library._DIRECTORY = Path(sys.argv[1])
device = torch.device("cpu")
torch.set_num_threads(1)
options = LambOptions(0.9, 0.999, 1e-6, 0.1, False)

kernel_cases.check_square_sums(device, [1, 5000, 7])
kernel_cases.check_lamb(device, 5003, 3, world_size=2, options=options)
if "sums" not in sys.argv:
    for block in (None, 24, 512, 4096, 8192):
        numel = 1003 if block == 24 else 5003  # ThreadSanitizer takes 8128 threads
        kernel_cases.check_compress(device, numel, 2, block, segments=3)
        kernel_cases.check_average_compress(device, 1003, 6, block)
        compact_cases.check_compress(device, numel, 2, block, segments=3, last=2)
    kernel_cases.check_compress(device, 1003, 2, 512, segments=800)
    kernel_cases.check_apply_adam(device, 1003, 3, world_size=2)
    kernel_cases.check_adam(device, [3, 1500], steps=1)
    compact_cases.check_apply_adam(device, 1003, 3, world_size=2)
    for bits in (4, 8):
        integer_cases.check_compress(device, 1003, 2, bits, segments=3)
        integer_cases.check_average_compress(device, 5003, 6, bits)
        integer_cases.check_commit(device, 1003, 2, bits, segments=3)
        compact_cases.check_commit_integers(device, 1003, 2, bits, segments=3)
    sketch_cases.check_sketch(device, 9001, 3, offset=5, seed=1)
