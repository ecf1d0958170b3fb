"""Exact parameters in FSDP2 over all ranks: what changed since the last all-gather in its place, bit for bit.

Parameters that FSDP2 gathers in 16 bits, which float32 shards round to, change little in a step. So every rank keeps a
replica of what was gathered last, 2 bytes per parameter. The owner of a shard sends the changes of its part
(:mod:`hf_compressopt.kernels.changes`), by which all replicas become what the shards round to now:

    message <- changes(replica, round(shard));  replica <- replica + message on all ranks               (1)

A replica is always what the shards rounded to in the last forward pass. So nothing of it is state: a model that is made
or loaded anew sends more once, and computes with the same bits.

The lengths of all units' messages are exchanged once in a forward pass, by its first all-gather: the host waits there.
They are exchanged anew if shards were written since then, on all ranks alike, as by a load: by an optimizer's step, or
by writes that torch counts in a tensor's version (``.data`` has a version of its own).
Units whose changes would take more bytes are gathered in full. Backward gathers again, without a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.fsdp.units import Unit
from hf_compressopt.kernels import changes


@dataclass(eq=False)
class _Replica:
    """The replica of one unit, and what this rank has to send of it."""

    unit: Unit
    values: Tensor | None = None  # [ranks, n] int16, as they were gathered last
    new: Tensor | None = None  # [n] int16, that this rank's shard rounds to, not yet sent
    sizes: Tensor | None = None  # [blocks] int16, of the changes of this rank's part
    payloads: Sequence[int] = ()  # bytes of each rank's blocks
    versions: Sequence[int] = ()  # of the shards that ``new`` was made of


class ExactGathers:
    """The all-gathers of all units of a model, by their changes.

    Attributes:
        nbytes: Bytes that all ranks together have put on the wire since the last optimizer step, each once.
        bits_per_parameter: Of the parameters that were gathered between the last two optimizer steps; None before.
    """

    def __init__(self, units: Sequence[Unit], ranks: TorchCommunicator) -> None:
        """Check that all units are gathered in 16 bits, and hook into FSDP2."""
        for unit in units:
            _check(unit)
        self._ranks = ranks
        self._replicas = [_Replica(unit) for unit in units]
        self._due: set[_Replica] = set()  # whose lengths were exchanged, and which were not gathered since then
        self.nbytes = 0
        self.bits_per_parameter: float | None = None
        for replica in self._replicas:
            replica.unit.set_all_gather(_AllGather(replica, self._gather))
        _living.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_step_taken))

    def end_step(self) -> None:
        """Note that parameters have changed, and close the counters of a step."""
        self._due.clear()
        numel = sum(0 if replica.values is None else replica.values.numel() for replica in self._replicas)
        if self.nbytes:
            self.bits_per_parameter = 8 * self.nbytes / numel
        self.nbytes = 0

    @torch.no_grad()
    def _gather(self, replica: _Replica, output: Tensor, part: Tensor) -> None:
        """Write what all ranks have of a unit to ``output``, [ranks * n]; ``part``, [n], is this rank's own."""
        whole = output.view(torch.int16)
        if replica.values is None or replica.values.numel() != whole.numel():
            self._in_full(whole, part.view(torch.int16))
            replica.values = whole.view(self._ranks.world_size, -1).clone()
            return
        in_backward = torch._C._current_graph_task_id() != -1  # where nothing has changed since forward
        if not in_backward and (replica not in self._due or replica.versions != replica.unit.versions):
            self._exchange_lengths()
        self._due.discard(replica)
        if replica.new is not None:
            self._refresh(replica, replica.values, replica.new)
            replica.new = replica.sizes = None
        _used_here(replica.values)
        whole.copy_(replica.values.view(-1))

    def _exchange_lengths(self) -> None:
        """Find out what has changed in all units, and how much each rank has to send. The host waits once."""
        rank, found = self._ranks.rank, [replica for replica in self._replicas if replica.values is not None]
        for replica in found:
            assert replica.values is not None
            _used_here(replica.values)
            replica.versions = replica.unit.versions
            replica.new = replica.unit.rounded_shard().view(torch.int16)
            replica.sizes = changes.change_sizes(replica.values[rank], replica.new)
        lengths = torch.stack([replica.sizes.sum(dtype=torch.int64) for replica in found if replica.sizes is not None])
        table = lengths.new_empty(self._ranks.world_size * len(lengths))
        self._ranks.all_gather(table, lengths).wait()
        self.nbytes += table.nbytes
        rows = table.view(self._ranks.world_size, -1).t().tolist()
        for replica, payloads in zip(found, rows, strict=True):
            replica.payloads = payloads
        self._due = set(found)

    def _refresh(self, replica: _Replica, values: Tensor, new: Tensor) -> None:
        """Make a replica what the shards round to, as (1) says. values: [ranks, n]; new: [n]."""
        rank, numel, sizes = self._ranks.rank, new.numel(), replica.sizes
        assert sizes is not None
        _used_here(new, sizes, values)
        if not any(replica.payloads):
            return
        lengths = [changes.message_nbytes(numel, payload) for payload in replica.payloads]
        stride = max(lengths)
        if stride > new.nbytes:
            self._in_full(values.view(-1), new)
            return
        together = torch.empty(len(lengths) * stride, dtype=torch.uint8, device=new.device)
        own = together[rank * stride :][:stride]
        changes.write_message_(values[rank], new, sizes, own[: lengths[rank]])
        own[lengths[rank] :] = 0
        self._ranks.all_gather(together, own).wait()
        self.nbytes += together.nbytes
        for other, length in enumerate(lengths):
            if other != rank:
                changes.read_message_(together[other * stride :][:length], values[other])
        values[rank] = new

    def _in_full(self, whole: Tensor, part: Tensor) -> None:
        self._ranks.all_gather(whole.view(torch.uint8), part.contiguous().view(torch.uint8)).wait()
        self.nbytes += whole.nbytes


#: Those of the process, whose lengths an optimizer's step makes out of date, and the hook that tells them.
_living: WeakSet[ExactGathers] = WeakSet()
_hooks: list[Any] = []


@torch._disable_dynamo  # type: ignore[attr-defined]
def _step_taken(*_: Any) -> None:
    for gathers in _living:
        gathers.end_step()


def _used_here(*tensors: Tensor) -> None:
    """Keep tensors' memory until this stream has used it: FSDP2 gathers on several, and they are made on one."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _check(unit: Unit) -> None:
    dtypes = unit.gathered_dtypes
    if len(dtypes) > 1 or not dtypes <= {*changes.DTYPES}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(
            "param_compression=exact sends changes of parameters that FSDP2 gathers in bfloat16 or float16, got "
            f"{names} in the unit of {type(unit.module).__name__}: give fully_shard "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) (Trainer: --bf16; Accelerate: "
            "mixed_precision='bf16'), or leave param_compression out"
        )
    if unit.gathers_its_own_way:
        raise TypeError(
            f"param_compression=exact sends changes of the parameters themselves, and the unit of "
            f"{type(unit.module).__name__} has some that say by fsdp_pre_all_gather what is gathered of them, as "
            "torchao's float8 does: leave one of the two out"
        )
    if unit.gathers_in_parts:
        raise ValueError(
            f"param_compression=exact needs reshard_after_forward=True or False in fully_shard, and the unit of "
            f"{type(unit.module).__name__} has a number of ranks"
        )
    if not unit.takes_all_gather:
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather, which param_compression=exact needs: "
            "install a newer torch, such as 2.13"
        )
    if (known := unit.all_gather) not in (None, "DefaultAllGather", _AllGather.__name__):
        raise ValueError(
            f"the unit of {type(unit.module).__name__} has a custom all-gather already, {known}: "
            "param_compression=exact needs it for itself, so leave one of the two out"
        )


@dataclass(eq=False)
class _AllGather:
    """An all-gather as FSDP2 calls it: see torch's AllGather."""

    replica: _Replica
    gather: Callable[[_Replica, Tensor, Tensor], None]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for gathered parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self.gather(self.replica, output_tensor, input_tensor)
