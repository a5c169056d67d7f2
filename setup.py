"""Package metadata; builds the optional operators from csrc: the CPU's when a C++ compiler is there, CUDA's when nvcc
and a CUDA build of torch are there, too (SAGC_BUILD_CUDA=1 and 0 decide otherwise)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

EXTRAS = {
    "gpu": ["triton>=3.6"],
    "flash": ["flash-attn>=2.7"],
    "tasks": ["reasoning-gym>=0.1.25", "math-verify>=0.9", "pyarrow", "datasets"],
    "gguf": ["gguf"],
    "plot": ["matplotlib"],
    "tensorboard": ["tensorboard"],
    "dev": [
        *("build", "hypothesis", "peft", "pytest", "pytest-benchmark", "pytest-xdist"),
        *("ruff", "setuptools>=77", "triton>=3.6; platform_system == 'Linux'", "wheel"),
    ],
}
# What runs on any machine; [gpu] and [flash] need a CUDA one.
EXTRAS["all"] = sorted({name for extra in ("tasks", "gguf", "plot", "tensorboard") for name in EXTRAS[extra]})

CPU_SOURCES = (
    *("library", "threads", "op_linear", "op_attention", "attention_plan", "op_rowwise"),
    *("decoder", "decoder_steps", "op_decoder"),
    *("op_varlen", "op_training"),
    *("dispatch", "level_scalar", "level_avx2", "level_avx512", "level_avx512_bf16"),
    *("level_amx", "level_amx_emulated"),
)
CUDA_SOURCES = ("sample_keyed", "step_rows")


def torch_folder() -> Path | None:
    """torch's folder, found without importing torch; also from pip's isolated build environment, where ``purelib``
    still names the environment that the package is installed into. None when there are no headers to build against."""
    spec = importlib.util.find_spec("torch")
    found = [Path(spec.origin).parent] if spec and spec.origin else []
    for folder in [*found, *(Path(sysconfig.get_path(key)) / "torch" for key in ("purelib", "platlib"))]:
        if (folder / "include/torch/csrc/stable/library.h").exists():
            return folder
    return None


def controller_extension() -> list[Extension]:
    """The reader of lists for the controller; it needs neither torch nor C++, and without it NumPy reads them."""
    if os.environ.get("SAGC_BUILD_NATIVE", "1") == "0":
        return []
    return [Extension("sagc_fast.controller._fill", ["csrc/controller/fill.c"], py_limited_api=True, optional=True)]


def cpu_extension() -> list[Extension]:
    """The CPU operators, optional throughout: whatever is missing, the package installs and runs on plain torch."""
    folder = torch_folder()
    missing = [
        sentence
        for sentence, is_there in (
            ("SAGC_BUILD_NATIVE=0 is set", os.environ.get("SAGC_BUILD_NATIVE", "1") != "0"),
            ("torch and its headers are not installed yet", folder is not None),
            ("there is no C++ compiler", shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")),
        )
        if not is_there
    ]
    if missing:
        print(f"sagc_fast: installing without the native CPU operators, because {missing[0]}.")
        return []
    return [
        Extension(
            "sagc_fast._C",
            [f"csrc/cpu/{name}.cpp" for name in CPU_SOURCES],
            depends=[str(path) for path in sorted(Path("csrc/cpu").glob("*.[hi]*"))],
            include_dirs=[f"{folder}/include"],
            library_dirs=[f"{folder}/lib"],
            libraries=["torch_cpu", "c10"],
            extra_link_args=["-pthread"],
            language="c++",
            # One library for torch 2.11 and later. No instruction set is named here: csrc chooses at run time. Products
            # and sums are fused only where the source says so, or the bits of a row would depend on the tile it is in.
            define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
            extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", "-g0"],
            optional=True,
        )
    ]


def cuda_toolkit() -> tuple[Path, Path] | None:
    """nvcc and the folder of the static CUDA runtime, from CUDA_HOME, /usr/local/cuda or the path."""
    on_path = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    roots += [str(Path(on_path).resolve().parents[1])] if on_path else []
    # nvcc on the path may be a script that calls the one of the toolkit.
    roots += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True) if on_path else []
    for root in filter(None, roots):
        for library in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if Path(root, "bin/nvcc").exists() and Path(root, library, "libcudart_static.a").exists():
                return Path(root, "bin/nvcc"), Path(root, library)
    return None


class CudaExtension(Extension):
    """An extension with sources for nvcc besides; they include no header of torch and link the CUDA runtime statically,
    so neither torch's version nor the one of its CUDA matters."""

    def __init__(self, *args: Any, nvcc: Path, cuda_sources: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nvcc, self.cuda_sources = nvcc, cuda_sources


def cuda_extension() -> list[Extension]:
    """The CUDA operators. SAGC_BUILD_CUDA=1 builds them beside a CPU torch too (they load there, and cannot run),
    0 never; SAGC_CUDA_ARCH="80;90" names what to compile for. A failing nvcc costs the operators, not the install.
    nvcc says what registers and shared memory each kernel takes, and whether it spills; tests/cuda reads that."""
    asked = os.environ.get("SAGC_BUILD_CUDA", "0" if os.environ.get("SAGC_BUILD_NATIVE") == "0" else "auto")
    folder, toolkit = torch_folder(), cuda_toolkit()
    if asked not in ("auto", "0", "1"):
        raise SystemExit(f"SAGC_BUILD_CUDA={asked!r} is none of auto, 0 and 1; leave it unset for auto.")
    has_cuda_torch = folder is not None and (folder / "lib/libtorch_cuda.so").exists()
    if asked == "0" or (asked == "auto" and not has_cuda_torch):
        return []
    missing = "torch and its headers are not installed yet" if folder is None else "there is no CUDA toolkit with nvcc"
    if folder is None or toolkit is None:
        print(f"sagc_fast: installing without the CUDA operators, because {missing}.")
        return []
    nvcc, libraries = toolkit
    return [
        CudaExtension(
            "sagc_fast._cuda",
            ["csrc/cuda/library.cpp"],
            nvcc=nvcc,
            cuda_sources=[f"csrc/cuda/{name}.cu" for name in CUDA_SOURCES],
            depends=[str(path) for path in sorted(Path("csrc/cuda").iterdir())],
            include_dirs=[f"{folder}/include"],
            library_dirs=[f"{folder}/lib", str(libraries)],
            libraries=["torch_cpu", "c10", "cudart_static", "dl", "rt", "pthread"],
            language="c++",
            define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
            extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", "-g0"],
            optional=True,
        )
    ]


class BuildStable(build_ext):
    """Builds libraries that serve every interpreter, under one file name: the controller's reader goes by Python's
    limited API, the operators by torch's stable ABI alone (no PyInit)."""

    def build_extension(self, ext: Extension) -> None:
        if isinstance(ext, CudaExtension):
            Path(self.build_temp).mkdir(parents=True, exist_ok=True)
            ext.extra_objects = [self._compile_cuda(ext, source) for source in ext.cuda_sources]
        super().build_extension(ext)

    def _compile_cuda(self, ext: CudaExtension, source: str) -> str:
        target = str(Path(self.build_temp) / Path(source).with_suffix(".cu.o").name)
        if not self.force and Path(target).exists():
            newest_input = max(Path(path).stat().st_mtime for path in (source, *ext.depends))
            if Path(target).stat().st_mtime > newest_input:
                return target
        architectures = os.environ.get("SAGC_CUDA_ARCH", "80;90").split(";")
        newest = f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}"
        generate = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
        flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"]
        command = [str(ext.nvcc), *flags, *generate, newest, "-c", source, "-o", target]
        print(" ".join(command), flush=True)
        if subprocess.call(command) != 0:
            raise CompileError(f"nvcc could not compile {source}; its words are above")
        return target

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols


class StableWheel(bdist_wheel):
    """A wheel that holds the library depends on the platform, not on the interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    name="sagc_fast",
    version="0.1.0",
    description="Straggler-aware group sizing for synchronous GRPO/DAPO, with its own rollout engine and trainer",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
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
    ext_modules=[*controller_extension(), *cpu_extension(), *cuda_extension()],
    cmdclass={"build_ext": BuildStable, "bdist_wheel": StableWheel},
    entry_points={"console_scripts": ["sagc-fast=sagc_fast.cli:main"]},
)
