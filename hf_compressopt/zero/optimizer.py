"""ZeRO stages 1 and 2 (Rajbhandari et al. 2020, arXiv 1910.02054): each rank keeps and updates its part of the state.

gradient -> slice -> reduce-scatter -> this rank's part -> ordinary optimizer -> all-gather -> parameters
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any, overload

import torch
import torch.distributed as dist

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.optim.functional import trust_ratio
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.options import check_at_least, resolve_communicator
from hf_compressopt.zero.join import JoinableZero
from hf_compressopt.zero.loss_scale import LossScale
from hf_compressopt.zero.messages import FLOAT_BYTES, Window, gather_parameters
from hf_compressopt.zero.options import (
    as_dtype,
    bucket_sizes,
    check_flags,
    check_optimizer_class,
    check_stage,
    make_precision,
    take_clipping,
    wants_offload,
)
from hf_compressopt.zero.partitioned import Layout
from hf_compressopt.zero.shards import UpdateBucket

logger = logging.getLogger(__name__)

_NOT_OPTIONS = ("self", "params", "optimizer_class", "defaults", "__class__")


class ZeroOptimizer(JoinableZero):
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
        clip_grad: Clip gradients to this norm in step(); 0 is off. The wrapped optimizer's ``max_grad_norm``, as
            FusedAdam has it, is another spelling.
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
        given = {key: value for key, value in locals().items() if key not in _NOT_OPTIONS}
        check_optimizer_class(optimizer_class, defaults)
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
        inner_options, clip_grad = take_clipping(optimizer_class, defaults, clip_grad)
        reduce_numel, self.gather_numel = bucket_sizes(bucket_cap_mb, reduce_bucket_size, allgather_bucket_size)
        precision = make_precision(
            communication_data_type, gradient_accumulation_dtype, postscale_gradients, gradient_predivide_factor
        )
        layout = Layout(
            bucket_numel=reduce_numel,
            rotate=round_robin_gradients,
            precision=precision,
            overlap=overlap_comm,
            contiguous=contiguous_gradients,
            master_dtype=as_dtype("master_dtype", master_dtype) or torch.float32,
            state_dtype=as_dtype("state_dtype", state_dtype),
            offload=wants_offload(offload_optimizer),
        )
        chosen = resolve_communicator(communicator, comm_backend_name, False)
        self.stage = stage
        super().__init__(
            params,
            optimizer_class,
            inner_options,
            layout,
            lambda device, traffic: make_communicator(chosen, process_group, device=device, traffic=traffic),
            loss_scale=LossScale.make(loss_scale, initial_loss_scale, loss_scale_window),
            ignore_unused_parameters=ignore_unused_parameters,
            clip_grad=clip_grad,
            model_parallel_group=model_parallel_group,
        )
        self._order_known = False
        self._made_with = {**given, **defaults}
        self._first_groups = len(self.param_groups)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroOptimizer:
        """A copy around copies of the parameters, which shares the process groups."""
        groups = [
            {key: value if key == "process_group" else deepcopy(value, memo) for key, value in group.items()}
            for group in self.param_groups
        ]
        options = dict(self._made_with)
        if isinstance(options["communicator"], Communicator):
            options["communicator"] = deepcopy(options["communicator"], memo)
        copied = type(self)(groups[: self._first_groups], self.optimizer_class, **options)
        memo[id(self)] = copied
        for group in groups[self._first_groups :]:
            copied.add_param_group(group)
        copied.load_state_dict(deepcopy(self.state_dict()))
        for mine, theirs in zip(self._reducer.slices, copied._reducer.slices, strict=True):
            theirs.average = None if mine.average is None else mine.average.clone()
        copied._reducer.present = list(self._reducer.present)
        return copied

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
        if self._states_are_away:
            self.reload_states()
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
        if not self._order_known and self.communicator.world_size > 1:
            # from here on slices leave in the order in which rank 0 completed them
            self._reducer.use_order(self.communicator.all_gather_object(self._reducer.arrival)[0])
        self._order_known = True

    def _update(self, update: Callable[[UpdateBucket], None]) -> None:
        """Update bucket by bucket; the parameters of one are on their way while the next is updated."""
        before = [dict(group) for group in self.param_groups]
        window = Window(FLOAT_BYTES * self.gather_numel)
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
        for communicator in self._communicators():
            rows = [n for n, group in enumerate(self._group_of) if self._is_of(group, communicator)]
            mine = squares[rows]
            communicator.all_reduce(mine).wait()
            squares[rows] = mine
        options = self._inner_options
        low, high = options.get("min_coeff", 0.01), options.get("max_coeff", 10.0)
        ratios = {n: trust_ratio(row[0], row[1], low, high) for n, row in enumerate(squares)}
        window = Window(FLOAT_BYTES * self.gather_numel)
        for bucket in self._buckets:
            bucket.apply(ratios)
            self._finish_bucket(bucket, window)
        window.drain()

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
