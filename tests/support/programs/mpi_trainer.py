"""Run the plain Trainer script over MPI, and again from its checkpoint. Started with mpirun.

Usage: mpi_trainer.py FOLDER
"""

import sys
from pathlib import Path

from hf_compressopt import run

SCRIPT = str(Path(__file__).with_name("plain_trainer_script.py"))
OPTIONS = """--use_cpu --optim onebit_adam --optim_args communicator=mpi,freeze_step=2,scale_block=64 --max_steps 6
--logging_steps 1 --save_steps 4 --per_device_train_batch_size 2 --report_to none"""

folder = sys.argv[1]
for name, more in (("whole", []), ("resumed", ["--resume_from_checkpoint", f"{folder}/whole/checkpoint-4"])):
    run.main([SCRIPT, *OPTIONS.split(), "--output_dir", f"{folder}/{name}", *more])
