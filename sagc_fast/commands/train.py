"""``sagc-fast train``: train a policy from one YAML file."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from sagc_fast.errors import ConfigError

HELP = "train a policy by GRPO or DAPO with straggler-aware group sizes"
EPILOG = """examples:
  sagc-fast train --config configs/addition.yaml
  sagc-fast train --config configs/addition.yaml --run-dir runs/try2 steps=50 controller.kind=fixed
  sagc-fast train --config configs/addition.yaml 'controller.candidates=[2, 4, 8]' optimizer.learning_rate=1e-4
  sagc-fast train --resume --run-dir runs/addition            continue where the newest checkpoint stands
  sagc-fast train --resume --run-dir runs/addition steps=500  ... and train longer
  torchrun --nproc-per-node=2 -m sagc_fast train --config configs/addition.yaml      several processes, one policy
  sagc-fast train --fields                                    every option, its default and its meaning

SIGTERM or Ctrl-C saves a checkpoint after the current step and prints the command that resumes; a second one exits at
once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the run (default: runs/NAME from the file's name)")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--force", action="store_true", help="resume although the configuration has changed")
    parser.add_argument("--fields", action="store_true", help="print every option of the configuration, then exit")
    parser.add_argument("--json", action="store_true", help="print the run's summary as one JSON line at the end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options in place of the file's")


def run(args: argparse.Namespace) -> int:
    if args.fields:
        return print_fields()
    config = load_config(args)
    from sagc_fast.train.trainer import Trainer

    stream = sys.stderr if args.json else sys.stdout  # with --json, stdout holds that one line
    trainer = Trainer(config, resume=args.resume, force=args.force, stream=stream)
    summary = trainer.fit()
    if not trainer.processes.is_first:
        return 0
    if summary["is_interrupted"]:
        print(f"stopped after step {summary['steps']}; to continue: {summary['resume_command']}", file=stream)
    else:
        print(f"done; for a page about the run: sagc-fast report {shlex.quote(summary['run_dir'])}", file=stream)
    if args.json:
        print(json.dumps(summary))
    return 0


def load_config(args: argparse.Namespace):
    """The run's configuration: from --config, or with --resume alone from the run directory."""
    from sagc_fast.config import TrainConfig

    overrides = list(args.overrides)
    if args.run_dir is not None:
        other = [text for text in overrides if text.startswith("run_dir=")]
        if other:
            raise ConfigError(f"--run-dir {args.run_dir} and {other[-1]} both name the run's folder; give one of them.")
        overrides.append(f"run_dir={json.dumps(args.run_dir)}")
    if args.config is not None:
        return TrainConfig.from_yaml(args.config, overrides)
    if not args.resume or args.run_dir is None:
        raise ConfigError("No configuration is given; use --config FILE, or --resume with --run-dir DIR.")
    stored = Path(args.run_dir) / "config.yaml"
    if not stored.is_file():
        raise ConfigError(f"{stored} does not exist, so there is no run to resume; give --config FILE to start one.")
    from sagc_fast.train.run_directory import read_stored

    return read_stored(stored).with_overrides(overrides)


def print_fields() -> int:
    """Every option as a wrapped list."""
    import textwrap

    from sagc_fast.config import field_reference

    for path, default, doc in field_reference():
        print(f"{path}  (default: {default})")
        print(textwrap.fill(doc, width=100, initial_indent="    ", subsequent_indent="    "))
    return 0
