"""The controller's step compiled by numba: a microsecond or two for summarising the lengths, learning and choosing.

``_twin.py`` is the same algorithm in plain Python, written to be read; the tests hold the two together. This file is
written to compile fast: few functions, scalar loops, no temporary arrays. numba keeps the result on disk.

Random numbers are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a pure
function of (seed, step, arm, attempt). There is no generator state, so a resumed controller continues bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numba
import numpy as np

from sagc_fast.controller import _layout as at
from sagc_fast.controller.config import SAGCConfig

_LOG = logging.getLogger(__name__)

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_TWO_PI = 2.0 * math.pi
_INV_2_32 = 2.0**-32
_BOOST_ATTEMPT = np.uint64(0xFFFFFFFF)
"""Counter of the extra uniform that a shape below 1 needs; no rejection loop ever counts so far."""


def compiled(function: Callable) -> Callable:
    """njit with the disk cache, or without it where no folder can be written (a read-only install, no home)."""
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        _LOG.info("The compiled controller cannot be kept on disk (%s); it is compiled anew in every process.", error)
        return numba.njit(error_model="numpy")(function)


@compiled
def _philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds on four 32-bit words held in uint64."""
    for _ in range(10):
        p0 = _M0 * c0
        p1 = _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@compiled
def _log_gamma_variate(shape, c0, c1, stream, k0, k1):
    """Logarithm of a Gamma(shape, 1) draw: Marsaglia and Tsang (2000), in logs so that tiny shapes stay finite."""
    boost = 0.0
    if shape < 1.0:
        w0, w1, _, _ = _philox(c0, c1, stream, _BOOST_ATTEMPT, k0, k1)
        boost = math.log((float(w0) * 4294967296.0 + float(w1) + 1.0) * _INV_2_32 * _INV_2_32) / shape
        shape += 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    attempt = np.uint64(0)
    while True:
        w0, w1, w2, w3 = _philox(c0, c1, stream, attempt, k0, k1)
        attempt += np.uint64(1)
        radius = math.sqrt(-2.0 * math.log((float(w0) + (float(w1) + 1.0) * _INV_2_32) * _INV_2_32))
        x = radius * math.cos(_TWO_PI * (float(w2) * _INV_2_32))
        t = 1.0 + c * x
        if t > 0.0:
            u, x2, log_v = (float(w3) + 1.0) * _INV_2_32, x * x, 3.0 * math.log(t)
            is_sure = u < 1.0 - 0.0331 * x2 * x2  # their squeeze: spares nearly every logarithm of u
            if is_sure or math.log(u) < 0.5 * x2 + d * (1.0 - t * t * t + log_v):
                return math.log(d) + log_v + boost


@compiled
def _median(values, n):
    """Median of values[:n], which it reorders (quickselect); the mean of the two middle ones when n is even."""
    middle = n // 2
    left, right = 0, n - 1
    while left < right:
        pivot = values[(left + right) // 2]
        i, j = left, right
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if middle <= j:
            right = j
        elif middle >= i:
            left = i
        else:
            break
    if n % 2 == 1:
        return values[middle]
    below = values[0]
    for index in range(1, middle):
        below = max(below, values[index])
    return 0.5 * (below + values[middle])


@compiled
def _summarise(state, params, lengths, group_size, offsets, scratch):
    """(events, trials) of the chosen signal; (-1, 0) and no change when a length is negative, infinite or NaN."""
    num_values = lengths.size
    for index in range(num_values):
        if not 0.0 <= lengths[index] < math.inf:
            return -1, 0
    tau, is_reference, signal = params[at.P_TAU], params[at.P_RATIO] == 1.0, params[at.P_SIGNAL]
    num_spans = num_values // group_size if group_size > 0 else offsets.size - 1
    reference = 0.0
    if num_values > 0 and (is_reference or signal == 2.0):
        for index in range(num_values):  # a slice assignment takes two seconds to compile
            scratch[index] = lengths[index]
        reference = _median(scratch, num_values)
        if is_reference:
            past = state[at.S_REFERENCE]
            state[at.S_REFERENCE] = _smooth(past, reference, past == 0.0)
            reference = reference if past == 0.0 else past
    groups, events, clipped = 0, 0, 0
    total, ratio_sum, ratio_max, batch_max = 0.0, 0.0, 0.0, 0.0
    for span in range(num_spans):
        start = span * group_size if group_size > 0 else offsets[span]
        size = group_size if group_size > 0 else offsets[span + 1] - start
        if size == 0:
            continue
        longest = 0.0
        for index in range(size):
            value = lengths[start + index]
            scratch[index] = value
            total += value
            longest = max(longest, value)
            clipped += value >= params[at.P_MAX_LENGTH]
        typical = reference if is_reference else _median(scratch, size)
        ratio = longest / (typical if typical > 0.0 else 1.0)
        groups += 1
        events += ratio > tau
        ratio_sum += ratio
        ratio_max = max(ratio_max, ratio)
        batch_max = max(batch_max, longest)
    state[at.S_NUM_GROUPS] = groups
    state[at.S_NUM_STRAGGLERS] = events
    state[at.S_RATIO_MEAN] = ratio_sum / groups if groups > 0 else 0.0
    state[at.S_RATIO_MAX] = ratio_max
    state[at.S_CLIPPED] = clipped / num_values if groups > 0 else 0.0
    if groups > 0:
        past = state[at.S_MEAN_LENGTH]
        state[at.S_MEAN_LENGTH] = _smooth(past, total / num_values, past == 0.0)
    if groups == 0 or signal == 0.0:
        return events, groups
    if signal == 2.0:
        return int(batch_max / (reference if reference > 0.0 else 1.0) > tau), 1
    return int(events > 0), 1


@compiled
def _smooth(past, value, is_first):
    return value if is_first else at.EMA_DECAY * past + (1.0 - at.EMA_DECAY) * value


@compiled
def _learn(state, params, events, trials):
    """Forget, learn from the arm that was played, move the price, judge whether delta is within reach."""
    arms, arm = int(params[at.P_ARMS]), int(state[at.S_ARM])
    a0, b0, gamma = params[at.P_PRIOR_ALPHA], params[at.P_PRIOR_BETA], params[at.P_GAMMA]
    alpha, beta, pulls = at.S_ARRAYS, at.S_ARRAYS + arms, at.S_ARRAYS + 2 * arms
    for i in range(arms):
        state[alpha + i] = a0 + gamma * (state[alpha + i] - a0)
        state[beta + i] = b0 + gamma * (state[beta + i] - b0)
    if trials == 0:
        return
    is_first = True
    for i in range(arms):
        is_first = is_first and state[pulls + i] == 0.0
    state[alpha + arm] += events
    state[beta + arm] += trials - events
    state[pulls + arm] += 1.0
    rate = events / trials
    state[at.S_RATE] = rate
    state[at.S_RATE_EMA] = _smooth(state[at.S_RATE_EMA], rate, is_first)

    delta, lambda_max, has_fallback = params[at.P_DELTA], params[at.P_LAMBDA_MAX], params[at.P_FALLBACK] == 1.0
    a, b = state[alpha], state[beta]
    spread = math.sqrt(a * b / ((a + b) * (a + b) * (a + b + 1.0)))
    is_missed = a / (a + b) - at.SURE_Z * spread > delta and a + b - a0 - b0 > at.SURE_EVIDENCE
    is_out_of_reach = has_fallback and is_missed
    if not is_out_of_reach:
        step_size = params[at.P_ETA] * min(1.0, trials / at.FULL_STEP_TRIALS)
        state[at.S_LAMBDA] = min(max(state[at.S_LAMBDA] + step_size * (rate - delta), 0.0), lambda_max)
    threshold = at.RELEASE * lambda_max if state[at.S_IS_FALLBACK] == 1.0 else lambda_max
    is_at_bound = has_fallback and state[at.S_LAMBDA] >= threshold
    state[at.S_IS_FALLBACK] = 1.0 if is_out_of_reach or is_at_bound else 0.0


@compiled
def _choose(state, params):
    """The arm of the next step: Thompson's choice in the neighbourhood, or down towards the smallest arm."""
    arms, arm, radius = int(params[at.P_ARMS]), int(state[at.S_ARM]), int(params[at.P_RADIUS])
    counter = np.uint64(state[at.S_STEP])
    state[at.S_STEP] += 1.0
    state[at.S_HELD] += 1.0
    if state[at.S_HELD] < params[at.P_DWELL]:
        return
    c0, c1 = counter & _MASK, counter >> _SHIFT
    k0, k1 = np.uint64(params[at.P_KEY_LOW]), np.uint64(params[at.P_KEY_HIGH])
    alpha, beta, draws = at.S_ARRAYS, at.S_ARRAYS + arms, at.S_ARRAYS + 3 * arms
    low, high = max(0, arm - radius), min(arms - 1, arm + radius)
    best, best_value = low, -math.inf
    if state[at.S_IS_FALLBACK] == 0.0:
        for i in range(low, high + 1):
            log_a = _log_gamma_variate(state[alpha + i], c0, c1, np.uint64(2 * i), k0, k1)
            log_b = _log_gamma_variate(state[beta + i], c0, c1, np.uint64(2 * i + 1), k0, k1)
            draw = 1.0 / (1.0 + math.exp(min(max(log_b - log_a, -700.0), 700.0)))
            state[draws + i] = draw
            value = params[at.P_UTILITY + i] - state[at.S_LAMBDA] * draw
            if value > best_value:
                best, best_value = i, value
    if best != arm:
        state[at.S_ARM] = best
        state[at.S_HELD] = 0.0


@compiled
def step(state, params, lengths, group_size, offsets, scratch, num_stragglers, num_groups):
    """One step in place, from lengths, or from counts when ``num_groups`` >= 0.

    Returns 2 * next arm + is_fallback, or -1, with nothing changed, when a length is unusable.
    """
    if num_groups >= 0:
        state[at.S_NUM_STRAGGLERS], state[at.S_NUM_GROUPS] = num_stragglers, num_groups
        is_any = params[at.P_SIGNAL] == 1.0 and num_groups > 0
        events, trials = (int(num_stragglers > 0), 1) if is_any else (num_stragglers, num_groups)
    else:
        events, trials = _summarise(state, params, lengths, group_size, offsets, scratch)
    if events < 0:
        return -1
    _learn(state, params, events, trials)
    _choose(state, params)
    return 2 * int(state[at.S_ARM]) + int(state[at.S_IS_FALLBACK])


@compiled
def event_loop(state, params, table, num_groups, seed, arms, stragglers, prices, probabilities):
    """``simulate_events``: each group straggles with its arm's probability, on random numbers of its own."""
    steps, moments = arms.size, table.shape[0]
    key, one = np.uint64(seed), np.uint64(1)
    counter = np.uint64(0)
    for t in range(steps):
        arm = int(state[at.S_ARM])
        p = table[t * moments // steps, arm]
        threshold = p * 4294967296.0
        events = 0
        for group in range(num_groups):
            if group % 4 == 0:
                w0, w1, w2, w3 = _philox(counter & _MASK, counter >> _SHIFT, key, one, _W0, _W1)
                counter += one
            events += float(w0) < threshold
            w0, w1, w2 = w1, w2, w3
        arms[t], stragglers[t], probabilities[t], prices[t] = arm, events, p, state[at.S_LAMBDA]
        _learn(state, params, events, num_groups)
        _choose(state, params)


class JitCore:
    """State and step of one controller in two float64 vectors; the compiled counterpart of ``_twin.TwinCore``."""

    backend = "numba"

    def __init__(self, config: SAGCConfig, seed: int) -> None:
        arms = len(config.candidates)
        self._arms = arms
        self._params = pack_params(config)
        self.set_seed(seed)
        self._state = pack_state(config)
        self._scratch = np.empty(256)

    def set_seed(self, seed: int) -> None:
        self._params[at.P_KEY_LOW], self._params[at.P_KEY_HIGH] = seed & 0xFFFFFFFF, seed >> 32

    def export_state(self) -> dict:
        values = self._state.tolist()
        state: dict = {
            name: int(value) if name in at.INTEGERS else value for name, value in zip(at.SCALARS, values, strict=False)
        }
        for place, name in enumerate(at.ARRAYS):
            start = at.S_ARRAYS + place * self._arms
            state[name] = values[start : start + self._arms]
        return state

    def import_state(self, state: dict) -> None:
        self._state[: at.S_ARRAYS] = [state[name] for name in at.SCALARS]
        for place, name in enumerate(at.ARRAYS):
            start = at.S_ARRAYS + place * self._arms
            self._state[start : start + self._arms] = state[name]

    def observe(self, lengths: np.ndarray, group_size: int, offsets: np.ndarray) -> int:
        """As ``TwinCore.observe``; ``lengths`` is a contiguous float64 vector."""
        if lengths.size > self._scratch.size:
            self._scratch = np.empty(2 * lengths.size)
        return step(self._state, self._params, lengths, group_size, offsets, self._scratch, 0, -1)

    def observe_counts(self, num_stragglers: int, num_groups: int) -> int:
        """As ``TwinCore.observe_counts``."""
        return step(self._state, self._params, _NO_LENGTHS, 0, NO_OFFSETS, self._scratch, num_stragglers, num_groups)


_NO_LENGTHS = np.empty(0)
NO_OFFSETS = np.zeros(1, np.int64)


def pack_params(config: SAGCConfig) -> np.ndarray:
    """The parameter vector of ``step``, with key 0."""
    params = np.empty(at.P_UTILITY + len(config.candidates))
    params[: at.P_UTILITY] = (
        len(config.candidates),
        config.tau,
        config.delta,
        config.dual_step,
        config.gamma,
        config.prior_alpha,
        config.prior_beta,
        config.lambda_max,
        config.radius,
        config.dwell,
        at.SIGNALS.index(config.signal),
        at.RATIOS.index(config.ratio),
        config.fallback,
        config.max_length or math.inf,
        0.0,
        0.0,
    )
    params[at.P_UTILITY :] = config.utilities
    return params


def pack_state(config: SAGCConfig) -> np.ndarray:
    """The state vector before the first observation."""
    arms = len(config.candidates)
    state = np.zeros(at.S_ARRAYS + len(at.ARRAYS) * arms)
    state[at.S_ARM] = config.start_arm
    state[at.S_LAMBDA] = config.lambda_0
    state[at.S_ARRAYS : at.S_ARRAYS + arms] = config.prior_alpha
    state[at.S_ARRAYS + arms : at.S_ARRAYS + 2 * arms] = config.prior_beta
    return state
