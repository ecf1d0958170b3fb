"""How long the documentation is. `python tests/docs/test_words.py` prints every page and the totals."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Words that a page may have, with its tables; docs/options.md is made from the docstrings.
LIMITS = {
    "README.md": 1100,
    "docs/quickstart.md": 950,
    "docs/choosing.md": 1250,
    "docs/training.md": 2200,
    "docs/multi_node.md": 1200,
    "docs/memory_and_zero.md": 1800,
    "docs/checkpoints.md": 1000,
    "docs/options.md": 2100,
    "docs/benchmarks.md": 1500,
    "docs/convergence.md": 1080,
    "docs/deepspeed.md": 700,
    "docs/algorithms.md": 2360,
    "docs/fine_tuning.md": 1080,
}
IN_PAGES, IN_DEV = 16_800, 5560
IN_RECIPES = 2500


def words(page: Path) -> int:
    """Everything between blanks that has a letter or a digit."""
    return sum(bool(re.search(r"[^\W_]", word)) for word in page.read_text().split())


def totals() -> dict[str, int]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*/README.md")]
    return {str(page.relative_to(ROOT)): words(page) for page in sorted(pages)}


def test_no_page_is_longer_than_a_reader_has_time_for() -> None:
    found = totals()
    assert {page: found[page] for page, limit in LIMITS.items() if found[page] > limit} == {}
    pages = {page for page in found if page.startswith("docs/") and page.count("/") == 1} - {"docs/README.md"}
    assert set(LIMITS) == {"README.md", *pages}
    assert sum(found[page] for page in pages) <= IN_PAGES
    assert sum(number for page, number in found.items() if page.startswith("docs/dev/")) <= IN_DEV
    assert sum(number for page, number in found.items() if page.startswith("recipes/")) <= IN_RECIPES


if __name__ == "__main__":
    found = totals()
    print("\n".join(f"{number:6,} {page}" for page, number in found.items()))
    print(f"{sum(found.values()):6,} words in {len(found)} pages")
