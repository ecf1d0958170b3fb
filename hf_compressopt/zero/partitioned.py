"""Who holds which parts of the parameters: the layout of an optimizer that is shared out among the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.zero.messages import FLOAT_BYTES, Precision
from hf_compressopt.zero.options import check_parameters
from hf_compressopt.zero.partition import partition, slice_numel
from hf_compressopt.zero.reducer import GradientReducer, SliceGradients, reducers_of
from hf_compressopt.zero.shards import Piece, UpdateBucket, make_piece
from hf_compressopt.zero.torch_clipping import guard_torch_clipping

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Options of the layout; see ZeroOptimizer.

    Attributes:
        bucket_numel: Elements that are reduced, and updated, together.
        rotate: Whether the parts of slices are dealt out to the ranks in turn.
        precision: How gradients are scaled and rounded.
        overlap: Whether gradients are under way while backward goes on.
        contiguous: Whether a gradient moves to its slice at once.
        master_dtype: dtype of the master copies of 16-bit parameters.
        state_dtype: dtype in which element-wise state is kept; None is the master's.
        offload: Whether masters and states live in host memory.
    """

    bucket_numel: int
    rotate: bool
    precision: Precision
    overlap: bool
    contiguous: bool
    master_dtype: torch.dtype
    state_dtype: torch.dtype | None
    offload: bool


class PartitionedOptimizer(torch.optim.Optimizer):
    """Param groups whose parameters are cut into pieces, each updated by one rank.

    Attributes:
        communicator: The ranks.
        traffic: What was sent.
        optimizer_class: The wrapped optimizer.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        inner_options: dict[str, Any],
        layout: Layout,
        make_communicator: Callable[[torch.device, Traffic], Communicator],
    ) -> None:
        """Lay out the parameters, and make the wrapped optimizers of this rank's pieces."""
        self.optimizer_class, self._inner_options, self._layout = optimizer_class, inner_options, layout
        self.traffic = Traffic()
        self._ready = False  # False while torch's constructor adds the groups: the layout comes when all are known
        self._ranks_checked = False
        self._params: list[Tensor] = []
        self._names: list[str] = []
        self._group_of: list[int] = []
        self._place_of: list[int] = []
        self._frozen: list[tuple[int, Tensor]] = []  # number of the param group, and the parameter
        self._buckets: list[UpdateBucket] = []
        self._group_communicators: dict[int, tuple[Any, Communicator]] = {}
        template = optimizer_class([torch.zeros(1, requires_grad=True)], **inner_options)
        filled = {key: value for key, value in template.param_groups[0].items() if key not in ("params", "param_names")}
        super().__init__(params, filled)
        for number, group in enumerate(self.param_groups):
            check_parameters(group["params"], number)
        guard_torch_clipping()
        self._take_the_place_of_others()
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        self.communicator = make_communicator(device, self.traffic)
        self._reducer = GradientReducer(
            self.communicator,
            layout.precision,
            2 * FLOAT_BYTES * layout.bucket_numel,
            overlap=layout.overlap,
            contiguous=layout.contiguous,
        )
        self._ready = True
        self._take_on(range(len(self.param_groups)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. All ranks add it at the same point of the training.

        Raises:
            TypeError: For parameters of an unknown kind.
        """
        super().add_param_group(param_group)
        if not self._ready:
            return
        number = len(self.param_groups) - 1
        try:
            check_parameters(self.param_groups[number]["params"], number)
        except TypeError:
            self.param_groups.pop()
            raise
        self._take_on([number])

    def _take_the_place_of_others(self) -> None:
        """Detach the optimizers that take gradients of these parameters: the hooks of two would part them."""
        others = reducers_of(param for group in self.param_groups for param in group["params"])
        for other in others:
            other.detach()
        if others:
            logger.warning(
                "%d ZeroOptimizer(s) of some of these parameters are still alive: they get no more gradients, and "
                "their step() raises an error",
                len(others),
            )

    def _unfrozen(self) -> list[int]:
        """Numbers of the param groups that have parameters which were frozen and are not any more.

        Raises:
            TypeError: For such a parameter of a dtype or layout that is not supported.
        """
        found = sorted({number for number, param in self._frozen if param.requires_grad})
        for number in found:
            check_parameters(self.param_groups[number]["params"], number)
        return found

    def _in_order(self) -> list[int]:
        """Numbers of the parameters in the order of the param groups, wherever they were taken on."""
        return sorted(range(len(self._params)), key=lambda n: (self._group_of[n], self._place_of[n]))

    def _take_on(self, groups: Iterable[int]) -> None:
        """Lay out the trainable parameters of some param groups, and make this rank's pieces of them."""
        known = {id(param) for param in self._params}
        numbers: list[int] = []
        for group_number in groups:
            group = self.param_groups[group_number]
            given = group.get("param_names", [f"group{group_number}.{i}" for i in range(len(group["params"]))])
            for place, (param, name) in enumerate(zip(group["params"], given, strict=True)):
                if param.requires_grad and id(param) not in known:
                    known.add(id(param))
                    numbers.append(len(self._params))
                    self._params.append(param)
                    self._names.append(name)
                    self._group_of.append(group_number)
                    self._place_of.append(place)
        self._frozen = [
            (number, param)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if id(param) not in known
        ]
        cuts = self._cut(numbers)
        first = len(self._reducer.slices)
        self._reducer.add([self._params[n] for n in numbers], [self._names[n] for n in numbers], cuts)
        for together in _in_buckets(cuts, self._layout.bucket_numel):
            self._buckets.append(self._update_bucket([first + index for index in together]))
        self._ranks_checked = False

    def _cut(self, numbers: list[int]) -> list[SliceGradients]:
        """Slices of the parameters that travel together: same ranks, dtype and device; in the order of backward."""
        streams: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
        for number in reversed(numbers):
            param = self._params[number]
            ranks = id(self._communicator_of(self._group_of[number]))
            streams.setdefault((ranks, param.dtype, param.device), []).append(number)
        cuts: list[tuple[int, SliceGradients]] = []
        for (_, dtype, device), members in streams.items():
            communicator = self._communicator_of(self._group_of[members[0]])
            sent = self._layout.precision.sent or dtype
            kept = self._layout.precision.kept or dtype
            sizes = [(number, self._params[number].numel()) for number in members]
            length = slice_numel(self._layout.bucket_numel, communicator.world_size)
            for cut in partition(sizes, length, communicator.world_size, rotate=self._layout.rotate):
                last_in_backward = min(cut.places)
                cuts.append(
                    (last_in_backward, SliceGradients(cut, communicator, sent, kept, device, self._layout.offload))
                )
        return [gradients for _, gradients in sorted(cuts, key=lambda entry: -entry[0])]

    def _update_bucket(self, slices: list[int]) -> UpdateBucket:
        pieces = []
        for number in slices:
            gradients = self._reducer.slices[number]
            for span in gradients.cut.parts[gradients.communicator.rank]:
                param, group = self._params[span.param], self._group_of[span.param]
                pieces.append(make_piece(span, number, group, param, self._layout.master_dtype, self._layout.offload))
        return UpdateBucket(slices, pieces, self.param_groups, self._make_inner, self._layout.state_dtype)

    def _make_inner(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.optimizer_class(groups, **self._inner_options)

    def _communicator_of(self, group_number: int) -> Communicator:
        process_group = self.param_groups[group_number].get("process_group")
        if process_group is None:
            return self.communicator
        kept = self._group_communicators.get(id(process_group))
        if kept is None:
            made = self._torch_communicator(process_group, self.communicator.device)
            kept = self._group_communicators[id(process_group)] = (process_group, made)
        return kept[1]

    def _torch_communicator(self, process_group: dist.ProcessGroup, device: torch.device) -> Communicator:
        return TorchCommunicator(process_group, device=device, traffic=self.traffic)

    @property
    def trainable_parameters(self) -> list[Tensor]:
        """The parameters that are partitioned, group by group."""
        return [self._params[number] for number in self._in_order()]

    def pieces(self) -> Iterator[tuple[UpdateBucket, Piece]]:
        """This rank's pieces of the parameters, and the buckets in which they are updated."""
        for bucket in self._buckets:
            for piece in bucket.pieces:
                yield bucket, piece

    def _follow_parameters(self) -> None:
        """Look at the parameters anew, if a model was moved or loaded after its optimizer was made."""
        for bucket, piece in self.pieces():
            if piece.follow(self._params[piece.param]):
                bucket.move_state(piece)
        self._reducer.follow_parameters()

    def _is_of(self, group: int, communicator: Communicator) -> bool:
        return self._communicator_of(group) is communicator

    def _communicators(self) -> list[Communicator]:
        """The communicator of all ranks, and those of groups that have their own."""
        return [self.communicator, *(communicator for _, communicator in self._group_communicators.values())]


def _in_buckets(cuts: list[SliceGradients], bucket_numel: int) -> Iterator[list[int]]:
    """Runs of consecutive slices that are about as long as a bucket."""
    together: list[int] = []
    numel = 0
    for index, gradients in enumerate(cuts):
        if together and numel + gradients.cut.numel > bucket_numel:
            yield together
            together, numel = [], 0
        together.append(index)
        numel += gradients.cut.numel
    if together:
        yield together
