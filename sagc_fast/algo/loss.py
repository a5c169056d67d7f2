"""The policy loss: one pure function of flat token tensors, its normaliser an argument.

Every algorithm is a set of options of this one function (:class:`LossConfig`). With r = pi_theta / pi_old, the group
advantage A, and per token t of completion c::

    J_t    = min(r A, clip(r, 1 - low, 1 + high) A)            objective "clip"   (A < 0 and dual clip: max(J_t, c A))
             stop_gradient(clip(r, 1 - low, 1 + high)) A log pi_theta                objective "cispo"
    l_t    = -w_t J_t + beta KL_t - coef H_t                   w_t: rollout/training importance weight, detached
    loss   = sum_t a_c l_t / normaliser                        a_c = 1 / length_c for "sequence", else 1

The caller counts the normaliser once over the whole global batch (:func:`loss_normalizer`), so the loss and the
gradient of the batch are the sums over its micro-batches, however it is split between completions and processes.

Shape suffixes: N completion tokens of the (micro-)batch, flat; C completions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from sagc_fast import ops
from sagc_fast.algo.config import CISPO, DAPO, DR_GRPO, GRPO, GSPO, LossConfig
from sagc_fast.errors import ConfigError
from sagc_fast.ops import policy_loss as fused
from sagc_fast.ops.rows import add_rows, take_rows
from sagc_fast.profiling import ranged

__all__ = [
    "CISPO", "DAPO", "DR_GRPO", "GRPO", "GSPO", "LossConfig", "LossMetrics", "LossOutput",
    "kl_estimate", "linear_policy_loss", "loss_normalizer", "policy_loss",
]  # fmt: skip

# exp() of a larger log-ratio says nothing but "far away", and its overflow would turn the other branch's zero gradient
# into NaN. Ratios beyond e^20 are therefore constant (gradient 0).
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Sums over unmasked tokens (0-dim float64 tensors, detached), so that micro-batches add up: ``a + b``."""

    num_tokens: torch.Tensor
    clip_low: torch.Tensor
    """Tokens held by the lower bound: r < 1 - low with A < 0 (cispo: any A)."""
    clip_high: torch.Tensor
    """Tokens held by the upper bound: r > 1 + high with A > 0 (cispo: any A)."""
    dual_clip: torch.Tensor
    """Tokens held by the dual clip."""
    ratio: torch.Tensor
    approx_kl: torch.Tensor
    """k3 of new against old policy: r - 1 - log r, from the per-token ratio."""
    ref_kl: torch.Tensor
    entropy: torch.Tensor
    is_weight: torch.Tensor
    """Importance weights pi_old / pi_rollout before truncation or masking."""
    is_limited: torch.Tensor
    """Tokens whose weight was truncated or masked."""
    ratio_min: torch.Tensor
    ratio_max: torch.Tensor

    def __add__(self, other: LossMetrics) -> LossMetrics:
        merge = {"ratio_min": torch.minimum, "ratio_max": torch.maximum}
        return LossMetrics(
            **{
                f.name: merge.get(f.name, torch.add)(getattr(self, f.name), getattr(other, f.name))
                for f in fields(self)
            }
        )

    def means(self) -> dict[str, float]:
        """Per-token means as floats (ratio_min and ratio_max as they are; num_tokens as a count). Waits for the
        device. Without any token every mean is 0."""
        count = float(self.num_tokens)
        values = {f.name: float(getattr(self, f.name)) for f in fields(self)}
        if count == 0:
            return dict.fromkeys(values, 0.0)
        kept = ("num_tokens", "ratio_min", "ratio_max")
        return {name: value if name in kept else value / count for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss`` is a 0-dim tensor to call ``backward`` on; the rest is for the log."""

    loss: torch.Tensor
    metrics: LossMetrics


def loss_normalizer(lengths_C: torch.Tensor, config: LossConfig, max_length: int) -> float:
    """The divisor of the whole global batch, at least 1.

    Args:
        lengths_C: int [C] over ALL completions of the optimizer step, on all processes: unmasked tokens of each, 0 for
            a completion that is left out (it does not count).
        max_length: length cap in tokens, the constant of ``aggregation="constant"``.
    """
    lengths_C = torch.as_tensor(lengths_C)
    num_sequences = int((lengths_C > 0).sum())
    totals = {
        "sequence": num_sequences,
        "token": int(lengths_C.sum()),
        "constant": max_length * num_sequences,
    }
    return float(max(totals[config.aggregation], 1))


def policy_loss(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_C: torch.Tensor,
    completion_index_N: torch.Tensor,
    mask_N: torch.Tensor | None = None,
    *,
    config: LossConfig,
    normalizer: float,
    ref_logp_N: torch.Tensor | None = None,
    rollout_logp_N: torch.Tensor | None = None,
    entropy_N: torch.Tensor | None = None,
) -> LossOutput:
    """This micro-batch's share of the batch loss (see the module's text for the formula).

    Args:
        logp_N: float [N], log-probs under the policy in training; carries the gradient.
        old_logp_N: float [N], log-probs under the policy that the ratio is taken against; detached here.
        advantages_C: float [C].
        completion_index_N: int64 [N], the row of ``advantages_C`` of each token. A completion must be whole.
        mask_N: bool [N], tokens that count; the others get exactly zero gradient, whatever their values. None: all.
        normalizer: from :func:`loss_normalizer` over the global batch.
        ref_logp_N: float [N], reference model; needed when ``kl_beta > 0`` and ``kl_in == "loss"``.
        rollout_logp_N: float [N], log-probs returned with the rollout; needed unless ``rollout_is == "none"``.
        entropy_N: float [N], policy entropy with gradient; needed when ``entropy_coef != 0`` (else only reported).

    Computes in float32, or in float64 when ``logp_N`` is float64; sums in float64.

    Raises:
        ConfigError: shapes that differ, or an input that ``config`` needs is missing.
    """
    _check_inputs(logp_N, completion_index_N, config, normalizer, ref_logp_N, rollout_logp_N, entropy_N)
    if _is_per_token(config) and fused.is_fused(logp_N):
        terms = _token_loss(
            logp_N, old_logp_N, advantages_C, completion_index_N, mask_N, config, normalizer, ref_logp_N, rollout_logp_N
        )
        loss, figures = fused.token_policy_loss(logp_N, entropy_N, terms)
        return LossOutput(loss, _fused_metrics(figures, mask_N, entropy_N))
    dtype = torch.float64 if logp_N.dtype == torch.float64 else torch.float32
    mask_N = torch.ones_like(logp_N, dtype=torch.bool) if mask_N is None else mask_N.bool()

    def masked(x_N: torch.Tensor) -> torch.Tensor:
        # where, not a product: a masked NaN or inf must not reach the sum or the gradient.
        return torch.where(mask_N, x_N.to(dtype), torch.zeros((), dtype=dtype, device=x_N.device))

    logp_N, old_logp_N = masked(logp_N), masked(old_logp_N.detach())
    advantage_N = advantages_C.to(dtype).detach()[completion_index_N]
    length_C = _segment_sum(mask_N.to(dtype), completion_index_N, len(advantages_C)).clamp(min=1)

    log_ratio_N = logp_N - old_logp_N
    ratio_N = _ratio(log_ratio_N, completion_index_N, length_C, config)
    objective_N, dual_N = _objective(ratio_N, logp_N, advantage_N, config)
    weight_N = is_limited_N = None
    if rollout_logp_N is not None and config.rollout_is != "none":
        log_weight_N = old_logp_N - masked(rollout_logp_N.detach())
        weight_N, kept_weight_N, is_limited_N = _importance_weight(
            log_weight_N, completion_index_N, len(advantages_C), config
        )
        objective_N = objective_N * kept_weight_N

    loss_N = -objective_N
    kl_N = None
    if ref_logp_N is not None:
        kl_N = kl_estimate(logp_N, masked(ref_logp_N.detach()), config.kl_estimator)
        if config.kl_in == "loss" and config.kl_beta > 0:
            loss_N = loss_N + config.kl_beta * kl_N
    entropy_N = None if entropy_N is None else masked(entropy_N)
    if entropy_N is not None and config.entropy_coef != 0:
        loss_N = loss_N - config.entropy_coef * entropy_N
    if config.aggregation == "sequence":
        loss_N = loss_N / length_C[completion_index_N]
    loss = (masked(loss_N).double().sum() / normalizer).to(dtype)
    metrics = _metrics(
        mask_N, log_ratio_N, ratio_N, advantage_N, dual_N, kl_N, entropy_N, weight_N, is_limited_N, config
    )
    return LossOutput(loss, metrics)


@ranged("loss")
def linear_policy_loss(
    hidden_NE: torch.Tensor,
    lm_head_VE: torch.Tensor,
    targets_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_C: torch.Tensor,
    completion_index_N: torch.Tensor,
    mask_N: torch.Tensor | None = None,
    *,
    temperature: float,
    config: LossConfig,
    normalizer: float,
    ref_logp_N: torch.Tensor | None = None,
    rollout_logp_N: torch.Tensor | None = None,
) -> tuple[LossOutput, torch.Tensor]:
    """:func:`policy_loss` of the tokens ``targets_N`` straight from hidden states [N, E] and the lm head [V, E], and
    their log-probs [N] (detached). On a GPU a per-token loss is formed while a chunk's logits are there, which saves
    the fourth of the head's four dense products; else log-probs first, then the loss.
    """
    if not (_is_per_token(config) and fused.is_fused(hidden_NE)):
        logp_N, entropy_N = ops.token_logprobs(hidden_NE, lm_head_VE, targets_N, temperature)
        output = policy_loss(
            logp_N, old_logp_N, advantages_C, completion_index_N, mask_N, config=config, normalizer=normalizer,
            ref_logp_N=ref_logp_N, rollout_logp_N=rollout_logp_N, entropy_N=entropy_N,
        )  # fmt: skip
        return output, logp_N.detach()
    _check_inputs(targets_N, completion_index_N, config, normalizer, ref_logp_N, rollout_logp_N, hidden_NE)
    terms = _token_loss(
        old_logp_N, old_logp_N, advantages_C, completion_index_N, mask_N, config, normalizer, ref_logp_N, rollout_logp_N
    )
    loss, logp_N, entropy_N, figures = fused.linear_policy_loss(hidden_NE, lm_head_VE, targets_N, temperature, terms)
    return LossOutput(loss, _fused_metrics(figures, mask_N, entropy_N)), logp_N


def _is_per_token(config: LossConfig) -> bool:
    """True when a token's loss depends on no other token but through the normaliser."""
    return config.ratio_level == "token" and (config.rollout_is == "none" or config.rollout_is_level == "token")


def _token_loss(
    like_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_C: torch.Tensor,
    completion_index_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    config: LossConfig,
    normalizer: float,
    ref_logp_N: torch.Tensor | None,
    rollout_logp_N: torch.Tensor | None,
) -> fused.TokenLoss:
    """The configuration and the tensors as the fused kernel takes them."""
    factors_C = torch.full((len(advantages_C),), 1 / normalizer, device=like_N.device)
    if config.aggregation == "sequence":
        is_token_N = torch.ones_like(like_N, dtype=torch.float32) if mask_N is None else mask_N.float()
        factors_C /= _segment_sum(is_token_N, completion_index_N, len(advantages_C)).clamp(min=1)
    has_weight = rollout_logp_N is not None and config.rollout_is != "none"
    return fused.TokenLoss(
        old_logp_N=old_logp_N.detach().float(),
        advantages_C=advantages_C.detach().float(),
        completion_index_N=completion_index_N,
        factors_C=factors_C,
        mask_N=None if mask_N is None else mask_N.bool(),
        ref_logp_N=None if ref_logp_N is None else ref_logp_N.detach().float(),
        rollout_logp_N=rollout_logp_N.detach().float() if has_weight else None,
        is_cispo=config.objective == "cispo",
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        kl_beta=config.kl_beta if config.kl_in == "loss" else 0.0,
        kl_estimator=0 if ref_logp_N is None else int(config.kl_estimator[1:]),
        entropy_coef=config.entropy_coef,
        rollout_is={"none": 0, "truncate": 1, "mask": 2}[config.rollout_is] if has_weight else 0,
        is_cap=config.rollout_is_cap,
        is_floor=config.rollout_is_floor,
    )


def _fused_metrics(figures: torch.Tensor, mask_N: torch.Tensor | None, entropy_N: torch.Tensor | None) -> LossMetrics:
    """The same sums as :func:`_metrics` from the rows that the kernel wrote (zero where masked)."""
    num_tokens = figures.shape[1]
    sums = dict(zip(fused.FIGURES, figures.double().sum(1).unbind(), strict=True))
    ratio_N = figures[fused.FIGURES.index("ratio")].double()
    hidden_N = torch.zeros_like(ratio_N, dtype=torch.bool) if mask_N is None else ~mask_N.bool()
    edge = ratio_N.new_full((1,), torch.inf)
    zero = torch.zeros((), dtype=torch.float64, device=figures.device)
    return LossMetrics(
        num_tokens=zero + num_tokens if mask_N is None else mask_N.double().sum(),
        entropy=zero if entropy_N is None else entropy_N.detach().double().masked_fill(hidden_N, 0.0).sum(),
        ratio_min=torch.cat([ratio_N.masked_fill(hidden_N, torch.inf), edge]).amin(),
        ratio_max=torch.cat([ratio_N.masked_fill(hidden_N, -torch.inf), -edge]).amax(),
        **sums,
    )


def kl_estimate(logp_N: torch.Tensor, ref_logp_N: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(pi || pi_ref) from tokens drawn from pi, with u = log pi_ref - log pi (Schulman,
    "Approximating KL divergence", 2020): k1 = -u, k2 = u^2 / 2, k3 = exp(u) - u - 1.

    As a loss term, k1's gradient is zero in expectation, k2's is that of the reverse KL, k3's that of the forward KL.
    """
    u_N = ref_logp_N - logp_N
    if estimator == "k1":
        return -u_N
    if estimator == "k2":
        return u_N.square() / 2
    u_N = u_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(u_N) - u_N


def _ratio(
    log_ratio_N: torch.Tensor, completion_index_N: torch.Tensor, length_C: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    if config.ratio_level == "sequence":
        mean_C = _segment_sum(log_ratio_N, completion_index_N, len(length_C)) / length_C
        log_ratio_N = take_rows(mean_C, completion_index_N)
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _objective(
    ratio_N: torch.Tensor, logp_N: torch.Tensor, advantage_N: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """J_t, and where the dual clip holds it."""
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.objective == "cispo":
        return clipped_N.detach() * advantage_N * logp_N, torch.zeros_like(advantage_N, dtype=torch.bool)
    objective_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    if config.dual_clip is None:
        return objective_N, torch.zeros_like(advantage_N, dtype=torch.bool)
    floor_N = config.dual_clip * advantage_N
    dual_N = (advantage_N < 0) & (objective_N < floor_N)
    return torch.where(dual_N, floor_N, objective_N), dual_N


def _importance_weight(
    log_weight_N: torch.Tensor, completion_index_N: torch.Tensor, num_completions: int, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw weight, the weight used, and where the two differ."""
    if config.rollout_is_level == "sequence":
        log_weight_N = _segment_sum(log_weight_N, completion_index_N, num_completions)[completion_index_N]
    weight_N = log_weight_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if config.rollout_is == "truncate":
        return weight_N, weight_N.clamp(max=config.rollout_is_cap), weight_N > config.rollout_is_cap
    outside_N = (weight_N > config.rollout_is_cap) | (weight_N < config.rollout_is_floor)
    return weight_N, torch.where(outside_N, 0.0, weight_N), outside_N


def _metrics(
    mask_N: torch.Tensor,
    log_ratio_N: torch.Tensor,
    ratio_N: torch.Tensor,
    advantage_N: torch.Tensor,
    dual_N: torch.Tensor,
    kl_N: torch.Tensor | None,
    entropy_N: torch.Tensor | None,
    weight_N: torch.Tensor | None,
    is_limited_N: torch.Tensor | None,
    config: LossConfig,
) -> LossMetrics:
    def total(x_N: torch.Tensor | None) -> torch.Tensor:
        if x_N is None:
            return torch.zeros((), dtype=torch.float64, device=mask_N.device)
        return torch.where(mask_N, x_N.detach().double(), 0.0).sum()

    any_sign = config.objective == "cispo"
    ratio_N = ratio_N.detach().double()
    token_log_ratio_N = log_ratio_N.detach().double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    low_N = (ratio_N < 1 - config.clip_low) & (any_sign | (advantage_N < 0))
    high_N = (ratio_N > 1 + config.clip_high) & (any_sign | (advantage_N > 0))
    edge = ratio_N.new_full((1,), torch.inf)  # lets an empty or fully masked batch have an extreme
    return LossMetrics(
        num_tokens=total(mask_N),
        clip_low=total(low_N),
        clip_high=total(high_N),
        dual_clip=total(dual_N),
        ratio=total(ratio_N),
        approx_kl=total(torch.expm1(token_log_ratio_N) - token_log_ratio_N),
        ref_kl=total(kl_N),
        entropy=total(entropy_N),
        is_weight=total(weight_N),
        is_limited=total(is_limited_N),
        ratio_min=torch.cat([torch.where(mask_N, ratio_N, torch.inf), edge]).amin(),
        ratio_max=torch.cat([torch.where(mask_N, ratio_N, -torch.inf), -edge]).amax(),
    )


def _segment_sum(x_N: torch.Tensor, completion_index_N: torch.Tensor, num_completions: int) -> torch.Tensor:
    return add_rows(x_N, completion_index_N, num_completions)


def _check_inputs(
    logp_N: torch.Tensor,
    completion_index_N: torch.Tensor,
    config: LossConfig,
    normalizer: float,
    ref_logp_N: torch.Tensor | None,
    rollout_logp_N: torch.Tensor | None,
    entropy_N: torch.Tensor | None,
) -> None:
    if logp_N.ndim != 1 or logp_N.shape != completion_index_N.shape:
        raise ConfigError(
            f"log-probs have shape {tuple(logp_N.shape)} and the completion index {tuple(completion_index_N.shape)}; "
            "both must be one flat list over completion tokens."
        )
    if not normalizer > 0:
        raise ConfigError(f"The loss normaliser is {normalizer!r}; it must be positive (see loss_normalizer).")
    needed = (
        (config.kl_beta > 0 and config.kl_in == "loss" and ref_logp_N is None, "kl_beta", "the reference's log-probs"),
        (config.rollout_is != "none" and rollout_logp_N is None, "rollout_is", "the rollout's log-probs"),
        (config.entropy_coef != 0 and entropy_N is None, "entropy_coef", "the policy's entropies"),
    )
    for is_missing, option, what in needed:
        if is_missing:
            raise ConfigError(
                f"algo.{option} is {getattr(config, option)!r} and {what} are not given; pass them or turn it off."
            )
