"""FSDP2 over all ranks that gathers parameters of 16 bits as their changes: the bits of FSDP2 alone, in fewer bytes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_compressopt import FSDPCompression, compress_fsdp
from tests.fsdp import test_fsdp_compression as hsdp
from tests.support.harness import on_ranks, run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def models(compression: str = "float32", **options: Any) -> tuple[Any, Any, FSDPCompression]:
    """A model that FSDP2 gathers by itself, and one whose changes are gathered."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {"mp_policy": BF16, **options}
    plain, exact = (hsdp.shard_units(hsdp.make(), mesh, **options) for _ in range(2))
    if compression != "float32":
        compress_fsdp(plain, mesh, compression, bucket_cap_mb=hsdp.CAP)
    made = compress_fsdp(exact, mesh, compression, bucket_cap_mb=hsdp.CAP, param_compression="exact")
    return plain, exact, made


def assert_alike(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p.to_local().view(torch.int32), q.to_local().view(torch.int32))


def trained_alike(rank: int, world_size: int, steps: int, compression: str, options: dict[str, Any]) -> None:
    plain, exact, made = models(compression, **options)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in (plain, exact)]
    for step in range(steps):
        outputs = []
        for net, optimizer in zip((plain, exact), optimizers, strict=True):
            with torch.no_grad():  # an evaluation between steps
                outputs.append(net(hsdp.data(rank, step + 1).bfloat16()).float())
                for module in net.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
                if step == 3:
                    net.second.weight.to_local().mul_(1.5)  # other code writes into the shards
                    net.frozen.weight.to_local().data[:1] = torch.inf
                if step == 4:
                    net.frozen.weight.to_local().data[:1] = -0.0
            if step == 3:
                continue
            hsdp.take_step(net, rank, step, "unreduced" if step % 4 == 2 else "")
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(outputs[0].isnan(), outputs[1].isnan()), step
        assert torch.equal(outputs[0].nan_to_num(), outputs[1].nan_to_num()), step
    assert_alike(plain, exact)
    bits = made.metrics()["bits_per_parameter"]
    assert 0 < bits < 8 and "bit for bit" in made.describe() if compression != "float32" else bits > 0


@pytest.mark.parametrize(
    ("world_size", "steps", "compression", "options"),
    [
        (2, 40, "float32", {}),
        pytest.param(2, 200, "float32", {}, marks=pytest.mark.full),
        (3, 8, "int4", {}),
        (4, 8, "float32", {"reshard_after_forward": False}),
        pytest.param(3, 200, "int4", {}, marks=pytest.mark.full),
        pytest.param(4, 200, "float32", {}, marks=pytest.mark.full),
    ],
)
def test_the_bits_of_fsdp2_alone(world_size: int, steps: int, compression: str, options: dict[str, Any]) -> None:
    run_ranks(world_size, trained_alike, steps, compression, options, timeout=300)


@on_ranks(2)
def test_backward_gathers_without_a_byte_and_a_resume_goes_on_bit_for_bit(rank: int, world_size: int) -> None:
    plain, exact, made = models(reshard_after_forward=True)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-4)
    gathers = made._gathers
    for step in range(4):
        loss = exact(hsdp.data(rank, step).bfloat16()).pow(2).mean()
        sent = gathers.nbytes
        loss.backward()
        assert gathers.nbytes == sent > 0
        optimizer.step()
        optimizer.zero_grad()
    x = hsdp.data(rank, 9).bfloat16()
    plain.load_state_dict(exact.state_dict())  # what was trained, in a model whose replicas are not made yet
    assert torch.equal(plain(x), exact(x)) and torch.equal(plain(x), exact(x))
    exact.first(x)  # a part of the model, before which the lengths of all are exchanged
    other = {name: 1.5 * value for name, value in exact.state_dict().items()}
    for net in (plain, exact):
        net.load_state_dict(other)
    assert torch.equal(plain(x), exact(x))


class Gathers:
    """An all-gather of somebody else."""


@on_ranks(2)
def test_what_has_no_changes_is_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(TypeError, match="got float32 in the unit of FSDPLinear: give fully_shard mp_policy=Mixed"):
        compress_fsdp(model, mesh, "int4", param_compression="exact")
    with pytest.raises(ValueError, match="must be 'exact' or 'none' with FSDP2, got 'int4'"):
        compress_fsdp(model, mesh, "int4", param_compression="int4")
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=BF16)
    model.set_custom_all_gather(Gathers())
    with pytest.raises(ValueError, match="has a custom all-gather already, Gathers"):
        compress_fsdp(model, mesh, "float32", param_compression="exact")
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=BF16)
    model.weight._local_tensor.fsdp_pre_all_gather = None  # as torchao's subclasses for float8 have it
    with pytest.raises(TypeError, match="FSDPLinear has some that say by fsdp_pre_all_gather what is gathered"):
        compress_fsdp(model, mesh, "float32", param_compression="exact")
    nodes = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=nodes["shard"], mp_policy=BF16)
    with pytest.raises(ValueError, match="exact is for FSDP2 over all ranks"):
        compress_fsdp(model, nodes, "int4", param_compression="exact")
