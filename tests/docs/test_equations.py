"""An algorithm is read in its own file: each numbered equation of the docstring stands at code there."""

import ast
import re

import pytest

from tests.support.launching import REPO_ROOT

OPTIM = REPO_ROOT / "hf_compressopt" / "optim"


@pytest.mark.parametrize("file", ["onebit_adam.py", "zero_one_adam.py", "lamb.py"])
def test_every_equation_of_an_algorithm_stands_at_its_code(file: str) -> None:
    text = (OPTIM / file).read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    numbered = re.findall(r"\((\d)\)$", docstring, re.MULTILINE)
    at_code = [re.findall(r"\((\d)\)", line.partition(" # ")[2]) for line in text.splitlines()]
    assert numbered == sorted(set(numbered)) and len(numbered) >= 6
    assert {number for numbers in at_code for number in numbers} == set(numbered)
