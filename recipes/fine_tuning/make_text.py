"""Write a text to fine-tune on, without a download: the docstrings of Python's standard library."""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def docstrings(folder: Path) -> Iterator[str]:
    """Yield the docstrings of the modules in a folder, and of their functions and classes; each of them once."""
    seen: set[str] = set()
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            text = ast.get_docstring(node)
            if text and text not in seen:
                seen.add(text)
                yield text


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="file to write, such as docstrings.txt")
    output: Path = parser.parse_args().output
    texts = list(docstrings(Path(sysconfig.get_paths()["stdlib"])))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    print(f"wrote {len(texts):,} docstrings, {output.stat().st_size / 1e6:.1f} MB, to {output}")


if __name__ == "__main__":
    main()
