"""Package metadata; builds the optional CPU operators from csrc when a C++ compiler is there."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    name="sagc_fast",
    version="0.1.0",
    description="Straggler-aware group sizing for synchronous GRPO/DAPO, with its own rollout engine and trainer",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["sagc_fast", "sagc_fast.*"]), "sagc_fast.kernels"],
    package_dir={"sagc_fast.kernels": "kernels"},
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "safetensors",
        "transformers>=5.17",
        "numba>=0.61",
        "pyyaml",
        "rich",
    ],
    entry_points={"console_scripts": ["sagc-fast=sagc_fast.cli:main"]},
)
