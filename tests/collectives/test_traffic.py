"""Bytes on the wire, counted at a network interface that nobody else uses."""

import json
import shutil
import subprocess

import pytest

from tests.support.launching import REPO_ROOT, run, torchrun

NUMEL, SCALE_BLOCK = 8_000_000, 4096


def own_network() -> list[str]:
    """The start of a command that runs in a network namespace of its own; [] where this user may make none."""
    if shutil.which("unshare"):
        for flags in ("-n", "-rn"):
            if subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0:
                return ["unshare", flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    return []


@pytest.mark.full
@pytest.mark.invariant(33)
def test_bytes_at_the_interface_are_those_of_the_formula() -> None:
    # where a namespace of its own is not allowed, other traffic on the loopback device can only add to the count
    command = [*own_network(), *torchrun(2), str(REPO_ROOT / "tests" / "support" / "programs" / "traffic.py")]
    numbers = json.loads(run([*command, str(NUMEL), "5", str(SCALE_BLOCK)]).stdout.strip().splitlines()[-1])
    formula = 2 * (2 - 1) / 2 * (NUMEL / 8 + 4 * -(-NUMEL // SCALE_BLOCK))
    assert 0.99 * formula < numbers["interface"] <= 1.05 * formula, numbers
    assert numbers["counted"] == pytest.approx(formula, rel=0.002)
