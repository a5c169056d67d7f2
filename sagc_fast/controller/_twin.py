"""The controller's algorithm in plain Python: the text to read, the oracle of the tests, and the core without numba.

``_jit.py`` is the same algorithm compiled. Decisions are the same; draws agree to 1e-12 (the two call different
implementations of log and cos, which differ in rare last bits).

One step, in the words of the paper (arXiv:2606.02218):

    observe    k of the n groups drawn with G straggled: max length > tau * median length
    forget     alpha <- a0 + gamma (alpha - a0), beta likewise, in every arm
    learn      alpha_G += k, beta_G += n - k
    price      lambda <- clip(lambda + eta (k / n - delta), 0, lambda_max)
    choose     draw p_H ~ Beta(alpha_H, beta_H) for H near G (radius); the next G maximises log2 H - lambda p_H
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from sagc_fast.controller import _layout as at
from sagc_fast.controller.config import SAGCConfig

_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words from a counter and a key, no state between calls."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def log_gamma_variate(shape: float, step: int, stream: int, key: tuple[int, int]) -> float:
    """Logarithm of a Gamma(shape, 1) draw (Marsaglia and Tsang, 2000), in logs so that tiny shapes stay finite."""
    counter = (step & _MASK, step >> 32, stream)
    boost = 0.0
    if shape < 1.0:
        w0, w1, _, _ = philox((*counter, _MASK), key)
        boost = math.log((w0 + (w1 + 1.0) / 2**32) / 2**32) / shape
        shape += 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    attempt = 0
    while True:
        w0, w1, w2, w3 = philox((*counter, attempt), key)
        attempt += 1
        radius = math.sqrt(-2.0 * math.log((w0 + (w1 + 1.0) / 2**32) / 2**32))
        x = radius * math.cos(2.0 * math.pi * (w2 / 2**32))
        t = 1.0 + c * x
        if t <= 0.0:
            continue
        u, x2, log_v = (w3 + 1.0) / 2**32, x * x, 3.0 * math.log(t)
        is_sure = u < 1.0 - 0.0331 * x2 * x2  # their squeeze: spares nearly every logarithm of u
        if is_sure or math.log(u) < 0.5 * x2 + d * (1.0 - t * t * t + log_v):
            return math.log(d) + log_v + boost


def beta_variate(alpha: float, beta: float, step: int, stream: int, key: tuple[int, int]) -> float:
    """A Beta(alpha, beta) draw that depends on nothing but its arguments; never NaN, for any positive shapes."""
    log_a = log_gamma_variate(alpha, step, 2 * stream, key)
    log_b = log_gamma_variate(beta, step, 2 * stream + 1, key)
    return 1.0 / (1.0 + math.exp(min(max(log_b - log_a, -700.0), 700.0)))


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones; 0 for none."""
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        return 0.0
    return ordered[n // 2] if n % 2 else 0.5 * (ordered[n // 2 - 1] + ordered[n // 2])


class TwinCore:
    """State and step of one controller. ``state`` holds what ``_layout.SCALARS`` and ``ARRAYS`` name."""

    backend = "python"

    def __init__(self, config: SAGCConfig, seed: int) -> None:
        self.config = config
        self.set_seed(seed)
        arms = len(config.candidates)
        self.state: dict = {name: 0 if name in at.INTEGERS else 0.0 for name in at.SCALARS}
        self.state |= {"arm": config.start_arm, "lambda": float(config.lambda_0)}
        self.state |= {"alpha": [float(config.prior_alpha)] * arms, "beta": [float(config.prior_beta)] * arms}
        self.state |= {"pulls": [0.0] * arms, "draws": [0.0] * arms}

    def set_seed(self, seed: int) -> None:
        self.key = (seed & _MASK, seed >> 32)

    @property
    def arm(self) -> int:
        return self.state["arm"]

    def export_state(self) -> dict:
        return {name: list(v) if isinstance(v, list) else v for name, v in self.state.items()}

    def import_state(self, state: dict) -> None:
        self.state = {name: list(v) if isinstance(v, list) else v for name, v in state.items()}

    def observe(self, lengths: Sequence[float], group_size: int, offsets: Sequence[int]) -> int:
        """One step. Groups are ``lengths`` cut every ``group_size`` values, or at ``offsets`` when that is 0.

        Returns 2 * next arm + is_fallback, or -1, with nothing changed, when a length is negative, infinite or NaN.
        """
        lengths = [float(length) for length in lengths]
        if not all(0.0 <= length < math.inf for length in lengths):
            return -1
        if group_size > 0:
            offsets = range(0, len(lengths) + 1, group_size)
        groups = [lengths[start:end] for start, end in pairwise(offsets) if end > start]
        self._learn(*self.summarise(lengths, groups))
        return self.choose()

    def observe_counts(self, num_stragglers: int, num_groups: int) -> int:
        """One step from counts alone: ``num_stragglers`` of ``num_groups`` groups straggled."""
        self.state["num_groups"], self.state["num_straggler_groups"] = num_groups, num_stragglers
        if self.config.signal == "any" and num_groups > 0:
            num_stragglers, num_groups = int(num_stragglers > 0), 1
        self._learn(num_stragglers, num_groups)
        return self.choose()

    def summarise(self, lengths: Sequence[float], groups: list[Sequence[float]]) -> tuple[int, int]:
        """(events, trials) of the configured signal; writes the statistics of the lengths into the state."""
        config, s = self.config, self.state
        is_reference, is_batch = config.ratio == "reference", config.signal == "batch"
        batch_median = median(lengths) if is_reference or is_batch else 0.0
        reference = batch_median
        if is_reference and groups:
            reference = s["reference_median"] or batch_median
            s["reference_median"] = smooth(s["reference_median"], batch_median, s["reference_median"] == 0.0)
        ratios = [max(group) / ((reference if is_reference else median(group)) or 1.0) for group in groups]
        events = sum(ratio > config.tau for ratio in ratios)
        s["num_groups"], s["num_straggler_groups"] = len(groups), events
        s["straggler_ratio_mean"] = sum(ratios) / len(ratios) if ratios else 0.0
        s["straggler_ratio_max"] = max(ratios, default=0.0)
        cap = config.max_length or math.inf
        s["clipped_ratio"] = sum(length >= cap for length in lengths) / len(lengths) if groups else 0.0
        if groups:
            s["mean_length"] = smooth(s["mean_length"], sum(lengths) / len(lengths), s["mean_length"] == 0.0)
        if not groups or config.signal == "group":
            return events, len(groups)
        if is_batch:
            return int(max(lengths) / (reference or 1.0) > config.tau), 1
        return int(events > 0), 1

    def _learn(self, events: int, trials: int) -> None:
        """Forget, learn from the arm that was played, move the price."""
        self.forget()
        if trials > 0:
            self.credit(self.arm, events, trials)
            self.price(events / trials, trials)

    def forget(self) -> None:
        """Decay the evidence of every arm towards the prior."""
        a0, b0, gamma = self.config.prior_alpha, self.config.prior_beta, self.config.gamma
        self.state["alpha"] = [a0 + gamma * (a - a0) for a in self.state["alpha"]]
        self.state["beta"] = [b0 + gamma * (b - b0) for b in self.state["beta"]]

    def credit(self, arm: int, events: float, trials: float) -> None:
        """Add evidence to one arm."""
        self.state["alpha"][arm] += events
        self.state["beta"][arm] += trials - events

    def price(self, rate: float, trials: int) -> None:
        """Dual ascent on the violation, unless delta is out of reach; then the price stands and the smallest arm holds.

        A price wound up against the impossible would take as long to come down when lengths change.
        """
        config, s = self.config, self.state
        s["straggler_rate"] = rate
        s["straggler_rate_ema"] = smooth(s["straggler_rate_ema"], rate, sum(s["pulls"]) == 0.0)
        s["pulls"][self.arm] += 1.0
        a, b = s["alpha"][0], s["beta"][0]
        spread = math.sqrt(a * b / ((a + b) * (a + b) * (a + b + 1.0)))
        is_missed = a / (a + b) - at.SURE_Z * spread > config.delta
        is_known = a + b - config.prior_alpha - config.prior_beta > at.SURE_EVIDENCE
        is_out_of_reach = config.fallback and is_missed and is_known
        if not is_out_of_reach:
            step_size = config.dual_step * min(1.0, trials / at.FULL_STEP_TRIALS)
            s["lambda"] = min(max(s["lambda"] + step_size * (rate - config.delta), 0.0), config.lambda_max)
        threshold = at.RELEASE * config.lambda_max if s["is_fallback"] else config.lambda_max
        is_at_bound = config.fallback and s["lambda"] >= threshold
        s["is_fallback"] = int(is_out_of_reach or is_at_bound)

    def choose(self) -> int:
        """The arm of the next step: Thompson's choice in the neighbourhood, or down towards the smallest arm."""
        config, s = self.config, self.state
        step = s["step"]
        s["step"] += 1
        s["held"] += 1
        if s["held"] >= config.dwell:
            best = self._best_arm(step)
            if best != self.arm:
                s["arm"], s["held"] = best, 0
        return 2 * self.arm + int(s["is_fallback"])

    def _reachable_arms(self) -> range:
        last = len(self.config.candidates) - 1
        return range(max(0, self.arm - self.config.radius), min(last, self.arm + self.config.radius) + 1)

    def _best_arm(self, step: int) -> int:
        config, s = self.config, self.state
        arms = self._reachable_arms()
        if s["is_fallback"]:
            return arms[0]
        best, best_value = arms[0], -math.inf
        for i in arms:
            s["draws"][i] = beta_variate(s["alpha"][i], s["beta"][i], step, i, self.key)
            value = config.utilities[i] - s["lambda"] * s["draws"][i]
            if value > best_value:
                best, best_value = i, value
        return best


def smooth(past: float, value: float, is_first: bool) -> float:
    """Exponential moving average that starts at the first value."""
    return value if is_first else at.EMA_DECAY * past + (1.0 - at.EMA_DECAY) * value
