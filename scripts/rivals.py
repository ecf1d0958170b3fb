"""Methods that others use on slow networks, each written from its paper, for comparisons on equal terms.

All of them surround an ordinary optimizer. A loop calls `gradients` after the backward pass, before clipping, and
`parameters` after the optimizer's step; all ranks call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from quantizers import QUANTIZERS
from torch import Tensor
from torch.nn.functional import pad

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels.messages import travels_in_full


class Rival:
    """One rank's part of a method that sends less than an all-reduce in float32."""

    def __init__(self, params: Iterable[Tensor], communicator: Communicator) -> None:
        self.params, self.communicator = list(params), communicator

    def gradients(self) -> None:
        """Exchange the gradients, in place."""

    def parameters(self, *, last: bool) -> None:
        """Exchange the parameters, in place; ``last`` says that no step follows."""

    def mean_(self, flat: Tensor) -> Tensor:
        """Replace a tensor by its mean over the ranks: times 1/W, then the sum."""
        flat.mul_(1 / self.communicator.world_size)
        self.communicator.all_reduce(flat).wait()
        return flat

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over the ranks, in one message."""
        if tensors := list(tensors):
            write(self.mean_(joined(tensors)), tensors)


class BFloat16(Rival):
    """Gradients by an all-reduce in bfloat16, as torch's bf16_compress_hook."""

    @torch.no_grad()
    def gradients(self) -> None:
        grads = gradients_of(self.params)
        write(self.mean_(joined(grads).to(torch.bfloat16)).float(), grads)


class Float8(Rival):
    """Gradients in e4m3, 8 bits, with a float32 scale per block of 128, there and back.

    Each rank averages a part: g <- Q(mean_r Q(g_r)), without error feedback.
    """

    BLOCK = 128

    @torch.no_grad()
    def gradients(self) -> None:
        grads, ranks = gradients_of(self.params), self.communicator.world_size
        flat = joined(grads)
        numel = flat.numel()
        flat = pad(flat, (0, -numel % (ranks * self.BLOCK)))
        mine = self._sent(flat, to_all=False).view(ranks, -1).mean(dim=0)
        write(self._sent(mine, to_all=True)[:numel], grads)

    def _sent(self, values: Tensor, *, to_all: bool) -> Tensor:
        """The values that arrive: of every rank's part for this one, or of every rank's values."""
        blocks = values.view(-1, self.BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        arrived = []
        for part in (codes.view(torch.uint8).view(-1), scales.view(-1)):
            ranks = self.communicator.world_size
            arrived.append(part.new_empty(part.numel() * ranks if to_all else part.numel()))
            if to_all:
                self.communicator.all_gather(arrived[-1], part).wait()
            else:
                splits = [part.numel() // ranks] * ranks
                self.communicator.all_to_all(arrived[-1], part, output_splits=splits, input_splits=splits).wait()
        found = arrived[0].view(torch.float8_e4m3fn).float().view(-1, self.BLOCK)
        return found.mul_(arrived[1].view(-1, 1)).view(-1)


class Quantized(Rival):
    """Gradients of matrices by a quantizer, there and back, with error feedback; all else in full precision.

    g <- Q(mean_r Q(g_r + e_r) + s), e_r and s what each Q has missed so far: what the package's low-bit gradients are
    with another Q, whose blocks run over all matrices as one. It is for losses: what Q returns travels in float32.
    """

    def __init__(self, params: Iterable[Tensor], communicator: Communicator, *, quantizer: str) -> None:
        """Begin with errors of 0; ``quantizer`` is a key of ``QUANTIZERS``."""
        super().__init__(params, communicator)
        self._quantizer = QUANTIZERS[quantizer]
        self._matrices = [param for param in self.params if not travels_in_full(param)]
        self._rest = [param for param in self.params if travels_in_full(param)]
        self._mine: Tensor | float = 0.0
        self._served: Tensor | float = 0.0

    @torch.no_grad()
    def gradients(self) -> None:
        self.average_(gradients_of(self._rest))
        if not (grads := gradients_of(self._matrices)):
            return
        wanted = joined(grads) + self._mine
        sent = self._quantizer(wanted)
        self._mine = wanted - sent
        mean = self.mean_(sent) + self._served
        found = self._quantizer(mean)
        self._served = mean - found
        write(found, grads)


class PowerSGD(Rival):
    """Gradients of low rank, with error feedback (Vogels et al. 2019, arXiv 1905.09727, Algorithms 1 and 2).

    For each matrix M (n x m) of a gradient plus the error of the step before, and Q (m x r) of that step:
        P <- mean_r M Q;  P <- orthonormal(P);  Q <- mean_r M^T P;  g <- P Q^T;  error <- M - g
    Vectors travel as they are. As in torch's hook, the first steps send gradients in full precision.
    """

    def __init__(self, params: Iterable[Tensor], communicator: Communicator, *, rank: int = 1, start: int = 10) -> None:
        """Begin with errors of 0 and random factors, alike on all ranks."""
        super().__init__(params, communicator)
        self._start, self._step = start, 0
        generator = torch.Generator().manual_seed(0)
        self._matrices = [param for param in self.params if param.ndim > 1]
        self._vectors = [param for param in self.params if param.ndim <= 1]
        views = [param.detach().reshape(param.shape[0], -1) for param in self._matrices]
        self._factors = [torch.randn(view.shape[1], min(rank, *view.shape), generator=generator) for view in views]
        self._errors = [torch.zeros_like(view) for view in views]

    @torch.no_grad()
    def gradients(self) -> None:
        self._step += 1
        if self._step <= self._start:
            return self.average_(gradients_of(self.params))
        grads, vectors = gradients_of(self._matrices), gradients_of(self._vectors)
        inputs = [grad.reshape(error.shape) + error for grad, error in zip(grads, self._errors, strict=True)]
        left = [value @ factor for value, factor in zip(inputs, self._factors, strict=True)]
        self.average_([*left, *vectors])
        left = [torch.linalg.qr(value).Q for value in left]
        right = [value.T @ basis for value, basis in zip(inputs, left, strict=True)]
        self.average_(right)
        for grad, value, basis, factor, error in zip(grads, inputs, left, right, self._errors, strict=True):
            mean = basis @ factor.T
            torch.sub(value, mean, out=error)
            grad.copy_(mean.view_as(grad))
        self._factors = right


class LocalSGD(Rival):
    """Ranks that step alone, and average parameters every ``interval`` steps (Stich 2018, arXiv 1805.09767)."""

    def __init__(self, params: Iterable[Tensor], communicator: Communicator, *, interval: int = 8) -> None:
        super().__init__(params, communicator)
        self._interval, self._step = interval, 0

    @torch.no_grad()
    def parameters(self, *, last: bool) -> None:
        self._step += 1
        if last or self._step % self._interval == 0:
            self._meet()

    def _meet(self) -> None:
        self.average_(self.params)


class DiLoCo(LocalSGD):
    """AdamW inside, Nesterov's momentum outside (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1).

    Every H steps, with theta the parameters at the last exchange and theta_r those of rank r now:
        d = mean_r (theta - theta_r);  theta <- Nesterov SGD of theta by d;  theta_r <- theta
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        communicator: Communicator,
        *,
        interval: int = 32,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        """Begin with the parameters as they are; ``outer_lr`` and ``momentum`` belong to the outer step."""
        super().__init__(params, communicator, interval=interval)
        self._together = joined(self.params).clone().requires_grad_()
        self._outer = torch.optim.SGD([self._together], lr=outer_lr, momentum=momentum, nesterov=momentum > 0)

    def _meet(self) -> None:
        self._together.grad = self.mean_(self._together - joined(self.params))
        self._outer.step()
        write(self._together, self.params)


RIVALS = {
    "bfloat16": BFloat16,
    "float8": Float8,
    "quantized": Quantized,
    "PowerSGD": PowerSGD,
    "LocalSGD": LocalSGD,
    "DiLoCo": DiLoCo,
}


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """The elements of all tensors, one after another."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def write(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """Write what :func:`joined` has read."""
    start = 0
    for tensor in tensors:
        tensor.detach().copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
