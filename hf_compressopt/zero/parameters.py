"""The trainable parameters of a ZeroOptimizer: cut into slices, with this rank's parts in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.collectives.topology import with_topology
from hf_compressopt.collectives.torch_dist import TorchCommunicator, make_communicator
from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.optim.math import bit_sum
from hf_compressopt.optim.options import check_names
from hf_compressopt.zero.config import LossScale, ZeroConfig
from hf_compressopt.zero.low_bit import SliceErrors
from hf_compressopt.zero.parts import Part, UpdateBucket, partition, slice_numel
from hf_compressopt.zero.reducer import GradientReducer, SliceGradients
from hf_compressopt.zero.supported import check_parameters


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that is partitioned.

    Attributes:
        tensor: The parameter itself.
        name: Its name, or its place such as "group0.3".
        group: Number of its param group.
        place: Its place in the group, frozen parameters counted.
        communicator: The ranks that hold copies of it.
        owner: The first of these ranks if the param group has a process group of its own, or None.
        model_parallel: Whether each rank of the model-parallel group has other elements of it.
    """

    tensor: Tensor
    name: str
    group: int
    place: int
    communicator: Communicator
    owner: int | None
    model_parallel: bool


class PartitionedParameters:
    """Parameters by their numbers, in the order in which they were added, with everything that is laid out over them.

    Attributes:
        config: The options.
        communicator: The communicator of all ranks.
        model_parallel: The communicator of the ranks that share one copy of the model, or None.
        optimizer_class: The wrapped optimizer's class.
        inner_options: Its options.
        known: The parameters by number.
        tensors: Their tensors, by number.
        reducer: Sends their gradients, and keeps this rank's averages.
        buckets: This rank's parts, in the order of the slices.
        holds_masters: Whether the parameters are the masters for now, and not the replicas that the ranks train.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        config: ZeroConfig,
        traffic: Traffic,
        inner: tuple[type[torch.optim.Optimizer], dict[str, Any]],
        loss_scale: LossScale,
        *,
        process_group: dist.ProcessGroup | None,
        model_parallel_group: dist.ProcessGroup | None,
    ) -> None:
        """Make the communicators, and lay out the trainable parameters of param groups.

        Raises:
            ValueError: If the group does not have the transport, or not the topology.
            RuntimeError: If a launcher announces several ranks but torch.distributed is not initialized.
        """
        self.config, (self.optimizer_class, self.inner_options) = config, inner
        device = next((param.device for group in groups for param in group["params"]), torch.device("cpu"))
        flat = make_communicator(config.transport, process_group, device=device, traffic=traffic)
        self.communicator: Communicator = with_topology(flat, config.topology_options())
        self.model_parallel = None if model_parallel_group is None else self._communicator(model_parallel_group)
        self._by_group: dict[dist.ProcessGroup | None, Communicator] = {None: self.communicator}
        self.known: list[TrainedParameter] = []
        self.tensors: list[Tensor] = []
        self.buckets: list[UpdateBucket] = []
        self.reducer = GradientReducer(
            self.communicator,
            config.precision,
            2 * FLOAT_BYTES * config.reduce_numel,
            loss_scale,
            overlap=config.overlap_comm,
            contiguous=config.contiguous_gradients,
        )
        self._frozen: dict[int, tuple[int, Tensor]] = {}  # by id: number of the param group, and the parameter
        self._ranks_checked = self.holds_masters = False
        self.add(groups, range(len(groups)))

    def _communicator(self, process_group: dist.ProcessGroup) -> Communicator:
        return TorchCommunicator(process_group, device=self.communicator.device, traffic=self.communicator.traffic)

    def communicators(self) -> list[Communicator]:
        """List the communicator of all ranks, then those of param groups."""
        return list(self._by_group.values())

    # -- layout -------------------------------------------------------------------------------------------------------

    def add(self, groups: Sequence[dict[str, Any]], numbers: Iterable[int]) -> None:
        """Lay out the trainable parameters that are not known yet of the param groups of these numbers."""
        first, known = len(self.known), {id(tensor) for tensor in self.tensors}
        for number in numbers:
            for found in self._in_group(groups[number], number):
                if not found.tensor.requires_grad:
                    self._frozen[id(found.tensor)] = (number, found.tensor)
                elif id(found.tensor) not in known:
                    known.add(id(found.tensor))
                    self._frozen.pop(id(found.tensor), None)
                    self.known.append(found)
                    self.tensors.append(found.tensor)
        added = range(first, len(self.known))
        slices, before = self._cut(added), len(self.reducer.slices)
        self.reducer.add([(self.tensors[n], self.known[n].name) for n in added], slices)
        for together in _in_buckets(slices, self.config.reduce_numel):
            self.buckets.append(self._update_bucket([before + index for index in together], groups))
        self._ranks_checked = False

    def _in_group(self, group: dict[str, Any], number: int) -> Iterator[TrainedParameter]:
        process_group: dist.ProcessGroup | None = group.get("process_group")
        if process_group is not None and process_group not in self._by_group:
            self._by_group[process_group] = self._communicator(process_group)
        communicator = self._by_group[process_group]
        owner = None if process_group is None else dist.get_process_group_ranks(process_group)[0]
        names = group.get("param_names", [f"group{number}.{place}" for place in range(len(group["params"]))])
        split = bool(group.get("model_parallel"))
        for place, (tensor, name) in enumerate(zip(group["params"], names, strict=True)):
            yield TrainedParameter(tensor, name, number, place, communicator, owner, split)

    def _cut(self, numbers: Iterable[int]) -> list[SliceGradients]:
        """Cut parameters of the same ranks, dtype and device into slices; returned in the order of backward.

        Parameters of one dimension, such as biases, are few and sensitive: they are in slices of full precision.
        """
        streams: dict[tuple[int, torch.dtype, torch.device, bool], list[int]] = {}
        config, found = self.config, []
        small = config.grad_form is not None or config.param_form is not None
        for number in sorted(numbers, reverse=True):
            tensor, communicator = self.tensors[number], self.known[number].communicator
            key = id(communicator), tensor.dtype, tensor.device, small and tensor.dim() > 1
            streams.setdefault(key, []).append(number)
        for (_, dtype, device, compressed), members in streams.items():
            communicator = self.known[members[0]].communicator
            compressed = compressed and communicator.world_size > 1
            sizes = [(number, self.tensors[number].numel()) for number in members]
            length = slice_numel(config.reduce_numel, communicator.world_size)
            for cut in partition(sizes, length, communicator.world_size, rotate=config.round_robin_gradients):
                sent, kept = config.precision.sent or dtype, config.precision.kept or dtype
                gradients = SliceGradients(cut, communicator, sent, kept, device, config.offload)
                if compressed:
                    gradients.param_form = config.param_form
                if compressed and config.grad_form is not None:
                    nodes = communicator.topology.nodes  # as many as ranks, if the topology is flat
                    gradients.errors = SliceErrors(config.grad_form, nodes * cut.part_numel, nodes, device)
                found.append(gradients)
        return sorted(found, key=lambda gradients: -min(gradients.cut.places))  # the last gradient of each in backward

    def _update_bucket(self, slices: list[int], groups: Sequence[dict[str, Any]]) -> UpdateBucket:
        parts, config = [], self.config
        for number in slices:
            gradients = self.reducer.slices[number]
            for span in gradients.cut.parts[gradients.communicator.rank]:
                known, is_ahead = self.known[span.index], gradients.param_form is not None
                parts.append(Part.of(span, number, known.group, known.tensor, config.master, config.offload, is_ahead))
        return UpdateBucket(slices, parts, groups, self._make_inner, config.kept_state)

    def _make_inner(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.optimizer_class(groups, **self.inner_options)

    # -- looking at the parameters ------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[UpdateBucket, Part]]:
        """Iterate over this rank's parts and the buckets in which they are updated."""
        for bucket in self.buckets:
            for part in bucket.parts:
                yield bucket, part

    def find(self, which: Tensor | str) -> tuple[int, list[tuple[UpdateBucket, Part]]]:
        """Find the number of a parameter, and this rank's parts of it in the order of its elements.

        Raises:
            KeyError: If it is not a trainable parameter of this optimizer.
        """
        for number, known in enumerate(self.known):
            if which is known.tensor or (isinstance(which, str) and which == known.name):
                mine = [(bucket, part) for bucket, part in self.parts() if part.param == number]
                return number, sorted(mine, key=lambda entry: entry[1].span.start)
        if isinstance(which, str):
            legal = ", ".join(known.name for known in self.known[:8])
            raise KeyError(f"{which!r} is not a trainable parameter of this optimizer: legal are {legal}, ...")
        raise KeyError(
            f"a tensor of shape {tuple(which.shape)} is not a trainable parameter of this optimizer, "
            "which has no state for it"
        )

    def in_order(self) -> list[int]:
        """List the numbers of the parameters in the order of the param groups, whenever they were added."""
        return sorted(range(len(self.known)), key=lambda n: (self.known[n].group, self.known[n].place))

    def names_by_group(self, names: Sequence[str] | None, groups: int) -> list[list[str]]:
        """List the names of the parameters for each param group: others in their order, or their own if None.

        Raises:
            ValueError: If their number is not that of the parameters, or one occurs twice.
        """
        order = self.in_order()
        names = [self.known[number].name for number in order] if names is None else names
        check_names(names, len(self.known))
        grouped: list[list[str]] = [[] for _ in range(groups)]
        for name, number in zip(names, order, strict=True):
            grouped[self.known[number].group].append(name)
        return grouped

    def of_communicator(self, communicator: Communicator) -> list[int]:
        """List the numbers of the parameters that the ranks of a communicator hold copies of."""
        return [number for number, known in enumerate(self.known) if known.communicator is communicator]

    def unfrozen(self, groups: Sequence[dict[str, Any]]) -> list[int]:
        """List the numbers of the param groups that have parameters which were frozen and no longer are.

        Raises:
            TypeError: For such a parameter of a dtype or layout that is not supported.
        """
        found = sorted({number for number, tensor in self._frozen.values() if tensor.requires_grad})
        for number in found:
            check_parameters(groups[number]["params"], number, self.config)
        return found

    def follow(self) -> None:
        """Follow the parameters: a model may be moved or loaded after its optimizer was made."""
        if self.holds_masters:
            return
        for bucket, part in self.parts():
            if part.follow(self.tensors[part.param]):
                bucket.move_state(part)
        self.reducer.follow_parameters()

    def check_ranks_agree(self, options: Sequence[Any]) -> None:
        """Check once before the first step that all ranks have the same layout, options (by repr) and parameters.

        Raises:
            ValueError: If they differ, on all ranks.
        """
        self.reducer.check_layout()
        if self._ranks_checked:
            return
        self.communicator.require_equal("optimizer, step or options", repr(options))
        digest = sum(int(bit_sum(self.tensors[number])) for number in self.of_communicator(self.communicator))
        self.communicator.require_equal("the bits of their parameters (are they alike at the start?)", digest)
        self._ranks_checked = True

    def check_ranks_again(self) -> None:
        """Let the next :meth:`check_ranks_agree` look anew, as after a load."""
        self._ranks_checked = False

    # -- replicas -----------------------------------------------------------------------------------------------------

    @property
    def has_replicas(self) -> bool:
        """True if some parameters are replicas that may lag behind masters; the same on all ranks."""
        return any(gradients.param_form is not None for gradients in self.reducer.slices)

    def replicas_restorer(self) -> Callable[[], None]:
        """Return a function that writes the present values of the replicas back into the parameters."""
        numbers = {number for g in self.reducer.slices if g.param_form is not None for number in g.cut.places}
        copies = {number: self.tensors[number].detach().clone() for number in numbers}

        @torch.no_grad()
        def restore() -> None:
            for number, copy in copies.items():
                self.tensors[number].copy_(copy)
            for _, part in self.parts():
                if part.is_ahead:
                    part.note_replica(self.tensors[part.param])

        return restore

    def require_replicas(self, doing: str) -> None:
        """Check that the parameters are not lent masters.

        Raises:
            RuntimeError: If they are.
        """
        if self.holds_masters:
            raise RuntimeError(f"{doing} inside masters_in_parameters(): leave the block first, it only lends masters")


def _in_buckets(slices: Sequence[SliceGradients], bucket_numel: int) -> Iterator[list[int]]:
    """Group consecutive slices into runs that are about as long as a bucket."""
    together: list[int] = []
    numel = 0
    for index, gradients in enumerate(slices):
        if together and numel + gradients.cut.numel > bucket_numel:
            yield together
            together, numel = [], 0
        together.append(index)
        numel += gradients.cut.numel
    if together:
        yield together
