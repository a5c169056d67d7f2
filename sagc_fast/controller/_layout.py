"""Places of the controller's numbers in the flat float64 vectors that the compiled core works on, and its constants.

One vector for parameters, one for state: a compiled call then unboxes two arrays instead of thirty scalars, which is
most of what a call of a few microseconds costs. Integers up to 2**53 are exact in float64.
"""

from __future__ import annotations

SIGNALS = ("group", "any", "batch")
RATIOS = ("group", "reference")

# Parameters, fixed for the life of a controller.
P_ARMS = 0  # number of candidates M
P_TAU = 1
P_DELTA = 2
P_ETA = 3  # the dual step, dwell taken into account
P_GAMMA = 4
P_PRIOR_ALPHA = 5
P_PRIOR_BETA = 6
P_LAMBDA_MAX = 7
P_RADIUS = 8
P_DWELL = 9
P_SIGNAL = 10  # index into SIGNALS
P_RATIO = 11  # index into RATIOS
P_FALLBACK = 12  # 1: hold the smallest arm while delta is out of reach; 0: the paper's plain rule
P_MAX_LENGTH = 13  # length cap in tokens; infinity when unknown
P_KEY_LOW = 14  # seed, low and high 32 bits
P_KEY_HIGH = 15
P_UTILITY = 16  # u(G) of each arm, M places

# State: the scalars in the order of SCALARS, then the ARRAYS, M places each.
S_STEP = 0
S_ARM = 1
S_HELD = 2
S_LAMBDA = 3
S_IS_FALLBACK = 4
S_NUM_GROUPS = 5
S_NUM_STRAGGLERS = 6
S_RATE = 7
S_RATE_EMA = 8
S_RATIO_MEAN = 9
S_RATIO_MAX = 10
S_CLIPPED = 11
S_MEAN_LENGTH = 12
S_REFERENCE = 13
S_ARRAYS = 14

SCALARS = {
    "step": "observations so far; the counter of the random numbers",
    "arm": "index of the chosen candidate",
    "held": "observations since the choice last changed",
    "lambda": "price of a straggler in units of log2 G",
    "is_fallback": "1 while the smallest arm is held because delta is out of reach",
    "num_groups": "groups in the last observation",
    "num_straggler_groups": "groups of the last observation beyond tau",
    "straggler_rate": "the dual's signal in the last observation",
    "straggler_rate_ema": "the same, smoothed over about ten observations",
    "straggler_ratio_mean": "max / median, mean over the groups of the last observation",
    "straggler_ratio_max": "max / median, largest in the last observation",
    "clipped_ratio": "share of the last observation's completions cut at the length cap",
    "mean_length": "mean completion length in tokens, smoothed over about ten observations",
    "reference_median": "median over all completions in tokens, smoothed likewise; 0 unless ratio is reference",
}
INTEGERS = frozenset({"step", "arm", "held", "is_fallback", "num_groups", "num_straggler_groups"})
ARRAYS = ("alpha", "beta", "pulls", "draws")

EMA_DECAY = 0.9
"""Smoothing of reported rate, mean length and reference median: about the last ten steps (ours)."""

FULL_STEP_TRIALS = 4.0
"""Groups from which the dual takes its whole step; fewer give a proportionally smaller one, because the noise of one
group's bit, pushed against the bound at lambda = 0, would push the rate below delta (ours)."""

SURE_Z = 1.645
"""95% of a normal, one-sided: how sure the smallest arm's posterior must be that it misses delta (ours)."""

SURE_EVIDENCE = 8.0
"""Groups that posterior must rest on before it is believed: the prior alone never triggers the fallback (ours)."""

RELEASE = 0.9
"""A fallback entered at lambda_max ends when lambda has come down to this share of it (ours)."""
