"""All the configuration machinery there is: override a field, print, compare, load a recipe.

A configuration is a tree of frozen dataclasses that lie beside the code they configure and check
themselves in `__post_init__`. A recipe is a Python file whose `config()` returns such a tree. The
text form is one `path.to.field=value` a line, and `override` reads what `to_text` writes.
"""

import dataclasses
import difflib
import importlib.util
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

_Config = TypeVar("_Config")

_EXAMPLES = {bool: "true", int: "64", float: "3e-4", str: "text"}
_WORDS = {type(None): {"none": None}, bool: {"true": True, "false": False}}
_RECIPES = "configs"


class ConfigError(ValueError):
    """A configuration cannot be built as asked; one line names value, rule and way out."""


def override(config: _Config, assignments: Sequence[str]) -> _Config:
    """Returns `config` with `path.to.field=value` applied, every level validated again.

    All assignments are applied together, so fields that constrain each other can change in one
    call in any order; of two for the same field the later one counts.

    Args:
      config: frozen dataclass, nested.
      assignments: texts such as `model.kda.chunk_size=32`. Values are read by the field's
        annotation: `int`, `float`, `bool` (true, false), `str`, `tuple` (1,2,3), `Literal`, and
        `none` for an optional field.

    Raises:
      ConfigError: unknown field, value of the wrong type, a whole sub-config, or a combination
        that the dataclass refuses.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"{assignment!r}: expected path.to.field=value")
        level, node = tree, config
        for depth, name in enumerate(names[:-1]):
            _require_field(node, name, names[:depth])
            node, level = getattr(node, name), level.setdefault(name, {})
            if level is None:
                raise ConfigError(
                    f"{assignment}: an earlier assignment set {name} to none; drop one of the two"
                )
        _require_field(node, names[-1], names[:-1])
        level[names[-1]] = _parse_field(node, names[-1], text, path.strip())
    return _rebuild(config, tree, "")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dict of JSON values: every field, tuples as lists. `from_dict` reads it back."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}


def from_dict(cls: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Builds `cls` from `to_dict`'s form (also after a trip through JSON).

    Raises:
      ConfigError: a key is unknown or missing (defaults are not filled in: a stored configuration
        is complete, so a gap means that it was written by other code), or a value has another type.
    """
    return _build(cls, values, "")


def to_text(config: Any) -> str:
    """The complete configuration, one sorted `path=value` a line; `override` accepts each line."""
    return "\n".join(f"{path}={text}" for path, text in sorted(_flatten(to_dict(config))))


def differences(a: Any, b: Any) -> list[str]:
    """Fields in which two configurations differ, as sorted lines `path: a != b`.

    Args:
      a: configuration, or the dict that `to_dict` made of one.
      b: likewise; a path that only one of them has reads `absent` for the other.
    """
    left, right = (dict(_flatten(c if isinstance(c, Mapping) else to_dict(c))) for c in (a, b))
    paths = sorted(left.keys() | right.keys())
    pairs = [(p, left.get(p, "absent"), right.get(p, "absent")) for p in paths]
    return [f"{path}: {x} != {y}" for path, x, y in pairs if x != y]


def load_recipe(path_or_name: str) -> Any:
    """Runs `config()` of a recipe file and returns its result.

    Args:
      path_or_name: a file such as `configs/tiny.py`, or a bare name such as `tiny`, looked up in
        `configs/` of the working directory and then of the repository.

    Raises:
      ConfigError: no such file (the message lists the recipes present), or the file has no
        `config()`, or that does not return a dataclass. Errors inside a recipe are not caught.
    """
    path = _find_recipe(path_or_name)
    # Registered, because dataclasses in a recipe look their annotations up in their module.
    name = "k3jax_recipe_" + re.sub(r"\W", "_", str(path.with_suffix("")))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = getattr(module, "config", None)
    if not callable(build):
        raise ConfigError(f"{path}: a recipe defines config() -> configuration; this file does not")
    config = build()
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"{path}: config() returned {config!r}; return a configuration object")
    return config


def _find_recipe(path_or_name: str) -> Path:
    """Path of an existing recipe file."""
    file = Path(path_or_name if path_or_name.endswith(".py") else path_or_name + ".py")
    folders = [file.parent]
    if len(file.parts) == 1:
        folders += [root / _RECIPES for root in (Path.cwd(), Path(__file__).parent.parent)]
    for folder in folders:
        if (folder / file.name).is_file():
            return folder / file.name
    # For a bare name the first folder is the working directory, whose scripts are no recipes.
    lists = []
    for folder in dict.fromkeys(folders[1:] or folders):
        present = ", ".join(sorted(found.stem for found in folder.glob("[!_]*.py")))
        lists.append(f"{folder} has {present or 'no recipes'}")
    raise ConfigError(f"recipe {path_or_name!r}: there is no file {file}; {'; '.join(lists)}")


def _names(node: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(node) if f.init]


def _annotation(node: Any, name: str) -> Any:
    cls = node if isinstance(node, type) else type(node)
    return typing.get_type_hints(cls)[name]


def _require_field(node: Any, name: str, above: Sequence[str]) -> None:
    """Raises unless `node` is a dataclass with the field `name`."""
    where = ".".join(above)
    if not dataclasses.is_dataclass(node):
        raise ConfigError(
            f"{where}: it is {_text(_plain(node))} and has no field {name!r}; set {where} itself"
        )
    names = _names(node)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        path = ".".join([*above, name])
        raise ConfigError(
            f"{path}: no such field; {hint}{type(node).__name__} has: {', '.join(names)}"
        )


def _parse_field(node: Any, name: str, text: str, path: str) -> Any:
    """Value of one assignment, read by the field's annotation."""
    current, annotation = getattr(node, name), _annotation(node, name)
    options = _members(annotation)
    if any(dataclasses.is_dataclass(option) for option in options):
        if text == "none" and type(None) in options:
            return None
        inside = "one of its fields"
        if dataclasses.is_dataclass(current):
            inside = ", ".join(f"{path}.{n}" for n in _names(current)[:3])
        raise ConfigError(
            f"{path}={text}: {name} is a whole configuration; set {inside}, or write a recipe"
        )
    try:
        return _parse(text, annotation)
    except ValueError:
        raise ConfigError(
            f"{path}={text}: expected {_describe(annotation)}, for example "
            f"{path}={_example(current, annotation)}"
        ) from None


def _parse(text: str, annotation: Any) -> Any:
    """Reads `text` as `annotation`; raises ValueError when it is something else."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    options = _members(annotation)
    if len(options) > 1:
        return _first_that_fits(options, lambda option: _parse(text, option))
    if origin is tuple:
        items = _split(text.strip().removeprefix("(").removesuffix(")"))
        kinds = _item_types(args, len(items))
        return tuple(_parse(item, kind) for item, kind in zip(items, kinds, strict=True))
    if annotation is int:
        return int(text)
    if annotation is float and not math.isnan(number := float(text)):
        return number
    if annotation is str:
        return json.loads(text) if text.startswith('"') else text
    # A choice is also read unquoted: a field that is never absent may call one of its values none.
    choices = {_text(c): c for c in args} | {c: c for c in args if isinstance(c, str)}
    for word, value in _WORDS.get(annotation, choices).items():
        if text == word:
            return value
    raise ValueError(text)


def _split(text: str) -> list[str]:
    """Items between commas; quotes and one level of brackets hold theirs together."""
    items = list(re.finditer(r'\s*("(?:[^"\\]|\\.)*"|\([^()]*\)|[^,"()]+)(?:\s*,|\s*$)', text))
    if sum(len(item[0]) for item in items) != len(text):
        raise ValueError(text)
    return [item[1].strip() for item in items]


def _first_that_fits(options: Sequence[Any], read: Callable[[Any], Any]) -> Any:
    """`read(option)` of the first option that does not raise ValueError."""
    for option in options[:-1]:
        try:
            return read(option)
        except ValueError:
            continue
    return read(options[-1])


def _members(annotation: Any) -> tuple[Any, ...]:
    """Alternatives of a union, None first so that `none` is not read as a string."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(sorted(typing.get_args(annotation), key=lambda a: a is not type(None)))
    return (annotation,)


def _item_types(args: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Types of a tuple's items; a wrong length raises ValueError at the caller's strict zip."""
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * length
    return args


def _describe(annotation: Any) -> str:
    """`annotation` in words, for messages."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(_text, args))
    if origin is tuple:
        many = len(args) == 2 and args[1] is Ellipsis
        item = getattr(args[0], "__name__", args[0])
        return f"a list of {item} with commas" if many else f"{len(args)} values with commas"
    if len(_members(annotation)) > 1:
        return " or ".join(_describe(option) for option in _members(annotation)[::-1])
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    if annotation is type(None):
        return "none"
    return names.get(annotation, f"a {annotation} (which only a recipe can set)")


def _example(current: Any, annotation: Any) -> str:
    """A value that would be accepted: the present one, or a typical one."""
    if current is not None:
        return _text(_plain(current))
    return _EXAMPLES.get(_members(annotation)[-1], "none")


def _rebuild(node: Any, tree: Mapping[str, Any], path: str) -> Any:
    """`dataclasses.replace` from the leaves up; in `tree` a dict stands for a level."""
    changes = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            value = _rebuild(getattr(node, name), value, _join(path, name))
        changes[name] = value
    return _validated(lambda: dataclasses.replace(node, **changes), path)


def _validated(build: Callable[[], Any], path: str) -> Any:
    """Runs a constructor; a refusal by its `__post_init__` is reported with the path, once."""
    try:
        return build()
    except ConfigError:
        raise
    except ValueError as error:
        above, _, last = path.rpartition(".")
        if not path or str(error).startswith(f"{path}."):
            raise ConfigError(str(error)) from error
        if str(error).startswith(f"{last}."):  # the class knows its own name, not where it stands
            raise ConfigError(f"{above}.{error}") from error
        raise ConfigError(f"{path}: {error}") from error


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _plain(value: Any) -> Any:
    """`value` in JSON's terms."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{value!r}: a configuration holds numbers, text, tuples and dataclasses; name it instead"
    )


def _flatten(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every leaf; a list of configurations counts as a level."""
    for name, value in values.items():
        below = _join(path, name)
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _flatten(value, below)
        else:
            yield below, _text(value)


def _text(value: Any) -> str:
    """One value as `_parse` reads it; text that would read as something else is quoted."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "(" + ",".join(_text(item) for item in value) + ")"
    if isinstance(value, str):
        plain = re.fullmatch(r"[^\s\",()]([^\",()]*[^\s\",()])?", value) and value.isprintable()
        return value if plain and value != "none" else json.dumps(value)
    return repr(value)


def _build(annotation: Any, value: Any, path: str) -> Any:
    """`value` of `_plain`'s form as `annotation`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    options = _members(annotation)
    if len(options) > 1:
        return _first_that_fits(options, lambda option: _build(option, value, path))
    if dataclasses.is_dataclass(annotation) and isinstance(value, Mapping):
        return _build_fields(annotation, value, path)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = _item_types(args, len(value))
        if len(kinds) == len(value):
            items = enumerate(zip(value, kinds, strict=True))
            return tuple(_build(kind, item, _join(path, str(i))) for i, (item, kind) in items)
    if annotation is float and type(value) is int:
        return float(value)  # a JSON writer may drop the point of 1.0
    # By exact type: True is no integer here, and 1 is not the Literal True.
    if type(value) is annotation or any(value == a and type(value) is type(a) for a in args):
        return value
    raise ConfigError(f"{path or annotation}: stored {value!r}, expected {_describe(annotation)}")


def _build_fields(cls: Any, values: Mapping[str, Any], path: str) -> Any:
    """One dataclass of exactly the fields in `values`."""
    names = _names(cls)
    unknown, missing = sorted(values.keys() - set(names)), [n for n in names if n not in values]
    if unknown or missing:
        raise ConfigError(
            f"{path or cls.__name__}: unknown fields {unknown}, missing fields {missing}; it was "
            "stored by another version of this code, so start a new run or convert it"
        )
    built = {n: _build(_annotation(cls, n), values[n], _join(path, n)) for n in names}
    return _validated(lambda: cls(**built), path)
