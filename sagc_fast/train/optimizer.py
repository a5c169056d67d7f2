"""AdamW on the policy's own parameters, in place; bf16 parameters get fp32 masters and fp32 gradient sums.

A bf16 parameter near 1 moves in steps of 2^-8, so a learning rate of 1e-6 would change nothing: the update goes to an
fp32 master and is rounded into the parameter. Gradients of micro-batches are summed in fp32 for the same reason.
fp32 parameters are their own masters.
"""

from __future__ import annotations

import torch
from torch import nn

from sagc_fast.config import OptimizerOptions
from sagc_fast.profiling import ranged


class PolicyOptimizer:
    """Accumulates gradients of micro-batches and applies them with clipping and warm-up.

    Args:
        model: every parameter with ``requires_grad`` is trained; tied parameters count once.
        options: learning rate, warm-up, betas, decay, clipping.
    """

    def __init__(self, model: nn.Module, options: OptimizerOptions) -> None:
        self.options = options
        self.num_updates = 0
        """Updates applied so far; the warm-up goes by it."""
        self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._params.items()}
        for name, p in self._params.items():
            if self._masters[name] is not p:
                p.register_post_accumulate_grad_hook(_sum_in_fp32(self._masters[name]))
        decayed = [m for m in self._masters.values() if m.ndim >= 2]
        plain = [m for m in self._masters.values() if m.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Rate of the next update: linear over the warm-up, then constant."""
        warmup = self.options.warmup_steps
        share = min(1.0, (self.num_updates + 1) / warmup) if warmup else 1.0
        return self.options.learning_rate * share

    @ranged("optimizer")
    def step(self) -> float:
        """Clip, apply and clear the gradients. Returns their global norm before clipping; when that is not finite,
        nothing is applied. Parameters without a gradient count as zero gradient (their moments decay)."""
        masters = list(self._masters.values())
        norm = nn.utils.get_total_norm(self.gradients())
        if torch.isfinite(norm):
            nn.utils.clip_grads_with_norm_(masters, self.options.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            self._round_into_parameters()
            self.num_updates += 1
        self.clear()
        return float(norm)

    def gradients(self) -> list[torch.Tensor]:
        """What has been accumulated, fp32, to be changed in place by who sums over processes; zeros where nothing has
        come."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._masters.values()]

    def clear(self) -> None:
        """Drop accumulated gradients."""
        for name, master in self._masters.items():
            master.grad = None
            self._params[name].grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments and masters by name, fp32, for a safetensors file."""
        tensors = {}
        for name, master in self._masters.items():
            state = self._adamw.state.get(master)
            if state:
                tensors[f"exp_avg.{name}"] = state["exp_avg"]
                tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
            if master is not self._params[name]:
                tensors[f"master.{name}"] = master.detach()
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], num_updates: int) -> None:
        """Continue from ``state_tensors``. Raises KeyError when a tensor is missing, ValueError when shapes differ."""
        self.num_updates = num_updates
        for name, master in self._masters.items():
            if master is not self._params[name]:
                _copy(master, tensors[f"master.{name}"], name)
            if num_updates:
                moments = {k: torch.empty_like(master) for k in ("exp_avg", "exp_avg_sq")}
                for key, moment in moments.items():
                    _copy(moment, tensors[f"{key}.{name}"], name)
                step = torch.tensor(float(num_updates), device=master.device)  # the fused step reads it on the device
                self._adamw.state[master] = {"step": step, **moments}
        self._round_into_parameters()

    @torch.no_grad()
    def _round_into_parameters(self) -> None:
        for name, master in self._masters.items():
            if master is not self._params[name]:
                self._params[name].copy_(master)


def _master(p: nn.Parameter) -> nn.Parameter:
    return p if p.dtype == torch.float32 else nn.Parameter(p.detach().float().clone())


def _sum_in_fp32(master: nn.Parameter):
    def hook(p: nn.Parameter) -> None:
        master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
        p.grad = None

    return hook


@torch.no_grad()
def _copy(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    if target.shape != source.shape:
        raise ValueError(f"{name} has shape {tuple(source.shape)} instead of {tuple(target.shape)}")
    target.copy_(source)
