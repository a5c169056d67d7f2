"""The machinery under config.py: type checks of frozen records, YAML, overrides, suggestions, field documentation.

Standard library only (PyYAML is imported when a file or an override is read).
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sagc_fast.errors import ConfigError


class Section:
    """Checks the types of a frozen dataclass's fields on construction, then its own ``_check``."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in _field_types(type(self)).items():
            value = _coerce(getattr(self, name), hint, self._path(name))
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """Ranges and combinations; types are right already."""

    def _path(self, name: str) -> str:
        return f"{self.SECTION}.{name}" if self.SECTION else name

    def _require(self, ok: bool, name: str, wanted: str) -> None:
        if not ok:
            shown = plain(getattr(self, name))  # lists as they were written, not as the tuples kept here
            raise ConfigError(f"{self._path(name)} is {shown!r}; it must be {wanted}.")

    def _at_least(self, low: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or value >= low, name, f"at least {low}")

    def _above_zero(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or 0 < value < math.inf, name, "a finite number above 0")


def describe_fields(config_class: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(full path, default, documentation) of every field, in order; the documentation is the string under the field."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(config_class))).body[0].body  # type: ignore[attr-defined]
    docs = {
        node.target.id: " ".join(after.value.value.split())
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    types_by_name = _field_types(config_class)
    for f in fields(config_class):
        hint = types_by_name[f.name]
        if is_dataclass(hint):
            yield from describe_fields(hint, f"{prefix}{f.name}.")
        else:
            is_required = f.default is MISSING and f.default_factory is MISSING
            value = f.default if f.default_factory is MISSING else f.default_factory()
            default = "required" if is_required else "unset" if value is None else str(value)
            yield prefix + f.name, default, docs.get(f.name, "")


def valid_paths(config_class: type, prefix: str = "") -> list[str]:
    """Full path of every field and section."""
    paths = []
    for name, hint in _field_types(config_class).items():
        paths.append(prefix + name)
        if is_dataclass(hint):
            paths += valid_paths(hint, f"{prefix}{name}.")
    return paths


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set ``a.b=value`` strings in nested dicts; the value is read as YAML. Raises ConfigError for a malformed one."""
    import yaml

    loader, _ = yaml_dialect()
    for text in overrides:
        path, equals, raw = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"The override {text!r} is not of the form name=value, for example steps=10.")
        try:
            value = yaml.load(raw, loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(f"The override {text!r} has a value that is not YAML; quote it.") from None
        *parents, last = path.strip().split(".")
        node = values
        for i, key in enumerate(parents):
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise ConfigError(
                    f"The override {text!r} goes below {'.'.join(parents[: i + 1])}, which is no section."
                )
            node = child
        node[last] = value


@functools.cache
def yaml_dialect() -> tuple[type, type]:
    """(loader, dumper) of safe YAML in which 1e-6 is a number, as in YAML 1.2 and as everyone means it, and a key given
    twice is an error."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            seen = set()
            for key_node, _ in node.value:
                if isinstance(key_node, yaml.CollectionNode):
                    raise yaml.constructor.ConstructorError(
                        None, None, "a key must be a name, not a list or a section", key_node.start_mark
                    )
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
            return super().construct_mapping(node, deep)

    class Dumper(yaml.SafeDumper):
        pass

    number = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$")
    for dialect in (Loader, Dumper):
        dialect.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader, Dumper


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    loader, _ = yaml_dialect()
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        if getattr(error, "context", None) == "expected a single document in the stream":
            raise ConfigError(
                f"{path}{line}: a second YAML document begins here; a configuration is one document, so remove the "
                "line --- or ... before it, or move what follows to a file of its own."
            ) from None
        problem = getattr(error, "problem", None) or "syntax error"
        raise ConfigError(f"{path}{line}: not valid YAML ({problem}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path}: not valid YAML ({problem}).") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; give the YAML file of a run.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}; it must hold sections such as 'model:' and 'task:'."
        )
    return values


def check_keys(
    config_class: type, values: Mapping[str, Any], *, root: type, prefix: str = "", where: str = "The configuration"
) -> None:
    """Raises ConfigError for a key that ``config_class`` lacks (naming the nearest of ``root``'s paths) or needs."""
    hints = _field_types(config_class)
    for key in values:
        if key not in hints:
            raise ConfigError(f"{where}: there is no option {prefix}{key}; {_suggestion(f'{prefix}{key}', root)}")
    for f in fields(config_class):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{where}: {prefix}{f.name} is missing; it has no default.")
        if is_dataclass(hints[f.name]) and isinstance(values.get(f.name), Mapping):
            check_keys(hints[f.name], values[f.name], root=root, prefix=f"{prefix}{f.name}.", where=where)


def _suggestion(path: str, root: type) -> str:
    """The nearest full path: the same last part elsewhere, else the most similar path, else a similar last part."""
    paths = valid_paths(root)
    by_last_part = {p.rpartition(".")[2]: p for p in reversed(paths)}
    last_part = path.rpartition(".")[2]
    near_paths = difflib.get_close_matches(path, paths, n=1, cutoff=0.6)
    near_last_parts = difflib.get_close_matches(last_part, list(by_last_part), n=1, cutoff=0.7)
    if last_part in by_last_part:
        return f"did you mean {by_last_part[last_part]}?"
    if near_paths or near_last_parts:
        return f"did you mean {near_paths[0] if near_paths else by_last_part[near_last_parts[0]]}?"
    return "`sagc-fast train --fields` lists them all."


def _field_types(config_class: type) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    return {f.name: hints[f.name] for f in fields(config_class)}


def _coerce(value: Any, hint: Any, path: str) -> Any:
    """``value`` as ``hint`` wants it: int to float, list to tuple, mapping to section, "1e-6" (YAML 1.1 reads it as a
    string) to float. Raises ConfigError naming ``path`` when it does not fit."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (a for a in typing.get_args(hint) if a is not type(None))
        return _coerce(value, inner, path)
    if origin is Literal:
        allowed = typing.get_args(hint)
        if value is False and "off" in allowed:
            return "off"  # YAML 1.1 reads a bare off as false
        if value not in allowed or isinstance(value, bool):
            raise ConfigError(f"{path} is {value!r}; it must be {_either(allowed)}.")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{path} is {value!r}; it must be a list.")
        return tuple(_coerce(v, typing.get_args(hint)[0], f"{path}[{i}]") for i, v in enumerate(value))
    if is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is {value!r}; it must be a section with options below it.")
        check_keys(hint, value, root=hint, prefix=f"{path}.")
        return hint(**value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is {value!r}; it must be a section with options below it.")
        return plain(dict(value))
    return _coerce_scalar(value, hint, path)


def _coerce_scalar(value: Any, hint: type, path: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float:
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
        if is_number and not math.isnan(value):
            return float(value)
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    shown = "empty" if value is None else repr(value)
    raise ConfigError(f"{path} is {shown}; it must be {words[hint]}.")


def _either(names: Sequence[Any]) -> str:
    return f"{', '.join(map(str, names[:-1]))} or {names[-1]}" if len(names) > 1 else str(names[0])


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
