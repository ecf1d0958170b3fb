"""docs/options.md is what the signatures and docstrings of the classes say."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import REPO_ROOT


@pytest.fixture(scope="module")
def make_options() -> dict[str, Any]:
    return runpy.run_path(str(REPO_ROOT / "scripts" / "make_options.py"), run_name="make_options")


def test_the_options_page_is_up_to_date(make_options: dict[str, Any]) -> None:
    page: Path = make_options["PAGE"]
    assert page.read_text() == make_options["render"](), "run `python scripts/make_options.py`"


def test_there_are_few_options(make_options: dict[str, Any]) -> None:
    options, _, accepted = make_options["render"]().partition("## Accepted arguments")
    sections = options[options.index("## All compressed optimizers") :]
    rows = re.findall(r"^\| `(\w+)` \|", sections, re.MULTILINE)
    assert len(rows) <= 70 and len(set(rows)) <= 49 and "`amsgrad`" in accepted


def test_an_option_without_a_description_is_an_error(make_options: dict[str, Any]) -> None:
    class Undescribed:
        def __init__(self, params: Any, secret: int = 3) -> None:
            """Do nothing."""

    with pytest.raises(KeyError, match="secret"):
        make_options["options"](Undescribed)


def test_options_of_bases_and_their_own_words_are_found(make_options: dict[str, Any]) -> None:
    class Base:
        """A base.

        Args:
            rate: Speed, or ``None`` of
                :class:`~somewhere.Else`.
            size: Bytes | bits.
        """

        def __init__(self, params: Any, *, rate: "float | None" = None, size: int = 8) -> None: ...

    class Derived(Base):
        """A derived class.

        Args:
            size: Bytes.
            **options: See Base.

        Raises:
            ValueError: never.
        """

        def __init__(self, params: Any, size: int = 16, **options: Any) -> None: ...

    found = make_options["options"](Derived)
    assert {name: (option.kinds, option.default, option.help) for name, option in found.items()} == {
        "size": ((int,), 16, "Bytes."),
        "rate": ((float, type(None)), None, "Speed, or ``None`` of :class:`~somewhere.Else`."),
    }
    table = make_options["_table"](found)
    assert "| `rate` | `None: float` | Speed, or `None` of `Else`. |" in table
