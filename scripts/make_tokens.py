"""Make tokens for converge_on_gpu.py from the sources and documentation of the packages that are installed here.

    python scripts/make_tokens.py                  # 16.5 million for training, 1.5 million for validation

Every tenth file is for validation. The vocabulary is a byte-level BPE of 8,192 words, trained on part of the text. It
writes build/tokens/train.bin and validation.bin (int16), and tokens.json, which says what they were made of.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import torch
from _common import REPOSITORY, check_least, parser_of

KINDS = {".py", ".pyi", ".md", ".rst", ".txt"}
LARGEST = 400_000  # bytes of a file: larger ones are tables
TRAINED_ON = 1500  # files that the vocabulary is made of
END = "<|end|>"


def text_files() -> list[Path]:
    """The files of the standard library and of all installed packages, shuffled, alike for the same packages."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    found = {p.resolve() for root in roots for p in root.rglob("*") if p.suffix in KINDS and p.is_file()}
    files = sorted(p for p in found if 200 < p.stat().st_size < LARGEST)
    random.Random(0).shuffle(files)
    return files


def read(files: Iterable[Path]) -> Iterator[str]:
    return (file.read_text(encoding="utf-8", errors="ignore") for file in files)


def train_tokenizer(files: list[Path], vocabulary: int) -> object:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(read(files), trainer)
    return tokenizer


def encode(tokenizer: object, files: list[Path], most: int) -> torch.Tensor:
    """Tokens of whole files, one after the other with an end between them, until there are enough: [most] int16."""
    found: list[torch.Tensor] = []
    count, end = 0, tokenizer.token_to_id(END)
    for first in range(0, len(files), 64):
        for encoding in tokenizer.encode_batch(list(read(files[first : first + 64]))):
            found.append(torch.tensor([*encoding.ids, end], dtype=torch.int16))
            count += len(found[-1])
        if count >= most:
            break
    return torch.cat(found)[:most]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--train", type=int, default=16_500_000, help="tokens for training (%(default)s)")
    parser.add_argument("--validation", type=int, default=1_500_000, help="tokens for validation (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="words, at most 32,768 (%(default)s)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "tokens", help="folder (%(default)s)")
    arguments = parser.parse_args()
    check_least(parser, arguments, {"train": 1, "validation": 1, "vocabulary": 257})
    files = text_files()
    held_out, kept = files[::10], [file for number, file in enumerate(files) if number % 10]
    tokenizer = train_tokenizer(kept[:TRAINED_ON], arguments.vocabulary)
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts = {"vocabulary": arguments.vocabulary, "packages": len({d.name for d in distributions()})}
    for name, chosen, most in (("train", kept, arguments.train), ("validation", held_out, arguments.validation)):
        tokens = encode(tokenizer, chosen, most)
        (arguments.out / f"{name}.bin").write_bytes(tokens.numpy().tobytes())
        facts[name] = len(tokens)
        print(f"{name}: {len(tokens):,} tokens", flush=True)
    (arguments.out / "tokens.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
