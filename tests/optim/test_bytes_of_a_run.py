"""Bytes that ranks send in runs of 1,000 steps, with the defaults, counted in steps of each stage."""

import pytest
import torch

import hf_compressopt
from hf_compressopt import GradientCompression, average_gradients
from tests.support.harness import run_ranks

STEPS, NUMEL = 1000, 4_000_000
RING = 2 * 4 * NUMEL  # bytes of an all-reduce in float32, times W / (W - 1)


def parameters(rank: int) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(NUMEL // 1000, 1000))]
    params[0].grad = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(rank))
    return params


def bytes_of_stages(rank: int, world_size: int, name: str) -> float:
    optimizer = getattr(hf_compressopt, name)(parameters(rank), lr=1e-3, warmup_bits=4)
    optimizer.scale_schedule(STEPS, given=[])
    last = optimizer.schedule.last_warmup_step  # no step of the warmup stage comes after it
    optimizer.schedule = optimizer.schedule.frozen_at(1)
    sent = []
    for _ in range(2):  # a step of each stage
        average_gradients(optimizer)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        sent.append(optimizer.metrics()["bytes_sent_step"])
    return last * sent[0] + (STEPS - last) * sent[1]


@pytest.mark.parametrize(("name", "times"), [("OnebitAdam", 18), ("OnebitLamb", 16)])  # whose warmup is longer
def test_a_run_of_a_compressed_optimizer_sends_so_many_times_fewer_bytes(name: str, times: int) -> None:
    for total in run_ranks(2, bytes_of_stages, name):
        assert STEPS * RING / 2 > times * total


def int4_bytes(rank: int, world_size: int) -> float:
    state = GradientCompression(parameters(rank), "int4")
    state.average_gradients()
    return state.metrics()["bytes_sent_step"]


def test_a_run_with_int4_gradients_sends_7_6_times_fewer_bytes() -> None:
    for sent in run_ranks(2, int4_bytes):
        assert RING / 2 > 7.6 * sent
