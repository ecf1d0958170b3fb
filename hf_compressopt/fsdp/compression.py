"""Messages of 4 or 8 bits in FSDP2: between the replicas of a model, or between the ranks that share it.

**Replicas** (a mesh of 2 dimensions). FSDP2 reduces the gradients of a unit, the parameters of one ``fully_shard``
call, among the ranks of a replica: each has its shard then. The ranks of the same place in all replicas average that
shard by (1) and (2) of :mod:`hf_compressopt.grad_compression`, where FSDP2 on a 2-D mesh has an all-reduce. All
replicas get the same bits. The errors belong to this rank's shards.

**No replicas** (a mesh of 1 dimension). (1) takes the place of FSDP2's reduce-scatter: every rank sends the gradients
of all shards, so that its worker errors are as many as the model has parameters. The owner of a shard averages in
float32, in rank order: g <- mean_r Q(u_r). FSDP2 itself gathers the parameters, in full precision.

Gradients of vectors and of small tensors are averaged in full precision in both ways: larger neighbours in a block
would round them to 0. The errors change in a step that uses the averages of a backward pass
(:mod:`hf_compressopt.collectives.feedback`), if all gradients of all shards were finite.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_compressopt import kernels
from hf_compressopt.announce import Announcement
from hf_compressopt.collectives.communicator import Traffic
from hf_compressopt.collectives.exchange import (
    BucketErrors,
    Task,
    reduce_scatter,
    run_tasks,
    summed,
)
from hf_compressopt.collectives.feedback import ErrorFeedback, HandedOut, Members, after_backward
from hf_compressopt.collectives.gradients import GradientBucket, give_errors, low_bit_buckets, runs_of
from hf_compressopt.collectives.sender import SendRecord
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.flat import SIGNS_PER_BYTE, Bucket, FlatLayout, bucket_numel_of, chunk_numel
from hf_compressopt.format.foreign import refuse_torch_checkpoint
from hf_compressopt.fsdp.beside import BesideUnits, together
from hf_compressopt.fsdp.exact import ExactGathers
from hf_compressopt.fsdp.units import Unit, units_of
from hf_compressopt.grad_compression import (
    FORMATS,
    FULL,
    GradientCompression,
    bits_of,
    check_place,
    name_of,
    scale_of,
    warn_not_finite,
)
from hf_compressopt.kernels import Average, Combination, IntegerFormat, Segment
from hf_compressopt.kernels.memory import reads_at_once
from hf_compressopt.kernels.messages import travels_in_full
from hf_compressopt.optim.math import bit_sum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


def rows_layout(numel: int, bucket_numel: int, ranks: int) -> FlatLayout:
    """Cut a row of ``numel`` elements for each rank into buckets: a bucket has the same columns of every row.

    The last bucket is padded, so that the part of each row is the chunk of its rank.
    """
    columns = max(1, bucket_numel // (SIGNS_PER_BYTE * ranks)) * SIGNS_PER_BYTE
    return FlatLayout.build([chunk_numel(numel * ranks, ranks) * ranks], columns * ranks)


def columns_of(rows: Tensor, bucket: Bucket, ranks: int) -> list[Segment]:
    """Return the elements of a bucket of :func:`rows_layout` in ``rows``, [ranks * numel]; padding has no tensor."""
    numel, begin, columns = rows.numel() // ranks, bucket.start // ranks, bucket.numel // ranks
    count, found = min(columns, numel - begin), []
    for rank in range(ranks):
        found += [Segment(rows, rank * numel + begin, count, 0), Segment(None, 0, columns - count, 0)]
    return [segment for segment in found if segment.numel]


class UnitErrors:
    """The errors of one unit, and its buckets. Small parameters and vectors travel in full precision, without errors.

    ``kept`` changes where a step uses the averages; with replicas it tells the parameters of the unit apart.
    """

    def __init__(self, unit: Unit, bucket_numel: int, ranks: TorchCommunicator, bits: int, *, replicated: bool) -> None:
        self.unit, self.replicated, self._ranks, self._bits = unit, replicated, ranks, bits
        if replicated:
            self.layout = FlatLayout.build(unit.numels, bucket_numel)
        else:
            self.layout = rows_layout(unit.numel, bucket_numel, ranks.world_size)
        self.kept = ErrorFeedback(self.layout, ranks, unit.device, compact=True, used=True, served=replicated)
        self.goes_on: Sequence[bool] = ()  # whose gradients of earlier passes are in those of the pass under way
        self.used = False  # in the pass under way
        self.waiting: Tensor | None = None  # gradients of earlier passes that have not been exchanged
        starts = [0, *accumulate(unit.numels)]
        in_full = [travels_in_full(param) for param in unit.params]
        self._full = [span for span, each in zip(pairwise(starts), in_full, strict=True) if each]
        # in the place of the unit's parameters, whose gradients are parts of one tensor
        self._params = [torch.empty(numel, device="meta") for numel in unit.numels]
        of = self.kept, self.layout, self._params, ranks, 0, bits
        self._buckets = low_bit_buckets(*of, in_full=in_full) if replicated else []

    @property
    def members(self) -> Members:
        """The errors, and the parameters that the unit has now."""
        return Members(self.kept, self.unit.params, as_one=not self.replicated)

    def begin_pass(self, kept: Sequence[bool]) -> None:
        """Begin a pass; ``kept`` are the parameters whose earlier gradients are still there, empty is none."""
        self.used, self.goes_on = False, kept
        if self.waiting is not None:
            flags = kept or [False] * len(self.unit.params)
            for part, each in zip(torch.split(self.waiting, list(self.unit.numels)), flags, strict=True):
                if not each:
                    part.zero_()  # it was dropped

    def holds_back(self, grads: Tensor) -> bool:
        """Add up the gradients of passes after which more are to come; FSDP2 gets zeros for them meanwhile."""
        if self.unit.more_to_come:
            self.waiting = grads.clone() if self.waiting is None else self.waiting.add_(grads)
            grads.zero_()
            return True
        if self.waiting is not None:
            grads.add_(self.waiting)
            self.waiting = None
        return False

    def _begin(self) -> tuple[ErrorFeedback, ErrorFeedback]:
        """Return the old and the new errors of the unit's gradients."""
        goes_on = [True] * len(self.unit.params) if self.used else self.goes_on
        self.used = True
        return self.kept.begin(goes_on)

    def average(self, grads: Tensor, loss_scale: float) -> list[Tensor]:
        """Average the gradients of the unit over the replicas, and return what is not finite."""
        faults: list[Tensor] = []
        parts = dict(zip(self._params, torch.split(grads, list(self.unit.numels)), strict=True))

        def average(run: list[GradientBucket]) -> Task[None]:
            not_finite, _ = yield from run[0].average(run, parts)
            if not_finite is not None:
                faults.append(not_finite)

        give_errors(self._buckets, {id(self.kept): self._begin()}, loss_scale)
        run_tasks(map(average, runs_of(self._buckets)))
        return faults

    def scatter(self, shard: Tensor, grads: Tensor, loss_scale: float, factor: float) -> list[Tensor]:
        """Average the gradients of this rank's shard, and return what is not finite.

        ``grads``, [ranks * n], are this rank's of every rank's shard; ``shard``, [n], becomes the average times
        ``factor``.
        """
        faults: list[Tensor] = []
        ranks, count = self._ranks, self._ranks.world_size

        def average(bucket: Bucket, old: BucketErrors, new: BucketErrors) -> Task[None]:
            begin, columns = bucket.start // count, bucket.numel // count
            segments = list(chain.from_iterable(map(self._without_full, columns_of(grads, bucket, count))))
            z = Combination(bucket.numel, grads.device, grads=segments, beta=1.0 / loss_scale)
            mean = yield from reduce_scatter(z, old.worker, new.worker, IntegerFormat(self._bits), ranks)
            faults.append(~torch.stack(mean.aminmax()).isfinite().all())  # one pass over the values
            stop = min(begin + columns, shard.numel())
            shard[begin:stop] = mean[: stop - begin].mul_(loss_scale * factor)

        def average_in_full() -> Task[None]:
            rows = grads.view(count, -1)
            values = torch.cat([rows[:, start:stop] for start, stop in self._full], dim=1).float()
            sizes = [values.shape[1]] * count
            mean = yield from summed(values.view(-1), sizes, ranks, factor / count)
            faults.append(~mean.isfinite().all())
            places = [Segment(shard, start, stop - start, 0) for start, stop in self._full]
            kernels.on(mean).add_(Average.of(mean), places)

        old, new = self._begin()
        run_tasks(average(*row) for row in zip(self.layout.buckets, old.feedback, new.feedback, strict=True))
        if any(start < stop for start, stop in self._full):
            run_tasks([average_in_full()])
        return faults

    def _without_full(self, segment: Segment) -> Iterator[Segment]:
        """Yield a run of gradients in pieces, of which those that travel in full precision have no tensor."""
        if segment.tensor is None or not self._full:
            yield segment
            return
        row, first = divmod(segment.start, self.unit.numel)
        place, last = first, first + segment.numel
        for start, stop in [*self._full, (last, last)]:
            start, stop = min(max(start, place), last), min(stop, last)
            if place < start:
                yield Segment(segment.tensor, row * self.unit.numel + place, start - place, 0)
            if start < stop:
                yield Segment(None, 0, stop - start, 0)
            place = max(place, stop)

    def end_pass(self, fault: bool | Tensor) -> None:
        """Note whether the gradients of the pass are not finite, [] bool. The host does not wait for a GPU."""
        if self.used:
            self.kept.spoil(fault)
        elif not any(self.goes_on):
            self.kept.drop()  # with the gradients of earlier passes
        elif self.kept.pending is not None:
            self.kept.begin(self.goes_on)  # some of them are still there
        self.used, self.goes_on = False, ()

    def runs(self, values: tuple[Tensor, Tensor], own: int) -> Iterator[tuple[str, int, int, Tensor]]:
        """Yield consecutive errors of one shard each: worker or server, the shard, the first place in it, and they."""
        worker, server = values
        if self.replicated:
            yield "worker_error", own, 0, worker
            owned = [self.kept.own_range(bucket) for bucket in self.layout.buckets]
            parts = torch.split(server, [stop - start for start, stop in owned])
            for (start, _), found in zip(owned, parts, strict=True):
                yield "server_error", own, start, found
            return
        for bucket in self.layout.buckets:
            count = self._ranks.world_size
            columns, begin = bucket.numel // count, bucket.start // count
            for rank in range(count):
                first = bucket.start + rank * columns
                yield "worker_error", rank, begin, worker[first : first + min(columns, self.unit.numel - begin)]


def _check_replicated(units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.names and not unit.is_replicated:
            raise ValueError(
                f"compression={FULL!r} leaves the gradients of units to FSDP2, which averages that of {unit.names[0]} "
                "inside each replica alone, since it is sharded by mesh['shard']: shard it by the mesh of 2 "
                "dimensions, or give 'int4' or 'int8', whose messages travel between the replicas"
            )


class Allocator:
    """The base of FSDP2's collectives: torch's Comm, whose import takes seconds."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for gathered parameters, or for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)


def _members(units: Sequence[UnitErrors]) -> list[Members]:
    return [errors.members for errors in units]


class FSDPCompression:
    """Low-bit gradients of a model that FSDP2 shards; :func:`compress_fsdp` makes it.

    Attributes:
        model: The model.
        bits: Bits per element of a message of gradients.
        replicated: Whether the messages travel between replicas, not between the ranks that share the model.
        communicator: The ranks that exchange messages: those of this rank's place in all replicas, or all.
        replica: The ranks that share this rank's replica.
        traffic: Bytes of the messages. FSDP2's own bytes are not counted.
        steps: Passes whose gradients were exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        bits: int,
        bucket_numel: int,
        loss_scale: Callable[[], float] | None,
        *,
        exact: bool = False,
    ) -> None:
        """Allocate the errors, in 8 bits, and hook into FSDP2: see :func:`compress_fsdp`."""
        self.bits, self.traffic, self._bucket_numel = bits, Traffic(), bucket_numel
        self.model, units = model, units_of(model, mesh)
        device, self.replicated = units[0].device if units else torch.device("cpu"), mesh.ndim == 2
        self.communicator = self.replica = TorchCommunicator(mesh.get_group(0), device=device, traffic=self.traffic)
        if self.replicated:
            self.replica = TorchCommunicator(mesh.get_group(1), device=device, traffic=self.traffic.inside_node())
        trained = [unit for unit in units if unit.names and bits in FORMATS.values()]
        made_of = bucket_numel, self.communicator, bits
        self._units = [UnitErrors(unit, *made_of, replicated=self.replicated) for unit in trained]
        if self.replicated and bits not in FORMATS.values():
            _check_replicated(units)
        several = next((each for each in (self.communicator, self.replica) if each.world_size > 1), None)
        self._record = SendRecord("compress_fsdp", communicator=several)
        for unit in trained:
            self._record.add(zip(unit.names, unit.params, strict=True))
        self.steps = 0
        self._announcement = Announcement("FSDP2")
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._loss_scale, self._scale = loss_scale, 1.0  # the latter in the pass under way
        self._checked, self._pass = False, -1
        self._outer, self._ended = -1, False  # the pass that the model's output began, and whether one ended in it
        self._faults: list[Tensor] = []
        members = partial(_members, self._units)
        self._handed_out = HandedOut(members, watches_steps=True, hooks=False)
        self._said_not_finite = 0  # passes whose gradients were not finite that the log has told of
        self._stream: torch.Stream | None = None
        if not self.replicated:
            self._check_ranks()
        options: dict[str, Any] = {"bucket_cap_mb": bucket_numel * 4 / 2**20, "loss_scale": loss_scale}
        hooks = self._enter_pass, self._backward_begins
        self._beside = BesideUnits(model, units, mesh, name_of(bits), *hooks, **options)
        ranks = TorchCommunicator(mesh.get_group(0), device=device)  # with counters of its own
        self._gathers = ExactGathers(units, ranks) if exact and ranks.world_size > 1 else None
        for errors in self._units:
            if self.replicated:
                errors.unit.set_hook(partial(self._average, errors))
            else:
                errors.unit.set_reduce_scatter(ReduceScatter(partial(self._scatter, errors)))

    @property
    def units(self) -> list[UnitErrors]:
        """The errors of each unit that has trainable parameters, up to the last step."""
        self._handed_out.settle()
        return self._units

    def step_taken(self) -> None:
        """Note that the parameters were updated by the averaged gradients: see :class:`GradientCompression`."""
        self._handed_out.use(checked=False)
        self._record.passes.end_step()
        if self._beside.averages is not None:
            self._beside.averages.step_taken()

    @property
    def beside(self) -> GradientCompression | None:
        """The averages of the trainable parameters beside the shards that were found; None if there are none."""
        return self._beside.averages

    def find_beside(self) -> GradientCompression | None:
        """Find the trainable parameters that FSDP2 does not manage, and return their averages. All ranks call."""
        return self._beside.find()

    def close_passes(self, doing: str) -> None:
        """Raise an error on all ranks if one is still in a backward pass. All ranks call."""
        self._record.passes.close(doing)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameters as one param group, as a checkpoint expects it."""
        return [{"params": [param for errors in self._units for param in errors.unit.params]}]

    @property
    def steps_not_finite(self) -> int:
        """Passes whose gradients were not finite, of those that FSDP2 manages."""
        return int(self._skipped)

    def resume(self, steps: int, steps_not_finite: int) -> None:
        """Go on from the counts of a saved state."""
        self.steps = steps
        self._skipped.fill_(steps_not_finite)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last pass and of the run so far, of this rank.

        Returns:
            ``steps_not_finite``; ``bytes_sent_step`` and ``bytes_sent``, of the messages; ``compression_ratio`` (bytes
            that FSDP2 would send in the dtype of its gradients, for an all-reduce of the shards or a reduce-scatter of
            the model, over bytes sent, of the last pass); ``bytes_uncompressed`` and ``bytes_on_link``, both sums
            for all passes of this process; ``seconds_communication`` (host seconds blocked so far).
        """
        ranks, reduced = self.communicator.world_size, sum(errors.unit.reduced_nbytes for errors in self._units)
        full = (ranks - 1) * reduced * (2 / ranks if self.replicated else 1)
        numbers = self.traffic.metrics(full, self.traffic.step_bytes, node_size=1)
        numbers.pop("bytes_sent_in_node", None)  # inside a replica FSDP2 sends, and does not tell
        if (spoilt := self.steps_not_finite) > self._said_not_finite and self.communicator.rank == 0:
            logger.warning(
                "gradients of %d passes since the last report, up to step %d, were not finite, nor were their averages "
                "on all ranks: an optimizer without a GradScaler takes such steps, and its parameters become NaN",
                spoilt - self._said_not_finite,
                self.steps,
            )
        self._said_not_finite = spoilt
        numbers = {"steps_not_finite": float(spoilt), **numbers}
        if self._gathers is not None and (found := self._gathers.bits_per_parameter) is not None:
            numbers["bits_per_parameter"] = found
        return numbers if self._beside.averages is None else together(numbers, full, self._beside.averages)

    def describe(self) -> str:
        """One line for a log: the compression and the ranks."""
        ranks, replicas = self.replica.world_size, self.communicator.world_size
        between = f"{replicas} replica(s) of {ranks} rank(s)" if self.replicated else f"{ranks} rank(s)"
        if not self._units:
            units = "no gradient that FSDP2 averages is compressed"
        elif replicas == 1:
            units = f"nothing is compressed, since there is one replica of {ranks} rank(s)"
        else:
            numel = sum(param.numel() for errors in self._units for param in errors.unit.params)
            how = "in full precision" if self._gathers is None else "as their changes, bit for bit"
            others = "" if self.replicated else f", and parameters {how}"
            units = (
                f"gradients of {numel:,} parameters travel as int{self.bits} with error feedback between {between}"
                f"{others}, over {self.communicator.name}"
            )
        return f"FSDPCompression: {units}{self._beside.describe()}"

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors and counters, in tensors and primitives. Makes no collective call."""
        refuse_torch_checkpoint(self)
        return {
            **self._place(),
            "steps": self.steps,
            "steps_not_finite": self.steps_not_finite,
            "worker_errors": [errors.kept.worker_values() for errors in self.units],
            "server_errors": [errors.kept.server_values() for errors in self._units],
            "beside": None if self._beside.averages is None else self._beside.averages.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the errors of a state dict of the same rank, with the same mesh and options, into the buffers.

        Raises:
            ValueError: If the state dict does not fit; nothing has changed then.
        """
        check_place(state_dict, self._place())
        beside = state_dict.get("beside")
        if (beside is None) != (self._beside.averages is None):
            raise ValueError(
                "only one of the state dict and this model has trainable parameters beside the shards of FSDP2: load "
                "it with the same parameters"
            )
        if self._beside.averages is not None and beside is not None:
            self._beside.averages.load_state_dict(beside)
        rows = zip(self.units, state_dict["worker_errors"], state_dict["server_errors"], strict=True)
        for errors, worker, server in rows:
            errors.kept.copy_(worker, server)
        self.resume(state_dict["steps"], state_dict["steps_not_finite"])

    def _place(self) -> dict[str, Any]:
        """Return the values that must be the same where the errors are loaded."""
        return {
            "bits": self.bits,
            "param_bits": 0,  # of messages of parameters, which earlier versions could send
            "bucket_numel": self._bucket_numel,
            "replicas": self.communicator.world_size if self.replicated else 1,
            "replica": self.communicator.rank if self.replicated else 0,
            "shards": self.replica.world_size,
            "shard": self.replica.rank,
            "numels": [list(errors.unit.numels) for errors in self._units],
        }

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _average(self, errors: UnitErrors, grads: Tensor) -> None:
        """Average the gradients of a unit, this rank's shards, over the replicas, in place. FSDP2 calls."""
        if self.communicator.world_size == 1:
            return
        self._take(errors.unit, grads, grads.numel())
        if errors.holds_back(grads):
            return
        self._faults += errors.average(grads, self._scale)

    def _scatter(self, errors: UnitErrors, shard: Tensor, grads: Tensor, op: Any) -> None:
        """Average the gradients of a unit in the place of a reduce-scatter ``op``. FSDP2 calls, on its stream."""
        self._take(errors.unit, grads, shard.numel())
        ranks = self.communicator.world_size
        factor = ranks / errors.unit.divisor(op, ranks)
        self._faults += errors.scatter(shard, grads, self._scale, factor)

    def _take(self, unit: Unit, grads: Tensor, numel: int) -> None:
        """Check the gradients of a unit, of which this rank's shard has ``numel``, and begin a pass with the first."""
        if numel != unit.numel:
            raise RuntimeError(
                f"the unit of {unit.names[0]} has {unit.numel} elements on this rank, and gradients of "
                f"{numel}: freeze parameters before grad_compression begins; parameters without a gradient "
                "need torch >= 2.13"
            )
        if grads.device.type != "cpu":  # FSDP2 may free them, and use the memory on another stream
            self._stream = torch.accelerator.current_stream()
            grads.record_stream(self._stream)
        self._check_ranks()
        self._enter_pass()

    def _enter_pass(self) -> None:
        """Begin a backward pass with its first unit, or with the first gradient beside the units; sends nothing."""
        task = torch._C._current_graph_task_id()
        if task == self._pass:
            return
        if self.replica.rank == 0:  # of the ranks that are the first among their peers, one
            self._announcement.begin(self)
        self._pass = task
        self._faults = []
        self._scale = scale_of(self._loss_scale)
        kept = self._handed_out.begin(is_first=True)
        for errors in self._units:
            errors.begin_pass(kept(errors.members))
        after_backward(self._end_pass)  # FSDP2 itself may send units at the end

    def _backward_begins(self) -> None:
        """Take part in the end of a pass, in which this rank may have no gradient beside the units, as others have."""
        task = torch._C._current_graph_task_id()
        if task != self._outer:
            self._outer, self._ended = task, False
            after_backward(self._end_without_gradients)

    def _end_without_gradients(self) -> None:
        if self._pass == -1 and not self._ended and self._beside.are_due:
            self._enter_pass()

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Decide together with the other shards whether the errors of the pass count."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        exchanged = bool(self._faults)
        if exchanged:  # what a GPU has told of the pass before is read here
            self._record.passes.begin()
            self._record.passes.post(self.communicator, self.replica)
        dropped = self._is_faulty() if exchanged else False
        if isinstance(dropped, Tensor) and reads_at_once(dropped.device) and dropped:
            self._warn_not_finite()
        for errors in self._units:
            errors.end_pass(dropped)
        self._handed_out.hand_out()
        self._pass = -1
        self._faults = []
        self._ended = True
        beside = self._beside.averages if self._beside.are_due else None
        if beside is not None:
            self._beside.average(beside)
        elif not exchanged:  # all gradients wait for a later pass
            return
        if exchanged:
            self._record.passes.check(now=False)
            self._skipped += dropped
        self.steps += 1
        self.traffic.end_step()
        if self.replica.rank == 0:
            self._announcement.end(self)

    def _warn_not_finite(self) -> None:
        """Say whose gradients were not finite, by what their messages have missed. All ranks call."""
        pending = [errors.kept.pending for errors in self._units]
        missed = any(new is not None and not bool(new.worker_values().isfinite().all()) for new in pending)
        everyone = [[dist.get_rank()] if missed else []]
        for ranks in dict.fromkeys((self.communicator, self.replica)):
            everyone = [each for found in ranks.all_gather_object(everyone) for each in found]
        if dist.get_rank() == 0:
            numbers = sorted(chain.from_iterable(everyone))
            whose = f"rank {', '.join(map(str, numbers))}" if numbers else "a rank"
            warn_not_finite(logger, self.steps + 1, whose)
        self._said_not_finite += 1

    def _is_faulty(self) -> Tensor:
        """Return whether a gradient of any shard is not finite, [] bool. All ranks of a replica call."""
        fault = torch.stack(self._faults).any().to(torch.float32).view(1)
        if self.replica.world_size > 1:
            self.replica.all_reduce(fault, op="max").wait()
        return fault[0] > 0

    def _check_ranks(self) -> None:
        """Check once that all replicas have the same options, units and parameters; else a ValueError on all."""
        if not self._checked:
            rows = [(errors.unit.names, errors.unit.numels) for errors in self._units]
            self.communicator.require_equal(
                "the options or parameters of compress_fsdp",
                [self.bits, self._bucket_numel, zlib.crc32(repr(rows).encode())],
            )
            shards = [values.to_local().detach() for errors in self._units for values in errors.unit.params]
            if self.replicated:
                self.communicator.require_equal(
                    "the bits of their parameters (do all replicas start from the same model?)",
                    sum(int(bit_sum(shard)) for shard in shards),
                )
            self._checked = True


@dataclass(eq=False)
class ReduceScatter(Allocator):
    """A reduce-scatter as FSDP2 calls it: see torch's ReduceScatter."""

    scatter: Callable[[Tensor, Tensor, Any], None]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.scatter(output_tensor, input_tensor, op)


def compress_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    compression: str = "int4",
    *,
    bucket_cap_mb: float | None = None,
    loss_scale: Callable[[], float] | None = None,
    param_compression: str = "none",
) -> FSDPCompression:
    """Average the gradients of a model that FSDP2 shards by low-bit messages.

    Any ordinary optimizer follows. With replicas, the messages travel between them::

        mesh = init_device_mesh("cuda", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        compression = compress_fsdp(model, mesh, "int4")

    A model that is sharded by ``mesh`` itself (HSDP) has an all-reduce of FSDP2's own, whose place the messages take.
    All replicas must begin with the same parameters.

    Without replicas, on a mesh of 1 dimension, they take the place of FSDP2's reduce-scatter. Each rank then keeps
    errors for every parameter of the model: 1.02 bytes, and as much again from the first gradient to the end of
    backward.

    Trainable parameters that no ``fully_shard`` call manages, such as adapters that PEFT adds to a model which was
    sharded when it was loaded, get rank 0's values now (or before the first forward in training), and their gradients
    are averaged over all ranks of the mesh after each backward pass that sends gradients. Torch's ``clip_grad_norm_``
    takes them together with shards then.

    Args:
        model: The model, after its last ``fully_shard`` call. Parameters that are frozen now stay so.
        mesh: 1-D: the ranks that share the model. 2-D: the replicas, one per node or several, and the ranks that share
            each.
        compression: "int4" or "int8". "float32" leaves gradients of units to FSDP2, and averages those of other
            parameters in full precision.
        bucket_cap_mb: MiB of float32 gradients that are sent together, > 0; a unit is one bucket or more. None is 100
            on CUDA devices, 25 on others.
        loss_scale: Returns the factor that the gradients of the coming step carry, such as a ``GradScaler.get_scale``;
            None stands for 1.
        param_compression: "exact": gather parameters that FSDP2 gathers in 16 bits, by a MixedPrecisionPolicy or since
            they are, as their changes, bit for bit. Each rank keeps a replica, 2 bytes per parameter, frozen ones too.
            Without replicas only, on a mesh of 1 dimension. "none" leaves gathering to FSDP2.

    Returns:
        The state: its errors (``state_dict()``) and its ``metrics()``. The model keeps it alive.

    Raises:
        ValueError: For an option outside its range, and for a model that is not sharded over ``mesh``.
        TypeError: If ``mesh`` is no DeviceMesh.
        RuntimeError: If this torch's FSDP2 has no hook.
    """
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r}: call compress_fsdp(model, mesh, 'int4')")
    bits = bits_of("compression", compression)
    if mesh.ndim == 2 and mesh.size(0) == 1 and mesh.get_rank() == 0:
        logger.warning(
            "grad_compression=%s compresses nothing: the mesh has one replica of %d rank(s), which sends nothing to "
            "others. Give init_device_mesh(device_type, (nodes, ranks_per_node), ...) with nodes >= 2",
            compression,
            mesh.size(1),
        )
    if param_compression not in ("exact", "none"):
        raise ValueError(f"param_compression must be 'exact' or 'none' with FSDP2, got {param_compression!r}")
    exact = param_compression == "exact"
    if exact and mesh.ndim == 2:
        raise ValueError(
            "param_compression=exact is for FSDP2 over all ranks; inside a replica the links are fast: leave it out"
        )
    bucket_numel = bucket_numel_of(bucket_cap_mb, mesh.device_type)
    return FSDPCompression(model, mesh, bits, bucket_numel, loss_scale, exact=exact)
