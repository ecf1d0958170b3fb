"""The trainable parameters of a ZeroOptimizer: cut into slices, with this rank's parts in buckets, and updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives import exchange
from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.collectives.exchange import Pipeline, in_runs
from hf_compressopt.collectives.topology import with_topology
from hf_compressopt.collectives.torch_dist import TorchCommunicator, make_communicator
from hf_compressopt.flat import FLOAT_BYTES, joined
from hf_compressopt.kernels.memory import numbers_on
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.math import bit_sum, trust_ratio
from hf_compressopt.optim.options import plain_group, plain_value
from hf_compressopt.zero.config import ZeroConfig, check_parameters
from hf_compressopt.zero.exact import ExactParameters
from hf_compressopt.zero.parts import Part, TrainedParameter, UpdateBucket, hyperparameters, partition
from hf_compressopt.zero.reducer import GradientReducer, LossScale, SliceGradients, gather_parameters, send_differences

#: Hyperparameters that schedulers change.
_SCHEDULED = ("lr", "weight_decay", "betas", "momentum")


class PartitionedParameters:
    """Parameters by number, in the order in which they were added, and everything that is laid out over them."""

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
        self.config, (self.optimizer_class, self.inner_options) = config, inner
        device = next((param.device for group in groups for param in group["params"]), torch.device("cpu"))
        flat = make_communicator(config.transport, process_group, device=device, traffic=traffic)
        self.communicator: Communicator = with_topology(flat, config.levels)
        # the ranks that share one copy of the model
        self.model_parallel = None if model_parallel_group is None else self._communicator(model_parallel_group)
        self._by_group: dict[dist.ProcessGroup | None, Communicator] = {None: self.communicator}
        self.tensors: list[Tensor] = []
        self.buckets: list[UpdateBucket] = []  # this rank's parts, in the order of the slices
        self.reducer = GradientReducer(self.communicator, config, loss_scale)
        self.known = self.reducer.known
        self._in_order: list[int] = []
        self._frozen: dict[int, tuple[int, Tensor]] = {}  # by id: number of the param group, and the parameter
        self._in_groups: dict[int, list[Tensor]] = {}  # the parameters that each param group had when it was added
        self._ranks_checked = False  # by check_ranks_agree(); not after a load
        self.bits_per_parameter: float | None = None  # of the exact parameters in the last step
        self._holds_masters = False  # the parameters are the masters for now, and not the replicas that the ranks train
        self.add(groups, range(len(groups)))

    def _communicator(self, process_group: dist.ProcessGroup) -> Communicator:
        return TorchCommunicator(process_group, device=self.communicator.device, traffic=self.communicator.traffic)

    def communicators(self) -> list[Communicator]:
        return list(self._by_group.values())

    # -- layout -------------------------------------------------------------------------------------------------------

    def add(self, groups: Sequence[dict[str, Any]], numbers: Iterable[int]) -> None:
        """Lay out the trainable parameters that are not known yet of the param groups of these numbers."""
        added, known = list[TrainedParameter](), {id(tensor) for tensor in self.tensors}
        for number in numbers:
            self._in_groups[number] = list(groups[number]["params"])
            for found in self._in_group(groups[number], number):
                if not found.tensor.requires_grad:
                    self._frozen[id(found.tensor)] = (number, found.tensor)
                elif id(found.tensor) not in known:
                    known.add(id(found.tensor))
                    self._frozen.pop(id(found.tensor), None)
                    added.append(found)
        self.tensors += [found.tensor for found in added]
        self.known += added
        self._in_order = sorted(range(len(self.known)), key=lambda n: (self.known[n].group, self.known[n].place))
        slices, before = self._cut(range(len(self.known) - len(added), len(self.known))), len(self.reducer.slices)
        self.reducer.add([found.tensor for found in added], slices)
        self._add_buckets(range(before, before + len(slices)), groups)
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
        """Cut parameters of the same ranks, dtype and device into slices, in the order of backward."""
        streams: dict[tuple[int, torch.dtype, torch.device, bool], list[int]] = {}
        config, found = self.config, list[SliceGradients]()
        # parameters of one dimension, such as biases, are few and sensitive: they are sent in full precision
        small = config.grad_form is not None or config.param_form is not None
        for number in sorted(numbers, reverse=True):
            tensor, communicator = self.tensors[number], self.known[number].communicator
            key = id(communicator), tensor.dtype, tensor.device, small and tensor.dim() > 1
            streams.setdefault(key, []).append(number)
        for (_, dtype, device, compressed), members in streams.items():
            communicator = self.known[members[0]].communicator
            compressed = compressed and communicator.world_size > 1
            sizes = [(number, self.tensors[number].numel()) for number in members]
            cuts = partition(sizes, config.reduce_numel, communicator.topology, communicator.name)
            if not compressed:  # those have blocks of their own
                cuts = list(map(joined, in_runs(cuts, lambda cut: cut.numel, communicator)))
            forms = (config.grad_form, config.param_form) if compressed else (None, None)
            dtypes = config.sent or dtype, config.kept or dtype
            found += [SliceGradients(cut, communicator, *dtypes, device, config.offload, *forms) for cut in cuts]
        return sorted(found, key=lambda gradients: -min(gradients.cut.spans))  # the last gradient of each in backward

    def _add_buckets(self, slices: Iterable[int], groups: Sequence[dict[str, Any]]) -> None:
        most, room = max(self.config.reduce_numel, exchange.TOGETHER), 0
        runs: list[list[int]] = []
        for number in slices:
            room -= self.reducer.slices[number].cut.numel
            if room < 0:
                runs.append([])
                room = most - self.reducer.slices[number].cut.numel
            runs[-1].append(number)
        config, inner = self.config, partial(self.optimizer_class, **self.inner_options)
        for run in runs:
            parts = []
            for number in run:
                gradients = self.reducer.slices[number]
                for span in gradients.cut.chunks[gradients.communicator.rank]:
                    parts.append(Part(span, number, self.known[span.index], config, gradients.param_form is not None))
            self.buckets.append(UpdateBucket(run, parts, groups, inner, config.kept_state))

    # -- looking at the parameters ------------------------------------------------------------------------------------

    def parts(self) -> Iterator[Part]:
        return chain.from_iterable(bucket.parts for bucket in self.buckets)

    def find(self, which: Tensor | str) -> tuple[int, TrainedParameter, list[Part]]:
        """Find a parameter, its number, and this rank's parts of it in the order of its elements; or a KeyError."""
        for number, known in enumerate(self.known):
            if which is known.tensor or (isinstance(which, str) and which == known.name):
                mine = [part for part in self.parts() if part.param == number]
                return number, known, sorted(mine, key=lambda part: part.span.start)
        legal = ", ".join(known.name for known in self.known[:8])
        what = repr(which) if isinstance(which, str) else f"a tensor of shape {tuple(which.shape)}"
        raise KeyError(f"{what} is not a trainable parameter of this optimizer: legal are {legal}, ...")

    def in_order(self) -> list[int]:
        """List the numbers of the parameters in the order of the param groups, whenever they were added."""
        return self._in_order

    def unfrozen(self, groups: Sequence[dict[str, Any]]) -> list[int]:
        """List the numbers of the param groups that have parameters which were frozen and no longer are, checked.

        Raises a ValueError if other code has put parameters into the param groups, or has taken some out.
        """
        known, now = list(self._in_groups.values()), [group["params"] for group in groups]
        alike = list(map(len, known)) == list(map(len, now))
        if not alike or any(map(is_not, chain.from_iterable(known), chain.from_iterable(now))):
            raise ValueError(
                "the param groups have other parameters than those of which the ZeroOptimizer has shared out the "
                "state: add parameters by add_param_group(), leave some out by requires_grad_(False), and make the "
                "optimizer anew for a model whose parameters were replaced"
            )
        found = sorted({number for number, tensor in self._frozen.values() if tensor.requires_grad})
        for number in found:
            check_parameters(groups[number], number, self.config)
        return found

    def follow(self) -> None:
        """Follow the parameters: a model may be moved or loaded after its optimizer was made."""
        if self._holds_masters:
            return
        later: list[tuple[Tensor, Callable[[], object]]] = []  # of parts in host memory: one wait for all of them
        for part in self.parts():
            if part.follow(later):
                part.move_state()
        for device in {flag.device for flag, _ in later}:
            mine = [row for row in later if row[0].device == device]
            for written, (_, take_over) in zip(torch.stack([flag for flag, _ in mine]).tolist(), mine, strict=True):
                if written:
                    take_over()
        self.reducer.follow()

    def check_ranks_again(self) -> None:
        """Compare the ranks before the next step, as before the first one: a state was loaded."""
        self._ranks_checked = False

    def check_ranks_agree(self, steps: int, options: Sequence[str], groups: Sequence[dict[str, Any]]) -> None:
        """Check once before the first step that all ranks have the same layout, options and parameters."""
        self.reducer.check_layout()
        if self._ranks_checked:
            return
        rows = [f"{steps} steps taken", *options]
        if steps == 0:  # later a wrapped optimizer may have changed them, on the ranks that have parts of a group
            shared = [group for group in groups if group.get("process_group") is None]
            rows += [f"param group {number} with {plain_group(group)}" for number, group in enumerate(shared)]
        self.communicator.require_equal_rows("optimizer, step, options or hyperparameters", rows)
        shared_parameters = self.reducer.numbers_of(self.communicator)
        bits = [f"{self.known[number].name} with {int(bit_sum(self.tensors[number]))}" for number in shared_parameters]
        self.communicator.require_equal_rows("the bits of their parameters (are they alike at the start?)", bits)
        self._ranks_checked = True

    def options_of_step(
        self, communicator: Communicator, groups: Sequence[dict[str, Any]], max_norm: float | None
    ) -> list[str]:
        """Return what the ranks of a communicator must have alike in every step, since other code may change it."""
        rows = [f"clip_grad_norm_({max_norm})"]
        for number, group in enumerate(groups):
            if self._by_group.get(group.get("process_group")) is communicator:
                values = {name: group[name] for name in _SCHEDULED if name in group}
                # the host would wait for a tensor on a device; the first step compares it
                known = {k: plain_value(v) for k, v in values.items() if not isinstance(v, Tensor) or v.is_cpu}
                rows.append(f"param group {number} with {known}")
        return rows

    @property
    def sends_changes(self) -> bool:
        """True if parameters are sent as their changes, bit for bit; the same on all ranks."""
        exact = ExactParameters(self.tensors, self.config)
        slices = [gradients for gradients in self.reducer.slices if gradients.param_form is None]
        return any(exact.takes(gradients.cut, gradients.communicator) for gradients in slices)

    # -- replicas -----------------------------------------------------------------------------------------------------

    @property
    def has_replicas(self) -> bool:
        """True if some parameters are replicas that may lag behind masters; the same on all ranks."""
        return any(gradients.param_form is not None for gradients in self.reducer.slices)

    def replicas_restorer(self) -> Callable[[], None]:
        """Return a function that writes the present values of the replicas back into the parameters."""
        numbers = {number for g in self.reducer.slices if g.param_form is not None for number in g.cut.spans}
        copies = {number: self.tensors[number].detach().clone() for number in numbers}

        @torch.no_grad()
        def restore() -> None:
            for number, copy in copies.items():
                self.tensors[number].copy_(copy)
            for part in self.parts():
                if part.is_ahead:
                    part.expect(part.replica)

        return restore

    @contextmanager
    def masters_lent(self) -> Iterator[None]:
        """Inside, the parameters are their rounded masters; afterwards they are as before. All ranks call."""
        if not self.has_replicas or self._holds_masters:
            yield
            return
        self.follow()
        restore = self.replicas_restorer()
        self._holds_masters = True
        try:
            self.share_masters()
            yield
        finally:
            restore()
            self._holds_masters = False

    @torch.no_grad()
    def take_written_values(self) -> None:
        """Give masters what other code has written into the parameters, if a load makes parameters of the masters.

        Else the next step takes over what is not rounded from them, after a load too.
        """
        if self.has_replicas:
            self.follow()

    def require_replicas(self, doing: str) -> None:
        if self._holds_masters:
            raise RuntimeError(f"{doing} inside masters_in_parameters(): leave the block first, it only lends masters")

    # -- the update: the parameters of one bucket are sent while the next is updated ----------------------------------

    def update(self, groups: Sequence[dict[str, Any]]) -> None:
        """Update this rank's parts with the averages, which are used up, and give all ranks the parameters."""
        self.require_replicas("step()")
        values = [hyperparameters(group) for group in groups]
        is_lamb = issubclass(self.optimizer_class, Lamb)
        ratios = self._trust_ratios(values) if is_lamb else {}
        pipeline = Pipeline(FLOAT_BYTES * self.config.gather_numel)
        in_16_bits = any(tensor.dtype.itemsize == 2 for tensor in self.tensors)
        exact = ExactParameters(self.tensors, self.config) if in_16_bits else None
        for bucket in self.buckets:
            if is_lamb:
                bucket.apply(ratios)
            else:
                bucket.take_hyperparameters(values)
                self.reducer.give_to(bucket)
                bucket.step()
            bucket.give_hyperparameters(groups, values)
            self._send(bucket, pipeline, exact)
        if exact is not None:
            exact.send(pipeline)
        pipeline.drain()
        self.bits_per_parameter = None if exact is None else exact.bits_per_parameter

    def _send(self, bucket: UpdateBucket, pipeline: Pipeline, exact: ExactParameters | None) -> None:
        """Write a bucket's parts back, drop their gradients, keep the errors, and start sending the parameters."""
        for part in bucket.parts:
            part.tensor.grad = None
        for number, mine in bucket.slices.items():
            gradients = self.reducer.slices[number]
            gradients.use_up(self.reducer.present)
            cut, communicator = gradients.cut, gradients.communicator
            if (form := gradients.param_form) is not None:
                nbytes = communicator.world_size * form.nbytes(cut.chunk_numel)
                pipeline.add(send_differences(self.tensors, mine, cut, communicator, form), nbytes)
            elif exact is not None and exact.takes(cut, communicator):
                exact.add(cut, communicator, mine)
            else:
                for part in mine:
                    part.write_back()
                self._gather(gradients, pipeline)

    def _gather(self, gradients: SliceGradients, pipeline: Pipeline) -> None:
        cut, communicator = gradients.cut, gradients.communicator
        if communicator.world_size > 1:
            nbytes = cut.numel * self.tensors[next(iter(cut.spans))].element_size()
            pipeline.add(gather_parameters(self.tensors, cut, communicator), nbytes)

    def _trust_ratios(self, values: Sequence[Mapping[str, Any]]) -> dict[int, Tensor]:
        """Run the first half of Lamb's step; one small all-reduce sums the norms of all tensors over the ranks."""
        squares = torch.zeros(len(self.known), 2, dtype=torch.float64, device=self.communicator.device)
        for bucket in self.buckets:
            bucket.take_hyperparameters(values)
            self.reducer.give_to(bucket)
            for number, square in bucket.measure():
                squares[number] += square.to(squares.device)
        for communicator in self.communicators():
            rows = numbers_on(squares.device, self.reducer.numbers_of(communicator), torch.int64)
            mine = squares.index_select(0, rows)
            communicator.all_reduce(mine).wait()
            squares.index_copy_(0, rows, mine)
        low, high = self.inner_options.get("min_coeff", 0.01), self.inner_options.get("max_coeff", 10.0)
        return {number: trust_ratio(row[0], row[1], low, high) for number, row in enumerate(squares)}

    @torch.no_grad()
    def share_masters(self) -> None:
        """Make the parameters of all ranks what the masters round to. All ranks call."""
        for part in self.parts():
            part.write_back()
        self.share_parts()

    @torch.no_grad()
    def share_parts(self) -> None:
        """Give all ranks this rank's elements of the parameters, at full precision. All ranks call."""
        pipeline = Pipeline(FLOAT_BYTES * self.config.gather_numel)
        with self.communicator.traffic.paused():
            for gradients in self.reducer.slices:
                self._gather(gradients, pipeline)
            pipeline.drain()
