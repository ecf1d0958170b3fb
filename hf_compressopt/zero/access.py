"""Full-precision values, state and gradients of single parameters: whole, or this rank's elements of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.zero.averages import GradientAverages
from hf_compressopt.zero.config import ZeroConfig, require_accelerator
from hf_compressopt.zero.parameters import PartitionedParameters, TrainedParameter
from hf_compressopt.zero.parts import Part, UpdateBucket, element_state
from hf_compressopt.zero.reducer import in_host_memory, write_span
from hf_compressopt.zero.update import share_masters

Mine = Sequence[tuple[UpdateBucket, Part]]  # this rank's parts of one parameter


class AccessByParameter:
    """Methods of a ZeroOptimizer that read and write single parameters, by parameter or name.

    All ranks that hold copies of the parameter call the ``full`` methods, with the same values. The ``local`` ones
    concern this rank's elements alone: a tensor [n] of them in their order, empty if there are none.

    Attributes:
        config: The options.
        partition: The parameters.
    """

    config: ZeroConfig
    param_groups: list[dict[str, Any]]
    partition: PartitionedParameters
    _averages: GradientAverages
    _states_are_away: bool

    @abstractmethod
    def finish_gradients(self) -> Tensor:
        """Send the rest of the gradients, and agree on the norm."""

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """List names of the trainable parameters, per group: ``names`` in their order, or torch's param_names.

        Raises:
            ValueError: If their number is not that of the trainable parameters, or one occurs twice.
        """
        return self.partition.names_by_group(names, len(self.param_groups))

    @property
    def trainable_parameters(self) -> list[Tensor]:
        """The parameters that are partitioned, in the order of the param groups."""
        return [self.partition.tensors[number] for number in self.partition.in_order()]

    # -- parameters ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_full_param(self, which: Tensor | str) -> Tensor:
        """Return the parameter in full precision (its master copy if it has one), as a new tensor. All ranks call.

        Raises:
            KeyError: If it is not a trainable parameter of this optimizer, as in all methods of this kind.
        """
        self.partition.follow()
        known, mine = self._find(which)
        return _whole(known, [(part, part.tensor) for _, part in mine])

    @torch.no_grad()
    def set_full_param(self, which: Tensor | str, value: Any) -> None:
        """Set the parameter and its master copy. All ranks call.

        Raises:
            ValueError: For a value of another shape.
        """
        known, mine = self._find(which)
        value = _checked(known.tensor, value)
        known.tensor.copy_(value)
        for _, part in mine:
            part.follow(known.tensor)
            part.tensor.copy_(_cut(value, part))

    def get_local_param(self, which: Tensor | str) -> Tensor:
        """Return this rank's elements [n] of the parameter in full precision, as a new tensor."""
        self.partition.follow()
        known, mine = self._find(which)
        return _joined(known, [part.tensor for _, part in mine])

    @torch.no_grad()
    def set_local_param(self, which: Tensor | str, value: Tensor) -> None:
        """Set this rank's elements [n] of the parameter; other ranks get them in the next step.

        With ``param_compression`` the next steps bring them to all ranks alike, this one too.
        """
        known, mine = self._find(which)
        for _, part, values in _split(known, mine, value):
            if part.is_ahead:
                part.follow(known.tensor)
                part.tensor.copy_(values)
                continue
            part.tensor.copy_(values)
            write_span(known.tensor, part.span.start, part.span.stop, values)

    @contextmanager
    def masters_in_parameters(self) -> Iterator[None]:
        """Set the parameters, inside the block, to their rounded masters, as a saved model has them. All ranks call.

        With ``param_compression`` the parameters that a model computes with lag behind the masters by less than a step.
        At the end they are as before, bit for bit, whatever was written inside. They are copied for that time. Without
        ``param_compression`` nothing happens.
        """
        if not self.partition.has_replicas or self.partition.holds_masters:
            yield
            return
        self.partition.follow()
        restore = self.partition.replicas_restorer()
        self.partition.holds_masters = True
        try:
            share_masters(self.partition)
            yield
        finally:
            restore()
            self.partition.holds_masters = False

    def settle_parameters(self) -> None:
        """Make the parameters what their masters round to, for good: later code may run on one rank. All ranks call."""
        if self.partition.has_replicas:
            self.partition.follow()
            share_masters(self.partition)

    # -- state --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_full_state(self, which: Tensor | str, name: str) -> Tensor:
        """Return a state tensor, such as "exp_avg", of the parameter's shape; or a count, []. All ranks call.

        Raises:
            KeyError: If there is no such state. The error lists the names that exist: none before the first step.
        """
        known, mine = self._find(which)
        kinds: dict[str, bool] = {}
        for bucket, part in mine:
            state = bucket.state_of(part)
            kinds |= {key: key in element_state(state, part) for key, value in state.items() if value is not None}
        counts = [float(bucket.state_of(part)[name]) for bucket, part in mine if kinds.get(name) is False]
        everyone = known.communicator.all_gather_object([kinds, counts[:1]])
        found = {key: kind for theirs, _ in everyone for key, kind in theirs.items()}
        if name not in found:
            raise KeyError(f"{known.name} has no state {name!r}; it has {sorted(found)}")
        if not found[name]:
            return torch.tensor(next(counts[0] for _, counts in everyone if counts))
        return _whole(known, [(part, bucket.state_of(part)[name].to(known.tensor.device)) for bucket, part in mine])

    @torch.no_grad()
    def set_full_state(self, which: Tensor | str, name: str, value: Any) -> None:
        """Set a state tensor of the parameter. All ranks call.

        Raises:
            KeyError: If this rank's part has no such state, as before the first step.
            ValueError: For a value of another shape.
        """
        known, mine = self._find(which)
        for bucket, part in mine:
            state = _state_with(known, bucket, part, name)
            if name in element_state(state, part):
                state[name].copy_(_cut(_checked(known.tensor, value), part))
            elif isinstance(state[name], Tensor):
                state[name].copy_(torch.as_tensor(value))
            else:
                state[name] = type(state[name])(value)

    def get_local_state(self, which: Tensor | str, name: str) -> Tensor:
        """Return this rank's elements [n] of a state tensor, as a new tensor.

        Raises:
            KeyError: If there is no such state.
        """
        known, mine = self._find(which)
        return _joined(known, [_state_with(known, bucket, part, name)[name] for bucket, part in mine])

    @torch.no_grad()
    def set_local_state(self, which: Tensor | str, name: str, value: Tensor) -> None:
        """Set this rank's elements [n] of a state tensor.

        Raises:
            KeyError: If there is no such state.
        """
        known, mine = self._find(which)
        for bucket, part, values in _split(known, mine, value):
            _state_with(known, bucket, part, name)[name].copy_(values)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_full_grad(self, which: Tensor | str) -> Tensor | None:
        """Return the average gradient of the coming step, unscaled, and clipped if it has been. All ranks call.

        Returns:
            A new tensor of the parameter's shape; None if no rank had a gradient.
        """
        self.finish_gradients()
        known, mine = self._find(which)
        if not self.partition.reducer.present[self.partition.number_of(which)]:
            return None
        return _whole(known, [(part, self._grad(part)) for _, part in mine])

    @torch.no_grad()
    def set_full_grad(self, which: Tensor | str, value: Any) -> None:
        """Replace the average gradient of the parameter. All ranks call.

        Raises:
            ValueError: For a value of another shape.
        """
        self.finish_gradients()
        known, mine = self._find(which)
        value = _checked(known.tensor, value)
        for _, part in mine:
            self._average(part).copy_(_cut(value, part) / self._averages.factor)
        self._averages.was_set(self.partition.number_of(which))

    def get_local_grad(self, which: Tensor | str) -> Tensor:
        """Return this rank's elements [n] of the average gradient, as a new tensor. All ranks call."""
        self.finish_gradients()
        known, mine = self._find(which)
        return _joined(known, [self._grad(part) for _, part in mine])

    @torch.no_grad()
    def set_local_grad(self, which: Tensor | str, value: Tensor) -> None:
        """Set this rank's elements [n] of the average gradient. All ranks call, each with its own."""
        self.finish_gradients()
        known, mine = self._find(which)
        for _, part, values in _split(known, mine, value):
            self._average(part).copy_(values / self._averages.factor)
        self._averages.was_set(self.partition.number_of(which))

    # -- moving states ------------------------------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Move state and master copies to page-locked host memory, until :meth:`reload_states` or the next step.

        Raises:
            ValueError: If there is no accelerator whose memory could be saved.
        """
        require_accelerator("offload_states")
        self._move_states(to_host=True)

    def reload_states(self) -> None:
        """Undo :meth:`offload_states`: each state returns to the device of its parameter."""
        if not self.config.offload:
            self._move_states(to_host=False)

    @torch.no_grad()
    def _move_states(self, *, to_host: bool) -> None:
        for bucket, part in self.partition.parts():
            device = self.partition.tensors[part.param].device
            if not part.direct:
                part.tensor.data = in_host_memory(part.tensor) if to_host else part.tensor.to(device)
            state = bucket.state_of(part)
            for name in element_state(state, part):
                state[name] = in_host_memory(state[name]) if to_host else state[name].to(device)
        self._states_are_away = to_host

    # -- elements -----------------------------------------------------------------------------------------------------

    def _find(self, which: Tensor | str) -> tuple[TrainedParameter, Mine]:
        number = self.partition.number_of(which)
        return self.partition.known[number], self.partition.parts_of(number)

    def _average(self, part: Part) -> Tensor:
        return self.partition.reducer.slices[part.slice].settable_average_of(part.span)

    def _grad(self, part: Part) -> Tensor:
        return self._average(part).float() * self._averages.factor


def _whole(known: TrainedParameter, pieces: Sequence[tuple[Part, Tensor]]) -> Tensor:
    """Join the ranks' parts of a parameter: float32 or float64, of its shape."""
    param, communicator = known.tensor, known.communicator
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    flat = torch.zeros(param.numel(), dtype=dtype, device=param.device)
    for part, values in pieces:
        flat[part.span.start : part.span.stop] = values
    bits = flat.view(torch.int32 if dtype == torch.float32 else torch.int64)  # a sum with zeros keeps these exactly
    with communicator.traffic.paused():
        communicator.all_reduce(bits).wait()
    whole: Tensor = flat.view(param.shape)
    return whole


def _checked(param: Tensor, value: Any) -> Tensor:
    given: Tensor = torch.as_tensor(value)
    if given.shape != param.shape:
        raise ValueError(f"the value must have the parameter's shape {tuple(param.shape)}, got {tuple(given.shape)}")
    return given


def _cut(value: Tensor, part: Part) -> Tensor:
    cut: Tensor = value.reshape(-1)[part.span.start : part.span.stop]
    return cut


def _joined(known: TrainedParameter, pieces: Sequence[Tensor]) -> Tensor:
    device = known.tensor.device
    return torch.cat([piece.detach().to(device) for piece in pieces]) if pieces else torch.empty(0, device=device)


def _split(known: TrainedParameter, mine: Mine, value: Tensor) -> Iterator[tuple[UpdateBucket, Part, Tensor]]:
    """Cut a tensor of this rank's elements into its parts."""
    sizes = [part.span.numel for _, part in mine]
    if value.numel() != sum(sizes):
        raise ValueError(f"this rank has {sum(sizes)} elements of {known.name}, got {value.numel()}")
    values = torch.split(value.reshape(-1), sizes) if mine else ()
    return ((bucket, part, piece) for (bucket, part), piece in zip(mine, values, strict=True))


def _state_with(known: TrainedParameter, bucket: UpdateBucket, part: Part, name: str) -> dict[str, Any]:
    state = bucket.state_of(part)
    if name not in state:
        raise KeyError(f"{known.name} has no state {name!r}; it has {sorted(state)}")
    return state
