"""Full-precision values, state and gradients of single parameters: whole, or this rank's part of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_compressopt.zero.messages import in_host_memory, write_span
from hf_compressopt.zero.options import require_accelerator
from hf_compressopt.zero.shards import Piece, UpdateBucket, element_state
from hf_compressopt.zero.state import ZeroState

Parts = list[tuple[int, Tensor]]  # where each part begins in the flattened parameter, and the part


class ZeroAccess(ZeroState):
    """Reading and writing by parameter or name.

    The ``full`` methods are called by all ranks that hold copies of the parameter, with the same values; the ``local``
    ones concern this rank's elements only, one after another in a tensor [elements], empty where it has none.
    """

    def _number(self, which: Tensor | str) -> int:
        for number, (param, name) in enumerate(zip(self._params, self._names, strict=True)):
            if which is param or (isinstance(which, str) and which == name):
                return number
        known = f"legal are {', '.join(self._names[:8])}, ..." if isinstance(which, str) else "it has no state here"
        what = repr(which) if isinstance(which, str) else f"a tensor of shape {tuple(which.shape)}"
        raise KeyError(f"{what} is no trainable parameter of this optimizer: {known}")

    def _mine(self, number: int) -> list[tuple[UpdateBucket, Piece]]:
        mine = [(bucket, piece) for bucket, piece in self.pieces() if piece.param == number]
        return sorted(mine, key=lambda entry: entry[1].span.start)

    def _whole(self, number: int, parts: Parts) -> Tensor:
        """Put the ranks' parts together: float32 (float64 where they are), shaped like the parameter."""
        param = self._params[number]
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        flat = torch.zeros(param.numel(), dtype=dtype, device=param.device)
        for start, part in parts:
            flat[start : start + part.numel()] = part
        bits = flat.view(torch.int32 if dtype == torch.float32 else torch.int64)  # a sum with zeros keeps these exactly
        communicator = self._communicator_of(self._group_of[number])
        with self.traffic.paused():
            communicator.all_reduce(bits).wait()
        whole: Tensor = flat.view(param.shape)
        return whole

    def _cut_to(self, number: int, value: Any, piece: Piece) -> Tensor:
        shape = self._params[number].shape
        value = torch.as_tensor(value)
        if value.shape != shape:
            raise ValueError(f"the value must have the parameter's shape {tuple(shape)}, got {tuple(value.shape)}")
        part: Tensor = value.reshape(-1)[piece.span.start : piece.span.stop]
        return part

    # -- parameters ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_full_param(self, which: Tensor | str) -> Tensor:
        """The parameter in full precision (its master copy where there is one), as a new tensor. All ranks call."""
        self._follow_parameters()
        number = self._number(which)
        return self._whole(number, [(piece.span.start, piece.tensor) for _, piece in self._mine(number)])

    @torch.no_grad()
    def set_full_param(self, which: Tensor | str, value: Any) -> None:
        """Set the parameter and its master copy. All ranks call.

        Raises:
            ValueError: For a value of another shape.
        """
        number = self._number(which)
        param = self._params[number]
        value = torch.as_tensor(value)
        if value.shape != param.shape:
            raise ValueError(
                f"the value must have the parameter's shape {tuple(param.shape)}, got {tuple(value.shape)}"
            )
        param.copy_(value)
        for _, piece in self._mine(number):
            piece.follow(param)
            piece.tensor.copy_(self._cut_to(number, value, piece))

    def get_local_param(self, which: Tensor | str) -> Tensor:
        """This rank's elements of the parameter in full precision, as a new tensor."""
        self._follow_parameters()
        number = self._number(which)
        return self._joined(number, [piece.tensor for _, piece in self._mine(number)])

    @torch.no_grad()
    def set_local_param(self, which: Tensor | str, value: Tensor) -> None:
        """Set this rank's elements of the parameter; other ranks see them after the next step."""
        number = self._number(which)
        for (_, piece), part in self._dealt_out(number, value):
            piece.tensor.copy_(part)
            write_span(self._params[number], piece.span.start, piece.span.stop, part)

    # -- state --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_full_state(self, which: Tensor | str, name: str) -> Tensor:
        """A state tensor of the parameter, such as "exp_avg", shaped like it; or a count, []. All ranks call.

        Raises:
            KeyError: If there is no such state: the names that there are, none before the first step, are in the error.
        """
        number = self._number(which)
        mine = self._mine(number)
        kinds: dict[str, bool] = {}
        for bucket, piece in mine:
            state = bucket.state_of(piece)
            kinds |= {key: key in element_state(state, piece) for key, value in state.items() if value is not None}
        values = [float(bucket.state_of(piece)[name]) for bucket, piece in mine if kinds.get(name) is False]
        communicator = self._communicator_of(self._group_of[number])
        everyone = communicator.all_gather_object([kinds, values[:1]])
        found = {key: kind for theirs, _ in everyone for key, kind in theirs.items()}
        if name not in found:
            raise KeyError(f"{self._names[number]} has no state {name!r}; it has {sorted(found)}")
        if found[name]:
            rows = ((piece.span.start, bucket.state_of(piece)) for bucket, piece in mine)
            return self._whole(number, [(start, state[name].to(self._params[number].device)) for start, state in rows])
        return torch.tensor(next(values[0] for _, values in everyone if values))

    @torch.no_grad()
    def set_full_state(self, which: Tensor | str, name: str, value: Any) -> None:
        """Set a state tensor of the parameter that it has already. All ranks call.

        Raises:
            KeyError: If this rank's part has no such state, as before the first step.
            ValueError: For a value of another shape.
        """
        number = self._number(which)
        for bucket, piece in self._mine(number):
            state = self._state_with(bucket, piece, name)
            if name in element_state(state, piece):
                state[name].copy_(self._cut_to(number, value, piece))
            elif isinstance(state[name], Tensor):
                state[name].copy_(torch.as_tensor(value))
            else:
                state[name] = type(state[name])(value)

    def get_local_state(self, which: Tensor | str, name: str) -> Tensor:
        """This rank's elements of a state tensor, as a new tensor.

        Raises:
            KeyError: If there is no such state.
        """
        number = self._number(which)
        return self._joined(
            number, [self._state_with(bucket, piece, name)[name] for bucket, piece in self._mine(number)]
        )

    @torch.no_grad()
    def set_local_state(self, which: Tensor | str, name: str, value: Tensor) -> None:
        """Set this rank's elements of a state tensor that there is.

        Raises:
            KeyError: If there is no such state.
        """
        for (bucket, piece), part in self._dealt_out(self._number(which), value):
            self._state_with(bucket, piece, name)[name].copy_(part)

    def _state_with(self, bucket: UpdateBucket, piece: Piece, name: str) -> dict[str, Any]:
        state = bucket.state_of(piece)
        if name not in state:
            raise KeyError(f"{self._names[piece.param]} has no state {name!r}; it has {sorted(state)}")
        return state

    # -- gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_full_grad(self, which: Tensor | str) -> Tensor | None:
        """The average gradient of the coming step, unscaled and clipped as far as it has been. All ranks call.

        Returns:
            A new tensor shaped like the parameter; None where no rank had a gradient.
        """
        self.finish_gradients()
        number = self._number(which)
        if not self._reducer.present[number]:
            return None
        return self._whole(
            number, [(p.span.start, self._average(p).float() * self._factor) for _, p in self._mine(number)]
        )

    @torch.no_grad()
    def set_full_grad(self, which: Tensor | str, value: Any) -> None:
        """Put another average gradient in the place of the parameter's. All ranks call.

        Raises:
            ValueError: For a value of another shape.
        """
        self.finish_gradients()
        number = self._number(which)
        for _, piece in self._mine(number):
            self._average(piece).copy_(self._cut_to(number, value, piece) / self._factor)
        self._grad_was_set(number)

    def get_local_grad(self, which: Tensor | str) -> Tensor:
        """This rank's elements of the average gradient, as a new tensor. All ranks call."""
        self.finish_gradients()
        number = self._number(which)
        return self._joined(number, [self._average(p).float() * self._factor for _, p in self._mine(number)])

    @torch.no_grad()
    def set_local_grad(self, which: Tensor | str, value: Tensor) -> None:
        """Set this rank's elements of the average gradient. All ranks call, each with its own."""
        self.finish_gradients()
        number = self._number(which)
        for (_, piece), part in self._dealt_out(number, value):
            self._average(piece).copy_(part / self._factor)
        self._grad_was_set(number)

    def _average(self, piece: Piece) -> Tensor:
        gradients = self._reducer.slices[piece.slice]
        if gradients.average is None:
            size = gradients.cut.part_numel
            gradients.average = torch.zeros(size, dtype=gradients.kept_dtype, device=gradients.device)
        return gradients.average[piece.span.offset : piece.span.offset + piece.span.numel]

    def _grad_was_set(self, number: int) -> None:
        self._reducer.present[number] = True
        self._norm_of_pass = -1  # the norm is another one

    # -- parts --------------------------------------------------------------------------------------------------------

    def _joined(self, number: int, parts: list[Tensor]) -> Tensor:
        device = self._params[number].device
        return torch.cat([part.detach().to(device) for part in parts]) if parts else torch.empty(0, device=device)

    def _dealt_out(self, number: int, value: Tensor) -> list[tuple[tuple[UpdateBucket, Piece], Tensor]]:
        mine = self._mine(number)
        sizes = [piece.span.numel for _, piece in mine]
        if value.numel() != sum(sizes):
            raise ValueError(f"this rank has {sum(sizes)} elements of {self._names[number]}, got {value.numel()}")
        return list(zip(mine, torch.split(value.reshape(-1), sizes), strict=True)) if mine else []

    # -- states out of the way ----------------------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Move state and master copies to page-locked host memory, until :meth:`reload_states` or the next step.

        Raises:
            ValueError: If there is no accelerator whose memory could be saved.
        """
        require_accelerator("offload_states")
        self._move_states(away=True)

    def reload_states(self) -> None:
        """Undo :meth:`offload_states`."""
        if not self._layout.offload:
            self._move_states(away=False)

    @torch.no_grad()
    def _move_states(self, *, away: bool) -> None:
        """Move state and master copies to host memory, or each to where its parameter is."""
        for bucket, piece in self.pieces():
            device = self._params[piece.param].device
            if not piece.direct:
                piece.tensor.data = in_host_memory(piece.tensor) if away else piece.tensor.to(device)
            state = bucket.state_of(piece)
            for name in element_state(state, piece):
                state[name] = in_host_memory(state[name]) if away else state[name].to(device)
        self._states_are_away = away
