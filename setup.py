"""Package metadata; builds the optional CPU operators from csrc when a C++ compiler is there."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "gpu": ["triton>=3.6"],
    "flash": ["flash-attn>=2.7"],
    "tasks": ["reasoning-gym>=0.1.25", "math-verify>=0.9", "pyarrow", "datasets"],
    "gguf": ["gguf"],
    "plot": ["matplotlib"],
    "tensorboard": ["tensorboard"],
    "dev": ["build", "hypothesis", "pytest", "pytest-benchmark", "pytest-xdist", "ruff", "setuptools>=77", "wheel"],
}
# What runs on any machine; [gpu] and [flash] need a CUDA one.
EXTRAS["all"] = sorted({name for extra in ("tasks", "gguf", "plot", "tensorboard") for name in EXTRAS[extra]})

setup(
    name="sagc_fast",
    version="0.1.0",
    description="Straggler-aware group sizing for synchronous GRPO/DAPO, with its own rollout engine and trainer",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords=["reinforcement learning", "GRPO", "DAPO", "RLVR", "rollout", "language models"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["sagc_fast", "sagc_fast.*"]), "sagc_fast.kernels"],
    package_dir={"sagc_fast.kernels": "kernels"},
    package_data={
        "sagc_fast.tasks": ["data/**/*"],
        "sagc_fast.report": ["assets/*"],
    },
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "safetensors",
        "transformers>=5.17",
        "numba>=0.61",
        "pyyaml",
        "rich",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["sagc-fast=sagc_fast.cli:main"]},
)
