"""The parameters inside a local interval of 0/1 Adam, in which each rank has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Traffic
from hf_compressopt.optim.functional import bit_sum
from hf_compressopt.optim.group_state import GroupState


class AlikeParameters:
    """Mixin of an optimizer whose ranks have the same parameters after each step."""

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Inside, all ranks hold the same parameters, as they always do here. All ranks call."""
        yield

    def own_parameters_restorer(self) -> Callable[[], None]:
        """Return a function that puts this rank's parameters back as they are now: nothing to do here."""
        return lambda: None

    @contextmanager
    def synced_parameters(self) -> Iterator[bool]:
        """Inside, the parameters are alike on all ranks, as they always are here. No collective call. Yields False."""
        yield False

    @property
    def ranks_are_apart(self) -> bool:
        """True if each rank has its own parameters at this moment; always False in this class."""
        return False

    def settle_parameters(self) -> None:
        """Make all ranks hold the same parameters until the next step, as they always do here. All ranks call."""

    def parameters_replaced(self) -> None:
        """Continue from the present parameters, such as those of a model that was loaded. All ranks call."""


class LocalInterval:
    """Averages over the ranks' parameters, and a watch for parameters that someone else has written.

    At a sync the parameters follow from the anchor, the parameters at the sync before. Values that others write in
    between (a loaded model, clamped weights) would be lost. So sums of the parameters' bits are taken after each step
    and compared before the next one, and a sync after such a write averages the parameters themselves.

    Attributes:
        states: The states of all param groups; those that are compressed have an anchor.
    """

    def __init__(self, states: Sequence[GroupState], traffic: Traffic) -> None:
        """Watch these states, a list that may grow."""
        self.states, self._traffic = states, traffic
        self._mark: Tensor | None = None  # [parameters] int64; None: whatever the parameters are, they are expected
        self._written: Tensor | None = None  # [] bool
        self._alike = False  # the mean is in the place of the ranks' own parameters until the next step
        self._settled: dict[Tensor, bool] = {}  # parameters that were averaged after they had been frozen

    @property
    def _compressed(self) -> list[GroupState]:
        return [state for state in self.states if state.compressed]

    # -- values that others write -------------------------------------------------------------------------------------

    def expect(self) -> None:
        """Record the present parameters as expected."""
        self._mark = self._fingerprint()

    def expect_anything(self) -> None:
        """Accept any parameters at the next step, as after a load, and forget earlier writes."""
        self._mark = self._written = None
        self._alike = False
        for state in self.states:
            state.own_params = None

    def look(self) -> None:
        """Compare the parameters with the expected ones. No host synchronisation."""
        if self._mark is None:
            return
        now = self._fingerprint()
        if now.shape == self._mark.shape:
            written = (now != self._mark.to(now.device)).any()
            self._written = written if self._written is None else self._written.to(now.device) | written

    def written(self, device: torch.device) -> Tensor:
        """Return whether anyone has written parameters since the last sync, [] float64."""
        found = False if self._written is None else self._written
        return torch.as_tensor(found, dtype=torch.float64, device=device)

    def _fingerprint(self) -> Tensor:
        sums = [bit_sum(param) for state in self._compressed for param in state.params]
        return torch.stack(sums or [torch.zeros((), dtype=torch.int64, device="cpu")])

    # -- one set of parameters ----------------------------------------------------------------------------------------

    def is_apart(self) -> bool:
        """Return whether each rank has its own parameters in place. No collective call; alike on all ranks."""
        inside = any(float(state.extra["lr_sum"]) != 0 and state.own_params is None for state in self._compressed)
        return inside and not self._alike and any(state.communicator.world_size > 1 for state in self._compressed)

    def begin_step(self) -> None:
        """Put this rank's own parameters in place, and look for writes."""
        self.put_back()
        self.look()
        self._alike = False

    @torch.no_grad()
    def settle(self) -> None:
        """Replace each rank's parameters by the mean over ranks; the next step starts from it."""
        if not self.is_apart():
            return
        self.look()
        for state in self._compressed:
            self.average(state)
        self._alike = True
        self.expect()

    @contextmanager
    def stand_in(self, fill: Callable[[GroupState], None]) -> Iterator[bool]:
        """Inside, other parameters, written by ``fill``, are in the place of this rank's own.

        Yields:
            Whether the ranks are apart; else the parameters stay as they are.
        """
        if not self.is_apart():
            yield False
            return
        self.look()
        with torch.no_grad():
            for state in self._compressed:
                state.own_params = [param.detach().clone() for param in state.params]
                fill(state)
        self.expect()
        try:
            yield True
        finally:
            self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Put this rank's own parameters back, unless someone has written others meanwhile, which stay."""
        if all(state.own_params is None for state in self.states):
            return
        before, self._written = self._written, None
        self.look()
        replaced = self._written is not None and bool(self._written)
        for state in self.states:
            for param, own in zip(state.params, state.own_params or (), strict=False):
                if not replaced:
                    param.copy_(own)
            state.own_params = None
        self._written = self._written if replaced else before
        self.expect()

    @staticmethod
    @torch.no_grad()
    def fill_with_anchor(state: GroupState) -> None:
        """Put the parameters at the last sync in place, which are alike on all ranks. No collective call."""
        for index, param in enumerate(state.params):
            param.copy_(state.view(state.extra["anchor"], index))

    def average(self, state: GroupState) -> None:
        """Put the mean over ranks in the place of the parameters of a group that may move. All ranks call."""
        for bucket in state.layout.buckets:
            with state.parameter_segments(bucket) as params, self._traffic.paused():
                moving = [segment for segment in params if segment.tensor is not None]
                parts = [segment.part.float() for segment in moving]
                mean = torch.cat(parts or [torch.empty(0, dtype=torch.float32, device=state.device)])
                _average_(mean, state)
                for segment, part in zip(moving, torch.split(mean, [s.numel for s in moving]), strict=True):
                    segment.part.copy_(part)

    # -- syncs that do not follow from the anchor ---------------------------------------------------------------------

    @torch.no_grad()
    def start_anew(self, state: GroupState) -> None:
        """Begin an interval with the present parameters."""
        for index, param in enumerate(state.params):
            state.view(state.extra["anchor"], index).copy_(param)
        state.extra["local_update"].zero_()
        state.extra["lr_sum"].zero_()
        state.extra["decay"].fill_(1.0)

    def sync_by_average(self) -> None:
        """Average parameters and momentum in full precision, and begin an interval. All ranks call."""
        for state in self._compressed:
            self.average(state)
            for bucket in state.layout.buckets:
                _average_(state.exp_avg[bucket.start : bucket.stop], state)
            self.start_anew(state)
        self._written = None

    @torch.no_grad()
    def average_frozen(self) -> None:
        """Average, once each, the parameters that were frozen inside an interval: no message brings them together.

        All ranks call. The mean is taken of the distances from the anchor, so that a parameter that has not moved
        keeps its bits.
        """
        for state in self._compressed:
            for index, param in enumerate(state.params):
                if not param.requires_grad and not self._settled.get(param):
                    anchor = state.view(state.extra["anchor"], index)
                    distance = param.detach().to(torch.float32) - anchor
                    _average_(distance, state)
                    param.copy_(anchor + distance)
                    anchor.copy_(param)
                self._settled[param] = not param.requires_grad

    def frozen(self) -> list[list[bool]]:
        """A flag for each parameter of each group: True if it is frozen now. Alike on all ranks."""
        return [[not param.requires_grad for param in state.params] for state in self._compressed]


def _average_(tensor: Tensor, state: GroupState) -> None:
    tensor.mul_(1 / state.communicator.world_size)
    state.communicator.all_reduce(tensor).wait()
