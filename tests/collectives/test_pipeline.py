"""One all-to-all and one all-gather per bucket, and the next bucket is compressed while one is on the wire."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.harness import run_ranks


def record(rank: int, world_size: int, numel: int, bucket: int) -> tuple[list[str], int]:
    from hf_compressopt import OnebitAdam
    from hf_compressopt.collectives.communicator import Handle
    from hf_compressopt.collectives.torch_dist import TorchCommunicator

    events: list[str] = []

    class Recording(TorchCommunicator):
        """The real thing, which also writes down what is started and what is waited for."""

        def _watched(self, kind: str, handle: Handle) -> Handle:
            number = sum(event.startswith(f"start {kind}") for event in events)
            events.append(f"start {kind} {number}")

            def wait() -> None:
                handle.wait()
                events.append(f"wait {kind} {number}")

            return Handle(wait, kind, self.traffic)

        def all_to_all(self, output: Any, inputs: Any, **splits: Sequence[int]) -> Handle:
            return self._watched("all_to_all", super().all_to_all(output, inputs, **splits))

        def all_gather(self, output: Any, part: Any) -> Handle:
            return self._watched("all_gather", super().all_gather(output, part))

    p = torch.nn.Parameter(torch.zeros(numel))
    cap = bucket * 4 / 2**20
    optimizer = OnebitAdam([p], freeze_step=1, scale_block=8, bucket_cap_mb=cap, communicator=Recording())
    for step in range(3):  # the second one also compares the ranks
        events.clear()
        p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return events, -(-numel // optimizer.bucket_numel)


def test_two_messages_per_bucket_and_the_next_bucket_leaves_before_one_is_awaited() -> None:
    for events, buckets in run_ranks(2, record, 1000, 256):
        assert buckets == 4
        for kind in ("all_to_all", "all_gather"):
            assert [e for e in events if e.startswith(f"start {kind}")] == [f"start {kind} {i}" for i in range(4)]
            assert [e for e in events if e.startswith(f"wait {kind}")] == [f"wait {kind} {i}" for i in range(4)]
        for i in range(3):
            assert events.index(f"start all_to_all {i + 1}") < events.index(f"wait all_to_all {i}")
            assert events.index(f"start all_gather {i + 1}") < events.index(f"wait all_gather {i}")
        for i in range(2):
            assert events.index(f"start all_to_all {i + 2}") < events.index(f"wait all_gather {i}")
