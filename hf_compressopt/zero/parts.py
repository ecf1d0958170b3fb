"""This rank's parts of the parameters, and the ordinary optimizers that update them, one bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.flat import Span
from hf_compressopt.kernels.memory import is_direct
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.zero.reducer import in_host_memory, write_span

#: Keys of a param group that are not the wrapped optimizer's.
OWN_KEYS = ("params", "param_names", "process_group", "model_parallel")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED = 1 << 15  # elements that are compared with their master copies at a time
_COLUMNS = 4093  # a prime: values that change places, by rows or columns of a matrix, come into another sum


@dataclass
class Part:
    """A part of a parameter that this rank updates.

    Attributes:
        span: The elements of the parameter.
        slice: Number of the slice that they travel in.
        group: Number of the param group.
        tensor: [span.numel], the parameter of the wrapped optimizer: the memory of the real parameter, or a master
            copy of another dtype or in another place.
        direct: Whether it is the memory of the real parameter.
        is_ahead: Whether it is a master of which all ranks have replicas, which may lag behind: the real parameters.
        written: After a master copy was written to the parameter: the version of the copy, and the parameter's bits.
        replica_bits: What tells whether the replica is as it was written last; None if it was not.
    """

    span: Span
    slice: int
    group: int
    tensor: Tensor
    direct: bool
    is_ahead: bool = False
    written: tuple[int, list[Tensor]] | None = field(default=None, repr=False, compare=False)
    replica_bits: list[Tensor] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        span: Span,
        slice_number: int,
        group: int,
        param: Tensor,
        master_dtype: torch.dtype,
        offload: bool,
        is_ahead: bool = False,
    ) -> Part:
        """Make a part of a parameter, with a master copy if the parameter's own memory is not suitable, or is ahead."""
        wide = master_dtype if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
        if param.is_contiguous() and param.dtype == wide and not offload and not is_ahead:
            return cls(span, slice_number, group, param.detach().view(-1)[span.start : span.stop], True)
        master = param.detach().reshape(-1)[span.start : span.stop].to(wide, copy=True)
        return cls(span, slice_number, group, in_host_memory(master) if offload else master, False, is_ahead)

    @property
    def param(self) -> int:
        """Number of the parameter."""
        return self.span.index

    def write_back(self, param: Tensor) -> None:
        """Round a master copy to the parameter."""
        if not self.direct:
            write_span(param, self.span.start, self.span.stop, self.tensor)
            if self.is_ahead:
                self.note_replica(param)
            else:
                self.written = self._bits_of(param)

    def read_from(self, param: Tensor) -> None:
        """Give a master copy the parameter's values."""
        if not self.direct:
            self.tensor.copy_(param.detach().reshape(-1)[self.span.start : self.span.stop])
            if self.is_ahead:
                self.note_replica(param)

    def replica_in(self, param: Tensor) -> Tensor:
        """Return this part's elements of the real parameter, in its memory if it is contiguous."""
        return param.detach().reshape(-1)[self.span.start : self.span.stop]

    def note_replica(self, param: Tensor) -> None:
        """Note that the parameter is as it should be, so that values which other code writes later are seen."""
        self.expect_replica(self.replica_in(param))

    def expect_replica(self, values: Tensor) -> None:
        """Note that this part's elements of the parameter should be these values, [n]."""
        self.replica_bits = _fingerprint(values.reshape(-1))

    def _follow_replica(self, values: Tensor) -> None:
        """Give a master that is ahead the parameter's values if other code has written any of them.

        A replica differs from what its master rounds to, so that single elements cannot tell: the whole part follows.
        """
        before, self.replica_bits = self.replica_bits, _fingerprint(values)
        if before is None or [b.shape for b in before] != [b.shape for b in self.replica_bits]:
            self.tensor.copy_(values)
            return
        pairs = [(old.to(values.device), new) for old, new in zip(before, self.replica_bits, strict=True)]
        if values.device.type != "cpu" and values.device == self.tensor.device:  # the host does not wait for it
            changed = torch.stack([(old != new).any() for old, new in pairs]).any()
            self.tensor.copy_(torch.where(changed, values.to(self.tensor.dtype), self.tensor))
        elif not all(torch.equal(old, new) for old, new in pairs):
            self.tensor.copy_(values)

    def follow(self, param: Tensor) -> bool:
        """Follow the parameter: to other memory if it was moved, and to values that other code has written.

        A master copy keeps its digits for elements that still are what it rounds to, and takes the parameter's value
        for all others; a master that is ahead takes all values if one was written. Values are compared, by sums of
        their bits if they were written here last, because torch counts no version for writes through ``.data``.

        Returns:
            Whether the part is on another device now.
        """
        values = self.replica_in(param)
        if self.is_ahead:
            self._follow_replica(values)
            return False
        if not self.direct:
            if self.written is None or not _same(self.written, self._bits_of(param)):
                _take_over(self.tensor, values)
            self.written = None  # a step that fails may leave the copy changed, and the parameter not
            return False
        moved = values.device != self.tensor.device
        if not param.is_contiguous() or values.dtype != self.tensor.dtype:  # model.to(channels_last) or .to(dtype)
            self.tensor.data, self.direct = values.to(self.tensor.dtype, copy=True), False
        elif moved or values.data_ptr() != self.tensor.data_ptr():
            self.tensor.data = values
        return moved

    def _bits_of(self, param: Tensor) -> tuple[int, list[Tensor]] | None:
        """Return the version of the master copy, and what tells whether its part of the parameter is written."""
        if self.tensor.device.type != "cpu" or not is_direct(param) or param.device.type != "cpu":
            return None  # the host would wait for another device
        return self.tensor._version, _sums_of_bits(param.detach().view(-1)[self.span.start : self.span.stop])


def _fingerprint(values: Tensor) -> list[Tensor]:
    """Return sums of the bits of [n] values, and copies of a few, that depend on nothing but the values."""
    values = values.resolve_neg()
    return _sums_of_bits(values.clone() if values.storage_offset() * values.element_size() % 8 else values)


def _same(one: tuple[int, list[Tensor]], other: tuple[int, list[Tensor]] | None) -> bool:
    return other is not None and one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def _sums_of_bits(values: Tensor) -> list[Tensor]:
    """Return sums of words of 8 bytes, each over every 4093rd word, and copies of the elements that fill no such row.

    Args:
        values: [n], contiguous.
    """
    per_word = 8 // values.element_size()
    first = min(-values.storage_offset() % per_word, values.numel())
    rows = (values.numel() - first) // (per_word * _COLUMNS)
    last = first + rows * per_word * _COLUMNS
    bits = values.view(_BITS[values.element_size()])
    sums = [values[first:last].view(torch.int64).view(rows, _COLUMNS).sum(0)] if rows else []
    return [*sums, bits[:first].clone(), bits[last:].clone()]


def _take_over(master: Tensor, values: Tensor) -> None:
    """Give a master copy the values that are not what it rounds to."""
    values = values.resolve_neg()  # torch views no lazily negated tensor as integers
    if master.device.type == "cpu" and values.device.type == "cpu":
        bits = _BITS[values.element_size()]  # torch compares integers faster than floats
        for begin in range(0, values.numel(), _COMPARED):  # fits into a cache; differences are rare
            rows = slice(begin, begin + _COMPARED)
            if not torch.equal(master[rows].to(values.dtype).view(bits), values[rows].view(bits)):
                _keep_digits(master[rows], values[rows])
    else:
        _keep_digits(master, values)


def _keep_digits(master: Tensor, values: Tensor) -> None:
    here = master.to(values.device)
    master.copy_(torch.where(here.to(values.dtype) == values, here, values.to(master.dtype)))


class UpdateBucket:
    """Some consecutive slices, and the wrapped optimizer of this rank's parts of them.

    Each bucket has an optimizer of its own, so that its parameters can be sent while the next bucket is updated.

    Attributes:
        slices: Numbers of the slices.
        parts: This rank's parts.
        inner: The wrapped optimizer; None if this rank has no part.
    """

    def __init__(
        self,
        slices: Sequence[int],
        parts: Sequence[Part],
        groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        state_dtype: torch.dtype | None,
    ) -> None:
        """Make the wrapped optimizer.

        Args:
            slices: Numbers of the slices.
            parts: This rank's parts of them.
            groups: All param groups.
            make: Makes an optimizer from param groups.
            state_dtype: dtype of element-wise state between steps; None leaves it as it is.
        """
        self.slices, self.parts = tuple(slices), list(parts)
        self._state_dtype = state_dtype
        self._numbers = sorted({part.group for part in parts})
        self.inner: torch.optim.Optimizer | None = None
        if parts:
            self.inner = make([{**hyperparameters(groups[n]), "params": self._tensors(n)} for n in self._numbers])

    def _tensors(self, group: int) -> list[Tensor]:
        return [part.tensor for part in self.parts if part.group == group]

    def take_hyperparameters(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy the hyperparameters of the users' param groups, which a scheduler may have changed."""
        for number, group in self._inner_groups():
            group.update(hyperparameters(groups[number]))

    def give_hyperparameters(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy what the wrapped optimizer may have changed back to the users' param groups."""
        for number, group in self._inner_groups():
            groups[number].update(hyperparameters(group))

    def _inner_groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if self.inner is not None:
            yield from zip(self._numbers, self.inner.param_groups, strict=True)

    def step(self) -> None:
        """Update the parts that have a gradient."""
        if self.inner is not None:
            with self._wide_state():
                self.inner.step()

    def measure(self) -> Iterator[tuple[Part, Tensor]]:
        """Run the first half of Lamb's step; see :meth:`Lamb.measure`."""
        if isinstance(self.inner, Lamb):
            with self._wide_state():
                measured = self.inner.measure()
            by_tensor = {id(part.tensor): part for part in self.parts}
            for tensor, squares in measured:
                yield by_tensor[id(tensor)], squares

    def apply(self, ratios: dict[int, Tensor]) -> None:
        """Run the second half of Lamb's step, with the trust ratio of each parameter."""
        if isinstance(self.inner, Lamb):
            with self._wide_state():
                self.inner.apply({p.tensor: ratios[p.param] for p in self.parts if p.tensor.grad is not None})

    def state_of(self, part: Part) -> dict[str, Any]:
        """Return the wrapped optimizer's state of a part; empty before the first step."""
        if self.inner is None:
            return {}
        state: dict[str, Any] = self.inner.state.get(part.tensor, {})
        return state

    def replace_state(self, part: Part, state: dict[str, Any]) -> None:
        """Put a state in place of a part's; an empty one removes it."""
        if self.inner is not None and state:
            self.inner.state[part.tensor] = state
        elif self.inner is not None:
            self.inner.state.pop(part.tensor, None)

    def move_state(self, part: Part) -> None:
        """Move the state of a part to the device of the part."""
        state = self.state_of(part)
        for name in element_state(state, part):
            state[name] = state[name].to(part.tensor.device)

    @contextmanager
    def _wide_state(self) -> Iterator[None]:
        """Inside, element-wise state has its part's dtype; outside, the dtype in which it is kept."""
        self._convert(None)
        try:
            yield
        finally:
            self._convert(self._state_dtype)

    def _convert(self, dtype: torch.dtype | None) -> None:
        if self._state_dtype is None:
            return
        for part in self.parts:
            state = self.state_of(part)
            for name in element_state(state, part):
                state[name] = state[name].to(dtype or part.tensor.dtype)


def element_state(state: dict[str, Any], part: Part) -> list[str]:
    """List the names of the state tensors that have one value per element of the part."""
    return [name for name, value in state.items() if isinstance(value, Tensor) and value.shape == part.tensor.shape]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a param group that are the wrapped optimizer's."""
    return {key: value for key, value in group.items() if key not in OWN_KEYS}
