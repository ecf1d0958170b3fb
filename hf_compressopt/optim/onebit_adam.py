"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888, Algorithm 1).

With g_r the gradient of rank r, clipped, g their mean, t the step; m, v and all errors begin at 0:

Warmup stage, t <= freeze_step (AdamW, arXiv 1711.05101), by the averaged g that the step finds in ``p.grad``; it has
travelled in messages of 4 bits, or as the option ``warmup_bits`` says:
    m = b1 m + (1 - b1) g                                                                   (1)
    v = b2 v + (1 - b2) g^2                                                                 (2)
    p <- p (1 - lr wd) - lr m^ / (sqrt(v^) + eps)                                           (3)
At the end of step freeze_step, once: m <- m^, v <- v^; in each tensor v <- max(v, variance_floor mean(v))
(``GroupState.freeze_variance``). After that v learns beside every variance_interval-th message only
(:mod:`~hf_compressopt.optim.refresh`). m_r has (1 - b1) g_r in it: the errors of the warmup's messages of g,
times 1 - b1 (and the factor of clipping), become the first errors of m_r. freeze_step is an option, or the step from
which v is stable (section 4.3): ``CompressedAdam._ends_warmup_stage`` decides.
Compressed stage, t > freeze_step (``CompressedOptimizer._take_step`` chooses):
    m_r = b1 m + (1 - b1) g_r                                                               (4)
    m = compressed_all_reduce(m_r), times exp_avg_mask if there is one                      (5)
    p <- p (1 - lr wd) - lr bounded(m / (sqrt(v) + eps))                                    (6)
where bounded(d) cuts every element of d to +-max_update. Q is the sign of each element times one scale per block, the
root mean square of its values, and
    compressed_all_reduce(m_r):  u = m_r + worker_error;  worker_error <- u - Q(u);
    on the rank that serves a chunk:  s = mean_r Q(u) + server_error;  server_error <- s - Q(s);  all ranks get Q(s),
which is :func:`~hf_compressopt.collectives.exchange.all_reduce`. With one rank nothing is compressed.

Beyond the paper are: weight decay, the 4 bits of the warmup stage, the corrected moments m^ and v^, the floor, the
refreshes of v and the bound, a scale per block where the paper has one for all of m, and small tensors, which travel in
full precision (:func:`~hf_compressopt.kernels.messages.travels_beside_signs`). A tensor whose v is 0 at the switch
stands still. With ``zero_stage`` the ranks share out (1), (2) and (3) (:mod:`~hf_compressopt.optim.sharded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from hf_compressopt.kernels import AdamUpdate, Descent
from hf_compressopt.optim.agreement import CLIPS
from hf_compressopt.optim.compressed_adam import CompressedAdam
from hf_compressopt.optim.group import BucketStep, Exchange, GroupState
from hf_compressopt.schedules import StepPlan


class OnebitAdam(CompressedAdam):
    """Adam whose momentum crosses the network as signs, after a warmup stage of averaged gradients.

    Source: arXiv 2102.02888, Algorithm 1. In a loop with DistributedDataParallel::

        optimizer = OnebitAdam(model.parameters(), lr=1e-3, total_steps=1000)
        attach_ddp(ddp_model, optimizer)

    Args:
        params: See :class:`~hf_compressopt.optim.compressed_adam.CompressedAdam`.
        lr: Learning rate, >= 0.
        fused_warmup: Take warmup steps in one pass of a native kernel: faster, and torch's AdamW except for rounding;
            False is bitwise torch's AdamW. None is True unless ``warmup_bits`` is 32.
        overlap_comm: Send messages of the compressed stage during backward, clipped by the norm of the step before
            (``clip="late"``).
        **options: See :class:`~hf_compressopt.optim.compressed_adam.CompressedAdam`. Papers put ``freeze_step`` at
            15-25 % of all steps.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
    """

    compact = True  # errors, and v after the warmup stage, in 8 bits
    momentum_is_message = True  # in the compressed stage the last message is kept as m
    _clips = CLIPS
    zero_stages = (0, 1, 2)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        fused_warmup: bool | None = None,
        overlap_comm: bool = False,
        **options: Any,
    ) -> None:
        if fused_warmup is not None and not isinstance(fused_warmup, bool):
            raise TypeError(f"fused_warmup must be True, False or None, got {fused_warmup!r}")
        if not isinstance(overlap_comm, bool):
            raise TypeError(f"overlap_comm must be True or False, got {overlap_comm!r}")
        if overlap_comm and options.get("clip", "sketch") == "local":
            raise ValueError(
                "overlap_comm=True needs clip='sketch', got 'local': messages leave before the norm is known"
            )
        if (options.get("zero_stage") == 2 or overlap_comm) and options.get("clip", "sketch") == "sketch":
            options["clip"] = "late"
        super().__init__(params, lr, **options)
        if fused_warmup is not None:
            self._fused_warmup = fused_warmup

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def _warmup_step(self, state: GroupState, grads: Sequence[Tensor | None]) -> None:
        state.take_adam_step(grads, fused=self._fused_warmup)  # (1), (2), (3), of g; math.py writes them out

    def _begin_group(self, plan: StepPlan, state: GroupState) -> Descent:
        return state.descent(self.max_update)  # lr, decay, eps and bound of (6)

    def _compressed(self, step: BucketStep) -> Exchange:
        beta1, _ = step.options["betas"]
        # (4): the sum of beta1 m and (1 - beta1) g_r, which message() adds; the kernel that compresses it computes it
        m_r = step.message(step.momentum, beta1, 1 - beta1)
        # (5): exchange_buckets() runs this generator, sends m_r, and returns the mean of all ranks, times the mask
        m = yield m_r
        to_store = step.store_momentum(m)  # memory for the values of m; None where the last messages are kept as m
        # (6): with lr, decay, eps and bound of _begin_group
        with step.parameters() as params:
            step.kernels.apply_adam_(AdamUpdate(m, to_store, step.variance, params, step.shared))

    # -- zero_stage=2: gradients that leave during backward ------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.sharded_overlap is not None:
            self.sharded_overlap.attach()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in ``p.grad`` inside; the next backward pass outside sends them with its own.

        With ``zero_stage=2`` all passes but the last one of a step must run inside. Otherwise it does nothing.
        """
        return nullcontext() if self.sharded_overlap is None else self.sharded_overlap.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients as torch does, and those that have left since the last step (``zero_stage=2``).

        All ranks call.
        """
        super().zero_grad(set_to_none)
        if self.sharded_overlap is not None:
            self.sharded_overlap.drop()
