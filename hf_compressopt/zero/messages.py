"""Slices in messages of 4 or 8 bits per element: gradients to their owners, and parameters back to all ranks.

Gradients go up in one phase with error feedback (LoCo, arXiv 2407.04480). Rank r sends, and the owner averages in
float32, in rank order:

    u_r = g_r + worker_error;  message <- Q(u_r);  worker_error <- u_r - Q(u_r);  g = mean_r Q(u_r)     (1)

Parameters come down as differences (SDP4Bit, arXiv 2410.15526). The owner has float32 masters, and all ranks have alike
replicas, the parameters that the model computes with:

    message <- Q(master - replica);  replica <- replica + Q(master - replica) on all ranks              (2)

What a message misses is still there in the next difference, so that (2) needs no error feedback of its own.

In two levels the ranks of a node first average what they have for the owners at each place, at full precision. Then (1)
is among the peers: r and W are nodes, and each rank has the errors of the parts that it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_compressopt.collectives import scattering
from hf_compressopt.collectives.communicator import Communicator, Handle
from hf_compressopt.kernels import Combination, IntegerFormat, Segment
from hf_compressopt.kernels.memory import is_direct
from hf_compressopt.zero.feedback import SliceErrors
from hf_compressopt.zero.parts import Part, Slice
from hf_compressopt.zero.transport import Window


def send_gradients(
    buffer: Tensor, cut: Slice, communicator: Communicator, errors: SliceErrors, loss_scale: float, kept: torch.dtype
) -> tuple[Handle, Callable[[], Tensor]]:
    """Start sending every rank its part of a slice, as (1) says. The errors wait for :meth:`SliceErrors.keep`.

    Args:
        buffer: [world_size * part_numel] float32, bfloat16 or float16, this rank's gradients.
        cut: The layout of the slice.
        communicator: The ranks, at least two.
        errors: The worker errors of the slice.
        loss_scale: Factor that the gradients carry; the average carries it too.
        kept: dtype of the average.

    Returns:
        The handle; and a function that returns the average [part_numel] after the handle was waited for.
    """
    form, numel, levels = errors.form, errors.kept.numel(), communicator.levels
    peers = communicator if levels is None else levels.peers
    nbytes = form.nbytes(cut.part_numel)  # of a chunk: a part is one, since ALIGN is a multiple of 8
    splits = [nbytes] * peers.world_size
    under_way: list[Tensor] = []

    def of_places(values: Tensor, starts: Sequence[int], factor: float = 1.0) -> Combination:
        grads = [Segment(values, start, numel // len(starts), 0) for start in starts]
        return Combination(numel, values.device, grads=grads, beta=factor / loss_scale)

    def send(z: Combination) -> Handle:
        messages = torch.empty(peers.world_size * nbytes, dtype=torch.uint8, device=z.device)
        latest = errors.latest
        form.compress_settled_(z, latest, errors.pending(), messages, peers.world_size)
        received = torch.empty_like(messages)
        under_way.extend((received, messages))
        return peers.all_to_all(received, messages, output_splits=splits, input_splits=splits)

    def average() -> Tensor:
        mean = torch.empty(cut.part_numel, dtype=torch.float32, device=under_way[0].device)
        form.mean_(under_way[0], mean, peers.world_size, loss_scale / peers.world_size)
        return mean.to(kept)

    if levels is None:
        return send(of_places(buffer, [0])), average
    node, nodes = levels.node, peers.world_size
    handle, means_of_node = scattering.sum_in_node(buffer, node, nodes, 1.0 / node.world_size)
    calls = scattering.TwoCalls(handle, lambda: send(of_places(means_of_node(), [0])))
    return calls, average


def send_differences(
    params: Sequence[Tensor],
    parts: Sequence[Part],
    cut: Slice,
    communicator: Communicator,
    form: IntegerFormat,
    window: Window,
) -> None:
    """Start bringing all replicas nearer to the masters, as (2) says. All ranks add the same numbers.

    The replicas have them when ``window`` is drained.

    Args:
        params: All parameters, by their numbers in the layout; contiguous or not.
        parts: This rank's parts of the slice, with the masters.
        cut: The layout of the slice.
        communicator: The ranks that share it, at least two.
        form: The form of the messages.
        window: The queue that completes the message.
    """
    nbytes = form.nbytes(cut.part_numel)
    device = params[next(iter(cut.places))].device
    window.room_for(communicator.world_size * nbytes)
    ahead = torch.zeros(cut.part_numel, dtype=torch.float32, device=device)
    for part in parts:
        place = ahead[part.span.offset : part.span.offset + part.span.numel]
        torch.sub(part.tensor.to(device), part.replica_in(params[part.param]), out=place)
    gathered = torch.empty(communicator.world_size * nbytes, dtype=torch.uint8, device=device)
    message = gathered[communicator.topology.chunk_of(communicator.rank) * nbytes :][:nbytes]
    form.compress_(Combination(cut.part_numel, device), ahead, message, 1)
    handle = scattering.all_gather(gathered, message, communicator)

    def arrived() -> None:
        handle.wait()
        messages, count = scattering.in_rank_order(gathered, communicator), communicator.world_size
        with replicas_of(cut, params) as replicas:
            form.add_(form.average(cut.numel, messages, count, nbytes), replicas, decay=1.0)
        for part in parts:
            part.note_replica(params[part.param])

    window.add(communicator.world_size * nbytes, arrived, handle)


@contextmanager
def replicas_of(cut: Slice, params: Sequence[Tensor]) -> Iterator[list[Segment]]:
    """Give the elements of the parameters in a slice as segments that cover it, to be changed inside."""
    flats = {number: params[number].detach().reshape(-1).resolve_neg() for number in cut.places}
    rows = [(start, Segment(None, 0, stop - start, 0)) for start, stop in cut.gaps]
    for number, spans in cut.places.items():
        rows += [(begin, Segment(flats[number], span.start, span.numel, number)) for begin, span in spans]
    yield [segment for _, segment in sorted(rows, key=lambda row: row[0])]
    for number, flat in flats.items():
        if not is_direct(params[number]):  # flat is a copy
            params[number].detach().copy_(flat.view(params[number].shape))
