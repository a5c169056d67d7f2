"""The figures of docs/reproduction.md and docs/controller.md, regenerated.

    python bench/controller_study.py headline       the paper's headline: rates, deltas, seconds       (about a minute)
    python bench/controller_study.py dynamics       rate held, recovery, regret; plain rule against ours
    python bench/controller_study.py variants       each variant against the paper's rule
    python bench/controller_study.py all --out docs/img

Every table is printed as Markdown; pictures go to --out. All numbers come from fixed seeds.
"""

from __future__ import annotations

import argparse
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sagc_fast.controller import SAGC, ControllerWarning, FixedG, SAGCConfig
from sagc_fast.controller.compare import PAPER_ETA
from sagc_fast.controller.cost_aware import CostAwareConfig, CostAwareSAGC
from sagc_fast.controller.costs import CostModel
from sagc_fast.controller.explorers import best_mixture
from sagc_fast.controller.fast import simulate_events
from sagc_fast.controller.plot import require_matplotlib
from sagc_fast.controller.processes import Difficulty, LengthProcess, Mixture, Pareto, Shock
from sagc_fast.controller.prompt_aware import PromptAwareSAGC
from sagc_fast.controller.simulate import Scenario, run_policy, straggler_probabilities, summarise

SIZES = (4, 8, 16)
HEADLINE_RATE = 0.996  # paper: Llama-3.2-3B, DAPO, G=16
HEADLINE_SAGC_RATE = 0.434  # paper: the same under SAGC
HEADLINE_FACTOR = 16.0 / 29.5  # paper: hours with SAGC over hours with G=16


def table(title: str, head: list[str], rows: list[list[Any]]) -> None:
    print(f"\n### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |")


def fit(make: Any, low: float, high: float, rises: bool, target: float = HEADLINE_RATE) -> LengthProcess:
    """The process of a one-parameter family whose G=16 rate is ``target``, by bisection on a Monte-Carlo rate."""
    for _ in range(18):
        middle = 0.5 * (low + high)
        rate = straggler_probabilities(make(middle), (16,), make.tau, groups=20_000)[0, 0]
        low, high = (middle, high) if (rate < target) == rises else (low, middle)
    return make(0.5 * (low + high))


class Family:
    """Lengths of one parameter, uncapped, judged at ``tau``."""

    def __init__(self, name: str, tau: float, low: float, high: float, rises: bool, make: Any) -> None:
        self.name, self.tau, self._range, self._make = name, tau, (low, high, rises), make

    def __call__(self, value: float) -> LengthProcess:
        return self._make(value)

    def fitted(self) -> LengthProcess:
        return fit(self, *self._range)


def families() -> list[Family]:
    def lognormal(sigma: float) -> LengthProcess:
        return LengthProcess(median=1000, sigma=sigma, cap=math.inf)

    return [
        Family("lognormal", 1.5, 0.1, 3.0, True, lognormal),
        Family("lognormal", 2.0, 0.1, 3.0, True, lognormal),
        Family("lognormal", 3.0, 0.1, 4.0, True, lognormal),
        Family("lognormal, cut at 6 medians", 2.0, 0.1, 1.25, True, lambda s: LengthProcess(1000, s, cap=6000)),
        Family("Pareto", 2.0, 0.3, 9.0, False, lambda a: Pareto(median=1000, alpha=a, cap=math.inf)),
        Family(
            "20% six times as long",
            2.0,
            0.01,
            2.0,
            True,
            lambda s: Mixture(median=1000, sigma=s, long=6000, share=0.2, cap=math.inf),
        ),
        Family(
            "30% twenty times as long",
            2.0,
            0.01,
            2.0,
            True,
            lambda s: Mixture(median=1000, sigma=s, long=20_000, share=0.3, cap=math.inf),
        ),
        Family(
            "every prompt its own spread",
            2.0,
            0.2,
            4.0,
            True,
            lambda s: Difficulty(median=1000, sigma=s, spread_sigma=0.3, cap=math.inf),
        ),
    ]


def headline(out: Path) -> None:
    """Which rates go with 99.6% at G=16, what SAGC makes of it, and what the time does."""
    rows = []
    for family in families():
        process = family.fitted()
        rates = straggler_probabilities(process, (2, *SIZES), family.tau, groups=50_000)[0]
        rows.append([family.name, family.tau, *(f"{rate:.1%}" for rate in rates)])
    narrow = LengthProcess(1000.0, 0.724, math.inf)
    rates = straggler_probabilities(narrow, (2, *SIZES), 2.0, groups=50_000)[0]
    rows.append(["for comparison: lognormal, sigma 0.72", 2.0, *(f"{rate:.1%}" for rate in rates)])
    table("Independent completions with a G=16 rate of 99.6%", ["lengths", "tau", "G=2", "G=4", "G=8", "G=16"], rows)

    process = families()[1].fitted()
    _headline_deltas(process)
    _headline_any()
    _headline_seconds(process, out)


def _headline_deltas(process: LengthProcess) -> None:
    rows = []
    for candidates in (SIZES, (2, *SIZES)):
        rates = straggler_probabilities(process, candidates, 2.0, groups=50_000)
        for delta in (0.3, HEADLINE_SAGC_RATE, 0.6, 0.7, 0.8, 0.9):
            run = simulate_events(quiet(SAGCConfig, candidates=candidates, delta=delta), rates, 20_000, 32, seed=1)
            shares = np.bincount(run.arms, minlength=len(candidates)) / len(run.arms)
            played = ", ".join(f"G={g} {share:.0%}" for g, share in zip(candidates, shares, strict=True))
            rows.append([candidates, delta, f"{run.num_stragglers.mean() / 32:.1%}", played])
    title = f"SAGC on lognormal lengths, sigma={process.sigma:.2f}, tau=2, 32 prompts, 20,000 steps"
    table(title, ["candidates", "delta", "straggler rate", "played"], rows)


def _headline_any() -> None:
    rows = []
    for num_prompts in (16, 64, 128, 512):
        target = 1.0 - (1.0 - HEADLINE_RATE) ** (1.0 / num_prompts)
        low, high = 0.05, 1.5
        for _ in range(12):
            middle = 0.5 * (low + high)
            rate = straggler_probabilities(LengthProcess(1e6, middle, math.inf), (16,), 2.0, groups=100_000)[0, 0]
            low, high = (middle, high) if rate < target else (low, middle)
        process = LengthProcess(1e6, 0.5 * (low + high), math.inf)
        rates = straggler_probabilities(process, SIZES, 2.0, groups=300_000)[0]
        steps = 1.0 - (1.0 - rates) ** num_prompts
        rows.append(
            [num_prompts, f"{process.sigma:.3f}", *(f"{rate:.2%}" for rate in rates), *(f"{r:.1%}" for r in steps)]
        )
    head = ["prompts", "sigma", *(f"group, G={g}" for g in SIZES), *(f"any, G={g}" for g in SIZES)]
    table("The other reading: 99.6% of the steps have a straggling group", head, rows)


def _headline_seconds(process: LengthProcess, out: Path) -> None:
    """Seconds per step relative to G=16 as the price of an iteration goes from nothing to everything."""
    process = replace(process, median=400.0, cap=8192.0)
    policies = {f"fixed G={size}": lambda size=size: FixedG(size) for size in (2, *SIZES)}
    policies["SAGC {2,4,8,16}, delta .434"] = lambda: quiet(
        SAGC, quiet(SAGCConfig, candidates=(2, *SIZES), delta=HEADLINE_SAGC_RATE), 0
    )
    policies["SAGC {4,8,16}, delta .434"] = lambda: SAGC(SAGCConfig(delta=HEADLINE_SAGC_RATE), 0)
    policies["SAGC {4,8,16}, delta .8"] = lambda: SAGC(SAGCConfig(delta=0.8), 0)
    longest, tokens, rates, informative = {}, {}, {}, {}
    costs = CostModel(1.0, 0.0, 10**6, 0.0, 0.0)  # counts iterations
    for name, make in policies.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ControllerWarning)
            record = run_policy(name, make(), Scenario(process, steps=600, num_prompts=32, costs=costs, seed=1))
        longest[name], tokens[name] = record.continuous_seconds[60:].mean(), record.num_tokens[60:].mean()
        rates[name], informative[name] = record.straggler_rate[60:].mean(), record.informative_groups[60:].mean()
    base = "fixed G=16"
    shares = np.linspace(0.0, 1.0, 101)  # share of a G=16 step that goes with the longest completion, not with tokens
    curves = {
        name: shares * longest[name] / longest[base] + (1.0 - shares) * tokens[name] / tokens[base] for name in policies
    }
    rows = []
    for name in policies:
        curve = curves[name]
        hit = float(np.interp(HEADLINE_FACTOR, curve, shares)) if curve[0] <= HEADLINE_FACTOR <= curve[-1] else math.nan
        rows.append(
            [
                name,
                f"{rates[name]:.1%}",
                f"{tokens[name] / tokens[base]:.2f}",
                f"{longest[name] / longest[base]:.2f}",
                *(f"{np.interp(share, shares, curve):.2f}" for share in (0.2, 0.4, 0.6, 0.8)),
                "never" if math.isnan(hit) else f"{hit:.0%}",
                f"{informative[name] / informative[base]:.2f}",
            ]
        )
    head = ["policy", "rate", "tokens", "longest", "s=.2", "s=.4", "s=.6", "s=.8", "factor .542 at s", "informative"]
    table("Step time relative to fixed G=16, equal prompts; s: share of its step that follows the longest", head, rows)
    _plot_seconds(shares, curves, out / "controller_headline.png")


def _plot_seconds(shares: np.ndarray, curves: dict[str, np.ndarray], path: Path) -> None:
    plt = require_matplotlib()
    figure, axis = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for name, curve in curves.items():
        is_fixed = name.startswith("fixed")
        colour = "0.45" if is_fixed else None
        label = "fixed G" if name == "fixed G=2" else ("_" if is_fixed else name)
        axis.plot(shares, curve, color=colour, lw=1.2 if is_fixed else 2.2, ls="--" if is_fixed else "-", label=label)
        if is_fixed:
            place = {"ha": "right", "va": "bottom", "textcoords": "offset points", "color": "0.3"}
            axis.annotate(name[6:], (1.0, curve[-1]), xytext=(-30, -1), **place)
    axis.axhline(HEADLINE_FACTOR, color="black", lw=0.9, ls=":")
    axis.annotate(
        "reported: 16.0 h / 29.5 h", (0.99, HEADLINE_FACTOR), xytext=(0, -12), textcoords="offset points", ha="right"
    )
    axis.set(
        xlabel="share of a G=16 step that follows the longest completion (the rest follows tokens)",
        ylabel="step time relative to fixed G=16",
        title="Equal prompts per step: what group size alone does to the step time",
        xlim=(0, 1),
        ylim=(0, 1.08),
    )
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def quiet(make: Any, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ControllerWarning)
        return make(*args, **options)


def dynamics(out: Path) -> None:
    """The plain rule at several dual steps and ours: rate held, recovery, smallest arm held, regret."""
    variants = {
        "plain rule, eta 0.1": {"eta": PAPER_ETA, "fallback": False},
        "eta 0.1": {"eta": 0.1},
        "eta 0.5": {"eta": 0.5},
        "eta 1": {"eta": 1.0},
        "eta 2 (default)": {},
        "eta 4": {"eta": 4.0},
        "eta 2, no fallback": {"fallback": False},
        "eta 2, dwell 5": {"dwell": 5},
        "eta 2, radius 3": {"radius": 3},
    }
    truth = {
        (sigma, candidates): straggler_probabilities(LengthProcess(1000.0, sigma, math.inf), candidates, 2.0)[0]
        for sigma in (0.3, 0.4, 0.5, 0.7, 1.0)
        for candidates in (SIZES, (2, *SIZES))
    }
    rows = [[name, *_dynamics_of(options, truth)] for name, options in variants.items()]
    head = [
        "controller",
        "error of the rate, 1,000 steps",
        "20,000 steps",
        "error 100-200 steps after a change",
        "Gmin share, delta infeasible",
        "log2 G below the oracle's",
    ]
    table("Worst cases over delta .1 ... .5 and sigma .3 ... 1 (16 groups per step)", head, rows)
    _plot_dynamics(truth, out / "controller_dynamics.png")


def _dynamics_of(options: dict[str, Any], truth: dict[tuple, np.ndarray]) -> list[str]:
    short, long, recovery, held, deficit = [], [], [], [], []
    for (sigma, candidates), rates in truth.items():
        utilities = np.log2(candidates)
        for delta in (0.1, 0.2, 0.3, 0.4, 0.5):
            config = quiet(SAGCConfig, candidates=candidates, delta=delta, **options)
            if delta < rates[0] - 0.02:
                held.append((simulate_events(config, rates, 3000, 16, 1).arms == 0).mean())
            if not rates[0] < delta < rates[-1]:
                continue
            run = simulate_events(config, rates, 20_000, 16, 1)
            short.append(abs(run.probabilities[:1000].mean() - delta))
            long.append(abs(run.probabilities.mean() - delta))
            best = best_mixture(utilities.tolist(), rates.tolist(), float(run.probabilities[1000:].mean()))
            deficit.append(best["utility"] - utilities[run.arms[1000:]].mean())
            for (other_sigma, other_candidates), before in truth.items():
                if other_candidates == candidates and other_sigma != sigma:
                    runs = [simulate_events(config, np.vstack([before, rates]), 2000, 16, s) for s in range(4)]
                    recovery.append(abs(np.mean([r.probabilities[1100:1200].mean() for r in runs]) - delta))
    return [
        f"{max(short):.3f}",
        f"{max(long):.3f}",
        f"{max(recovery):.3f} (median {np.median(recovery):.3f})",
        f"{min(held):.1%}",
        f"{np.mean(deficit):.3f}",
    ]


def _plot_dynamics(truth: dict[tuple, np.ndarray], path: Path) -> None:
    plt = require_matplotlib()
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), constrained_layout=True)
    rates = np.vstack([truth[0.4, SIZES], truth[0.7, SIZES], truth[0.5, SIZES]])
    delta = 0.42
    for label, colour, options in (
        ("default", "#1b6ca8", {}),
        ("plain, eta 0.1", "#e07b00", {"eta": 0.1, "fallback": False}),
    ):
        runs = [simulate_events(SAGCConfig(delta=delta, **options), rates, 900, 16, seed) for seed in range(40)]
        mean_rate = np.mean([run.probabilities for run in runs], axis=0)
        axes[0].plot(mean_rate, color=colour, lw=1.3, label=label)
        axes[1].plot(np.mean([run.prices for run in runs], axis=0), color=colour, lw=1.3, label=label)
        config = SAGCConfig(delta=0.4, **options)
        best = best_mixture(list(config.utilities), truth[0.5, SIZES].tolist(), 0.4)
        lengths = np.unique(np.geomspace(20, 20_000, 25).astype(int))
        long_runs = [simulate_events(config, truth[0.5, SIZES], 20_000, 16, seed) for seed in range(20)]
        regrets = []
        for steps in lengths:
            utility = np.mean([np.array(config.utilities)[run.arms[:steps]].mean() for run in long_runs])
            violation = np.mean([run.probabilities[:steps].mean() for run in long_runs]) - 0.4
            regrets.append(best["utility"] - utility + 4.0 * max(0.0, violation))
        axes[2].plot(lengths, regrets, "o-", ms=3, color=colour, lw=1.3, label=label)
    for axis in axes[:2]:
        for step in (300, 600):
            axis.axvline(step, color="0.6", lw=0.8)
        axis.set_xlabel("optimizer step")
    axes[0].axhline(delta, color="black", lw=0.8, ls="--")
    axes[0].set(
        ylabel="straggler probability of the arm played", ylim=(0, 1), title="σ: 0.4, then 0.7, then 0.5 (δ = 0.42)"
    )
    axes[1].set(ylabel="λ", title="Price (mean of 40 runs)")
    axes[2].set(xscale="log", xlabel="steps T", ylabel="log2 G", title="Average regret (σ = 0.5, δ = 0.4)")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def variants(_: Path) -> None:
    """Each variant against the paper's rule and the fixed sizes, where it should help and where it should not."""
    cases = {
        "one spread for all prompts (sigma .5)": (LengthProcess(sigma=0.5), 0.4),
        "own spread per prompt, 64 prompts": (Difficulty(sigma=0.5, num_problems=64), 0.4),
        "own spread per prompt, 512 prompts": (Difficulty(sigma=0.5, num_problems=512), 0.4),
        "10% long answers": (Mixture(sigma=0.3), 0.4),
        "spread jumps .4 to .8": (Shock(sigma=0.4, to_sigma=0.8), 0.45),
    }
    for title, (process, delta) in cases.items():
        config = SAGCConfig(delta=delta)
        scenario = Scenario(process, steps=600, num_prompts=16, seed=3)
        policies = {
            **{f"fixed-{size}": FixedG(size) for size in (2, *SIZES)},
            "sagc": SAGC(config),
            "sagc-fair": SAGC(replace(config, ratio="reference")),
            "prompt-aware": PromptAwareSAGC(config),
            "cost-aware, log2 G": CostAwareSAGC(CostAwareConfig()),
            "cost-aware, informative": CostAwareSAGC(CostAwareConfig(utility="informative")),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ControllerWarning)
            records = [run_policy(name, policy, scenario) for name, policy in policies.items()]
        wall = min(float(record.continuous_seconds.sum()) for record in records)
        rows = []
        for record in records:
            row = summarise(record, wall)
            rows.append(
                [
                    row["policy"],
                    f"{row['straggler_rate']:.3f}",
                    f"{row['mean_log2_group_size']:.2f}",
                    f"{row['step_seconds']:.1f}",
                    f"{row['informative_groups_per_step']:.2f}",
                    f"{row['equal_wall_clock']['informative_groups']:.0f}",
                ]
            )
        head = ["policy", "rate", "log2 G", "s per step", "informative per step", f"informative in {wall:,.0f} s"]
        table(f"{title}; delta {delta}", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("headline", "dynamics", "variants", "all"))
    parser.add_argument("--out", type=Path, default=Path("docs/img"), help="folder of the pictures (docs/img)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, study in (("headline", headline), ("dynamics", dynamics), ("variants", variants)):
        if args.study in (name, "all"):
            study(args.out)


if __name__ == "__main__":
    main()
