"""Training loops on real ranks for the tests of ZeroOptimizer, and the unpartitioned optimizer beside them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_compressopt import Lamb, ZeroOptimizer
from tests.oracles.simulation_integers import in_order

INT4 = {"grad_compression": "int4", "param_compression": "int4"}


class Lion(torch.optim.Optimizer):
    """A user's own element-wise optimizer, with a counter in its group and a number in its state."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                m = state["exp_avg"]
                update = (m * group["beta"] + p.grad * (1 - group["beta"])).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] / group["seen"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1e-1}),
    "lion": (Lion, {"lr": 1e-2, "weight_decay": 0.1}),
    "lamb": (Lamb, {"lr": 1e-2, "weight_decay": 0.1}),
}


class Net(nn.Module):
    """Odd sizes, tied and frozen weights, a tensor with no element, one that is never used, one that only some use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(37, 19)
        self.first = nn.Linear(19, 61)
        self.second = nn.Linear(61, 19)
        self.norm = nn.LayerNorm(19)
        self.frozen = nn.Linear(19, 19)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.never = nn.Parameter(torch.ones(5))
        self.sometimes = nn.Parameter(torch.ones(19))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(19, 7).t() * 0.1)
        self.head = nn.Linear(19, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens: Tensor, use: bool = True) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.second(torch.tanh(self.first(x)))
        x = self.frozen(self.norm(x)) * self.scalar + self.transposed.sum(0)
        return self.head(x * self.sometimes if use else x)


@dataclass
class Case:
    """A model to train, and its options."""

    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    passes: int = 1
    hold: bool = False  # accumulate whole gradients with no_sync
    dtype: torch.dtype = torch.float32
    clip: float = 0.0
    groups: bool = False
    set_grads: bool = False  # give gradients by hand instead of by backward


def batch(rank: int, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randint(0, 37, (3, 5), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int, number: int = 0) -> Tensor:
    tokens = batch(rank, step, number)
    logits = model(tokens, use=(rank + step) % 2 == 0)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def param_groups(model: nn.Module, groups: bool) -> Any:
    if not groups:
        return list(model.parameters())
    wide = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": wide, "weight_decay": 0.2}, {"params": rest, "lr": 3e-3}, {"params": []}]


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    params = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, params, allow_unused=True))


def averaged(grads: list[Tensor | None], params: list[Tensor], node_size: int = 1) -> list[Tensor | None]:
    """Average in rank order, with a sum in float32 of what each rank scaled in its own dtype.

    Several nodes of some ranks send what these add up to, in the dtype of the first parameter.
    """
    world_size = dist.get_world_size()
    mine = [
        torch.zeros(p.numel()) if g is None else (g * (1.0 / world_size)).flatten()
        for g, p in zip(grads, params, strict=True)
    ]
    flat = torch.cat([*(part.float() for part in mine), torch.tensor([float(g is not None) for g in grads])])
    parts = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(parts, flat)
    total = in_order(parts)
    if node_size > 1:
        nodes = [in_order(parts[first : first + node_size]) for first in range(0, world_size, node_size)]
        total = in_order([node.to(params[0].dtype).float() for node in nodes])
    *averages, present = total.split([*(p.numel() for p in params), len(params)])
    return [
        part.view(p.shape).to(p.dtype) if has else None
        for part, p, has in zip(averages, params, present.tolist(), strict=True)
    ]


def give_averages(loss: Tensor, params: list[Tensor], masters: list[Tensor] | None = None) -> None:
    """Set the gradients of parameters, or of float32 copies of them, as an unpartitioned optimizer wants them."""
    grads = averaged(list(torch.autograd.grad(loss, params, allow_unused=True)), params)
    for p, grad in zip(masters or params, grads, strict=True):
        p.grad = None if grad is None else grad.to(p.dtype)


def train_plain(rank: int, case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The unpartitioned optimizer on float32 copies of the parameters, fed with averages."""
    model = Net(case.dtype)
    params = [p for p in model.parameters() if p.requires_grad]
    # torch's fused kernels go through memory, whatever the strides of parameter and gradient are
    masters = {id(p): nn.Parameter(p.detach().float().clone(memory_format=torch.contiguous_format)) for p in params}
    cls, options = OPTIMIZERS[case.optimizer]
    scale, node_size = case.options.get("loss_scale", 1.0), case.options.get("node_size", 1)
    groups = param_groups(model, case.groups)
    groups = groups if case.groups else [{"params": groups}]
    for group in groups:
        group["params"] = [masters[id(p)] for p in group["params"] if p.requires_grad]
    optimizer = cls(groups, **options)
    for step in range(case.steps):
        total: list[Tensor | None] = [None] * len(params)
        for number in range(case.passes):
            grads = gradients(model, loss_of(model, rank, step, number) * scale)
            if not case.hold:
                grads = averaged(grads, params, node_size)
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, grads, strict=True)]
        if case.hold:
            total = averaged(total, params, node_size)
        for p, grad in zip(params, total, strict=True):
            masters[id(p)].grad = None if grad is None else grad.float() / scale
        if case.clip:
            present = [masters[id(p)].grad for p in params if masters[id(p)].grad is not None]
            norm = torch.stack([g.double().square().sum() for g in present]).sum().sqrt().float()
            factor = torch.clamp(case.clip / (norm + 1e-6), max=1.0)
            for grad in present:
                grad.mul_(factor)
        optimizer.step()
        with torch.no_grad():
            for p in params:
                p.copy_(masters[id(p)])
    return model, optimizer


def fresh(case: Case) -> tuple[Net, ZeroOptimizer]:
    model, (cls, options) = Net(case.dtype), OPTIMIZERS[case.optimizer]
    return model, ZeroOptimizer(param_groups(model, case.groups), cls, **{**options, **case.options})


def train_zero(rank: int, case: Case) -> tuple[Net, ZeroOptimizer]:
    model, optimizer = fresh(case)
    run_steps(rank, case, model, optimizer, range(case.steps))
    return model, optimizer


def run_steps(rank: int, case: Case, model: nn.Module, optimizer: ZeroOptimizer, steps: Iterable[int]) -> None:
    for step in steps:
        for number in range(case.passes):
            loss = loss_of(model, rank, step, number)
            if case.set_grads:
                trainable = [p for p in model.parameters() if p.requires_grad]
                for p, grad in zip(trainable, gradients(model, loss), strict=True):
                    p.grad = grad
            elif case.hold and number < case.passes - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                optimizer.backward(loss)
        if case.clip and not optimizer.clip_grad:
            optimizer.clip_grad_norm_(case.clip)
        optimizer.step()


def bits(model: nn.Module, trainable: bool = False) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters() if p.requires_grad or not trainable]


def masters_of(model: nn.Module, optimizer: ZeroOptimizer) -> list[Tensor]:
    return [optimizer.get_full_param(p) for p in model.parameters() if p.requires_grad]


def different(a: list[Tensor], b: list[Tensor]) -> Iterator[str]:
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        if not torch.equal(x, y):
            yield f"tensor {number} {tuple(x.shape)}: {(x != y).sum()} elements, at most {(x - y).abs().max()}"


def compare(rank: int, world_size: int, cases: list[Case], stages: tuple[int, ...] = (2,)) -> list[list[str]]:
    """For each case, where ZeroOptimizer's parameters differ from the unpartitioned optimizer's in a bit."""
    found = []
    for case in cases:
        plain, _ = train_plain(rank, case)
        differences: list[str] = []
        for stage in stages:
            zero, optimizer = train_zero(rank, replace(case, options={"stage": stage, **case.options}))
            differences += different(bits(plain), bits(zero))
            assert optimizer.steps == case.steps
            assert optimizer.communicator.topology.node_size == case.options.get("node_size", 1)
        found.append(differences)
    return found
