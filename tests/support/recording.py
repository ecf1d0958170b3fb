"""When messages leave, beside the gradients of a backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.collectives.communicator import Handle
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.oracles.cases import bucket_cap

LAYERS, WIDTH = 8, 256
CAP = bucket_cap(WIDTH * WIDTH)


class Recording(TorchCommunicator):
    """The real thing, which also writes down its phases, and of each, by its number, that it has been awaited."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(device=torch.device("cpu"))
        self.events = events

    def all_to_all(self, output: Tensor, inputs: Tensor, **splits: Sequence[int]) -> Handle:
        return self._watched("message", super().all_to_all(output, inputs, **splits))

    def all_gather(self, output: Tensor, part: Tensor) -> Handle:
        return self._watched("answer", super().all_gather(output, part))

    def _watched(self, event: str, handle: Handle) -> Handle:
        number, wait = self.events.count(event), handle._wait
        self.events.append(event)
        handle._wait = lambda: (wait(), self.events.append(f"{event} {number} awaited"))
        return handle


def events_of_backward(
    attach: Callable[[DistributedDataParallel, Recording], Callable[[], Any]], steps: int = 2
) -> list[str]:
    """ "gradient" and "message" in the order of the last step; ``attach`` returns what ends a step."""
    events: list[str] = []
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=CAP)
    end_step = attach(ddp, Recording(events))
    for p in net.parameters():
        p.register_hook(lambda grad: events.append("gradient"))
    for _ in range(steps):
        events.clear()
        ddp(torch.randn(4, WIDTH)).sum().backward()
        end_step()
    return events


def check_overlap(events: list[str]) -> None:
    """The first messages leave before the last gradient is there."""
    assert events.count("message") > LAYERS // 2 and events.count("gradient") == 2 * LAYERS
    last = len(events) - 1 - events[::-1].index("gradient")
    assert events[:last].count("message") >= LAYERS // 2
