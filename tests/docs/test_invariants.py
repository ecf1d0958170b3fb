"""docs/dev/invariants.md: every number that a test names stands there, and every number there has a test."""

import re

from tests.support.launching import REPO_ROOT


def test_every_invariant_has_a_test_and_every_test_an_invariant() -> None:
    page = (REPO_ROOT / "docs" / "dev" / "invariants.md").read_text()
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert listed == list(range(1, len(listed) + 1)) and len(listed) > 30
    marks = (
        re.findall(r"mark\.invariant\(([\d, ]+)\)", path.read_text()) for path in (REPO_ROOT / "tests").rglob("*.py")
    )
    held = {int(number) for found in marks for group in found for number in group.split(",")}
    assert held == set(listed)
