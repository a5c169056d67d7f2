"""Measuring: workloads, peers, ceilings, statistics and records of ``sagc-fast bench`` (docs/performance.md)."""
