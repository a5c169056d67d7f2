"""Triton kernels, reachable as ``sagc_fast.kernels`` only; one kernel and its launcher per file."""
