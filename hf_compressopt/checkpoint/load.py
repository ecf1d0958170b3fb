"""Loads: the ranks agree on an index, check that it fits, and read their tensors, verified."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import torch

from hf_compressopt.checkpoint.state import FSDPState, Header, LoadPlan, State
from hf_compressopt.checkpoint.stored import Stored, source_of
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.topology import FLAT, TWO_LEVELS
from hf_compressopt.format.index import (
    BY_PLACE,
    INDEX_NAME,
    NODE_SIZE,
    CheckpointError,
    CheckpointIndex,
    errors_naming,
    name_by_place,
)
from hf_compressopt.format.plan import StateTensor
from hf_compressopt.format.shards import ShardFiles, absent_shards, not_whole, progress

logger = logging.getLogger(__name__)


def load(
    state: State, optimizer: torch.optim.Optimizer, folder: Path, names: Sequence[str] | None, prefix: str
) -> None:
    """Read a checkpoint into an optimizer's state, verified. All ranks call."""
    communicator = state.communicator
    index, path = _agreed_index(communicator, folder / INDEX_NAME.format(prefix=prefix))
    absent = absent_shards(folder, index)
    places = communicator.all_gather_object((gethostname(), str(folder.absolute()), list(absent.items())))

    with ExitStack() as opened:  # the files stay open, so that what is read is what was checked

        def check() -> _Reading:
            with errors_naming(path):
                by_place = index.header.get(BY_PLACE)
                grouped = _names_by_place(state, optimizer) if by_place else state.checked_names(names)
                source = source_of(index, _class_of(optimizer), optimizer.param_groups)
                _check_model(state, index, grouped)
                out_of_reach = {
                    number: _out_of_reach(number, problem, index.shards[number].file, places, communicator.rank)
                    for number, problem in absent.items()
                }
                files = opened.enter_context(ShardFiles(folder, index, out_of_reach))
                opened.enter_context(_topology_of(source.header, state))
                plan = state.plan_load(grouped, source.header, source.entries)
                reading = _Reading(source, plan, files, communicator, path)
                reading.check()
            return reading

        reading = communicator.run_together(check, others=CheckpointError)
        communicator.run_together(reading.read, others=CheckpointError)
    reading.plan.commit()


@contextmanager
def _topology_of(header: Header, state: State) -> Iterator[None]:
    """Take the topology of the run that saved where this one's was measured; warn of another one: it has other bits.

    If the load fails inside the block, topology and errors are those of before.
    """
    ranks, saved = state.communicator, header.values.get(NODE_SIZE, 1)
    before, timed, of = ranks.levels, ranks.timed, Header.of(state.header())
    alike = header.title == of.title and header.values.get("world_size") == ranks.world_size
    if not alike or isinstance(state, FSDPState) or saved == ranks.topology.node_size:
        yield
        return
    take = timed is not None and saved in (1, timed.node.world_size)
    if take:
        ranks.levels = None if saved == 1 else timed
    undo = state.remake_errors() if take else []
    try:
        yield
    except BaseException:
        ranks.levels = before
        for restore in undo:
            restore()
        raise
    name = FLAT if saved == 1 else TWO_LEVELS
    if ranks.rank == 0 and take:
        logger.info("topology=auto: %s, as the run that saved the checkpoint, whatever was measured now", name)
    elif ranks.rank == 0:
        logger.warning(
            "the checkpoint was saved with a node_size of %s, and this run has %d: the run is resumed, but not bit for "
            "bit. For equal bits give topology='%s'",
            saved,
            ranks.topology.node_size,
            name,
        )


# -- finding ----------------------------------------------------------------------------------------------------------


def _agreed_index(communicator: Communicator, path: Path) -> tuple[CheckpointIndex, Path]:
    """Return the index of the same save on all ranks, and its file."""
    index = communicator.run_together(lambda: CheckpointIndex.read(path), others=CheckpointError)
    saves = communicator.all_gather_object(index.save_id)
    if len(set(saves)) == 1:
        return index, path
    found = {index.save_id: (index, path)}
    aside = path.with_suffix(".tmp")
    with suppress(CheckpointError):
        index = CheckpointIndex.read(aside)
        found[index.save_id] = (index, aside)
    everywhere = set.intersection(*map(set, communicator.all_gather_object(list(found))))
    for save in saves:
        if save in everywhere:
            return found[save]
    hosts = communicator.all_gather_object(gethostname())
    told = [
        f"rank {rank} on {host} has save {save}" for rank, (host, save) in enumerate(zip(hosts, saves, strict=True))
    ]
    raise CheckpointError(f"{path} is of different saves: {', '.join(told)}; bring together the files of one save")


def _out_of_reach(number: int, problem: str, file: str, places: Sequence[tuple[str, str, Any]], rank: int) -> str:
    for other, (host, folder, absent) in enumerate(places):
        if number not in dict(absent):
            return (
                f"{problem}: rank {rank} on {places[rank][0]} needs it, and rank {other} on {host} has "
                f"{Path(folder, file)}: copy it, or start the ranks on the machines on which they were when it was "
                "saved"
            )
    raise not_whole(problem)


# -- reading ----------------------------------------------------------------------------------------------------------


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    cls = getattr(optimizer, "optimizer_class", type(optimizer))
    known = cls.__module__.startswith(("torch.optim.", "hf_compressopt."))
    return cls.__name__ if known else f"{cls.__module__}.{cls.__name__}"


def _names_by_place(state: State, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the trainable parameters of each param group by their places, as for :data:`BY_PLACE`."""
    names = []
    for number, (group, params) in enumerate(zip(optimizer.param_groups, state.params, strict=True)):
        places = {param: place for place, param in enumerate(group["params"])}
        names.append([name_by_place(number, places[param]) for param in params])
    return names


def _check_model(state: State, index: CheckpointIndex, names: Sequence[Sequence[str]]) -> None:
    saved_ranks = index.header["world_size"]
    if saved_ranks != len(index.shards):
        raise ValueError(f"it was saved by {saved_ranks!r} rank(s) and has {len(index.shards)} shard(s)")
    mine, by_place = state.described(names), index.header.get(BY_PLACE)
    counts = [list(map(len, groups)) for groups in (index.parameters, mine)]
    if len(counts[0]) != len(counts[1]) if by_place else counts[0] != counts[1]:
        raise ValueError(
            f"it is of another model: its param groups have {counts[0]} trainable parameters, this optimizer's "
            f"{counts[1]}"
        )
    for saved, ours in zip(index.parameters, mine, strict=True):
        if by_place:  # others have no saved state, and start from zero
            shapes = {parameter["name"]: parameter["shape"] for parameter in ours}
            for name, shape in ((parameter["name"], parameter["shape"]) for parameter in saved):
                if (own := shapes.get(name, "is not trainable, or not there")) != shape:
                    raise ValueError(
                        f"it is of another model: its parameter {name} has shape {shape}, this optimizer's {own}"
                    )
        for theirs, own in zip(saved, ours, strict=True) if not by_place else ():
            if theirs != own:
                raise ValueError(
                    f"it is of another model: it has the parameter {theirs} in the place of this optimizer's {own}"
                )


@dataclass(frozen=True)
class _Reading:
    source: Stored
    plan: LoadPlan
    files: ShardFiles
    communicator: Communicator
    path: Path

    def check(self) -> None:
        """Read and verify everything, and change nothing."""
        ranks = self.communicator.world_size

        def check(tensor: StateTensor) -> None:
            self.source.read(tensor, ranks, self.files, None)
            if (check_values := self.plan.checks.get(tensor.key)) is not None:
                values = torch.empty_like(tensor.local, device="cpu")
                self.source.read(tensor, ranks, self.files, values)
                check_values(values)

        self._each("checking", check)

    @torch.no_grad()
    def read(self) -> None:
        """Read everything once more, from the system's cache if it is still there, into the tensors."""
        ranks = self.communicator.world_size

        def read(tensor: StateTensor) -> None:
            local = tensor.local.detach()
            direct = local.is_contiguous()
            values = local.view(-1) if direct else torch.empty(local.numel(), dtype=local.dtype, device="cpu")
            self.source.read(tensor, ranks, self.files, values)
            if not direct:
                local.copy_(values.view(local.shape))

        try:
            self._each("loading", read)
        except Exception as error:
            told = error if isinstance(error, CheckpointError) else f"{self.path}: {type(error).__name__}: {error}"
            raise CheckpointError(
                f"{told}: the first check found no error, and now the state is half loaded; load again"
            ) from error

    def _each(self, doing: str, action: Callable[[StateTensor], None]) -> None:
        nbytes = sum(tensor.local.nbytes for tensor in self.plan.tensors)
        shown = None if self.communicator.rank == 0 else False
        with progress(f"{doing} {self.path.name}", nbytes, shown=shown) as advance:
            for tensor in self.plan.tensors:
                action(tensor)
                advance(tensor.local.nbytes)
