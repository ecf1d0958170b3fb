"""Build the site of the documentation into build/site. `make docs` runs this with mkdocs in build/docs-venv.

README.md, the pages of docs/, and the recipes with their scripts are gathered into build/pages, in their own places, so
that links lead to the same pages on the site. A page with the API is made from the public names.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"


def public_names() -> dict[str, str]:
    """The modules of the names that hf_compressopt exports, read without an import: torch need not be there."""
    tree = ast.parse((ROOT / "hf_compressopt" / "__init__.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME"]
    homes: dict[str, tuple[str, ...]] = ast.literal_eval(found[0].value)
    return {name: f"hf_compressopt.{home}" for home, names in homes.items() for name in names}


def gather() -> None:
    """Copy the pages, and write that of the API."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES / "docs")
    recipes = (path for kind in ("*/README.md", "*/*.py", "*.ipynb") for path in ROOT.glob(f"recipes/{kind}"))
    for page in (*ROOT.glob("*.md"), *recipes):
        place = PAGES / page.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, place)
    bases = {"CompressedOptimizer": "base", "CompressedAdam": "compressed_adam"}  # they have the options of all three
    names = public_names() | {name: f"hf_compressopt.optim.{module}" for name, module in bases.items()}
    entries = [f"::: {home}.{name}\n" for name, home in sorted(names.items())]
    (PAGES / "api.md").write_text("\n".join(["# API\n", *entries]))


def on_page_content(html: str, **_: object) -> str:
    """Show roles and colons of reStructuredText as plain names; mkdocs calls this for each page."""
    html = re.sub(r":\w+:<code>~(?:\w+\.)*(\w+)</code>", r"<code>\1</code>", html)
    return re.sub(r":\w+:(?=<code>)", "", html).replace("::</p>", ":</p>")


if __name__ == "__main__":
    gather()
    sys.exit(subprocess.run([sys.executable, "-m", "mkdocs", "build", "--clean"], cwd=ROOT).returncode)
