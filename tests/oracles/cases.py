"""Problems for optimizers as data, both ways to solve them, on real ranks and by a simulation, and the comparison.

Recorded trajectories are compared with both, too.
"""

import json
import math
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_compressopt import Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam
from hf_compressopt.kernels import messages
from hf_compressopt.optim.compressed_adam import CompressedAdam
from tests.oracles.simulation import OnebitAdamSimulation, OnebitLambSimulation, ZeroOneAdamSimulation
from tests.support.forms import in_form

BYTES_PER_MB = 2**20
SAFE_DISTANCE = 3e-7
ODD = [(7,), (3, 5), (2, 3, 4), (1,), (13,)]
MASK = [1.0, 0, 1, 0, 0]
CANCEL = "momentum cancels"


def bucket_cap(numel: int) -> float:
    """bucket_cap_mb of buckets of this many elements, and a little: the fraction of an element is cut off."""
    return (numel + 0.5) * 4 / BYTES_PER_MB


def cosine(lr: float, steps: int) -> tuple[float, ...]:
    """A schedule from lr down to a tenth of it."""
    return tuple(lr * (0.55 + 0.45 * math.cos(math.pi * t / steps)) for t in range(steps))


def mixed_groups(lr: float) -> list[dict[str, Any]]:
    """Groups with options of their own; one is empty, and one is never compressed."""
    return [
        {"shapes": ODD, "lr": lr, "weight_decay": 0.2},
        {"shapes": []},
        {"shapes": [(4, 4), (0,), (9,)], "non_freeze": True, "eps": 1e-3},
        {"shapes": [(0, 3), (21,), (0,)], "betas": (0.5, 0.9)},
    ]


@dataclass(frozen=True)
class Case:
    """One run.

    groups: per group "shapes" and the group's own options; "mask" stands for exp_avg_mask, as a nested list.
    missing: (step, rank, group, parameter) without a gradient; None matches anything.
    lrs: learning rate of every group without its own, step by step.
    """

    name: str
    groups: list[dict[str, Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    freeze_step: int = 4
    steps: int = 12
    missing: tuple[tuple[int | None, ...], ...] = ()
    lrs: tuple[float, ...] = ()

    @property
    def bucket_numel(self) -> int:
        return int(self.kwargs.get("bucket_cap_mb", 25.0) * BYTES_PER_MB // 4)


def missing_gradients(kwargs: dict[str, Any]) -> Case:
    """Two groups, in which some ranks, or all, have no gradient for some parameters in some steps."""
    places = ((2, None, 0, 1), (3, 0, 0, 2), (6, None, 0, 1), (7, 0, 0, 0), (8, 0, None, None), (9, None, 1, 1))
    groups = [{"shapes": ODD}, {"shapes": [(6,), (2, 2)], "non_freeze": True}]
    return Case("missing_gradients", groups, kwargs, missing=places)


def shared_cases() -> list[Case]:
    """Cases of OnebitAdam and OnebitLamb alike."""
    clipped = [{"shapes": ODD}, {"shapes": [(5,)], "non_freeze": True}]
    return [
        Case("weight_decay", [{"shapes": ODD}], {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}, lrs=COSINE),
        Case("eps_inside_sqrt", [{"shapes": ODD}], {"eps_inside_sqrt": True, "eps": 0.05, "lr": 0.01}),
        Case("mask", [{"shapes": [(3, 5), (5,)], "mask": MASK}, {"shapes": ODD}], {"scale_block": 8, "lr": 0.01}),
        Case("groups", mixed_groups(0.02), {"scale_block": 64}, lrs=COSINE),
        missing_gradients({"lr": 0.01, "scale_block": 8}),
        Case("small_buckets", [{"shapes": ODD}, {"shapes": [(50,)]}], {"bucket_cap_mb": bucket_cap(11), "lr": 0.01}),
        Case("small_buckets_one_scale", ONE_SCALE_GROUPS, ONE_SCALE),
        *(
            Case(f"clipping_{clip}", clipped, {"max_grad_norm": 0.5, "clip": clip, "lr": 0.01})
            for clip in ("sketch", "local")  # of fewer than 4096 elements the sketch is exact
        ),
        Case("no_floor", [{"shapes": ODD}], {"variance_floor": 0.0, "scale_block": 64}),
        Case("high_floor", [{"shapes": ODD}], {"variance_floor": 0.9, "lr": 0.01}, freeze_step=1),
    ]


#: Options and groups of buckets that cut through tensors, with one scale for each.
ONE_SCALE = {"bucket_cap_mb": bucket_cap(37), "scale_block": None, "weight_decay": 0.05}
ONE_SCALE_GROUPS = [{"shapes": [*ODD, (40,)]}]
COSINE = cosine(0.01, 12)
#: Small tensors that travel in full precision beside signs, in buckets that cut through the others.
BESIDE = Case(
    "beside",
    [{"shapes": [(7,), (9, 5), (40,), (3, 5), (12, 11), (1,)]}, {"shapes": [(5,), (2, 2)], "weight_decay": 0.2}],
    {"own_blocks": 2, "scale_block": 8, "bucket_cap_mb": bucket_cap(50), "lr": 0.01},
)
#: Groups with a mask, with weight decay, and in full precision, in buckets that cut through tensors.
MIXED_GROUPS = [
    {"shapes": [(3, 5), (5,)], "mask": MASK},
    {"shapes": ODD, "weight_decay": 0.1},
    {"shapes": [(6,), (0, 2)], "non_freeze": True},
]
MIXED = {"bucket_cap_mb": bucket_cap(11), "scale_block": 16}


class Problem:
    """Initial parameters [group][parameter] and local gradients [step][rank][group][parameter] of a case, float32."""

    optimizer: type[Any] = OnebitAdam
    simulation: type[Any] = OnebitAdamSimulation

    def __init__(self, case: Case, world_size: int, seed: int):
        rng = np.random.default_rng(seed)
        self.case, self.world_size = case, world_size
        self.params = [[self._draw(rng, shape) for shape in group["shapes"]] for group in case.groups]
        self.grads = [
            [
                [
                    [self._gradient(rng, shape, (t, rank, g, i)) for i, shape in enumerate(group["shapes"])]
                    for g, group in enumerate(case.groups)
                ]
                for rank in range(world_size)
            ]
            for t in range(1, case.steps + 1)
        ]

    @property
    def schedule(self) -> dict[str, Any]:
        return {"freeze_step": self.case.freeze_step}

    @staticmethod
    def _draw(rng, shape):
        return rng.standard_normal(shape).astype(np.float32)

    def _gradient(self, rng, shape, place):
        grad = self._draw(rng, shape)
        for pattern in self.case.missing:
            if all(want is None or want == got for want, got in zip(pattern, place, strict=True)):
                return None
        return grad

    def options(self, index, convert):
        """A group's options, its mask converted."""
        own = {key: value for key, value in self.case.groups[index].items() if key not in ("shapes", "mask", "scale")}
        if (mask := self.case.groups[index].get("mask")) is not None:
            own["exp_avg_mask"] = convert(np.array(mask, np.float32))
        return own

    def averaged(self, t):
        """Averages over the ranks in float32, [group][parameter]; None where no rank has a gradient."""
        averages = []
        for g, group in enumerate(self.case.groups):
            averages.append([])
            for i, shape in enumerate(group["shapes"]):
                given = [rank[g][i] for rank in self.grads[t - 1] if rank[g][i] is not None]
                total = sum(given, np.zeros(shape, np.float32)) * np.float32(1 / self.world_size)
                averages[-1].append(np.float32(total) if given else None)
        return averages


class LambProblem(Problem):
    """Its groups may have a "scale", one factor on the initial values of each tensor.

    In the case CANCEL, tensor 1 of every group has a momentum of exactly zero at the freeze.
    """

    optimizer, simulation = OnebitLamb, OnebitLambSimulation

    def __init__(self, case, world_size, seed):
        super().__init__(case, world_size, seed)
        for group, values in zip(case.groups, self.params, strict=True):
            for i, scale in enumerate(group.get("scale", ())):
                values[i] *= np.float32(scale)
        for rank, g in product(range(world_size), range(len(case.groups))) if case.name == CANCEL else ():
            self.grads[1][rank][g][1] = np.float32(-0.5) * self.grads[0][rank][g][1]


class PlainLambProblem(LambProblem):
    """The warmup stage alone, on one rank."""

    optimizer, schedule = Lamb, {}

    @staticmethod
    def simulation(groups, world_size, **options):
        return OnebitLambSimulation(groups, world_size, freeze_step=10**9, **options)


class ZeroOneProblem(Problem):
    """In the case not_finite, the last rank has a gradient with a NaN inside an interval, and one at a sync."""

    optimizer, simulation, schedule = ZeroOneAdam, ZeroOneAdamSimulation, {}

    def __init__(self, case, world_size, seed):
        super().__init__(case, world_size, seed)
        for t, i in ((18, 1), (20, 4)) if case.name == "not_finite" else ():
            self.grads[t - 1][-1][0][i].flat[0] = math.nan if t == 18 else math.inf


def run_simulation(problem: Problem, kind: Any = None, **options: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """The finished simulation of a problem; after every step each rank's parameters, and LAMB's coefficients.

    kind: Another simulation than the problem's own, with its options.
    """
    case = problem.case
    kwargs = {key: value for key, value in case.kwargs.items() if key != "bucket_cap_mb"}
    groups = [{"params": params, **problem.options(g, lambda mask: mask)} for g, params in enumerate(problem.params)]
    options = {"bucket_numel": case.bucket_numel, **problem.schedule, **kwargs, **options}
    simulation = (kind or problem.simulation)(groups, problem.world_size, **options)
    history, coeffs = [], []
    for t in range(1, case.steps + 1):
        set_rates(problem, simulation.groups, t)
        assert simulation.step(problem.grads[t - 1])
        history.append([simulation.params_of(rank) for rank in range(problem.world_size)])
        coeffs.append(simulation.lamb_coeffs)
    return simulation, np.array(history), np.array(coeffs)


def first_safe(
    case: Case, world_size: int, kind: type[Problem] = Problem, *simulation: Any, first: int = 0, **options: Any
):
    """The first problem whose messages keep away from a change of sign, and what run_simulation() returns for it."""
    for seed in range(first, first + 400):
        problem = kind(case, world_size, seed)
        solution = run_simulation(problem, *simulation, **options)
        if solution[0].min_distance >= SAFE_DISTANCE:
            return problem, *solution
    raise AssertionError(f"{case.name}: no seed keeps every message away from a change of sign")


def make_params(problem: Problem):
    """The parameters, [group][parameter], and the param groups that hold them."""
    params = [[torch.nn.Parameter(torch.from_numpy(p.copy())) for p in group] for group in problem.params]
    return params, [{"params": group, **problem.options(g, torch.from_numpy)} for g, group in enumerate(params)]


def make_optimizer(problem: Problem, form: str | None = None, **kwargs):
    """The optimizer, in a form of the state, and its parameters, [group][parameter]."""
    params, groups = make_params(problem)
    options = {**problem.schedule, **take_own_blocks(problem.case.kwargs), **kwargs}
    if issubclass(problem.optimizer, CompressedAdam):
        # a refresh averages in warmup_bits what a simulation averages exactly
        exact = {"warmup_bits": 32} if "variance_interval" in options else {"variance_interval": 0}
        options = {**exact, **options}
    return in_form(problem.optimizer, form)(groups, **options), params


def take_own_blocks(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of an optimizer without "own_blocks", which this process takes over: how many a tensor needs."""
    messages.OWN_BLOCKS = kwargs.get("own_blocks", 0)
    return {name: value for name, value in kwargs.items() if name != "own_blocks"}


def set_gradients(problem: Problem, optimizer, params, rank: int, t: int) -> None:
    """Set the gradients of step t: averaged if the plan asks for them, else this rank's own."""
    plan = getattr(optimizer, "plan", None)
    grads = problem.averaged(t) if plan is None or plan.reduce_grads else problem.grads[t - 1][rank]
    give(params, grads)
    set_rates(problem, optimizer.param_groups, t)


def give(params, grads) -> None:
    for group, group_grads in zip(params, grads, strict=True):
        for p, grad in zip(group, group_grads, strict=True):
            p.grad = None if grad is None else torch.from_numpy(grad.copy())


def set_rates(problem: Problem, groups: Any, t: int) -> None:
    """Set the rates of step t in the groups of an optimizer or of a simulation, but those that have their own."""
    for group, spec in zip(groups, problem.case.groups, strict=True):
        if problem.case.lrs and "lr" not in spec:
            rate = problem.case.lrs[t - 1]
            group.update(lr=rate) if isinstance(group, dict) else setattr(group, "lr", rate)


def flat_params(params) -> np.ndarray:
    flat = [p.detach().reshape(-1) for group in params for p in group]
    return torch.cat(flat).numpy().copy()


def flat_state(optimizer, params, key: str) -> list[np.ndarray]:
    """exp_avg or exp_avg_sq of every group, flat."""
    return [torch.cat([torch.zeros(0), *(optimizer.state[p][key].reshape(-1) for p in g)]).numpy() for g in params]


# -- results of real ranks, and their comparison -----------------------------------------------------------------------


def solve(rank: int, problem: Problem) -> dict[str, Any]:
    """Solve a problem with the real optimizer on this rank, with all state in float32."""
    plain = not hasattr(problem.optimizer, "schedule_class")
    optimizer, params = make_optimizer(problem, None if plain else "float32")
    history, coeffs, sent = [], [], []
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        optimizer.step()
        assert not getattr(optimizer, "step_was_skipped", False)
        history.append(flat_params(params))
        coeffs.append(optimizer.get_lamb_coeffs() if hasattr(optimizer, "get_lamb_coeffs") else [])
        sent.append(0 if plain else optimizer.traffic.step_bytes)
    found = {name: flat_state(optimizer, params, name) for name in ("exp_avg", "exp_avg_sq")}
    saved = optimizer.state_dict().get("compressopt", {"worker_error": [], "server_error": []})
    return {
        **found,
        **{name: [error.numpy() for error in saved[name]] for name in ("worker_error", "server_error")},
        "history": np.stack(history),
        "coeffs": np.array(coeffs),
        "bytes": sent,
    }


def assert_state_close(got: Any, simulation: Any, rank: int, context: str, rtol: float, atol: float) -> None:
    """A rank's moments and errors of every group against the simulation's."""
    for g, group in enumerate(simulation.groups):
        where, (mean, square) = f"{context}, group {g}", simulation.moments_of(group, rank)
        np.testing.assert_allclose(got["exp_avg"][g], mean, rtol=rtol, atol=atol, err_msg=where)
        np.testing.assert_allclose(got["exp_avg_sq"][g], square, rtol=1e-5, atol=1e-7, err_msg=where)
        for name in ("worker_error", "server_error") if simulation.world_size > 1 else ():
            expected = np.concatenate([np.zeros(0), *(errors[rank] for errors in getattr(group, name + "s"))])
            np.testing.assert_allclose(got[name][g], expected, rtol=1e-5, atol=5e-6, err_msg=f"{where}: {name}")


class Recorded(Problem):
    """Some tensors of a recorded run of two ranks, in this package's counting of steps."""

    schedule: dict[str, Any] = {}

    def __init__(self, name: str, tensors: list[int], optimizer: Any, simulation: Any) -> None:
        found = dict(np.load(Path(__file__).with_name(f"{name}.npz")))
        kwargs = json.loads(str(found["config"]))["kwargs"]
        kwargs["betas"] = tuple(kwargs.get("betas", (0.9, 0.999)))
        if "var_freeze_step" in kwargs:
            kwargs["var_freeze_step"] += 1  # the first step() only counted, the next one was number 2
        else:
            kwargs["freeze_step"] -= 1  # the first step() only counted
        kwargs |= {"bias_correction": False, "scale_block": None, "variance_floor": 0.0, "max_update": 0}
        if "Lamb" in optimizer.__name__:
            kwargs["trust_ratio"] = "frozen"
        self.found, self.tensors, self.optimizer, self.simulation = found, tensors, optimizer, simulation
        self.world_size, self.params = 2, [[found[f"init_param{i}"] for i in tensors]]
        group: dict[str, Any] = {"shapes": [p.shape for p in self.params[0]]}
        if "mask" in name and tensors == [1]:
            group["mask"] = np.ones(group["shapes"][0], np.float32)
            group["mask"][:, 5:] = 0
        rates = tuple(map(float, found["lr"][1:]))
        self.case = Case(name, [group], kwargs, steps=len(rates), lrs=rates)
        steps = range(1, len(rates) + 1)
        self.grads = [[[[found[f"grads{i}"][rank, t] for i in tensors]] for rank in range(2)] for t in steps]
        self.reduces_grads = [bool(reduces) for reduces in found["reduce_grads"][1:]]

    def assert_follows(self, rank: int, history: Any, moments: Any, coeffs: Any, atol: float) -> None:
        """Compare a rank's parameters after every step, its final moments, and LAMB's coefficients."""
        rank = min(rank, len(self.found["param0"]) - 1)  # some have one row for all ranks, which were alike
        for name, got in zip(("param", "exp_avg", "exp_avg_sq"), (history, *moments), strict=True):
            rows = [self.found[f"{name}{i}"][rank] for i in self.tensors]
            rows = [row[1:].reshape(self.case.steps, -1) if name == "param" else row.reshape(1, -1) for row in rows]
            expected = np.concatenate(rows, axis=1)
            np.testing.assert_allclose(np.reshape(got, expected.shape), expected, rtol=0, atol=atol, err_msg=name)
        if "lamb" in self.case.name:
            np.testing.assert_allclose(coeffs, self.found["lamb_coeffs"][1:], rtol=0, atol=atol)
