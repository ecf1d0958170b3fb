"""This rank's parts of the parameters: their layout, their values, and the ordinary optimizers that update them.

Parameters that are sent together lie one after another, each from a multiple of ``ALIGN`` elements on, and are cut into
slices of equal length, across tensor boundaries. A slice is one message. It is cut again into ``world_size`` parts, and
part r belongs to rank r. Every cut is a multiple of ``ALIGN`` elements away from the start of its parameter, so that a
vector unit treats each element as in the whole tensor: an element-wise optimizer computes the same bits on the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.chunks import Topology
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import Partition, Span, round_up, slices_of
from hf_compressopt.kernels.memory import kept_per_device, reads_at_once
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.zero.config import ZeroConfig

#: Elements; a multiple of every vector unit's width and of torch's unrolled loops, in float32 and in 16 bits.
ALIGN = 64
#: Slices of a bucket, under way at the same time: one big gloo all-to-all leaves half of the link unused.
SLICES_PER_BUCKET = 8
#: Elements below which a slice is not made shorter for that reason: with gloo; and where a message costs launches, and
#: the link is full with one of them, so that a bucket of 32 MiB is one.
SHORTEST_SLICE = 1 << 16
SHORTEST_SLICE_BESIDE_GLOO = 1 << 23
#: Keys of a param group that are not the wrapped optimizer's.
OWN_KEYS = ("params", "param_names", "process_group", "model_parallel")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED = 1 << 15  # elements that are compared with their master copies at a time
_COLUMNS = 4093  # a prime: values that change places, by rows or columns of a matrix, come into another sum


# -- layout ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedParameter:
    tensor: Tensor
    name: str  #: Or its place, such as "group0.3".
    group: int  #: Number of its param group.
    place: int  #: In the group, frozen parameters counted.
    communicator: Communicator  #: The ranks that hold copies of it.
    owner: int | None  #: The first of these ranks if the param group has a process group of its own.
    model_parallel: bool  #: Whether each rank of the model-parallel group has other elements of it.


def slice_numel(bucket_numel: int, world_size: int, backend: str = "gloo") -> int:
    """Return the length of the slices of a bucket, in elements: a multiple of ``ALIGN * world_size``."""
    shortest = SHORTEST_SLICE if backend == "gloo" else SHORTEST_SLICE_BESIDE_GLOO
    wanted = max(-(-bucket_numel // SLICES_PER_BUCKET), min(bucket_numel, shortest))
    return round_up(wanted, ALIGN * world_size)


def partition(
    numels: Sequence[tuple[int, int]], bucket_numel: int, topology: Topology, backend: str = "gloo"
) -> list[Partition]:
    """Cut parameters, (number, elements) in sending order, into slices."""
    length = slice_numel(bucket_numel, topology.world_size, backend)
    return slices_of(numels, length, ALIGN, topology.chunks)


# -- values -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def write_span(param: Tensor, start: int, stop: int, values: Tensor) -> None:
    """Write elements [start, stop) of the flattened parameter, contiguous or not, rounded to its dtype."""
    if param.is_contiguous():
        param.detach().view(-1)[start:stop] = values
    else:
        flat = param.detach().reshape(-1)  # a copy
        flat[start:stop] = values
        param.copy_(flat.view(param.shape))


def in_host_memory(tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=non_blocking)


class Part:
    """A part of a parameter that this rank updates, by the wrapped optimizer ``inner``."""

    inner: torch.optim.Optimizer

    def __init__(self, span: Span, number: int, known: TrainedParameter, config: ZeroConfig, is_ahead: bool) -> None:
        self.param, self.span, self.slice, self.group, self.is_ahead = span.index, span, number, known.group, is_ahead
        self.real = param = known.tensor
        wide = config.master if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
        # whether the tensor is the memory of the real parameter; else a master copy, ahead of replicas if ``is_ahead``
        self.direct = param.is_contiguous() and param.dtype == wide and not config.offload and not is_ahead
        self.tensor = self.replica  # [span.numel], the parameter of the wrapped optimizer
        if not self.direct:
            self.tensor = self.tensor.to(wide, copy=True)
            self.tensor = in_host_memory(self.tensor) if config.offload else self.tensor
        # sums of the bits that the parameter is expected to have, and the version of the master copy they belong to
        self._sums: list[Tensor] | None = None
        self._version = 0

    @property
    def replica(self) -> Tensor:
        """This part's elements of the real parameter, in its memory if it is contiguous."""
        return self.real.detach().reshape(-1)[self.span.start : self.span.stop]

    def write_back(self, values: Tensor | None = None) -> None:
        """Write the master copy into the parameter; ``values`` are what it rounds to, if the caller knows them."""
        if not self.direct:
            if values is None:
                # page-locked if it is offloaded, and not written before the next step, which waits for the device
                values = self.tensor.to(self.real.device, non_blocking=True)
            write_span(self.real, self.span.start, self.span.stop, values)
            self._version = self.tensor._version
            # on a device a copy's values are compared instead: the host would wait for sums
            if self.is_ahead or self.tensor.is_cpu:
                self.expect(self.replica)

    def read_back(self) -> None:
        if not self.direct:
            self.tensor.copy_(self.replica)
            if self.is_ahead:
                self.expect(self.replica)

    def expect(self, values: Tensor) -> None:
        """Take these values of the parameter as right: values that other code writes later are seen."""
        self._sums = _sums_of_bits(values.reshape(-1))

    def follow(self, later: list[tuple[Tensor, Callable[[], object]]] | None = None) -> bool:
        """Follow the parameter to other memory, and to values that others have written. Returns if the device is new.

        ``later`` takes what the host would wait for: whether values were written, [] bool, and what to do then.

        A master copy keeps its digits for elements that still are what it rounds to, and takes the parameter's value
        for all others; a master that is ahead takes all values if one was written. Values are compared, by sums of
        their bits if they were written here last, because torch counts no version for writes through ``.data``.
        """
        param = self.real
        if self.direct and param.is_contiguous() and param.dtype == self.tensor.dtype:
            here = self.tensor.data_ptr() - self.span.start * self.tensor.element_size()
            if param.data_ptr() == here and param.device == self.tensor.device:
                return False  # the memory is still held: no other tensor has this address
        values = self.replica
        if not self.direct:
            (self._follow_replica if self.is_ahead else self._follow_copy)(values, later)
            return False
        moved = values.device != self.tensor.device
        if not param.is_contiguous() or values.dtype != self.tensor.dtype:  # model.to(channels_last) or .to(dtype)
            self.tensor.data, self.direct = values.to(self.tensor.dtype, copy=True), False
        else:
            self.tensor.data = values
        return moved

    def _follow_copy(self, values: Tensor, later: list[tuple[Tensor, Callable[[], object]]] | None) -> None:
        before, self._sums = self._sums, None  # a step that fails may leave the copy changed, and the parameter not
        if before is not None and self._version == self.tensor._version:
            now = _sums_of_bits(values)
            if later is not None and _on_a_device(before, now):
                later.append((_changed(before, now), partial(_take_over, self.tensor, values)))
                return
            if not _differ(before, now):
                return
        _take_over(self.tensor, values)

    def _follow_replica(self, values: Tensor, later: list[tuple[Tensor, Callable[[], object]]] | None) -> None:
        """Take all values if any of them was written: single elements differ from what the master rounds to anyway."""
        before, self._sums = self._sums, _sums_of_bits(values)
        if before is not None:
            before = [old.to(values.device) for old in before]
            alike = [old.dtype for old in before] == [new.dtype for new in self._sums]
            if alike and not values.is_cpu and values.device == self.tensor.device:  # the host does not wait for it
                values = torch.where(_changed(before, self._sums), values.to(self.tensor.dtype), self.tensor)
            elif later is not None and _on_a_device(before, self._sums):
                later.append((_changed(before, self._sums), partial(self.tensor.copy_, values)))
                return
            elif not _differ(before, self._sums):
                return
        self.tensor.copy_(values)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.inner.state.get(self.tensor, {})
        return found

    def take_state(self, state: dict[str, Any]) -> None:
        """Take over the state of the wrapped optimizer."""
        self.inner.state.pop(self.tensor, None)
        if state:
            self.inner.state[self.tensor] = state

    def move_state(self, to: Callable[[Tensor], Tensor] | None = None) -> None:
        """Move element-wise state, to the device of the part unless it is said how."""
        state = self.state
        for name in element_state(state, self):
            state[name] = state[name].to(self.tensor.device) if to is None else to(state[name])


def element_state(state: dict[str, Any], part: Part) -> list[str]:
    """List the names of the state tensors that have one value per element of the part."""
    return [name for name, value in state.items() if isinstance(value, Tensor) and value.shape == part.tensor.shape]


def _sums_of_bits(values: Tensor) -> list[Tensor]:
    """Return sums of the words of 8 bytes of [n] values, each over every 4093rd, and copies of the last few values."""
    values = values.resolve_neg().contiguous()
    if values.storage_offset() * values.element_size() % 8:
        values = values.clone()  # torch views only what begins at a word as words
    row = 8 // values.element_size() * _COLUMNS
    last = values.numel() // row * row
    sums = [values[:last].view(torch.int64).view(-1, _COLUMNS).sum(0)] if last else []
    return [*sums, values[last:].view(_BITS[values.element_size()]).clone()]


def digest_of_bits(values: Tensor) -> Tensor:
    """Return a number that tells values with other bits, or in another order, from these: [] int64. values: [n]."""
    factors = _factors(values.device)
    digests = [(row * factors[: len(row)]).sum() for row in _sums_of_bits(values)]
    return digests[0] if len(digests) == 1 else digests[0] * 31 + digests[1]


@kept_per_device
def _factors(device: torch.device) -> Tensor:
    return (2 * torch.arange(8 * _COLUMNS, device=device) + 1) * 0x9E3779B97F4A7C1  # odd, so that no bit is lost


def _changed(before: Sequence[Tensor], now: Sequence[Tensor]) -> Tensor:
    return torch.stack([(old != new).any() for old, new in zip(before, now, strict=True)]).any()


def _on_a_device(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Tell whether sums can be compared where they are, and the host would wait for it."""
    rows = zip(before, now, strict=True)
    return not reads_at_once(now[0].device) and all(o.dtype == n.dtype and o.device == n.device for o, n in rows)


def _differ(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Tell whether sums differ; the host waits once for those on a device."""
    if any(old.dtype != new.dtype or old.device != new.device for old, new in zip(before, now, strict=True)):
        return True
    return not all(map(torch.equal, before, now)) if before[0].is_cpu else bool(_changed(before, now))


def _take_over(master: Tensor, values: Tensor) -> None:
    """Give a master copy the values that are not what it rounds to; on a CPU as many at a time as a cache holds."""
    size = _COMPARED if master.is_cpu and values.is_cpu else max(1, values.numel())
    for mine, written in zip(torch.split(master, size), torch.split(values.resolve_neg(), size), strict=True):
        here = mine.to(written.device)
        mine.copy_(torch.where(here.to(written.dtype) == written, here, written.to(mine.dtype)))


# -- updates ----------------------------------------------------------------------------------------------------------


class UpdateBucket:
    """Some consecutive slices, their parts by number, and the wrapped optimizer of this rank's parts if it has any."""

    def __init__(
        self,
        slices: Sequence[int],
        parts: Sequence[Part],
        groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        state_dtype: torch.dtype | None,
    ) -> None:
        self.slices = {number: [part for part in parts if part.slice == number] for number in slices}
        self.parts, self._state_dtype = list(parts), state_dtype  # of element-wise state between steps; None: as it is
        self.inner: torch.optim.Optimizer | None = None
        self._groups: list[tuple[int, dict[str, Any]]] = []  # number of the user's group, and the wrapped optimizer's
        if parts:
            numbers = sorted({part.group for part in parts})
            own = [[part.tensor for part in parts if part.group == number] for number in numbers]
            self.inner = make([{**hyperparameters(groups[n]), "params": p} for n, p in zip(numbers, own, strict=True)])
            self._groups = list(zip(numbers, self.inner.param_groups, strict=True))
            for part in parts:
                part.inner = self.inner

    def take_hyperparameters(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Take the hyperparameters of the users' param groups, which a scheduler may have changed."""
        for number, group in self._groups:
            group.update(values[number])

    def give_hyperparameters(self, groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]]) -> None:
        """Give the users' param groups what the wrapped optimizer has changed of the values that it took."""
        for number, group in self._groups:
            before = values[number]
            changed = {k: v for k, v in group.items() if k != "params" and (k not in before or v is not before[k])}
            groups[number].update(changed)

    def step(self) -> None:
        if self.inner is not None:
            with self._wide_state():
                self.inner.step()

    def measure(self) -> Iterator[tuple[int, Tensor]]:
        """Run the first half of Lamb's step; yield what :meth:`Lamb.measure` returns, by numbers of parameters."""
        if isinstance(self.inner, Lamb):
            with self._wide_state():
                measured = self.inner.measure()
            number_of = {id(part.tensor): part.param for part in self.parts}
            for tensor, squares in measured:
                yield number_of[id(tensor)], squares

    def apply(self, ratios: dict[int, Tensor]) -> None:
        """Run the second half of Lamb's step, with the trust ratio of each parameter."""
        if isinstance(self.inner, Lamb):
            with self._wide_state():
                self.inner.apply({p.tensor: ratios[p.param] for p in self.parts if p.tensor.grad is not None})

    @contextmanager
    def _wide_state(self) -> Iterator[None]:
        """Inside, element-wise state has its part's dtype; outside, the dtype in which it is kept."""
        parts = [] if self._state_dtype is None else self.parts
        for part in parts:
            part.move_state(partial(Tensor.to, dtype=part.tensor.dtype))
        try:
            yield
        finally:
            for part in parts:
                part.move_state(partial(Tensor.to, dtype=self._state_dtype))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a param group that are the wrapped optimizer's."""
    return {key: value for key, value in group.items() if key not in OWN_KEYS}
