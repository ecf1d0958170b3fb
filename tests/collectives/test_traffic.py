"""Bytes on the wire, counted at a network interface that nobody else uses."""

import json

import pytest

from tests.support.launching import REPO_ROOT, own_network, run, torchrun

NUMEL, SCALE_BLOCK = 8_000_000, 4096


@pytest.mark.full
@pytest.mark.invariant(33)
def test_bytes_at_the_interface_are_those_of_the_formula() -> None:
    # where a namespace of its own is not allowed, other traffic on the loopback device can only add to the count
    command = [*own_network(), *torchrun(2), str(REPO_ROOT / "tests" / "support" / "programs" / "traffic.py")]
    numbers = json.loads(run([*command, str(NUMEL), "5", str(SCALE_BLOCK)]).stdout.strip().splitlines()[-1])
    formula = 2 * (2 - 1) / 2 * (NUMEL / 8 + 4 * -(-NUMEL // SCALE_BLOCK))
    assert 0.99 * formula < numbers["interface"] <= 1.05 * formula, numbers
    assert numbers["counted"] == pytest.approx(formula, rel=0.002)
