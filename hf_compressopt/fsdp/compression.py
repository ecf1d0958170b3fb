"""FSDP2 inside a node, and messages of 4 or 8 bits between nodes.

FSDP2 reduces the gradients of a unit, the parameters of one ``fully_shard`` call, among the ranks of a replica: each
has its shard then. The ranks of the same place in all replicas average that shard by the compressed all-reduce of
:mod:`hf_compressopt.collectives.exchange`, with error feedback, where FSDP2 on a 2-D mesh has an all-reduce:

    u = g_r + worker_error;  messages <- Q(u);  worker_error <- u - Q(u)                        (1)
    a = mean_r Q(u_r) + server_error;  g <- Q(a);  server_error <- a - Q(a)                     (2)

All replicas get the same bits. The errors belong to this rank's shards. They change at the end of a backward pass, if
all gradients of all shards are finite; otherwise they are as before the pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hf_compressopt.collectives.communicator import Traffic
from hf_compressopt.collectives.ddp import IntegerBucket
from hf_compressopt.collectives.errors import GroupErrors
from hf_compressopt.collectives.exchange import Task, in_runs, run_tasks
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.flat import FlatLayout, bucket_numel_of
from hf_compressopt.fsdp.units import Unit, units_of
from hf_compressopt.grad_compression import FORMATS, STATES, unscaled
from hf_compressopt.optim.math import bit_sum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class UnitErrors:
    """The errors of one unit: those of the last pass, and beside them those of a pass under way.

    Attributes:
        unit: The unit.
        layout: Its shard as one tensor, cut into buckets.
        kept: The errors of the last pass whose gradients were finite.
        pending: Those of the pass under way.
        used: Whether the pass under way has changed ``pending``.
        waiting: Gradients of earlier passes that have not been exchanged, or None.
    """

    def __init__(self, unit: Unit, bucket_numel: int, communicator: TorchCommunicator, *, compact: bool) -> None:
        self.unit, self.layout = unit, FlatLayout.build([unit.numel], bucket_numel)
        self.kept, self.pending = (
            GroupErrors(self.layout, communicator, unit.device, compact=compact, used=True) for _ in range(2)
        )
        self.used = False
        self.waiting: Tensor | None = None

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

    def average(self, grads: Tensor, communicator: TorchCommunicator, bits: int, loss_scale: float) -> list[Tensor]:
        """Average the gradients of the unit, write the new errors into ``pending``, and return what is not finite."""
        before, self.used = self.pending if self.used else self.kept, True
        faults: list[Tensor] = []

        def average(run: list[IntegerBucket]) -> Task[None]:
            not_finite, _ = yield from IntegerBucket.average(run, {grads: grads})
            faults.append(not_finite)

        rows = zip(self.layout.buckets, before.feedback, self.pending.feedback, strict=True)
        buckets = (IntegerBucket(b, [grads], communicator, 0, old, bits, loss_scale, new) for b, old, new in rows)
        run_tasks(map(average, in_runs(buckets, lambda bucket: bucket.bucket.numel, communicator)))
        return faults

    def end_pass(self, dropped: Tensor) -> None:
        """Keep the errors of the pass unless it is ``dropped``, [] bool. The host does not wait for that."""
        if self.used:
            for kept, new in ((self.kept.worker, self.pending.worker), (self.kept.server, self.pending.server)):
                kept.copy_(torch.where(dropped, kept, new))
        self.used = False


class FSDPCompression:
    """Low-bit gradients between the replicas of a model; :func:`compress_fsdp` makes it.

    Attributes:
        model: The model.
        bits: Bits per element of a message.
        communicator: The ranks of this rank's place in all replicas.
        replica: The ranks that share this rank's replica.
        units: The errors of each unit.
        traffic: Bytes sent to other replicas. FSDP2's own bytes inside a replica are not counted.
        steps: Passes whose gradients were exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        bits: int,
        bucket_numel: int,
        loss_scale: Callable[[], float],
        compact: bool,
    ) -> None:
        """Allocate the errors, in 8 bits if they are ``compact``, and hook into FSDP2: see :func:`compress_fsdp`."""
        self.bits, self.traffic, self._bucket_numel = bits, Traffic(), bucket_numel
        self.model, units = model, units_of(model, mesh)
        device = units[0].device if units else torch.device("cpu")
        self.communicator = TorchCommunicator(mesh.get_group(0), device=device, traffic=self.traffic)
        self.replica = TorchCommunicator(mesh.get_group(1), device=device, traffic=self.traffic.inside_node())
        self.units = [UnitErrors(unit, self._bucket_numel, self.communicator, compact=compact) for unit in units]
        self.steps = 0
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._loss_scale = loss_scale
        self._checked, self._pass = False, -1
        self._faults: list[Tensor] = []
        self._stream: torch.Stream | None = None
        for errors in self.units:
            errors.unit.set_hook(partial(self._average, errors))

    @property
    def numel(self) -> int:
        """Elements of this rank's shards, padding included."""
        return sum(errors.unit.numel for errors in self.units)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameters as one param group, as a checkpoint expects it."""
        return [{"params": [param for errors in self.units for param in errors.unit.params]}]

    @property
    def skipped_steps(self) -> int:
        """Passes whose gradients were not finite."""
        return int(self._skipped)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last pass and of the run so far, of this rank.

        Returns:
            ``skipped_steps``; ``bytes_sent_step`` and ``bytes_sent``, to other replicas; ``compression_ratio`` (bytes
            of a float32 ring all-reduce of the shards over bytes sent, of the last pass); ``seconds_communication``
            (host seconds blocked so far).
        """
        replicas, sent = self.communicator.world_size, self.traffic.step_bytes
        return {
            "skipped_steps": float(self.skipped_steps),
            "bytes_sent_step": float(sent),
            "bytes_sent": float(self.traffic.total_bytes),
            "compression_ratio": 2 * (replicas - 1) / replicas * 4 * self.numel / sent if sent else 1.0,
            "seconds_communication": self.traffic.total_seconds,
        }

    def describe(self) -> str:
        """One line for a log: the compression and the ranks."""
        return (
            f"FSDPCompression: gradients travel as int{self.bits} with error feedback between "
            f"{self.communicator.world_size} replica(s) of {self.replica.world_size} rank(s), over "
            f"{self.communicator.name}"
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors and counters, in tensors and primitives. Makes no collective call."""
        return {
            **self._place(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "worker_errors": [errors.kept.worker_values() for errors in self.units],
            "server_errors": [errors.kept.server_values() for errors in self.units],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the errors of a state dict of the same rank, with the same mesh and options, into the buffers.

        Raises:
            ValueError: If the state dict does not fit; nothing has changed then.
        """
        for key, mine in self._place().items():
            if state_dict[key] != mine:
                raise ValueError(
                    f"the state dict has {key}={state_dict[key]}, this rank {mine}: load it on the same mesh, with the "
                    "same options and units"
                )
        rows = zip(self.units, state_dict["worker_errors"], state_dict["server_errors"], strict=True)
        for errors, worker, server in rows:
            errors.kept.copy_(worker, server)
        self.set_counters(state_dict["steps"], state_dict["skipped_steps"])

    def set_counters(self, steps: int, skipped_steps: int) -> None:
        """Continue the counts of another run."""
        self.steps = steps
        self._skipped.fill_(skipped_steps)

    def _place(self) -> dict[str, Any]:
        """Return the values that must be the same where the errors are loaded."""
        return {
            "bits": self.bits,
            "bucket_numel": self._bucket_numel,
            "replicas": self.communicator.world_size,
            "replica": self.communicator.rank,
            "shards": self.replica.world_size,
            "shard": self.replica.rank,
            "numels": [list(errors.unit.numels) for errors in self.units],
        }

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _average(self, errors: UnitErrors, grads: Tensor) -> None:
        """Average the gradients of a unit over the replicas, in place. FSDP2 calls, on its stream.

        Args:
            errors: The unit.
            grads: [n] float32, bfloat16 or float16, this rank's shards, one after another.

        Raises:
            RuntimeError: If not all parameters of the unit have gradients.
        """
        unit = errors.unit
        if self.communicator.world_size == 1:
            return
        if grads.numel() != unit.numel:
            raise RuntimeError(
                f"the unit of {unit.names[0]} has {unit.numel} elements on this rank, and gradients of "
                f"{grads.numel()}: freeze parameters before grad_compression begins; parameters without a gradient "
                "need torch >= 2.13"
            )
        if errors.holds_back(grads):
            return
        if grads.device.type != "cpu":
            self._stream = torch.accelerator.current_stream()
            grads.record_stream(self._stream)  # FSDP2 may free them, and use the memory on another stream
        self._enter_pass()
        self._faults += errors.average(grads, self.communicator, self.bits, float(self._loss_scale()))

    def _enter_pass(self) -> None:
        """Begin a backward pass with its first unit."""
        task = torch._C._current_graph_task_id()
        if task == self._pass:
            return
        self._check_ranks()
        self._pass, self._faults = task, []
        for errors in self.units:  # of a pass that raised before its end
            errors.used = False
        Variable._execution_engine.queue_callback(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Decide together with the other shards whether the errors of the pass count."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        fault = torch.stack(self._faults).any().to(torch.float32).view(1)
        if self.replica.world_size > 1:
            self.replica.all_reduce(fault, op="max").wait()
        dropped = fault[0] > 0
        for errors in self.units:
            errors.end_pass(dropped)
        self._skipped += dropped
        self._pass, self._faults = -1, []
        self.steps += 1
        self.traffic.end_step()

    def _check_ranks(self) -> None:
        """Check once that all replicas have the same options, units and parameters.

        Raises:
            ValueError: If they do not, on the ranks of all replicas that are compared.
        """
        if not self._checked:
            rows = [(errors.unit.names, errors.unit.numels) for errors in self.units]
            self.communicator.require_equal(
                "the options or parameters of compress_fsdp",
                [self.bits, self._bucket_numel, zlib.crc32(repr(rows).encode())],
            )
            digest = sum(
                int(bit_sum(values.to_local().detach())) for errors in self.units for values in errors.unit.params
            )
            self.communicator.require_equal(
                "the bits of their parameters (do all replicas start from the same model?)", digest
            )
            self._checked = True


def compress_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    compression: str = "int4",
    *,
    bucket_cap_mb: float = 25.0,
    loss_scale: Callable[[], float] | None = None,
    state: str = "compact",
) -> FSDPCompression:
    """Average the gradients of a model that FSDP2 shards by low-bit messages between its replicas.

    Any optimizer follows::

        mesh = init_device_mesh("cuda", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        compression = compress_fsdp(model, mesh, "int4")

    A model that is sharded by ``mesh`` itself (HSDP) has an all-reduce of FSDP2's own, whose place the messages take.
    All replicas must begin with the same parameters.

    Args:
        model: The model, after its last ``fully_shard`` call. Parameters that are frozen now stay so.
        mesh: 2-D: the replicas, one per node or several, and the ranks that share each.
        compression: "int4" or "int8".
        bucket_cap_mb: MiB of float32 gradients that are sent together, > 0; a unit is one bucket or more.
        loss_scale: Returns the factor that the gradients of the coming step carry, such as a ``GradScaler.get_scale``;
            None stands for 1.
        state: "compact" keeps errors in 8 bits, 1.03 bytes each; "float32" rounds nothing.

    Returns:
        The state: its errors (``state_dict()``) and its ``metrics()``. The model keeps it alive.

    Raises:
        ValueError: For an option outside its range, and for a model that is not sharded over ``mesh``.
        TypeError: If ``mesh`` is no DeviceMesh.
        RuntimeError: If this torch's FSDP2 has no hook.
    """
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r}: call compress_fsdp(model, mesh, 'int4')")
    if compression not in FORMATS:
        raise ValueError(f"compression must be one of {sorted(FORMATS)}, got {compression!r}")
    if state not in STATES:
        raise ValueError(f"state must be one of {sorted(STATES)}, got {state!r}")
    bits, bucket_numel = FORMATS[compression], bucket_numel_of(bucket_cap_mb)
    return FSDPCompression(model, mesh, bits, bucket_numel, loss_scale or unscaled, compact=state == "compact")
