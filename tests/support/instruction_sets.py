"""The instruction sets of the CPU library that this machine has."""

import torch

from hf_compressopt.kernels import library

CPU = torch.device("cpu")
BEST = "portable" if library.why_not(CPU) else library.instruction_set("cpu")
KNOWN = ("portable", "avx2", "avx512", "avx512_gfni")
INSTRUCTION_SETS = KNOWN[: KNOWN.index(BEST) + 1]
