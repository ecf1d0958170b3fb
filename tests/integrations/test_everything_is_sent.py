"""No gradient is used that nobody sent: it is averaged, or every rank raises with the name of its parameter.

Each situation leaves something out of what is hooked, in each entry and with each method that can meet it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import (
    CompressOptAccelerator,
    CompressOptPlugin,
    GradientCompression,
    ZeroOptimizer,
    attach_ddp,
    average_gradients,
    compress_fsdp,
    compress_hook,
)
from tests.support import trainer_runs as hosts
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.launching import run_python
from tests.support.logs import log_lines

STEPS = 4


class Method(NamedTuple):
    """How the gradients travel: in low-bit messages for AdamW, or by an optimizer; ``named`` in Trainer."""

    compression: str = ""
    optimizer: str = ""
    options: dict[str, Any] = {}
    named: str = ""
    first: int = 0  # step from which something is left out


ADAM = {"lr": 1e-2}
METHODS = {
    "int4": Method("int4"),
    "int8": Method("int8"),
    "onebit_adam": Method("", "OnebitAdam", {"freeze_step": 100}, "onebit_adam"),
    "onebit_adam, frozen": Method("", "OnebitAdam", {"freeze_step": 1}, "onebit_adam", first=2),
    "onebit_adam, late": Method("", "OnebitAdam", {"freeze_step": 1, "clip": "late"}, "onebit_adam", first=2),
    "zero_one_adam": Method("", "ZeroOneAdam", {"local_step_scaler": 100}, "zero_one_adam"),
    "onebit_lamb": Method("", "OnebitLamb", {"freeze_step": 100}, "onebit_lamb"),
    "zero_stage=1": Method("", "OnebitAdam", {"freeze_step": 2, "zero_stage": 1}, "onebit_adam"),
    "zero_stage=2": Method("", "OnebitAdam", {"freeze_step": 2, "zero_stage": 2, "clip": "late"}, "onebit_adam"),
    "zero1_adamw": Method("", "ZeroOptimizer", {"stage": 1}, "zero1_adamw"),
    "zero2_adamw": Method("", "ZeroOptimizer", {"stage": 2}, "zero2_adamw"),
}
HOOKED = ["int4", "int8", "onebit_adam", "onebit_adam, frozen", "onebit_adam, late", "zero_one_adam", "onebit_lamb"]


class Net(nn.Module):
    """A body, a head, and an adapter that is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adapter: Any = None) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden if adapter is None else hidden + adapter(x)).square().mean()


def adapter_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(8, 8)


def batch(step: int) -> Tensor:
    seed = 100 * torch.distributed.get_rank() + step
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def optimizer_of(method: Method, params: Any) -> Any:
    if method.compression:
        return torch.optim.AdamW(params, **ADAM)
    if method.optimizer == "ZeroOptimizer":
        return ZeroOptimizer(params, torch.optim.AdamW, **ADAM, **method.options)
    return getattr(hf_compressopt, method.optimizer)(params, **ADAM, **method.options)


def wrapped(method: Method, model: nn.Module, optimizer: Any, **options: Any) -> Any:
    """The model in a DistributedDataParallel that has the method's hook."""
    ddp = DistributedDataParallel(model, **options)
    if method.compression:
        ddp.register_comm_hook(GradientCompression(model.named_parameters(), method.compression), compress_hook)
    else:
        attach_ddp(ddp, optimizer)
    return ddp


Trained = tuple[list[Tensor], Callable[[int], None]]  # parameters, and a step


def stepping(method: Method, optimizer: Any, right: Callable[[int], Any], wrong: Callable[[int], Any]) -> Any:
    """A function that takes a step, by a loss of which something is left out from the method's first step on."""

    def step(number: int) -> None:
        loss = (right if number < method.first else wrong)(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- a loop of the user's with DistributedDataParallel ----------------------------------------------------------------


def ddp_forward_around(method: Method) -> Trained:
    model = Net()
    optimizer = optimizer_of(method, model.named_parameters())
    ddp = wrapped(method, model, optimizer)
    return list(model.parameters()), stepping(method, optimizer, lambda n: ddp(batch(n)), lambda n: model(batch(n)))


def ddp_part_around(method: Method, **options: Any) -> Trained:
    """Both: a backward through the wrapper, and another one around it."""
    model = Net()
    optimizer = optimizer_of(method, model.named_parameters())
    ddp = wrapped(method, model, optimizer, **options)

    def wrong(number: int) -> Tensor:
        ddp(batch(number)).backward()
        return model(batch(number + 50))

    return list(model.parameters()), stepping(method, optimizer, lambda n: ddp(batch(n)), wrong)


def ddp_backward_around(method: Method) -> Trained:
    """A forward through the wrapper, and the backward of one around it: DDP expects a pass, and sends this one."""
    model = Net()
    optimizer = optimizer_of(method, model.named_parameters())
    ddp = wrapped(method, model, optimizer, find_unused_parameters=True)

    def wrong(number: int) -> Tensor:
        ddp(batch(number))
        return model(batch(number + 50))

    return list(model.parameters()), stepping(method, optimizer, lambda n: ddp(batch(n)), wrong)


def ddp_module_outside(method: Method) -> Trained:
    model, adapter = Net(), adapter_of()
    optimizer = optimizer_of(method, [*model.named_parameters("model"), *adapter.named_parameters("adapter")])
    ddp = wrapped(method, model, optimizer)
    params = [*model.parameters(), *adapter.parameters()]
    return params, stepping(method, optimizer, lambda n: ddp(batch(n), adapter), lambda n: ddp(batch(n), adapter))


def ddp_adapter_around(method: Method) -> Trained:
    """LoRA in a module and a DistributedDataParallel of its own, whose forward nobody calls."""
    model, adapter = Net().requires_grad_(False), adapter_of()
    optimizer = optimizer_of(method, adapter.named_parameters("adapter"))
    ddp = wrapped(method, adapter, optimizer)
    right, wrong = (lambda n: model(batch(n), ddp)), (lambda n: model(batch(n), adapter))
    return list(adapter.parameters()), stepping(method, optimizer, right, wrong)


def ddp_unfrozen(method: Method, *, again: bool = False, known: bool = False) -> Trained:
    """The body is made trainable later; ``again``: DistributedDataParallel is made anew then, with the old state.

    known: The optimizer was made when it was trainable.
    """
    model = Net()
    model.body.requires_grad_(known)
    optimizer = optimizer_of(method, model.named_parameters())
    model.body.requires_grad_(False)
    ddp = wrapped(method, model, optimizer)
    hook, state = ddp._comm_hooks[0][0], ddp._comm_hooks[0][1]

    def wrong(number: int) -> Tensor:
        nonlocal ddp
        if not model.body.weight.requires_grad:
            model.body.requires_grad_(True)
            if again:
                ddp = DistributedDataParallel(model)
                ddp.register_comm_hook(state, hook)
        return ddp(batch(number))

    return list(model.parameters()), stepping(method, optimizer, lambda n: ddp(batch(n)), wrong)


def ddp_one_group_of_two(method: Method) -> Trained:
    """A param group over two models, each with a DistributedDataParallel and a hook."""
    model, adapter = Net(), adapter_of()
    optimizer = optimizer_of(method, [*model.named_parameters("model"), *adapter.named_parameters("adapter")])
    first, second = wrapped(method, model, optimizer), wrapped(method, adapter, optimizer)
    params = [*model.parameters(), *adapter.parameters()]
    return params, stepping(method, optimizer, lambda n: first(batch(n), second), lambda n: first(batch(n), second))


def ddp_a_group_for_each() -> Trained:
    model, adapter = Net(), adapter_of()
    method = METHODS["onebit_adam"]
    optimizer = optimizer_of(method, [{"params": model.parameters()}, {"params": adapter.parameters()}])
    first, second = wrapped(method, model, optimizer), wrapped(method, adapter, optimizer)
    params = [*model.parameters(), *adapter.parameters()]
    return params, stepping(method, optimizer, lambda n: first(batch(n), second), lambda n: first(batch(n), second))


def ddp_no_sync(method: Method) -> Trained:
    """A step all of whose backward passes were under no_sync."""
    model = Net()
    optimizer = optimizer_of(method, model.named_parameters())
    ddp = wrapped(method, model, optimizer)

    def wrong(number: int) -> Any:
        with ddp.no_sync():
            ddp(batch(number)).backward()
        return torch.zeros((), requires_grad=True)

    return list(model.parameters()), stepping(method, optimizer, lambda n: ddp(batch(n)), wrong)


def ddp_half_in_adamw(method: Method) -> Trained:
    """The head belongs to an optimizer that averages nothing by itself."""
    model = Net()
    optimizer = optimizer_of(method, model.body.named_parameters("body"))
    plain = torch.optim.AdamW(model.head.parameters(), **ADAM)
    ddp = wrapped(method, model, optimizer)

    def step(number: int) -> None:
        ddp(batch(number)).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()

    return list(model.parameters()), step


def ddp_closure_around(method: Method, *, first: int = 0) -> Trained:
    """The closure of a step calls the model around its wrapper, from a step on or from the method's first one."""
    model = Net()
    optimizer = optimizer_of(method, model.named_parameters())
    ddp = wrapped(method, model, optimizer)

    def step(number: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (ddp if number < max(first, method.first) else model)(batch(number))
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()

    return list(model.parameters()), step


def ddp_another_optimizer(method: Method, *, anew: bool) -> Trained:
    """AdamW trains the model from the third step on; ``anew``: in a DistributedDataParallel without a hook."""
    model = Net()
    made: dict[str, Any] = {"optimizer": optimizer_of(method, model.named_parameters())}
    made["ddp"] = wrapped(method, model, made["optimizer"])

    def step(number: int) -> None:
        if number == 2:
            made["optimizer"] = torch.optim.AdamW(model.parameters(), **ADAM)
        if number == 2 and anew:
            made["ddp"] = DistributedDataParallel(model)
        made["ddp"](batch(number)).backward()
        made["optimizer"].step()
        made["optimizer"].zero_grad()

    return list(model.parameters()), step


# -- a loop of the user's without DistributedDataParallel -------------------------------------------------------------


def plain_not_averaged(method: Method) -> Trained:
    model = Net()
    optimizer = optimizer_of(method, model.named_parameters())
    state = GradientCompression(model.named_parameters(), method.compression) if method.compression else None

    def right(number: int) -> Tensor:
        model(batch(number)).backward()
        average_gradients(optimizer) if state is None else state.average_gradients()
        return torch.zeros((), requires_grad=True)

    return list(model.parameters()), stepping(method, optimizer, right, lambda n: model(batch(n)))


# -- Accelerate -------------------------------------------------------------------------------------------------------


def accelerator_of(method: Method) -> Any:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    hosts.use_accelerate(rank, world_size)
    plugin = CompressOptPlugin(grad_compression=method.compression) if method.compression else None
    return CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)


def accelerated(accelerator: Any, method: Method, optimizer: Any, right: Any, wrong: Any) -> Any:
    def step(number: int) -> None:
        accelerator.backward((right if number < method.first else wrong)(number))
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate_forward_around(method: Method) -> Trained:
    accelerator, model = accelerator_of(method), Net()
    optimizer = optimizer_of(method, model.named_parameters())
    prepared, optimizer = accelerator.prepare(model, optimizer)
    wrong = lambda n: accelerator.unwrap_model(prepared)(batch(n))  # noqa: E731
    params = list(model.parameters())
    return params, accelerated(accelerator, method, optimizer, lambda n: prepared(batch(n)), wrong)


def accelerate_module_outside(method: Method) -> Trained:
    accelerator, model, adapter = accelerator_of(method), Net(), adapter_of()
    optimizer = optimizer_of(method, [*model.named_parameters("model"), *adapter.named_parameters("adapter")])
    prepared, optimizer = accelerator.prepare(model, optimizer)
    loss = lambda n: prepared(batch(n), adapter)  # noqa: E731
    params = [*model.parameters(), *adapter.parameters()]
    return params, accelerated(accelerator, method, optimizer, loss, loss)


def accelerate_adapter_around(method: Method) -> Trained:
    accelerator, model, adapter = accelerator_of(method), Net().requires_grad_(False), adapter_of()
    optimizer = optimizer_of(method, adapter.named_parameters("adapter"))
    prepared, optimizer = accelerator.prepare(adapter, optimizer)
    right, wrong = (lambda n: model(batch(n), prepared)), (lambda n: model(batch(n), adapter))
    return list(adapter.parameters()), accelerated(accelerator, method, optimizer, right, wrong)


def accelerate_optimizer_unprepared(method: Method) -> Trained:
    accelerator, model = accelerator_of(method), Net()
    optimizer = optimizer_of(method, model.named_parameters())
    prepared = accelerator.prepare(model)
    loss = lambda n: prepared(batch(n))  # noqa: E731
    return list(model.parameters()), accelerated(accelerator, method, optimizer, loss, loss)


def accelerate_half_partitioned(method: Method) -> Trained:
    """A model with one half in this optimizer, and the other in AdamW."""
    accelerator, model = accelerator_of(method), Net()
    optimizer = optimizer_of(method, model.body.named_parameters("body"))
    plain = torch.optim.AdamW(model.head.parameters(), **ADAM)
    prepared, optimizer, plain = accelerator.prepare(model, optimizer, plain)

    def step(number: int) -> None:
        accelerator.backward(prepared(batch(number)))
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()

    return list(model.parameters()), step


def accelerate_plugin_without_an_optimizer(method: Method) -> Trained:
    """The plug-in is to make the optimizer, but AdamW never comes to ``prepare``."""
    hosts.use_accelerate(torch.distributed.get_rank(), torch.distributed.get_world_size())
    chosen: dict[str, Any] = (
        {"zero_stage": int(method.named[4])} if method.named[4].isdigit() else {"optimizer": method.named}
    )
    accelerator, model = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin(**chosen)), Net()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    prepared = accelerator.prepare(model)
    loss = lambda n: prepared(batch(n))  # noqa: E731
    return list(model.parameters()), accelerated(accelerator, method, optimizer, loss, loss)


# -- Trainer ----------------------------------------------------------------------------------------------------------


def trainer_of(method: Method, folder: str, **more: Any) -> Any:
    hosts.use_accelerate(torch.distributed.get_rank(), torch.distributed.get_world_size())
    from transformers import Trainer

    hf_compressopt.register()

    class Around(Trainer):
        """Its loss is of the model itself, as PPO-like trainers have it."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            outside = self.state.global_step >= method.first
            return super().compute_loss(self.model if outside else model, inputs, *args, **kwargs)

    options = {"grad_compression": method.compression} if method.compression else method.options
    given = {key: value for key, value in options.items() if key != "stage"}
    words = ",".join(f"{key}={value}" for key, value in given.items())
    own = {"optim": method.named or "adamw_torch", "optim_args": words or None, "max_steps": STEPS}
    args = hosts.trainer_arguments(output_dir=folder, max_grad_norm=0.0, **own)
    return Around(model=hosts.small_model(dropout=0.0), args=args, train_dataset=hosts.tokens(), **more)


def trainer_forward_around(method: Method, folder: str) -> Trained:
    trainer = trainer_of(method, folder)
    return list(trainer.model.parameters()), lambda n: trainer.train() if n == 0 else None


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def sharded(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return mesh


def fsdp_adapter_beside_shards(method: Method) -> Trained:
    """A base that is sharded when it is loaded gets its adapter afterwards."""
    model = Net()
    mesh = sharded(model)
    model.adapter = adapter_of()
    compress_fsdp(model, mesh, method.compression)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    loss = lambda n: model(batch(n), model.adapter)  # noqa: E731
    return list(model.adapter.parameters()), stepping(method, optimizer, loss, loss)


def fsdp_adapter_after_a_step(method: Method) -> Trained:
    """An adapter that comes when training has begun."""
    model = Net()
    compress_fsdp(model, sharded(model), method.compression)
    model(batch(0)).backward()
    model.adapter = adapter_of()
    optimizer = torch.optim.AdamW(model.named_parameters(), **ADAM)
    loss = lambda n: model(batch(n), model.adapter)  # noqa: E731
    return list(model.adapter.parameters()), stepping(method, optimizer, loss, loss)


def fsdp_module_outside(method: Method) -> Trained:
    model, adapter = Net(), adapter_of()
    compress_fsdp(model, sharded(model), method.compression)
    optimizer = torch.optim.AdamW([*model.named_parameters("model"), *adapter.named_parameters("adapter")], **ADAM)
    loss = lambda n: model(batch(n), adapter)  # noqa: E731
    return list(adapter.parameters()), stepping(method, optimizer, loss, loss)


# -- the matrix -------------------------------------------------------------------------------------------------------

#: Methods whose steps send gradients that are each rank's own: nothing has to be sent before.
STEP_SENDS = ["onebit_adam, frozen", "onebit_adam, late", "zero_stage=1", "zero_stage=2", "zero1_adamw", "zero2_adamw"]
ALL, LOW = list(METHODS), ["int4", "int8"]


class Situation(NamedTuple):
    """How to make it, with which methods, what errors name, and the methods that average nevertheless."""

    make: Callable[..., Trained]
    methods: list[str]
    named: str
    averaged: list[str] = []


SITUATIONS = {
    "DDP: forward goes around": Situation(ddp_forward_around, HOOKED, "body.weight", STEP_SENDS),
    "DDP: one of two passes goes around": Situation(ddp_part_around, HOOKED, "body.weight", STEP_SENDS),
    "DDP: the same with find_unused_parameters": Situation(
        partial(ddp_part_around, find_unused_parameters=True), HOOKED, "body.weight", STEP_SENDS
    ),
    "DDP: forward through it, backward around it": Situation(ddp_backward_around, HOOKED, "", HOOKED),
    "DDP: a module outside": Situation(ddp_module_outside, HOOKED, "adapter.weight"),
    "DDP: an adapter whose wrapper is not called": Situation(ddp_adapter_around, HOOKED, "weight", STEP_SENDS),
    "DDP: trainable later": Situation(ddp_unfrozen, HOOKED, "body.weight|a parameter that was"),
    "DDP: frozen while it was made": Situation(partial(ddp_unfrozen, known=True), HOOKED, "body.weight", STEP_SENDS),
    "DDP: trainable later, DDP made anew": Situation(
        partial(ddp_unfrozen, again=True), HOOKED, "body.weight|a parameter that was"
    ),
    "DDP: a group over two models": Situation(ddp_one_group_of_two, HOOKED, "", HOOKED),
    "DDP: a step under no_sync": Situation(ddp_no_sync, HOOKED, "body.weight", STEP_SENDS),
    "DDP: half of the model in AdamW": Situation(ddp_half_in_adamw, HOOKED, "", HOOKED),
    "DDP: a closure goes around": Situation(ddp_closure_around, HOOKED, "body.weight", STEP_SENDS),
    "DDP: a later closure goes around": Situation(
        partial(ddp_closure_around, first=2), HOOKED, "body.weight", STEP_SENDS
    ),
    "DDP: another optimizer follows": Situation(
        partial(ddp_another_optimizer, anew=False),
        [*HOOKED, "zero_stage=1"],
        "body.weight",
        [name for name in HOOKED if "frozen" not in name and "late" not in name],
    ),
    "DDP: another optimizer follows, DDP made anew": Situation(
        partial(ddp_another_optimizer, anew=True), [*HOOKED, "zero_stage=1"], "", [*HOOKED, "zero_stage=1"]
    ),
    "plain: nobody averages": Situation(plain_not_averaged, ALL, "body.weight", STEP_SENDS),
    "Accelerate: forward goes around": Situation(accelerate_forward_around, ALL, "body.weight", STEP_SENDS),
    "Accelerate: a module outside": Situation(
        accelerate_module_outside, ALL, "adapter.weight", [name for name in ALL if "zero" in name and "one" not in name]
    ),
    "Accelerate: an adapter whose wrapper is not called": Situation(
        accelerate_adapter_around, ALL, "weight", STEP_SENDS
    ),
    "Accelerate: the optimizer is not prepared": Situation(
        accelerate_optimizer_unprepared, ALL, "body.weight", [*HOOKED, "zero_stage=1"]
    ),
    "Accelerate: the plug-in gets no optimizer": Situation(
        accelerate_plugin_without_an_optimizer,
        ["onebit_adam", "zero_one_adam", "onebit_lamb", "zero1_adamw", "zero2_adamw"],
        "no optimizer was given to prepare",
    ),
    "Accelerate: half of the model in AdamW": Situation(
        accelerate_half_partitioned, ALL, "head.weight|the model has parameters in .* and in AdamW", LOW
    ),
    "Trainer: forward goes around": Situation(trainer_forward_around, ALL, "transformer.wte.weight", STEP_SENDS),
    "FSDP2: an adapter beside the shards": Situation(fsdp_adapter_beside_shards, LOW, "", LOW),
    "FSDP2: an adapter that comes after a step": Situation(fsdp_adapter_after_a_step, LOW, "adapter.weight"),
    "FSDP2: a module outside": Situation(fsdp_module_outside, LOW, "adapter.weight"),
}


def outcome(situation: str, name: str, folder: str) -> str:
    """What became of it on this rank: "averaged", "apart" or the error."""
    make, method = SITUATIONS[situation].make, METHODS[name]
    arguments = (method, folder) if situation.startswith("Trainer") else (method,)
    try:
        params, step = make(*arguments)
        for number in range(STEPS):
            step(number)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "averaged" if same_on_all_ranks(params) else "apart"


def outcomes(rank: int, world_size: int, situation: str, folder: str) -> dict[str, str]:
    names = enumerate(SITUATIONS[situation].methods)
    return {name: outcome(situation, name, f"{folder}/{number}") for number, name in names}


@pytest.mark.invariant(39)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_gradient_is_averaged_or_every_rank_raises_with_its_name(situation: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, outcomes, situation, str(tmp_path), timeout=150)
    row = SITUATIONS[situation]
    for name in row.methods:
        found = [rank[name] for rank in ranks]
        print(f"{situation:50} {name:20} {found[0]:.80}")  # pytest -s prints the matrix
        if name in row.averaged:
            assert found == ["averaged"] * 2, (name, found)
        else:
            assert all(re.search(row.named, text) and "Error: " in text for text in found), (name, found)


@on_ranks(2)
def test_a_group_over_two_models_says_that_it_travels_in_full(rank: int, world_size: int) -> None:
    for of_two in (True, False):
        with log_lines() as lines:
            params, step = ddp_one_group_of_two(METHODS["onebit_adam"]) if of_two else ddp_a_group_for_each()
            step(0)
            step(1)
        told = [line for line in lines if "has parameters of several DistributedDataParallel models" in line]
        assert len(told) == (of_two and rank == 0)
        assert same_on_all_ranks(params)


@on_ranks(2, timeout=30)
def test_an_optimizer_that_makes_others_for_each_step_is_compared_once(rank: int, world_size: int) -> None:
    """By its parameters: ids of objects that are gone are given to others, on some ranks only."""
    model, adapter = Net(), adapter_of()
    state = GradientCompression(model.named_parameters(), "int4")
    params = [*model.parameters(), *adapter.parameters()]
    matrices = {"params": [param for param in params if param.ndim == 2], "muon": True}
    vectors = {"params": [param for param in params if param.ndim < 2], "muon": False}
    optimizer = hf_compressopt.optim.muon.MuonAdamW([matrices, vectors], lr=1e-3)
    kept = []
    for number in range(30):
        if rank:
            kept += [torch.optim.SGD(adapter.parameters(), lr=0.1) for _ in range(number)]
        model(batch(number), adapter).backward()
        average_gradients(adapter.parameters())
        state.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks(params)


# -- what must stay quiet ---------------------------------------------------------------------------------------------


def quiet_generator_and_discriminator(compression: str) -> Trained:
    """A GAN: the generator's pass leaves gradients in the discriminator that nobody sends, and that are dropped."""
    generator, discriminator = Net(), Net()
    models, optimizers = [], []
    for net in (generator, discriminator):
        models.append(wrapped(METHODS[compression], net, None))
        optimizers.append(torch.optim.AdamW(net.parameters(), **ADAM))

    def step(number: int) -> None:
        loss = models[0](batch(number)) + discriminator(batch(number))  # around the discriminator's wrapper
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad(set_to_none=number % 2 == 0)
        models[1](batch(number)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    return [*generator.parameters(), *discriminator.parameters()], step


def quiet_two_ways(compression: str) -> Trained:
    """One optimizer for a model in low-bit messages and one that DistributedDataParallel averages by itself."""
    model, adapter = Net(), adapter_of()
    first = wrapped(METHODS[compression], model, None)
    second = DistributedDataParallel(adapter)
    optimizer = torch.optim.AdamW([*model.parameters(), *adapter.parameters()], **ADAM)
    loss = lambda n: first(batch(n), second)  # noqa: E731
    return [*model.parameters(), *adapter.parameters()], stepping(METHODS[compression], optimizer, loss, loss)


def quiet_accumulation(compression: str) -> Trained:
    model = Net()
    ddp = wrapped(METHODS[compression], model, None)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

    def right(number: int) -> Tensor:
        with ddp.no_sync():
            ddp(batch(number)).backward()
        return ddp(batch(number + 50))

    return list(model.parameters()), stepping(METHODS[compression], optimizer, right, right)


def quiet_experts(compression: str) -> Trained:
    """An expert of which each rank has its own, with an optimizer of its own; both of one seed."""
    model, expert = Net(), adapter_of()
    ddp = wrapped(METHODS[compression], model, None)
    optimizers = [torch.optim.AdamW(part.parameters(), **ADAM) for part in (model, expert)]

    def step(number: int) -> None:
        ddp(batch(number), expert).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return list(model.parameters()), step


def quiet_given_gradients(_: str) -> tuple[list[Tensor], Callable[[int], None]]:
    """The model goes around DDP, and the script averages by itself what it gives to the step, by position."""
    model, chosen = Net(), METHODS["onebit_adam"]
    optimizer = optimizer_of(chosen, model.parameters())
    wrapped(chosen, model, optimizer)

    def step(number: int) -> None:
        model(torch.randn(4, 8)).backward()
        grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        for grad in grads:
            torch.distributed.all_reduce(grad)
        optimizer.step(None, grads)
        optimizer.zero_grad()

    return list(model.parameters()), step


QUIET = (quiet_given_gradients, quiet_generator_and_discriminator, quiet_two_ways, quiet_accumulation, quiet_experts)


@on_ranks(2)
def test_gradients_that_nobody_uses_or_others_average_are_no_error(rank: int, world_size: int) -> None:
    for make in QUIET:
        params, step = make("int4")
        for number in range(STEPS):
            step(number)
        assert same_on_all_ranks(params), make.__name__


# -- as many backward passes on all ranks ------------------------------------------------------------------------------

Looped = tuple[Any, Callable[[], Any], Callable[[], Any]]  # optimizer, forward, and what follows each backward


def take_steps(
    optimizer: Any, forward: Callable[[], Any], average: Callable[[], Any], *, passes: int, count: int
) -> None:
    for _ in range(count):
        for _ in range(passes):
            forward().backward()
            average()
        optimizer.step()
        optimizer.zero_grad()


def in_ddp(method: str, **options: Any) -> Looped:
    model, chosen = Net(), METHODS[method]
    optimizer = optimizer_of(chosen._replace(options=chosen.options | options), model.parameters())
    ddp = wrapped(chosen, model, optimizer)
    return optimizer, lambda: ddp(torch.randn(4, 8)), lambda: None


def in_a_loop(what: str) -> Looped:
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), **ADAM)
    average: Callable[[], Any] = partial(average_gradients, list(model.parameters()))
    if what == "state":
        average = GradientCompression(model.named_parameters()).average_gradients
    elif what != "parameters":
        optimizer = optimizer_of(METHODS[what], model.parameters())
        average = partial(average_gradients, optimizer) if METHODS[what].options.get("freeze_step") else lambda: None
    return optimizer, lambda: model(torch.randn(4, 8)), average


def in_fsdp(*mesh: int) -> Looped:
    model, names = Net(), ("replicate", "shard")[-len(mesh) :]
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    fully_shard(model, mesh=devices["shard"])
    compress_fsdp(model, devices)
    return torch.optim.AdamW(model.parameters(), **ADAM), lambda: model(torch.randn(4, 8)), lambda: None


@on_ranks(2)
def test_an_uneven_number_of_backward_passes_raises_on_all_ranks(rank: int, world_size: int) -> None:
    loops: list[Callable[[], Looped]] = [partial(in_ddp, method) for method in HOOKED]
    loops += [partial(in_ddp, "onebit_adam", warmup_bits=32), partial(in_ddp, "zero_one_adam", freeze_step=1)]
    loops += [partial(in_a_loop, what) for what in ("parameters", "state", "onebit_adam", "zero1_adamw", "zero2_adamw")]
    loops += [partial(in_fsdp, 2), partial(in_fsdp, 2, 1)]
    for make in loops:
        loop = make()
        take_steps(*loop, passes=2, count=3)
        with pytest.raises(RuntimeError, match=r"different numbers of backward passes.*rank 0 .*3.*; rank 1 .*(1|2)"):
            take_steps(*loop, passes=2 if rank else 3, count=16)
        loop[0].zero_grad()


@pytest.mark.full
@on_ranks(4)
def test_an_uneven_number_of_passes_of_replicas_raises_on_all_ranks(rank: int, world_size: int) -> None:
    for more in ((0, 1), (2,)):  # a whole replica, and one rank of it
        loop = in_fsdp(2, 2)
        take_steps(*loop, passes=2, count=3)
        with pytest.raises(RuntimeError, match="different numbers of backward passes"):
            take_steps(*loop, passes=3 if rank in more else 2, count=16)
        loop[0].zero_grad()


@on_ranks(2)
def test_a_gradient_that_one_rank_alone_has_not_sent_raises_on_all(rank: int, world_size: int) -> None:
    model = Net()
    state = GradientCompression(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

    def step(*, alone: bool) -> None:
        model(torch.randn(4, 8)).backward()
        state.average_gradients()
        if alone and rank:
            model.head(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(alone=False)
    with pytest.raises(
        RuntimeError, match=r"rank 1 takes a step with gradients of head.weight, head.bias that were not"
    ):
        for _ in range(2):
            step(alone=True)


def end_training(accelerator: Any) -> None:
    accelerator.end_training()


def save_state(accelerator: Any) -> None:
    with TemporaryDirectory() as folder:
        accelerator.save_state(folder)


@contextmanager
def impatient() -> Iterator[None]:
    """Have ranks say at once that they wait for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_compressopt.integrations.accelerate.PATIENCE", 0.1)
        yield


@on_ranks(2)
def test_a_rank_that_saves_alone_says_who_is_missing(rank: int, world_size: int) -> None:
    for name in ("int4", "zero2_adamw"):
        accelerator, model = accelerator_of(METHODS[name]), Net()
        prepared, optimizer = accelerator.prepare(model, optimizer_of(METHODS[name], model.named_parameters()))
        for step in range(2):  # DistributedDataParallel has messages of its own in the second one
            accelerator.backward(prepared(batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        with impatient(), log_lines() as lines, pytest.raises(RuntimeError, match="rank 0 saves its state; rank 1 is"):
            if rank == 0:
                save_state(accelerator)
            accelerator.backward(prepared(batch(2)))
            optimizer.step()
        told = [line for line in lines if "rank 0 saves its state, and for 0 s rank 1 has not come" in line]
        assert len(told) == (rank == 0), lines


MAIN_PROCESS_ENDS_ALONE = """
import torch
from hf_compressopt import CompressOptAccelerator, CompressOptPlugin
from hf_compressopt.integrations import accelerate

accelerate.PATIENCE = 0.1
model = torch.nn.Linear(64, 64)
accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin({options}))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(2):
    accelerator.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
if accelerator.is_main_process:
    accelerator.end_training()
    assert not torch.distributed.is_initialized()
"""


@pytest.mark.parametrize("options", ["grad_compression='int4'", "zero_stage=2"])
def test_a_main_process_that_ends_the_training_alone_ends_it_once_the_others_are_gone(options: str) -> None:
    done = run_python(["-c", MAIN_PROCESS_ENDS_ALONE.format(options=options)], ranks=2)
    assert "rank 0 ends the training, and for 0 s rank 1 has not come" in done.stderr


@on_ranks(2)
def test_the_error_of_one_rank_is_not_hidden_where_its_script_ends_the_training(rank: int, world_size: int) -> None:
    accelerator, model = accelerator_of(METHODS["zero2_adamw"]), Net()
    accelerator.prepare(model, optimizer_of(METHODS["zero2_adamw"], model.named_parameters()))
    if rank == 1:
        with impatient(), log_lines() as lines, pytest.raises(KeyError, match="no batch"):
            try:
                raise KeyError("no batch")
            finally:
                end_training(accelerator)
        assert not [line for line in lines if "has not come" in line]


@on_ranks(2)
def test_a_pass_more_in_the_last_step_raises_where_the_training_ends(rank: int, world_size: int) -> None:
    """A rank that runs one more is in its first message, and no step follows in which the others would tell it."""
    with impatient():
        for name in ("int4", "onebit_adam"):
            for ending in (end_training, save_state):
                accelerator, model = accelerator_of(METHODS[name]), Net()
                prepared, optimizer = accelerator.prepare(model, optimizer_of(METHODS[name], model.named_parameters()))
                accelerator.backward(prepared(batch(0)))
                optimizer.step()
                optimizer.zero_grad()
                said = rf"rank 0 is in pass 2 .*; rank 1 {'ends the training' if ending is end_training else 'saves'}"
                with pytest.raises(RuntimeError, match=said):
                    for _ in range(1 if rank else 2):
                        accelerator.backward(prepared(batch(1)))
                    optimizer.step()
                    ending(accelerator)
