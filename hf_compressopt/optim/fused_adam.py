"""Adam (Kingma and Ba 2015, arXiv 1412.6980) and AdamW (arXiv 1711.05101), all tensors of a group in one pass.

For every tensor:
    g <- g + wd p (Adam)  or  p <- p (1 - lr wd) (AdamW)
    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p <- p - lr m^ / (sqrt(v^) + eps)
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels.adam import AdamPlan, AdamStep, AdamTensors, adam_
from hf_compressopt.optim.math import clip_factor, evaluate, grad_square_sum
from hf_compressopt.optim.options import check_at_least, check_betas, check_last_group, check_parameter
from hf_compressopt.optim.state import load_groups, load_with_hooks, matching_groups

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OF_A_STEP = ("lr", "eps", "weight_decay", "adam_w_mode", "bias_correction", "maximize")
_NOT_LOADED = ("params", "foreach", "fused", "differentiable", "decoupled_weight_decay", "capturable")


class FusedAdam(torch.optim.Optimizer):
    """A drop-in replacement for torch's AdamW and Adam: one pass over memory, with float32 moments for any dtype.

    The results are torch's, and state dicts load in both directions. Parameters of one group may differ in dtype and
    device. Like torch's fused optimizers it reads ``grad_scale`` and ``found_inf``, so that a GradScaler needs no pass
    of its own over the gradients. A step leaves these unscaled (and clipped), unless ``write_grads`` is False.

    ``copies`` may hold a tensor for a parameter, of its shape. Every step also writes the new parameter there, rounded
    to that tensor's dtype.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer.
        lr: Learning rate, >= 0; or a tensor of one element, which is read at each step.
        adam_w_mode: Decoupled weight decay (AdamW); False is L2 regularization (Adam).
        weight_decay: Weight decay, >= 0.
        betas: Coefficients of the running averages, each in [0, 1).
        eps: Added to the denominator, >= 0.
        bias_correction: Apply Adam's bias corrections.
        amsgrad: Must be False.
        set_grad_none: Default of ``zero_grad()``: True drops the gradients, False fills them with 0.
        maximize: Ascend instead of descend.
        capturable: Allow capturing a step in a CUDA graph. Then give lr as a tensor on the GPU, because a graph keeps
            numbers.
        max_grad_norm: Clip gradients to this norm in the same pass; 0 is off. (Trainer clips by itself.) For FSDP2's
            DTensors it is the norm over all ranks; parameters of FSDP1 are refused.
        master_weights: Keep float32 weights for bfloat16 and float16 parameters, which become rounded copies. The first
            step takes them from the parameters. If other code writes a parameter later, delete
            ``state[p]["master_param"]``.
        fp32_moments: Keep moments in float32; False gives them the parameter's dtype, as torch does.
        write_grads: Leave unscaled (and clipped) gradients after a step with a grad_scale, as torch does. False saves
            the writes and leaves undefined values.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that are complex or sparse.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler sets grad_scale and found_inf, and always calls step()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        bias_correction: bool = True,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        maximize: bool = False,
        capturable: bool = False,
        max_grad_norm: float = 0.0,
        master_weights: bool = False,
        fp32_moments: bool = True,
        write_grads: bool = True,
    ) -> None:
        check_at_least("max_grad_norm", max_grad_norm, 0)
        self.max_grad_norm, self.set_grad_none = max_grad_norm, set_grad_none
        self.master_weights, self.fp32_moments = master_weights, fp32_moments
        self.write_grads = write_grads
        self.copies: dict[Tensor, Tensor] = {}
        self._plans: dict[int, AdamPlan] = {}
        self._last_found_inf: Tensor | None = None
        numbers = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        modes = {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction, "amsgrad": amsgrad}
        super().__init__(params, {**numbers, **modes, "maximize": maximize, "capturable": capturable})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        check_last_group(self.param_groups, _check_group)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step changed nothing because a GradScaler found an overflow. The host waits for it."""
        return self._last_found_inf is not None and bool(self._last_found_inf)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
    ) -> float | None:
        """Take one step. Returns the closure's return value.

        Raises:
            TypeError: For the arguments after the closure, which earlier optimizers of this name took.
        """
        _refuse(grads=grads, output_params=output_params, scale=scale, grad_norms=grad_norms)
        loss = evaluate(closure)
        self._update()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _update(self) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._last_found_inf = found_inf
        clip = self._clip_factor(grad_scale) if self.max_grad_norm > 0 else None
        _check_capture(self.param_groups)
        known = _Known(self.state)
        for number, group in enumerate(self.param_groups):
            tensors = self._tensors_with_gradient(group, known)
            if tensors.params:
                (beta1, beta2), options = group["betas"], {name: group[name] for name in _OF_A_STEP}
                step = AdamStep(
                    **options,
                    beta1=beta1,
                    beta2=beta2,
                    grad_scale=grad_scale,
                    found_inf=found_inf,
                    clip_factor=clip,
                    write_grads=self.write_grads and grad_scale is not None,
                )
                self._plans[number] = adam_(tensors, step, self._plans.get(number))

    def _clip_factor(self, grad_scale: Tensor | None) -> Tensor | None:
        square = grad_square_sum([*chain.from_iterable(group["params"] for group in self.param_groups)])
        if square is None:
            return None
        norm = square.sqrt()
        return clip_factor(norm if grad_scale is None else norm / grad_scale.to(norm.device), self.max_grad_norm)

    def _tensors_with_gradient(self, group: dict[str, Any], known: _Known) -> AdamTensors:
        params, grads = list(group["params"]), [p.grad for p in group["params"]]
        if any(map(is_, grads, repeat(None))):
            params = [p for p in params if p.grad is not None]
            grads = [p.grad for p in params]
        states = known.next(params) or [self.state[p] or self._new_state(p) for p in params]
        return AdamTensors(
            grads=grads,
            params=params,
            exp_avgs=[state["exp_avg"] for state in states],
            exp_avg_sqs=[state["exp_avg_sq"] for state in states],
            steps=[state["step"] for state in states],
            masters=[*map(self._master, params, states)] if self.master_weights else None,
            copies=[self.copies.get(p) for p in params] if self.copies else None,
        )

    def _new_state(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        state["exp_avg"] = torch.zeros_like(param, dtype=self._moment_dtype(param))
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=self._moment_dtype(param))
        return state

    def _moment_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_moments and param.dtype != torch.float64 else param.dtype

    def _master(self, param: Tensor, state: dict[str, Tensor]) -> Tensor | None:
        if param.dtype not in (torch.bfloat16, torch.float16):
            return None
        if "master_param" not in state:
            state["master_param"] = param.detach().float()
        return state["master_param"]

    # -- copies and state dicts ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = ("max_grad_norm", "set_grad_none", "master_weights", "fp32_moments", "write_grads", "copies")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._last_found_inf = {}, None

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of FusedAdam, Adam or AdamW; moments and masters get the dtypes of this optimizer.

        Raises:
            ValueError: For a state dict that does not fit; nothing is changed then.
        """
        load_with_hooks(self, state_dict, self._load, in_shards=False)

    def _load(self, state_dict: dict[str, Any], _: Any) -> None:
        """Take over a state dict: an lr that is a tensor stays this tensor, and other moments are new ones."""
        groups = matching_groups(self, state_dict)
        states = state_dict["state"]
        rows: list[tuple[Tensor, dict[str, Any]]] = []
        for group, saved in zip(self.param_groups, groups, strict=True):
            if saved.get("amsgrad"):
                raise ValueError("amsgrad must be False, got a state dict with amsgrad=True: use torch.optim.AdamW")
            rows += [(p, states.get(key, {})) for p, key in zip(group["params"], saved["params"], strict=True)]
        for param, values in rows:
            _check_saved(values, param)
        for group, saved in zip(self.param_groups, groups, strict=True):  # torch's Adam says it by another name
            group["adam_w_mode"] = saved.get("decoupled_weight_decay", group["adam_w_mode"])
        load_groups(self, deepcopy(groups), _NOT_LOADED)
        self.state.clear()
        self._plans, self._last_found_inf = {}, None
        for param, values in rows:
            if values:
                self._load_state(param, values)

    def _load_state(self, param: Tensor, values: dict[str, Any]) -> None:
        state = self._new_state(param)
        if self.master_weights and "master_param" in values:
            state["master_param"] = torch.empty_like(param, dtype=torch.float32)
        for name, tensor in state.items():
            tensor.copy_(values[name]) if isinstance(values[name], Tensor) else tensor.fill_(values[name])


class _Known:
    """The states of one step in their order. It is mostly that of the parameters, which then need not be hashed."""

    def __init__(self, state: dict[Tensor, dict[str, Tensor]]) -> None:
        self._params, self._states = [*state], [*state.values()]
        self._begin = 0

    def next(self, params: list[Tensor]) -> list[dict[str, Tensor]] | None:
        """Return the states of the next group's parameters; None if the order differs, or one is missing or empty."""
        begin, end = self._begin, self._begin + len(params)
        self._begin = end
        states = self._states[begin:end]
        same = len(states) == len(params) and all(map(is_, self._params[begin:end], params))
        return states if same and all(states) else None


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(
                f"step() takes no {name}, unlike earlier optimizers of this name: gradients are read from .grad; "
                "torch.amp.GradScaler hands over a loss scale, FusedAdam(max_grad_norm=...) clips, and "
                "FusedAdam(master_weights=True) or the copies attribute writes low-precision parameters"
            )


def _check_capture(groups: list[dict[str, Any]]) -> None:
    on_gpu = any(param.is_cuda for group in groups for param in group["params"][:1])
    if on_gpu and torch.cuda.is_current_stream_capturing() and not all(group["capturable"] for group in groups):
        raise RuntimeError("capturable must be True to capture step() in a CUDA graph, got False")


def _check_saved(values: dict[str, Any], param: Tensor) -> None:
    if not values:
        return
    if missing := {"step", "exp_avg", "exp_avg_sq"} - values.keys():
        raise ValueError(f"the state dict is not one of Adam: it has no {sorted(missing)} for a parameter")
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        if name in values and values[name].shape != param.shape:
            raise ValueError(
                f"{name} in the state dict must have the parameter's shape {tuple(param.shape)}, got "
                f"{tuple(values[name].shape)}"
            )


def _check_group(group: dict[str, Any], number: int) -> None:
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, got one of {group['lr'].numel()}")
    for name in ("lr", "eps", "weight_decay"):
        check_at_least(name, group[name], 0)
    check_betas(group["betas"])
    for name in ("bias_correction", "adam_w_mode", "maximize", "capturable"):
        if not isinstance(group[name], bool):
            raise TypeError(f"{name} must be True or False, got {group[name]!r} in param group {number}")
    if group["amsgrad"]:
        raise ValueError(
            f"amsgrad must be False, got {group['amsgrad']} in param group {number}: use torch.optim.AdamW"
        )
    for param in group["params"]:
        check_parameter(param, _DTYPES, number)
