"""The ``sagc-fast`` command: finds every module of sagc_fast.commands and runs the one that is asked for.

A command module offers ``HELP: str`` (one line), ``add_arguments(parser)`` and ``run(args) -> int``; optionally
``EPILOG`` with examples. Heavy imports belong inside ``run``, so that ``--help`` stays instant.

Exit status: 0 done, 2 a mistake that one sentence on stderr explains, 130 interrupted from the keyboard.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import sagc_fast
from sagc_fast import commands
from sagc_fast.errors import SagcError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; ``argv`` excludes the program's name and defaults to sys.argv."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: spinning threads starve neighbours
    parser = build_parser(find_commands())
    args = _parsed(parser, argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except SagcError as error:
        print(f"sagc-fast: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_lack_of_memory(error):
            raise
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        print(f"sagc-fast: the memory of this machine does not suffice{reason}; ask for less at once.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sagc-fast: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `sagc-fast ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # no permission, a full disk, a name too long: said with the file, wherever it turns up
        if error.filename is None:
            raise
        print(
            f"sagc-fast: {error.filename!s:.200} cannot be used: {error.strerror}; check the path, its permissions "
            "and the space that is left.",
            file=sys.stderr,
        )
        return 2


def _is_lack_of_memory(error: Exception) -> bool:
    """Python's and NumPy's error, torch's for a GPU, and what its allocator for the CPU says in words alone."""
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes a command's key=value pairs from one place alone; users write them before and behind options."""
    args, others = parser.parse_known_args(argv)
    if hasattr(args, "overrides") and not any(other.startswith("-") for other in others):
        args.overrides += others
    elif others:
        getattr(args, "command_parser", parser).error(f"unrecognized arguments: {' '.join(others)}")
    return args


def find_commands() -> dict[str, ModuleType]:
    """Command name (dashes for underscores) -> module, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(commands.__path__) if not m.name.startswith("_"))
    return {name.replace("_", "-"): import_module(f"{commands.__name__}.{name}") for name in names}


def build_parser(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    """The parser with one sub-command per module."""
    parser = argparse.ArgumentParser(
        prog="sagc-fast",
        description="Straggler-aware group sizing for synchronous GRPO/DAPO, with its own rollout engine and trainer.",
        epilog="`sagc-fast COMMAND --help` shows a command's options and examples.",
    )
    parser.add_argument("--version", action="version", version=f"sagc-fast {sagc_fast.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in modules.items():
        sub = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, command_parser=sub)
    return parser
