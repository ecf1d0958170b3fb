"""Bytes at the interface of the ranks in runs of 1,000 steps, with the defaults, counted in steps of each stage."""

import sys

import pytest
import torch

from hf_compressopt import GradientCompression, OnebitAdam, OnebitLamb, average_gradients
from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

from _convergence_ranks import InProcess, Room  # noqa: E402

STEPS, NUMEL = 1000, 4_000_000
RING = 2 * 4 * NUMEL  # bytes of an all-reduce in float32, times W / (W - 1)


def parameters(rank):
    params = [torch.nn.Parameter(torch.ones(NUMEL // 1000, 1000))]
    params[0].grad = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(rank))
    return params


@pytest.mark.parametrize(("cls", "times"), [(OnebitAdam, 18), (OnebitLamb, 16)])  # whose warmup is longer
def test_a_run_of_a_compressed_optimizer_sends_so_many_times_fewer_bytes(cls, times):
    def action(communicator):
        optimizer = cls(parameters(communicator.rank), lr=1e-3, warmup_bits=4, communicator=communicator)
        optimizer.scale_schedule(STEPS, given=[])
        last = optimizer.schedule.last_warmup_step  # no step of the first stage comes after it
        optimizer.schedule = optimizer.schedule.frozen_at(1)
        sent = []
        for _ in range(2):  # a step of each stage
            average_gradients(optimizer)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            sent.append(optimizer.metrics()["bytes_sent_step"])
        return last * sent[0] + (STEPS - last) * sent[1]

    room = Room(2)
    for total in room.run(lambda rank: action(InProcess(room, rank))):
        assert STEPS * RING / 2 > times * total


def test_a_run_with_int4_gradients_sends_7_6_times_fewer_bytes():
    def action(communicator):
        params = parameters(communicator.rank)
        state = GradientCompression(params, "int4", communicator=communicator)
        state.average_gradients()
        return state.metrics()["bytes_sent_step"]

    room = Room(2)
    for sent in room.run(lambda rank: action(InProcess(room, rank))):
        assert RING / 2 > 7.6 * sent
