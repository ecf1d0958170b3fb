"""ZeRO stages 1 and 2 (Rajbhandari et al. 2020, arXiv 1910.02054): each rank keeps and updates its part of the state.

gradient -> slice -> reduce-scatter -> this rank's part -> ordinary optimizer -> all-gather -> parameters
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import TorchCommunicator, make_communicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.optim.functional import bit_sum, clip_factor, exact_square_sum, trust_ratio
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.options import check_at_least, resolve_communicator
from hf_compressopt.zero.loss_scale import LossScale
from hf_compressopt.zero.messages import Window, gather_parameters
from hf_compressopt.zero.options import (
    Offload,
    as_dtype,
    bucket_sizes,
    check_flags,
    check_optimizer_class,
    check_parameters,
    check_stage,
    make_precision,
)
from hf_compressopt.zero.partition import partition, slice_numel
from hf_compressopt.zero.reducer import GradientReducer, SliceGradients
from hf_compressopt.zero.shards import Piece, UpdateBucket, make_piece

logger = logging.getLogger(__name__)


class ZeroOptimizer(torch.optim.Optimizer):
    """An ordinary optimizer whose state, and in stage 2 whose gradients, are shared out among the ranks.

    Gradients leave while backward runs; :meth:`step` updates this rank's part of every parameter and gathers the
    parameters. Nothing else averages gradients: do not wrap the model in DistributedDataParallel. The results are
    those of the wrapped optimizer on averaged gradients, bit for bit, whatever stage, bucket size and overlap are.

    Every backward outside :meth:`no_sync` sends its gradients and frees them; step() uses them up, so that zero_grad()
    is needed only to throw gradients away. All ranks run the same number of such passes. Stages differ in what
    accumulation does in Trainer and Accelerate: in stage 1 they hold whole gradients over the micro-batches and send
    once, in stage 2 they send those of each micro-batch, and whole gradients never exist.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer. A param group may also carry
            ``process_group`` (the ranks that hold copies of its parameters, such as an expert's) and
            ``model_parallel`` (True: each rank of the model-parallel group has other elements of its parameters).
        optimizer_class: An element-wise optimizer class, or :class:`hf_compressopt.Lamb`.
        stage: 1 or 2.
        process_group: The ranks; None is the default group.
        communicator: "auto", the name of a torch.distributed backend, "mpi", or a Communicator.
        bucket_cap_mb: MiB of float32 gradients that are under way together; 25 where nothing is given.
        reduce_bucket_size: The same, in elements.
        allgather_bucket_size: Elements of parameters that are gathered together; as many as are reduced where None.
        overlap_comm: Whether gradients are under way while backward goes on.
        reduce_scatter: Must be True: an all-reduce would send twice as much.
        communication_data_type: dtype of gradients on the wire, such as "bf16"; None is the parameter's.
        gradient_accumulation_dtype: dtype in which averages are kept and summed up; None is the parameter's.
        postscale_gradients: Divide the sum of the gradients, and not the gradients, by the number of ranks.
        gradient_predivide_factor: With postscale_gradients: divide by this before the sum, by the rest after it.
        round_robin_gradients: Deal out the parts of the slices to the ranks in turn.
        contiguous_gradients: Move each gradient into its slice as soon as it is there (and free it), not when the
            slice is sent.
        ignore_unused_parameters: Accept parameters that had no gradient on any rank; False raises an error.
        clip_grad: Clip gradients to this norm in step(); 0 is off.
        loss_scale: Factor of the loss in :meth:`backward` and :meth:`scale_loss`; "dynamic" seeks it.
        initial_loss_scale: First factor of a dynamic loss scale.
        loss_scale_window: Steps without an overflow after which it doubles.
        model_parallel_group: Ranks that share one copy of the model: they agree on norm and overflow.
        master_dtype: dtype of the master copies of bfloat16 and float16 parameters; the parameters' own dtype means
            none, updates then are rounded at once.
        state_dtype: dtype in which element-wise state is kept between steps; None is the master's.
        offload_optimizer: Keep masters, states and gradients in page-locked host memory and update on the CPU.
        comm_backend_name: DeepSpeed's spelling of ``communicator``.
        **defaults: The wrapped optimizer's options, such as lr.

    Raises:
        ValueError: For an option outside its range, or an optimizer that cannot be partitioned.
        TypeError: For what is no optimizer class, or parameters of an unknown kind.
        RuntimeError: If a launcher announces several ranks but torch.distributed is not initialized.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        stage: int = 2,
        process_group: dist.ProcessGroup | None = None,
        communicator: str | Communicator | None = None,
        bucket_cap_mb: float | None = None,
        reduce_bucket_size: int | None = None,
        allgather_bucket_size: int | None = None,
        overlap_comm: bool = True,
        reduce_scatter: bool = True,
        communication_data_type: torch.dtype | str | None = None,
        gradient_accumulation_dtype: torch.dtype | str | None = None,
        postscale_gradients: bool = False,
        gradient_predivide_factor: float = 1.0,
        round_robin_gradients: bool = False,
        contiguous_gradients: bool = True,
        ignore_unused_parameters: bool = True,
        clip_grad: float = 0.0,
        loss_scale: float | str = 1.0,
        initial_loss_scale: float = 65536.0,
        loss_scale_window: int = 1000,
        model_parallel_group: dist.ProcessGroup | None = None,
        master_dtype: torch.dtype | str = torch.float32,
        state_dtype: torch.dtype | str | None = None,
        offload_optimizer: bool | str | None = False,
        comm_backend_name: str | None = None,
        **defaults: Any,
    ) -> None:
        """See the class."""
        check_optimizer_class(optimizer_class)
        check_stage(stage)
        check_flags(
            overlap_comm=overlap_comm,
            reduce_scatter=reduce_scatter,
            round_robin_gradients=round_robin_gradients,
            contiguous_gradients=contiguous_gradients,
            ignore_unused_parameters=ignore_unused_parameters,
        )
        if not reduce_scatter:
            raise ValueError(
                "reduce_scatter must be True, got False: an all-reduce would send twice as much and change nothing"
            )
        check_at_least("clip_grad", clip_grad, 0)
        self.optimizer_class, self.stage, self.clip_grad = optimizer_class, stage, clip_grad
        self.round_robin_gradients = round_robin_gradients
        self.ignore_unused_parameters = ignore_unused_parameters
        self.bucket_numel, self.gather_numel = bucket_sizes(bucket_cap_mb, reduce_bucket_size, allgather_bucket_size)
        self.loss_scale = LossScale.make(loss_scale, initial_loss_scale, loss_scale_window)
        self._precision = make_precision(
            communication_data_type, gradient_accumulation_dtype, postscale_gradients, gradient_predivide_factor
        )
        self._master_dtype = as_dtype("master_dtype", master_dtype) or torch.float32
        self._state_dtype = as_dtype("state_dtype", state_dtype)
        self._offload = Offload.make(offload_optimizer)
        self._inner_options = defaults
        self.traffic = Traffic()
        self.steps, self.skipped_steps, self.step_was_skipped = 0, 0, False
        self._ready = False  # False while torch's constructor adds the groups: the layout comes when all are known
        self._params: list[Tensor] = []
        self._names: list[str] = []
        self._group_of: list[int] = []
        self._buckets: list[UpdateBucket] = []
        template = optimizer_class([torch.zeros(1, requires_grad=True)], **defaults)
        filled = {key: value for key, value in template.param_groups[0].items() if key not in ("params", "param_names")}
        super().__init__(params, filled)
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        chosen = resolve_communicator(communicator, comm_backend_name, False)
        self.communicator = make_communicator(chosen, process_group, device=device, traffic=self.traffic)
        self._reducer = GradientReducer(
            self.communicator,
            self._precision,
            2 * _FLOAT_BYTES * self.bucket_numel,
            overlap=overlap_comm,
            contiguous=contiguous_gradients,
        )
        self._model_parallel = (
            None if model_parallel_group is None else self._torch_communicator(model_parallel_group, device)
        )
        self._group_communicators: dict[int, tuple[Any, Communicator]] = {}
        self._norm: Tensor | None = None  # [] float64, of the averages as they are; None where it has to be found
        self._norm_of_pass = 0
        self._factor = 1.0  # what the averages are multiplied with when they are used
        self._ready = True
        for number, group in enumerate(self.param_groups):
            check_parameters(group["params"], number)
        self._take_on(range(len(self.param_groups)))

    # -- parameters ---------------------------------------------------------------------------------------------------

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

    def _take_on(self, groups: Iterable[int]) -> None:
        """Lay out the trainable parameters of some param groups, and make this rank's pieces of them."""
        known = {id(param) for param in self._params}
        numbers: list[int] = []
        for group_number in groups:
            group = self.param_groups[group_number]
            given = group.get("param_names", [f"group{group_number}.{i}" for i in range(len(group["params"]))])
            for param, name in zip(group["params"], given, strict=True):
                if param.requires_grad and id(param) not in known:
                    known.add(id(param))
                    numbers.append(len(self._params))
                    self._params.append(param)
                    self._names.append(name)
                    self._group_of.append(group_number)
        cuts = self._cut(numbers)
        first = len(self._reducer.slices)
        self._reducer.add([self._params[n] for n in numbers], [self._names[n] for n in numbers], cuts)
        for together in _in_buckets(cuts, self.bucket_numel):
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
            sent = self._precision.sent or dtype
            kept = self._precision.kept or dtype
            sizes = [(number, self._params[number].numel()) for number in members]
            length = slice_numel(self.bucket_numel, communicator.world_size)
            rotate = self.round_robin_gradients
            for cut in partition(sizes, length, communicator.world_size, rotate=rotate):
                last_in_backward = min(cut.places)
                cuts.append((last_in_backward, SliceGradients(cut, communicator, sent, kept, device)))
        return [gradients for _, gradients in sorted(cuts, key=lambda entry: -entry[0])]

    def _update_bucket(self, slices: list[int]) -> UpdateBucket:
        pieces = []
        for number in slices:
            gradients = self._reducer.slices[number]
            for span in gradients.cut.parts[gradients.communicator.rank]:
                param, group = self._params[span.param], self._group_of[span.param]
                pieces.append(make_piece(span, number, group, param, self._master_dtype, self._offload.enabled))
        return UpdateBucket(slices, pieces, self.param_groups, self._make_inner, self._state_dtype)

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
        return list(self._params)

    def pieces(self) -> Iterator[tuple[UpdateBucket, Piece]]:
        """This rank's pieces of the parameters, and the buckets in which they are updated."""
        for bucket in self._buckets:
            for piece in bucket.pieces:
                yield bucket, piece

    def _follow_parameters(self) -> None:
        """Look at the parameters' memory anew, if a model was moved after its optimizer was made."""
        for _, piece in self.pieces():
            piece.follow(self._params[piece.param])

    # -- gradients ----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward leaves gradients in p.grad; they are sent with those of the next pass outside, or by step().

        Whole gradients exist until then.
        """
        with self._reducer.no_sync():
            yield

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return loss * self.loss_scale.value

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward on the scaled loss; step() takes the scale out again."""
        torch.autograd.backward(self.scale_loss(loss), **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw all gradients away, also those that were averaged. All ranks call; p.grad is None afterwards."""
        self._reducer.clear()
        self._norm, self._factor = None, 1.0
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @torch.no_grad()
    def finish_gradients(self) -> Tensor:
        """Send what has not been sent, and agree on the norm. All ranks call; done by all that need averages.

        Returns:
            [] float64, the square of the norm of the average gradient, loss scale and clipping taken into account;
            not finite where an element of it is not.

        Raises:
            TypeError: For a gradient that cannot be used; a RuntimeError on the other ranks.
            RuntimeError: With ``ignore_unused_parameters=False``, if a parameter had no gradient on any rank.
        """
        self._check_ranks_agree()
        self._reducer.flush()
        if self._norm is None or self._norm_of_pass != self._reducer.passes:
            if self._norm is None:
                self._factor /= self.loss_scale.value
            self._norm, self._norm_of_pass = self._agree(), self._reducer.passes
        return self._norm * self._factor**2

    def _agree(self) -> Tensor:
        """Tell each other of norms, faults, parameters without gradient, and of gradients that were not sent yet."""
        reducer = self._reducer
        while True:
            left = reducer.leftovers()
            mine = [float(reducer.fault is not None), float(any(left))]
            mine += self._flags(reducer.present, left, self.communicator)
            tail = torch.tensor(mine, dtype=torch.float64, device=self.communicator.device)
            message = torch.cat([self._squares(), tail])
            self.communicator.all_reduce(message).wait()
            squares, faults, any_left, flags = message[:2], float(message[2]), bool(message[3] > 0), message[4:]
            chosen, present = self._read_flags(flags, self.communicator)
            for _, communicator in self._group_communicators.values():
                flags = torch.tensor(self._flags(reducer.present, left, communicator), dtype=torch.float64)
                flags = flags.to(communicator.device)
                communicator.all_reduce(flags).wait()
                theirs = self._read_flags(flags, communicator)
                chosen = [a or b for a, b in zip(chosen, theirs[0], strict=True)]
                present = [a or b for a, b in zip(present, theirs[1], strict=True)]
            if faults > 0:
                self._raise_fault(int(faults))
            if not any_left:
                break
            reducer.send_leftovers(chosen)
        reducer.present = present
        if not self.ignore_unused_parameters and not all(present):
            unused = [name for name, met in zip(self._names, present, strict=True) if not met]
            raise RuntimeError(
                f"parameters without a gradient on any rank: {', '.join(unused[:8])}; ignore_unused_parameters=True "
                "accepts them, or set requires_grad=False before making the optimizer"
            )
        return self._sum_over_model(squares)

    def _flags(self, present: list[bool], left: list[bool], communicator: Communicator) -> list[float]:
        """What this rank has to say to the ranks of a communicator, about parameters and slices."""
        groups, slices = self._group_of, self._reducer.slices
        own = [float(met) for met, group in zip(present, groups, strict=True) if self._is_of(group, communicator)]
        return own + [float(flag) for flag, g in zip(left, slices, strict=True) if g.communicator is communicator]

    def _read_flags(self, flags: Tensor, communicator: Communicator) -> tuple[list[bool], list[bool]]:
        """For each slice whether anyone has leftovers, for each parameter whether anyone has met a gradient."""
        rest = iter((flags > 0).tolist())
        present = [self._is_of(group, communicator) and next(rest) for group in self._group_of]
        chosen = [g.communicator is communicator and next(rest) for g in self._reducer.slices]
        return chosen, present

    def _is_of(self, group: int, communicator: Communicator) -> bool:
        return self._communicator_of(group) is communicator

    def _squares(self) -> Tensor:
        """Squares of this rank's averages: of parameters that are replicated over a model-parallel group, and not."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.communicator.device)
        for _, piece in self.pieces():
            average = self._reducer.slices[piece.slice].average
            if average is not None:
                kind = int(bool(self.param_groups[piece.group].get("model_parallel")))
                part = average[piece.span.offset : piece.span.offset + piece.span.numel]
                squares[kind] += exact_square_sum(part).to(squares.device)
        return squares

    def _sum_over_model(self, squares: Tensor) -> Tensor:
        """The square of the norm over the whole model; replicated parameters count once."""
        if self._model_parallel is None:
            return squares.sum()
        replicated, split = squares
        mine = split + replicated if self._model_parallel.rank == 0 else split + 0 * replicated
        total: Tensor = mine.reshape(1)
        self._model_parallel.all_reduce(total).wait()
        return total.sum()

    def _raise_fault(self, count: int) -> None:
        fault, self._reducer.fault = self._reducer.fault, None
        if fault is not None:
            raise fault
        raise RuntimeError(f"{count} other rank(s) had gradients that cannot be used")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Clip the average gradient of the coming step. All ranks call.

        Args:
            max_norm: The norm to clip to; ``math.inf`` only measures.
            parameters: For the sake of callers that name them: all that this optimizer has, or more.

        Returns:
            [] float32, the norm before clipping.

        Raises:
            ValueError: If ``max_norm`` is not positive, or ``parameters`` leaves out some of the optimizer's.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm}")
        if parameters is not None:
            given = {id(param) for param in parameters}
            if any(id(param) not in given for param in self._params):
                raise ValueError("parameters must hold all trainable parameters of the optimizer, some are missing")
        norm = self.finish_gradients().sqrt().float()
        factor = float(clip_factor(norm, max_norm))
        if math.isfinite(factor) and factor < 1.0:
            self._factor *= factor
        return norm

    def unscale_(self, inverse_scale: float) -> bool:
        """Take a gradient scaler's factor out of the averages. All ranks call.

        Returns:
            Whether an element of them is not finite, alike on all ranks.
        """
        square = self.finish_gradients()
        self._factor *= inverse_scale
        return not math.isfinite(float(square))

    # -- the step -----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, on all ranks together, and use the gradients up.

        Where the average gradient is not finite the step is skipped on all ranks: nothing changes but a dynamic loss
        scale, and ``step_was_skipped`` is True until the next step.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            TypeError: As :meth:`finish_gradients`.
            RuntimeError: Likewise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_parameters()
        if not math.isfinite(float(self.finish_gradients())):
            self.skip_step()
            return loss
        if self.clip_grad > 0:
            self.clip_grad_norm_(self.clip_grad)
        if issubclass(self.optimizer_class, Lamb):
            self._lamb_update()
        else:
            self._update(UpdateBucket.step)
        self.steps += 1
        self.step_was_skipped = False
        self._end_step()
        return loss

    def skip_step(self) -> None:
        """Close a step that is not taken, because a gradient is not finite: also for a gradient scaler to call."""
        self.step_was_skipped = True
        self.skipped_steps += 1
        self._end_step()
        if self.communicator.rank == 0:
            logger.warning("step %d skipped: a gradient is not finite", self.steps + 1)

    def _end_step(self) -> None:
        self.loss_scale.update(self.step_was_skipped)
        self._reducer.clear()
        self._norm, self._factor = None, 1.0
        self.traffic.end_step()
        if self.steps == 1 and not self.step_was_skipped and self.communicator.world_size > 1:
            # from here on slices leave in the order in which rank 0 completed them
            self._reducer.use_order(self.communicator.all_gather_object(self._reducer.arrival)[0])

    def _update(self, update: Callable[[UpdateBucket], None]) -> None:
        """Update bucket by bucket; the parameters of one are on their way while the next is updated."""
        before = [dict(group) for group in self.param_groups]
        window = Window(_FLOAT_BYTES * self.gather_numel)
        for bucket in self._buckets:
            bucket.take_hyperparameters(before)
            self._give_gradients(bucket)
            update(bucket)
            self._finish_bucket(bucket, window)
        window.drain()

    def _finish_bucket(self, bucket: UpdateBucket, window: Window) -> None:
        bucket.give_hyperparameters(self.param_groups)
        for piece in bucket.pieces:
            piece.tensor.grad = None
            piece.write_back(self._params[piece.param])
        for number in bucket.slices:
            gradients = self._reducer.slices[number]
            gradients.average = None
            if gradients.communicator.world_size > 1:
                gather_parameters(self._params, gradients.cut, gradients.communicator, window, lambda: None)

    def _give_gradients(self, bucket: UpdateBucket) -> None:
        """Hand the averages, unscaled and clipped, to the pieces; None where no rank had a gradient."""
        for piece in bucket.pieces:
            average = self._reducer.slices[piece.slice].average
            if average is None or not self._reducer.present[piece.param]:
                piece.tensor.grad = None
                continue
            part = average[piece.span.offset : piece.span.offset + piece.span.numel]
            wide = part if part.dtype in (torch.float32, torch.float64) else part.float()
            if self._factor != 1.0:
                wide = wide.mul_(self._factor)
            piece.tensor.grad = wide.to(piece.tensor)

    def _lamb_update(self) -> None:
        """Lamb's step: norms are summed over the ranks between its halves, one small all-reduce for all tensors."""
        before = [dict(group) for group in self.param_groups]
        squares = torch.zeros(len(self._params), 2, dtype=torch.float64, device=self.communicator.device)
        for bucket in self._buckets:
            bucket.take_hyperparameters(before)
            self._give_gradients(bucket)
            for piece, square in bucket.measure():
                squares[piece.param] += square.to(squares.device)
        for communicator in [self.communicator, *(entry[1] for entry in self._group_communicators.values())]:
            rows = [n for n, group in enumerate(self._group_of) if self._is_of(group, communicator)]
            mine = squares[rows]
            communicator.all_reduce(mine).wait()
            squares[rows] = mine
        options = self._inner_options
        low, high = options.get("min_coeff", 0.01), options.get("max_coeff", 10.0)
        ratios = {n: trust_ratio(row[0], row[1], low, high) for n, row in enumerate(squares)}
        window = Window(_FLOAT_BYTES * self.gather_numel)
        for bucket in self._buckets:
            bucket.apply(ratios)
            self._finish_bucket(bucket, window)
        window.drain()

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _check_ranks_agree(self) -> None:
        """Once before the first step: all ranks must hold the same layout, options, step and parameters.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        self._reducer.check_layout()
        if self._ranks_checked:
            return
        options = [self.optimizer_class.__name__, self.steps, self.clip_grad, repr(self.loss_scale)]
        self.communicator.require_equal("optimizer, step or options", repr(options))
        alike = [p for p, g in zip(self._params, self._group_of, strict=True) if self._is_of(g, self.communicator)]
        digest = sum(int(bit_sum(param)) for param in alike)
        self.communicator.require_equal("the bits of their parameters (are they alike at the start?)", digest)
        self._ranks_checked = True

    # -- what a user may ask ------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"ZeRO stage {self.stage} around {self.optimizer_class.__name__}, {self.communicator.world_size} rank(s) "
            f"over {self.communicator.name}, {len(self._reducer.slices)} slices"
        )

    def metrics(self) -> dict[str, float]:
        """Numbers for a log: stage, step, bytes sent and host seconds in communication (this rank's), skipped steps."""
        return {
            "stage": float(self.stage),
            "step": float(self.steps),
            "bytes_sent": float(self.traffic.total_bytes),
            "bytes_sent_step": float(self.traffic.step_bytes),
            "seconds_communication": self.traffic.total_seconds,
            "skipped_steps": float(self.skipped_steps),
            "loss_scale": self.loss_scale.value,
        }


_FLOAT_BYTES = 4


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
