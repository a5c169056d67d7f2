"""Records for people: tables that become lists where the terminal is too narrow for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from sagc_fast.bench.compare import Change

PIPE_COLUMNS = 120
"""Width where the output is no terminal."""
UNBOUNDED_COLUMNS = 10_000
"""Width in which a table is laid out to see how wide it would like to be."""


def console() -> Console:
    from rich.console import Console

    made = Console(highlight=False, soft_wrap=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def show_record(screen: Console, record: dict[str, Any]) -> None:
    """Everything of one record that a person wants to see."""
    screen.print(f"[bold]bench {record['bench']}[/bold]  {_settings(record['settings'])}")
    screen.print(machine_line(record))
    if record["ceilings"]:
        screen.print(ceilings_line(record["ceilings"], record["machine"]["threads"]))
    screen.print()
    shown = {"rollout": _show_rollout, "kernels": _show_kernels, "step": _show_step}
    shown.get(record["bench"], _show_results)(screen, record)
    for absent in record["absent"]:
        screen.print(f"absent: {absent['name']} ({absent['reason']})\n  {absent['install']}", markup=False)
    for note in record["notes"]:
        screen.print(f"note: {note}", markup=False)


def machine_line(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["machine"]["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("torch", "sagc_fast"))
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    return (
        f"{machine['cpu']} ({', '.join(machine['features']) or 'no vector extensions'}), {cores}, "
        f"{machine['threads']} used, load {machine['load']:g}, {machine['memory_gb']:g} GB, "
        f"Python {machine['python']}, {packages}, commit {record['commit'] or 'unknown'}, "
        f"{record['time'][:16].replace('T', ' ')} UTC"
    )


def ceilings_line(ceilings: dict[str, Any], threads: int) -> str:
    """Per CPU second on one thread, else on the wall clock, as the results are judged."""
    clock = "per_cpu_second" if threads == 1 else "per_wall_second"
    rates = [f"memory read {ceilings['read_bytes'][clock] / 1e9:.1f} GB/s"]
    rates += [f"{dtype} products {rate[clock] / 1e9:.0f} GFLOP/s" for dtype, rate in ceilings["gemm_flops"].items()]
    return f"ceilings ({'per CPU second' if threads == 1 else 'wall'}): {', '.join(rates)}"


def print_table(screen: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """First column left, others right; one block per row when the table is wider than the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    unbounded = screen.options.update(max_width=UNBOUNDED_COLUMNS)
    if screen.measure(table, options=unbounded).maximum <= screen.width:
        screen.print(table)
        return
    for row in rows:
        screen.print(Text(row[0], style="bold"))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                screen.print(Text(f"  {column}: {cell}"))


def number(value: float) -> str:
    """Three significant digits, thousands in full: 0.0123, 4.56, 123, 12,300."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(metric: dict[str, Any]) -> str:
    """Median with its quartiles, or the one value there is."""
    if len(metric["values"]) == 1:
        return number(metric["median"])
    return f"{number(metric['median'])} ({number(metric['q25'])} - {number(metric['q75'])})"


def show_changes(screen: Console, changes: list[Change], names: tuple[str, str]) -> None:
    """B against A, one line per metric."""
    columns = ("measured", "A", "B", "B / A", "95% interval", "p", "runs", "verdict")
    rows = [
        (
            f"{change.bench} {change.name} {change.metric} [{change.unit}]",
            number(change.before),
            number(change.after),
            f"{change.ratio:.3f}",
            f"{change.low:.3f} - {change.high:.3f}",
            f"{change.p_value:.3f}",
            f"{change.num_before}, {change.num_after}",
            change.verdict,
        )
        for change in changes
    ]
    screen.print(f"A: {names[0]}   B: {names[1]}", markup=False)
    print_table(screen, columns, rows)
    drift = max(change.drift for change in changes)
    if drift > 1.02:
        screen.print(f"The machine's own ceilings differ by up to {drift - 1:.0%}; smaller changes count as none.")
    if any(change.verdict == "too few runs" for change in changes):
        screen.print("Too few runs to tell: measure both sides with --runs 5 or more.")


def say(text: str) -> None:
    """Progress, on stderr, so that stdout carries results alone."""
    print(f"sagc-fast bench: {text}", file=sys.stderr, flush=True)


def _settings(settings: dict[str, Any]) -> str:
    parts = [f"{key} {value}" for key, value in settings.items() if not isinstance(value, dict)]
    return ", ".join(parts)


def _show_results(screen: Console, record: dict[str, Any]) -> None:
    """Any bench: a row per result, a column per metric; units stand in the heading, or by the figures if they vary."""
    names = list(dict.fromkeys(name for entry in record["results"] for name in entry["metrics"]))
    units: dict[str, set[str]] = {name: set() for name in names}
    for entry in record["results"]:
        for name, found in entry["metrics"].items():
            units[name].add(found["unit"])

    def cell(entry: dict[str, Any], name: str) -> str:
        found = entry["metrics"].get(name)
        return "" if found is None else spread(found) + (f" {found['unit']}" if len(units[name]) > 1 else "")

    headings = [
        name.replace("_", " ") + (f" [{next(iter(units[name]))}]" if len(units[name]) == 1 else "") for name in names
    ]
    rows = [[entry["name"], *(cell(entry, name) for name in names)] for entry in record["results"]]
    print_table(screen, ["", *headings], rows)
    for entry in record["results"]:
        if phases := entry["facts"].get("seconds"):
            parts = ", ".join(f"{name} {number(value)} s" for name, value in phases.items())
            screen.print(f"{entry['name']}: {parts} a run", markup=False)
    for entry in record["results"]:
        if ratio := entry["facts"].get("ours_is_faster_by"):
            screen.print(
                f"faster than {entry['name']} by {ratio['ratio']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})",
                markup=False,
            )


def _show_step(screen: Console, record: dict[str, Any]) -> None:
    """CPU seconds by phase; what the update reaches of the products' rate; ratios to peers."""
    about = record["workload"]
    screen.print(
        f"{about['num_prompts']} prompts x {about['group_size']} completions, {about['output_tokens']:,} output tokens "
        f"(longest {about['max_length']}), {about['unique_prompt_tokens']:,} unique prompt tokens; CPU seconds"
    )
    phases = [name for name in record["results"][0]["metrics"] if name.endswith("_cpu")]
    columns = ("", *(name.removesuffix("_cpu") for name in phases), "tokens/CPU-s", "tokens/s wall", "peak MB", "runs")
    rows = []
    for entry in record["results"]:
        metrics = entry["metrics"]
        peak = number(metrics["peak_rss"]["median"]) if "peak_rss" in metrics else ""
        rates = (spread(metrics[f"tokens_per_{clock}_second"]) for clock in ("cpu", "wall"))
        runs = str(entry["facts"]["runs"])
        rows.append((entry["name"], *(spread(metrics[name]) for name in phases), *rates, peak, runs))
    print_table(screen, columns, rows)
    for dtype, facts in record["update"].items():
        screen.print(
            f"{dtype} update: {sum(facts['gflop'].values()):,.0f} GFLOP at {facts['gflops']:.0f} GFLOP/s, "
            f"{facts['share_of_gemm_rate']:.0%} of what the model's dense products reach alone"
        )
    for pair, found in record["ratios"].items():
        parts = (f"{name} {r['ratio']:.1f} ({r['low']:.1f} - {r['high']:.1f})" for name, r in found.items())
        screen.print(f"{pair}: {', '.join(parts)}", markup=False)


def _show_kernels(screen: Console, record: dict[str, Any]) -> None:
    """Rates are the best batch's, as ceilings are; operands that lie in caches can exceed the memory's."""
    columns = ("operation", "us", "GFLOP/s", "of ceiling", "GB/s", "of ceiling", "faster than torch by")
    rows = []
    for entry in record["results"]:
        facts = entry["facts"]
        has_flops, faster = facts["gflops"] > 0, facts.get("faster_than_torch_by")
        rows.append(
            (
                entry["name"],
                spread(entry["metrics"]["time"]),
                number(facts["gflops"]) if has_flops else "",
                f"{facts['of_gemm_rate']:.0%}" if has_flops else "",
                number(facts["gbytes_per_second"]),
                f"{facts['of_read_rate']:.0%}",
                f"{faster[0]:.2f} ({faster[1]:.2f} - {faster[2]:.2f})" if faster else "",
            )
        )
    print_table(screen, columns, rows)


def _show_rollout(screen: Console, record: dict[str, Any]) -> None:
    about = record["workload"]
    screen.print(
        f"{about['num_prompts']} prompts x {about['group_size']} completions, {about['output_tokens']:,} output tokens "
        f"(longest {about['max_length']}), {about['unique_prompt_tokens']:,} unique prompt tokens; a lock-step batch "
        f"would idle {about['lock_step_idle']:.0%}"
    )
    is_cpu = record["machine"]["threads"] == 1
    columns = ("engine", "tokens/CPU-s", "tokens/s wall", "ours is faster by", "unused", "prefill", "peak MB", "runs")
    rows = [_rollout_row(entry) for entry in record["results"]]
    print_table(screen, columns, rows)
    bound, memory = record["bound"], record["memory"]
    screen.print(
        f"\nbound ({bound['clock']} seconds): weights {bound['weight_seconds']:.2f} + arithmetic "
        f"{bound['arithmetic_seconds']:.2f} = {bound['seconds']:.2f} s, {number(bound['output_tokens_per_second'])} "
        f"tokens/s; reached {bound['reached']:.0%}"
    )
    screen.print(
        f"memory: peak {memory['peak_rss_mb']:,.0f} MB, of it weights {memory['weights_mb']:,.0f} and keys and values "
        f"{memory['kv_mb']:,.0f}"
    )
    if record["curve"]:
        screen.print(f"\none decode step by live rows ({'CPU' if is_cpu else 'wall'} time)")
        columns = ("live rows", "ms per step", "us per row", "of the product rate")
        print_table(
            screen,
            columns,
            [
                (
                    str(point["rows"]),
                    number(point["step_milliseconds"]),
                    number(point["row_microseconds"]),
                    f"{point['share_of_gemm_rate']:.0%}",
                )
                for point in record["curve"]
            ],
        )
    screen.print()


def _rollout_row(entry: dict[str, Any]) -> tuple[str, ...]:
    metrics, facts = entry["metrics"], entry["facts"]
    versions = facts.get("versions", {})
    version = next((found for found in versions.values() if found), "")
    ratio = facts.get("ours_is_faster_by")
    return (
        f"{entry['name']} {version}".strip(),
        spread(metrics["output_tokens_per_cpu_second"]),
        spread(metrics["output_tokens_per_second"]),
        f"{ratio['ratio']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})" if ratio else "",
        f"{facts['unused_fraction']:.0%}" if "unused_fraction" in facts else "",
        f"{facts['prefill_tokens']:,}" if "prefill_tokens" in facts else "",
        number(metrics["peak_rss"]["median"]) if "peak_rss" in metrics else "",
        str(facts["runs"]),
    )
