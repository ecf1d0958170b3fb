"""The interface of the kernels, with the contract of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hf_compressopt.kernels.errors import Errors
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import AdamUpdate, LambMoments, LambOptions, LocalUpdate, ParameterSync
from hf_compressopt.kernels.variance import Variance


class Kernels(Protocol):
    """The kernels of one device. All implementations leave the same bits.

    Every operation on an element is rounded on its own, in the order of the formulas. Only sums over many elements
    (scales, norms) may differ, by at most 2 ulp.

    Errors may lie in 8 bits (:class:`~hf_compressopt.kernels.errors.CompactErrors`), and so may a frozen variance
    (:class:`~hf_compressopt.kernels.variance.LogVariance`).

    m, v, p, g and u stand for momentum, variance, parameter, gradient and local update. A segment that stands still
    (:attr:`Segment.still`) counts as a direction of 0, and as a momentum of 0.
    """

    def compress_(
        self, z: Combination, error: Errors, messages: Tensor, world_size: int, scale_block: int | None
    ) -> None:
        """Compress a bucket to signs, with error feedback: u = z + error; messages <- Q(u); error <- u - Q(u).

        Q(u) is sign(u) times RMS(u) of the block. If ``scale_block`` is None, all chunks share RMS(u) of the bucket.

        Args:
            z: The n values to send, read.
            error: n elements, updated in place.
            messages: [sum(chunk_message_nbytes(n, world_size, scale_block))] uint8, written.
            world_size: Number of chunks.
            scale_block: Elements per scale, a positive multiple of 8, or None.
        """

    def average_compress_(
        self, messages: Tensor, error: Errors, out: Tensor, world_size: int, scale_block: int | None
    ) -> None:
        """Average a chunk on its server: a = mean of the messages' values + error; out <- Q(a); error <- a - Q(a).

        The sum is taken in float32: messages in groups of four, in rank order, and then the groups' sums, in order.

        Args:
            messages: [world_size * message_nbytes(n, scale_block)] uint8, one message of the same chunk per rank, read.
            error: n elements, updated in place.
            out: [message_nbytes(n, scale_block)] uint8, written.
            world_size: Number of messages.
            scale_block: As in :meth:`compress_`.
        """

    def compress_only_(
        self, z: Combination, error: Errors, messages: Tensor, world_size: int, scale_block: int | None
    ) -> None:
        """Compress a bucket to signs as :meth:`compress_` does, in its bits, but only read the error.

        Args:
            z: The n values to send, read.
            error: n elements, read.
            messages: As in :meth:`compress_`.
            world_size: Number of chunks.
            scale_block: As in :meth:`compress_`.
        """

    def commit_(self, z: Combination, error: Errors, own: Tensor, world_size: int, scale_block: int | None) -> None:
        """Write the error that :meth:`compress_` would have left: error <- z + error - the values of ``own``.

        Args:
            z: As it was given to :meth:`compress_only_`, n elements, read.
            error: n elements, updated in place.
            own: The messages that :meth:`compress_only_` wrote, read.
            world_size: Number of chunks.
            scale_block: As in :meth:`compress_`.
        """

    def decompress_(self, y: Average, out: Tensor) -> None:
        """Write the values of an average: out <- y.

        Args:
            y: n elements, read.
            out: [n] float32, written.
        """

    def combine_(self, z: Combination, out: Tensor) -> None:
        """Write the values of a combination: out <- z.

        Args:
            z: n elements, read.
            out: [n] float32, written.
        """

    def apply_adam_(self, update: AdamUpdate) -> None:
        """Take the momentum from an average, and step: m <- y; p <- p decay - lr bounded(m^ / denominator(v^)).

        With another ``beta`` than 1 the momentum becomes m + beta (y - m).
        """

    def local_step_(self, update: LocalUpdate) -> None:
        """Take 0/1 Adam's local step.

        m <- b1 m + (1-b1) g; p <- p decay - lr bounded(m / denominator(v)); u <- u + lr m.
        """

    def sync_parameters_(self, sync: ParameterSync) -> None:
        """Take 0/1 Adam's sync.

        m <- y / lr_sum; anchor <- anchor decay - bounded(y / denominator(v)); p <- anchor; u <- 0.
        """

    def lamb_moments_(self, moments: LambMoments) -> None:
        """Take 1-bit LAMB's first pass over a bucket: momentum, fresh variance, and the sums for each coefficient.

        m' = y / factor; g' = (m' - b1 m) / (1 - b1); v_fresh <- b2 v_fresh + (1-b2) g'^2; m <- m'.

        Each tensor has three sums: [0] grows by the sum of (m'/denominator(v))^2, [1] by the sum of
        (m'/denominator(v) + wd p)^2, and [2] becomes the largest denominator(v)/denominator(v_fresh) so far. A tensor
        that stands still counts as 1 in [2].
        """

    def lamb_apply_(
        self, exp_avg: Tensor, exp_avg_sq: Variance, params: Sequence[Segment], rates: Tensor, options: LambOptions
    ) -> None:
        """Take 1-bit LAMB's second pass: p <- p - rate (m / denominator(v) + wd p).

        Args:
            exp_avg: [n] float32, m, read.
            exp_avg_sq: n elements, the frozen v, read.
            params: Segments that cover the n elements. Segments without a tensor change no parameter.
            rates: [tensors] float32, read.
            options: Hyperparameters.
        """

    def sum_of_squares(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Sum the squares of all elements, in float64. Native code takes no float64.

        Args:
            tensors: Any shapes, on ``device``.
            device: The device of the result.

        Returns:
            [] float64. It is not finite if an element is not.
        """
