"""Low-bit gradients for any optimizer: a DDP communication hook, and the same average for plain loops.

Every gradient is averaged over the ranks by the two-phase all-reduce of :mod:`hf_compressopt.collectives.exchange`, in
messages of 4 or 8 bits with error feedback (LoCo, arXiv 2407.04480; groups of 128 as in SDP4Bit, arXiv 2410.15526).
All ranks get the same bits, so that clipping, loss scaling, logging and the optimizer work as they do without it.

    u = g_r + worker_error;  messages <- Q(u);  worker_error <- u - Q(u)                        (1)
    a = mean_r Q(u_r) + server_error;  g <- Q(a);  server_error <- a - Q(a)                     (2)

Errors change only where a step uses the averages (:mod:`hf_compressopt.collectives.feedback`), if all were finite. If a
gradient is not finite on any rank, every rank gets gradients that are not finite, and the errors stay as they were.
Vectors and small tensors are averaged in full precision: larger neighbours in a block would round them to 0.
"""

# No postponed annotations here: DDP compares those of a hook with the types themselves.

import logging
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.announce import Announcement
from hf_compressopt.collectives.backward import take_over
from hf_compressopt.collectives.communicator import Communicator, Traffic, all_reduce_bytes
from hf_compressopt.collectives.feedback import ErrorFeedback, HandedOut, Members, after_backward, in_backward
from hf_compressopt.collectives.gradients import (
    GradientBucket,
    GradientRounds,
    begin_pass,
    low_bit_buckets,
    plain_buckets,
)
from hf_compressopt.collectives.sender import SendRecord, as_it_is, check_bucket, listed, note_sent
from hf_compressopt.collectives.topology import AUTO, TopologyOptions, with_topology
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.flat import FlatLayout, bucket_numel_of
from hf_compressopt.format.foreign import refuse_torch_checkpoint
from hf_compressopt.format.index import NODE_SIZE
from hf_compressopt.kernels.memory import fetch_later, numbers_in_place, reads_at_once

logger = logging.getLogger(__name__)

FORMATS = {"int4": 4, "int8": 8}
#: Averages as they are, without errors: what a rank must send beside messages of another kind.
FULL = "float32"
_FULL_BITS = 32


@dataclass(frozen=True)
class MessageOptions(TopologyOptions):
    """Options of the messages of gradients in Trainer and Accelerate.

    Attributes:
        bucket_cap_mb: See :class:`GradientCompression`; None is the model's DDP's.

    Raises:
        ValueError: For an option outside its range.
        TypeError: If ``node_size`` is no int.
    """

    bucket_cap_mb: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_cap_mb is not None:
            bucket_numel_of(self.bucket_cap_mb)


class GradientCompression:
    """State of :func:`compress_hook`: the errors, and what they belong to.

    With DistributedDataParallel::

        state = GradientCompression(model.named_parameters(), "int4")
        ddp_model.register_comm_hook(state, compress_hook)

    Without it, :meth:`average_gradients` after ``backward()`` does the same. Any optimizer follows. A state that is
    made before ``init_process_group``, as for Lightning's DDPStrategy, takes its ranks at the first use. Source: error
    feedback of both phases, arXiv 1901.09847 and 2102.02888, section 5; integers in blocks, LoCo, arXiv 2407.04480.

    Attributes:
        params: The trainable parameters.
        names: Their names.
        bits: Bits per element of a message.
        layout: Their place in the flat buffers: the last parameter first, as backward brings the gradients.
        traffic: Bytes that were sent.
        steps: Steps whose gradients were exchanged.
        steps_not_finite: Those of them whose gradients were not finite, which a GradScaler would skip.
    """

    #: Whether errors lie in 8 bits, 1.02 bytes each; else in float32.
    compact = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        compression: str = "int4",
        *,
        bucket_cap_mb: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        communicator: str | Communicator | None = None,
        loss_scale: Callable[[], float] | None = None,
        topology: str = AUTO,
        node_size: int | None = None,
        node_bits: int = 32,
    ) -> None:
        """Allocate the errors; before ``init_process_group``, check the options only.

        There are 1 / node_size + 1 / world_size of them per parameter; if the topology is flat the node_size is 1.

        Args:
            params: The model's parameters, alike on all ranks, named or not; those that require no gradient do not
                count.
            compression: "int4" or "int8"; "float32" averages in full precision, without errors.
            bucket_cap_mb: MiB of float32 gradients that are sent together, > 0; None is 100 on CUDA devices, else 25.
            process_group: The ranks; None is the default group.
            communicator: As for :class:`~hf_compressopt.OnebitAdam`.
            loss_scale: Returns the factor that the gradients of the coming step carry, such as a
                ``GradScaler.get_scale``; None stands for 1.
            topology: As for :class:`~hf_compressopt.OnebitAdam`.
            node_size: Likewise.
            node_bits: Likewise.

        Raises:
            ValueError: For an option outside its range, and for parameters on several devices.
            TypeError: For what are no parameters, and for those of another dtype than float32, bfloat16 or float16.
        """
        self.bits = bits_of("compression", compression)
        wanted = TopologyOptions(topology, node_size, node_bits)
        rows = [p if isinstance(p, tuple) else (str(index), p) for index, p in enumerate(_iterable(params))]
        named = {p: name for name, p in rows if p.requires_grad}  # a tensor that is given twice counts once
        self.params, self.names = list(named)[::-1], list(named.values())[::-1]
        for name, param in zip(self.names, self.params, strict=True):
            if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise TypeError(f"{name} must be float32, bfloat16 or float16, got {param.dtype}")
        devices = {param.device for param in self.params}
        if len(devices) > 1:
            raise ValueError(f"all parameters must be on one device, got {sorted(map(str, devices))}")
        bucket_numel = bucket_numel_of(bucket_cap_mb, next(iter(devices), torch.device("cpu")).type)
        self.traffic = Traffic()
        self.steps = self._steps_not_finite = 0
        #: A step that was exchanged, and whether its gradients were not finite, on its way from a device.
        self._fault: tuple[int, Callable[[], Tensor]] | None = None
        self._ranks_asked_for = communicator, process_group, wanted
        self._loss_scale = loss_scale
        self.layout = FlatLayout.build([p.numel() for p in self.params], bucket_numel)
        self._connected: tuple[Communicator, ErrorFeedback] | None = None
        self._rows, self._record = rows, SendRecord("GradientCompression")
        if communicator is not None or (dist.is_available() and dist.is_initialized()):
            self._connect()
        self._rounds, self._buckets = GradientRounds(), list[GradientBucket]()
        self._checked = False
        self._announcement = Announcement()
        take_over(self.params, "GradientCompression")

    def _connect(self) -> tuple[Communicator, ErrorFeedback]:
        """Return the ranks, and the errors of this one. The first call is one of all ranks together."""
        if self._connected is None:
            name, group, wanted = self._ranks_asked_for
            device = self.params[0].device if self.params else torch.device("cpu")  # the model may have moved
            flat = make_communicator(name, group, device=device, traffic=self.traffic, cuda_aware=False)
            communicator = with_topology(flat, wanted)
            sends_integers = self.bits in FORMATS.values()
            errors = ErrorFeedback(self.layout, communicator, device, compact=self.compact, used=sends_integers)
            self._connected = communicator, errors
            self._record = self._answer(self._rows)
            self._watch()
        return self._connected

    def _follow(self) -> None:
        """Follow the parameters to the device to which a model was moved after this was made."""
        communicator, errors = self._connect()
        device = self.params[0].device if self.params else communicator.device
        if device != communicator.device:
            communicator.follow(device)
            errors.to(device)

    @property
    def steps_not_finite(self) -> int:
        """Steps whose gradients were not finite."""
        self._read_fault()
        return self._steps_not_finite

    def resume(self, steps: int, steps_not_finite: int) -> None:
        """Go on from the counts of a saved state."""
        self.steps = steps
        self._steps_not_finite = steps_not_finite
        self._fault = None

    def _read_fault(self) -> None:
        """Count the step before, and say it, if its gradients were not finite; the copy was made long ago."""
        if self._fault is not None:
            (step, fault), self._fault = self._fault, None
            if bool(fault()):
                self._steps_not_finite += 1
                self._warn_not_finite(step, "a rank")

    def _watch(self) -> None:
        if self._connected is not None:
            members = [Members(self._connected[1], self.params)]
            self._handed_out = HandedOut(lambda: members, watches_steps=True)

    @property
    def communicator(self) -> Communicator:
        """The ranks."""
        return self._connect()[0]

    @property
    def errors(self) -> ErrorFeedback:
        """What messages have missed up to the last step, of this rank, and of the averages that it has sent."""
        errors = self._connect()[1]
        self._handed_out.settle()
        return errors

    @property
    def worker_error(self) -> Tensor:
        """The worker error, decoded: [elements that this rank sends, or its shards if it is hierarchical] float32.

        It is what this rank's messages have missed so far, in the unit of an unscaled gradient; [0] with one rank.
        """
        return self.errors.worker_values()

    @property
    def server_error(self) -> Tensor:
        """[elements whose server this rank is] float32, likewise for the averages that it has sent."""
        return self.errors.server_values()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what the next step makes anew."""
        self._read_fault()
        if self._connected is not None:
            self._handed_out.settle()
        new: dict[str, Any] = {"_rounds": GradientRounds(), "_buckets": [], "_record": None, "_handed_out": None}
        return self.__dict__ | new

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Answer for the parameters of the copy."""
        self.__dict__.update(state)
        self._watch()
        self._record = self._answer(zip(self.names, self.params, strict=True))

    def _answer(self, named: Iterable[tuple[str, Tensor]]) -> SendRecord:
        """Answer for the gradients of parameters, those that are frozen now too; with one rank there are none to send.

        A state that is older than the process group answers from its first use on.
        """
        if self._connected is None or self.communicator.world_size == 1:
            return SendRecord("GradientCompression")
        return SendRecord("GradientCompression", named, self.communicator)

    def _check_ranks(self) -> None:
        """Check once that all ranks have the same parameters and options; else a ValueError on all."""
        if not self._checked:
            sizes = [[name, p.numel()] for name, p in zip(self.names, self.params, strict=True)]
            self.communicator.require_equal(
                "the options or parameters of GradientCompression",
                [self.bits, self.layout.bucket_numel, zlib.crc32(repr(sizes).encode())],
            )
            self._checked = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameters as one param group, as a checkpoint expects it."""
        return [{"params": self.params}]

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step and of the run so far, of this rank; a pass that sends gradients counts as a step.

        Returns:
            ``steps_not_finite``; ``bytes_sent_step`` and ``bytes_sent`` (in the hierarchical topology to other nodes
            only, beside ``bytes_sent_in_node`` and ``node_size``); ``compression_ratio`` (bytes that DDP would send for
            gradients of these dtypes over bytes sent, of the last step; in the hierarchical topology both on the link
            of a node); ``bytes_uncompressed`` and ``bytes_on_link``, both sums for all steps of this process;
            ``seconds_communication`` (host seconds blocked so far).
        """
        place, spoilt = self.communicator.topology, {"steps_not_finite": float(self.steps_not_finite)}
        full = all_reduce_bytes(self.params, place.world_size)
        return spoilt | self.traffic.metrics(full, self.traffic.step_bytes, place.node_size)

    def describe(self) -> str:
        """One line for a log: the compression and the ranks."""
        ranks = str(self.communicator) if self._connected else "between ranks that the first step finds"
        return f"GradientCompression: the gradients of {self.layout.numel:,} parameters {self.form}, {ranks}"

    @property
    def form(self) -> str:
        """How the gradients travel, in words."""
        if self.bits == _FULL_BITS:
            return "travel in full precision"
        return f"travel as int{self.bits} with error feedback, small tensors in full precision"

    def leave_lines_to_others(self) -> None:
        """Write no lines of its own into the log: another object tells of it."""
        self._announcement.leave_to_others()

    def close(self) -> None:
        """Answer for the parameters no more: others average them from now on."""
        self._record.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors and counters, in tensors and primitives. Makes no collective call."""
        refuse_torch_checkpoint(self)
        return {
            "bits": self.bits,
            "bucket_numel": self.layout.bucket_numel,
            "world_size": self.communicator.world_size,
            "rank": self.communicator.rank,
            NODE_SIZE: self.communicator.topology.node_size,
            "steps": self.steps,
            "steps_not_finite": self.steps_not_finite,
            "worker_error": self.worker_error,
            "server_error": self.server_error,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the errors of a state dict of the same rank, with the same options, into the buffers.

        Raises:
            ValueError: If the state dict does not fit; nothing has changed then.
        """
        mine = self.state_dict()
        keys = "bits", "bucket_numel", "world_size", "rank", NODE_SIZE
        check_place({NODE_SIZE: 1, **state_dict}, {key: mine[key] for key in keys})
        for key in ("worker_error", "server_error"):
            if state_dict[key].shape != mine[key].shape:
                raise ValueError(
                    f"{key} must have {mine[key].numel()} elements, the state dict has {state_dict[key].numel()}: "
                    "are the parameters the same?"
                )
        self.errors.copy_(state_dict["worker_error"], state_dict["server_error"])
        self.resume(state_dict["steps"], state_dict["steps_not_finite"])

    # -- gradients ----------------------------------------------------------------------------------------------------

    def average_gradients(self) -> None:
        """Replace every ``p.grad`` by the average over the ranks. All ranks call, after the last backward of a step.

        A parameter without a gradient on any rank stays without one.

        Raises:
            TypeError: For sparse gradients, on all ranks together; on a GPU only where a gradient is sparse or missing.
        """
        if self.communicator.world_size > 1:
            self._record.passes.run_in_loop(self.communicator)
        self.average_in_pass()

    def average_in_pass(self) -> None:
        """Do so at the end of a backward pass, which all ranks end."""
        self._follow()
        self._check_ranks()
        if self.communicator.world_size == 1:
            return
        self._record.passes.begin(self.communicator)  # another rank may be in a step, which it refuses
        with torch.no_grad():
            mine = [0.0 if p.grad is None else 1.0 if p.grad.layout == torch.strided else 2.0 for p in self.params]
            found, device = array("f", mine), self.communicator.device
            present = numbers_in_place(device, found)
            self.communicator.all_reduce(present, op="max").wait()
            if not reads_at_once(device) and set(mine) != {1.0}:  # else without another wait for a GPU
                found = array("f", present.tolist())
            if 2.0 in found:
                raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")
            self._start()
            for param, anywhere in zip(self.params, found, strict=True):
                if anywhere and param.grad is None:
                    param.grad = torch.zeros_like(param)
                self._rounds.add(param, param.grad)
            self._rounds.finish(self._finish)
            self._handed_out.hand_out()
        note_sent(self.params)

    def add_bucket(self, bucket: "dist.GradBucket") -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Take a bucket of DDP's; :func:`compress_hook` calls it."""
        if self.communicator.world_size == 1:
            self._check_alone()
            return as_it_is(bucket.buffer())
        joined = not in_backward()  # torch's Join: this rank has no inputs left, and sends zeros and its errors
        start = partial(self._start_pass, joined=joined)
        future = self._rounds.add_ddp_bucket(bucket, start, self._finish, self._refuse)
        if bucket.is_last() and joined:
            self.errors.commit()
        elif bucket.is_last():
            after_backward(self._hand_out)
        return future

    def _start_pass(self, *, joined: bool) -> None:
        """Start the round of a backward pass, which the ranks compare before another message is under way."""
        self._start()
        self._record.passes.begin(self.communicator, joined=joined)

    def _refuse(self, params: Sequence[Tensor]) -> None:
        """Refuse parameters of a DistributedDataParallel model that have no errors here; alike on all ranks."""
        names = listed([self._record.name_of(param) for param in params])
        raise ValueError(
            f"DistributedDataParallel averages {names}, which GradientCompression does not know as trainable: make "
            "parameters trainable first, then DistributedDataParallel, and GradientCompression of all its parameters "
            "(named_parameters()); after another requires_grad_() make both again"
        )

    def _check_alone(self) -> None:
        """Raise if this state took one rank for all: ranks would average nothing."""
        name, group, _ = self._ranks_asked_for
        if name is None and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            raise RuntimeError(
                f"this GradientCompression was used before torch.distributed had its {dist.get_world_size(group)} "
                "ranks, and would average nothing: make it after init_process_group(), or read nothing of it before "
                "the first backward"
            )

    def step_taken(self) -> None:
        """Note that the parameters were updated by the averaged gradients.

        A step of a ``torch.optim.Optimizer`` is noted by itself. Call this after updates of another kind, which would
        otherwise count as dropped gradients, so that what messages miss is never sent.
        """
        if self._connected is not None:
            self._handed_out.use(checked=False)
            self._record.passes.end_step()

    def close_passes(self, doing: str) -> None:
        """Raise an error on all ranks if one is still in a backward pass. All ranks call."""
        self._record.passes.close(doing)

    def _hand_out(self) -> None:
        self._handed_out.hand_out(self._rounds.before)

    def _start(self) -> None:
        """Start the round of a step. All ranks call."""
        self._follow()
        self._check_ranks()
        self._read_fault()
        if self._announcement.is_open:
            self._announcement.begin(self)
        if not self._buckets:
            dtype = torch.float32 if self.communicator.name == "mpi" else None  # it sums no 16-bit numbers
            if self.bits == _FULL_BITS:
                cap = self.layout.bucket_numel
                buckets = plain_buckets(self.params, self.communicator, 0, bucket_numel=cap, dtype=dtype)
            else:
                of = self.errors, self.layout, self.params, self.communicator, 0, self.bits
                buckets = low_bit_buckets(*of, dtype=dtype, with_frozen=True)  # they may be trainable later
            position = {param: number for number, param in enumerate(self.params)}
            last = [(max(map(position.__getitem__, bucket.members())), bucket) for bucket in buckets]
            self._buckets = [bucket for _, bucket in sorted(last, key=lambda row: row[0])]
        begin_pass(self._buckets, self._handed_out, scale_of(self._loss_scale))
        self._rounds.begin(self._buckets)

    def _finish(self, fault: bool | Tensor) -> None:
        self.steps += 1
        if isinstance(fault, Tensor):
            self._fault = self.steps, fetch_later(fault)
        elif fault:
            self._steps_not_finite += 1
            self._warn_not_finite(self.steps, self._whose_were_not_finite())
        self.traffic.end_step()
        if self._announcement.is_open:
            self._announcement.end(self)

    def _whose_were_not_finite(self) -> str:
        """Say whose gradients were not finite, by what their messages have missed. All ranks call."""
        new = self.errors.pending
        missed = new is not None and not bool(new.worker_values().isfinite().all())
        ranks = [rank for rank, found in enumerate(self.communicator.all_gather_object(missed)) if found]
        return f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"

    def _warn_not_finite(self, step: int, whose: str) -> None:
        if self.communicator.rank == 0:
            warn_not_finite(logger, step, whose)


def warn_not_finite(log: logging.Logger, step: int, whose: str) -> None:
    """Warn of averages of a step that are not finite."""
    log.warning(
        "step %d: gradients of %s are not finite, and so are their averages on all ranks: an optimizer without a "
        "GradScaler takes the step all the same, and its parameters become NaN. Errors stay as they were",
        step,
        whose,
    )


def bits_of(option: str, value: str) -> int:
    """Return the bits that a value of an option stands for."""
    legal = {**FORMATS, FULL: _FULL_BITS}
    if value not in legal:
        raise ValueError(f"{option} must be one of {[*legal]}, got {value!r}")
    return legal[value]


def name_of(bits: int) -> str:
    """Return the value of an option that stands for so many bits."""
    return next((name for name, each in FORMATS.items() if each == bits), FULL)


def check_place(state_dict: dict[str, Any], mine: dict[str, Any]) -> None:
    """Check that a state dict was saved in the same place as this rank's, and with the same options."""
    for key, value in mine.items():
        if state_dict[key] != value:
            raise ValueError(
                f"the state dict has {key}={state_dict[key]}, this rank {value}: load it with the same options and "
                "parameters, on the same ranks"
            )


def scale_of(loss_scale: Callable[[], float] | None) -> float:
    """Return the factor that the gradients of the coming step carry; 1 without a function that returns it."""
    scale = 1.0 if loss_scale is None else float(loss_scale())
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"loss_scale must return a finite number > 0, got {scale}")
    return scale


def _iterable(params: Any) -> Iterable[Any]:
    """Return ``params``, which must hold parameters, named or not."""
    given = list(params) if isinstance(params, Iterable) and not isinstance(params, (str, Tensor)) else None
    if given is None or not all(isinstance(p[-1] if isinstance(p, tuple) else p, Tensor) for p in given):
        raise TypeError(
            f"params must be parameters, and come first, got {params!r:.80}: give model.parameters() or "
            "model.named_parameters(), such as GradientCompression(model.named_parameters(), 'int4')"
        )
    return given


def compress_hook(
    state: GradientCompression,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP communication hook: average a bucket of gradients by low-bit messages with error feedback.

    Raises:
        TypeError: If the bucket holds a sparse gradient.
    """
    check_bucket(bucket)
    return state.add_bucket(bucket)
