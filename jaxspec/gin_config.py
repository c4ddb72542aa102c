"""Frozen dataclasses filled from gin files: strict names, strict types, nothing silently unused.

The files are written in gin's language and read by gin's parser. Bindings are kept by the call that
reads them: gin's global configuration is neither read nor written, so that notebooks, flags and
several experiments in one process do not disturb each other.

A setting that holds a dataclass is filled from that dataclass's own bindings. Its scope is its
path, so with an Experiment that holds two Optimizers `draft` and `policy`,

    Optimizer.warmup = 10                  # both
    draft/Optimizer.learning_rate = 1e-4   # the draft's

A setting that may also be None, or one of several dataclasses, is filled by a reference:
`Experiment.draft = @Eagle3Config()`.
"""

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import importlib
import math
import pathlib
import tokenize
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import gin
from gin import config_parser

T = TypeVar("T")

_REGISTERED: dict[str, type] = {}


def register(cls: type[T], module: str = "jaxspec") -> type[T]:
    """Makes a frozen, keyword-only dataclass known to gin as `module.Name`, and returns it.

    Raises:
      ValueError: if it isn't a frozen, keyword-only dataclass, or another has its name.
    """
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:
        raise ValueError(f"{cls.__name__} must be a frozen dataclass to be configured")
    positional = [f.name for f in _settings(cls) if not f.kw_only]
    if positional:
        raise ValueError(f"{cls.__name__} must be keyword-only; {positional} are positional")
    gin.external_configurable(cls, module=module)
    _REGISTERED[f"{module}.{cls.__name__}"] = cls
    return cls


def load(
    cls: type[T],
    gin_files: Sequence[str | pathlib.Path] = (),
    gin_bindings: Sequence[str] = (),
) -> T:
    """Builds an instance from gin files, then single bindings; of two bindings the later one holds.

    Args:
      cls: a registered dataclass.
      gin_files: paths; includes are relative to the file that includes.
      gin_bindings: lines such as "LossConfig.clip_low = 0.1".

    Raises:
      ValueError: for an unknown or misspelt name, a wrong type, a value that the dataclass refuses,
        a missing value, and a binding or macro without effect; with file and line.
    """
    reader = _Reader()
    for path in gin_files:
        reader.read_file(pathlib.Path(path), ())
    for binding in gin_bindings:
        reader.read_lines(binding, None, ())
    return _Builder(reader.bindings, reader.macros).load(cls)


def operative_config(instance: Any) -> str:
    """Writes every setting in gin's language; `load` turns the text into an equal instance.

    Raises:
      ValueError: for a value that the language can't express, or an unregistered dataclass.
    """
    return "\n".join(_sections(instance, ())).lstrip("\n") + "\n"


def to_dict(instance: Any) -> Any:
    """Turns a configuration into dicts, lists and plain values, as a JSON file holds them.

    Each dataclass's name is kept under the key "class".
    """
    if dataclasses.is_dataclass(instance):
        values = {f.name: to_dict(getattr(instance, f.name)) for f in _settings(type(instance))}
        return {"class": type(instance).__name__} | values
    if isinstance(instance, dict):
        return {str(key): to_dict(value) for key, value in instance.items()}
    if isinstance(instance, tuple | list):
        return [to_dict(value) for value in instance]
    return instance


def differences(a: Any, b: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns the settings in which two `to_dict` results differ, by dotted path.

    A setting that one side lacks is the string "(absent)" there.
    """
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return {} if a == b else {path: (a, b)}
    found = {}
    for key in a | b:
        inner = f"{path}.{key}" if path else key
        found |= differences(a.get(key, "(absent)"), b.get(key, "(absent)"), inner)
    return found


@dataclasses.dataclass(frozen=True)
class _Reference:
    cls: type
    scopes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Macro:
    name: str


@dataclasses.dataclass(frozen=True)
class _Binding:
    scope: str
    cls: type
    name: str
    value: Any
    where: str

    @property
    def setting(self) -> str:
        scope = f"{self.scope}/" if self.scope else ""
        return f"{scope}{self.cls.__name__}.{self.name}"


def _settings(cls: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def _find(selector: str) -> type:
    if selector in _REGISTERED:
        return _REGISTERED[selector]
    found = {full: cls for full, cls in _REGISTERED.items() if full.endswith(f".{selector}")}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ValueError(f"{selector!r} may be any of {sorted(found)}; write more of its name")
    names = list(_REGISTERED) if "." in selector else [cls.__name__ for cls in _REGISTERED.values()]
    raise ValueError(f"no configurable is named {selector!r}; {_nearest(selector, names)}")


class _Delegate(config_parser.ParserDelegate):
    """Turns gin's references and macros into ours."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        *scopes, selector = scoped_configurable_name.split("/")
        cls = _find(selector)
        if not evaluate:
            raise ValueError(f"@{scoped_configurable_name} must be written with (): it is built")
        return _Reference(cls, tuple(scopes))

    def macro(self, macro_name):
        return _Macro(macro_name)


class _Located(ValueError):
    """An error that already says where it is."""


@contextlib.contextmanager
def _located(where: Callable[[], str]) -> Iterator[None]:
    """Puts the place in front of what goes wrong inside, once."""
    try:
        yield
    except _Located:
        raise
    except SyntaxError as error:
        raise _Located(
            f"{where()}: {error.msg}; values are Python literals such as 0.1, True, None or "
            "'text', references @Name() and macros %name"
        ) from error
    except tokenize.TokenError as error:
        raise _Located(f"{where()}: {error.args[0]}") from error
    except ValueError as error:
        # Gin appends its own account of the place on further lines.
        message = str(error).split("\n  In ")[0]
        raise _Located(f"{where()}: {message}") from error


class _Reader:
    """Collects the bindings and macros of files and lines, in order, with their places."""

    def __init__(self):
        self.bindings: list[_Binding] = []
        self.macros: dict[str, tuple[Any, str]] = {}

    def read_file(self, path: pathlib.Path, including: tuple[pathlib.Path, ...]) -> None:
        path = path.resolve()
        if path in including:
            raise ValueError(f"{path} includes itself")
        if not path.is_file():
            raise ValueError(f"there is no gin file {path}")
        self.read_lines(path.read_text(), path, (*including, path))

    def read_lines(self, text: str, path: pathlib.Path | None, including: tuple) -> None:
        parser = None

        def place(line: int | None = None) -> str:
            if path is None:
                return f"binding {text!r}"
            return f"{path}:{line or (parser.current_token.start[0] if parser else 1)}"

        with _located(place):
            parser = config_parser.ConfigParser(text, _Delegate())
            while (statement := parser.parse_statement()) is not None:
                where = place(statement.location.line_num)
                with _located(lambda where=where: where):
                    self._take(statement, where, path, including)

    def _take(self, statement: Any, where: str, path: pathlib.Path | None, including) -> None:
        if isinstance(statement, config_parser.IncludeStatement):
            folder = path.parent if path else pathlib.Path()
            self.read_file(folder / statement.filename, including)
        elif isinstance(statement, config_parser.ImportStatement):
            importlib.import_module(statement.module)
        elif isinstance(statement, config_parser.BlockDeclaration):
            _find(statement.selector)
        elif not statement.arg_name:
            name = "/".join(filter(None, (statement.scope, statement.selector)))
            self.macros[name] = (statement.value, where)
        else:
            cls = _find(statement.selector)
            names = [f.name for f in _settings(cls)]
            if statement.arg_name not in names:
                raise ValueError(
                    f"{cls.__name__} has no setting {statement.arg_name!r}; "
                    f"{_nearest(statement.arg_name, names)}"
                )
            self.bindings.append(
                _Binding(statement.scope, cls, statement.arg_name, statement.value, where)
            )


class _Builder:
    """Checks bindings against the annotations, builds the instances, and says what had no use."""

    def __init__(self, bindings: list[_Binding], macros: dict[str, tuple[Any, str]]):
        self.macros = macros
        self.used_macros: set[str] = set()
        self.visited: set[tuple[str, type]] = set()
        for value, where in macros.values():
            with _located(lambda where=where: where):
                self._expand(value)
        # Replaced bindings are checked too, and what they refer to counts as used.
        self.bindings = [self._checked(binding) for binding in bindings]
        self.table: dict[tuple[str, type], dict[str, _Binding]] = {}
        for binding in self.bindings:
            key = (binding.scope, binding.cls)
            self.table.setdefault(key, {})[binding.name] = binding

    def load(self, cls: type[T]) -> T:
        instance = self._build(_find_registered(cls), (), None, cls.__name__)
        idle = [b for b in self.bindings if (b.scope, b.cls) not in self.visited]
        idle = [b for b in idle if not self._replaced_by_none(b)]
        lines = [f"{b.where}: {b.setting} has no effect; {self._why_idle(b, cls)}" for b in idle]
        for name, (_, where) in self.macros.items():
            if name not in self.used_macros:
                fields = [f.name for c in _reachable(cls) for f in _settings(c)]
                hint = f"a setting is written Name.{name}" if name in fields else "remove it"
                lines.append(f"{where}: the macro {name!r} is never used; {hint}")
        if lines:
            raise ValueError("\n".join(lines))
        return instance

    def _expand(self, value: Any, inside: tuple[str, ...] = ()) -> Any:
        """Puts macros' values in their place."""
        if isinstance(value, _Macro):
            if value.name not in self.macros:
                raise ValueError(
                    f"no macro is named {value.name!r}; {_nearest(value.name, list(self.macros))}"
                )
            if value.name in inside:
                raise ValueError(f"the macro {value.name!r} is defined by itself")
            self.used_macros.add(value.name)
            return self._expand(self.macros[value.name][0], (*inside, value.name))
        if isinstance(value, list | tuple):
            return type(value)(self._expand(item, inside) for item in value)
        if isinstance(value, dict):
            return {key: self._expand(item, inside) for key, item in value.items()}
        return value

    def _checked(self, binding: _Binding) -> _Binding:
        hint = _hints(binding.cls)[binding.name]
        with _located(lambda: binding.where):
            value = self._expand(binding.value)
            try:
                value = _convert(value, hint)
            except TypeError as error:
                raise ValueError(
                    f"{binding.setting} = {_show(value)} must be {_name(hint)}{error}"
                ) from None
        return dataclasses.replace(binding, value=value)

    def _bound(self, cls: type, scopes: tuple[str, ...]) -> dict[str, _Binding]:
        """Returns the bindings in effect: an inner scope's come before an outer one's."""
        bound = {}
        for depth in range(len(scopes) + 1):
            key = ("/".join(scopes[:depth]), cls)
            self.visited.add(key)
            bound |= self.table.get(key, {})
        return bound

    def _build(self, cls: type, scopes: tuple[str, ...], base: Any, path: str) -> Any:
        """Builds a dataclass from its bindings; `base` gives what is not bound."""
        if path.count(".") > 32:
            raise ValueError(f"{cls.__name__} refers to itself: {path}")
        bound, hints, values = self._bound(cls, scopes), _hints(cls), {}
        for field in _settings(cls):
            name, inner = field.name, f"{path}.{field.name}"
            if name in bound:
                values[name] = self._evaluate(bound[name].value, scopes, inner)
                continue
            default = _default(field) if base is None else getattr(base, name)
            if dataclasses.is_dataclass(hints[name]):
                kind = hints[name] if default is dataclasses.MISSING else type(default)
                default = None if default is dataclasses.MISSING else default
                values[name] = self._build(_find_registered(kind), (*scopes, name), default, inner)
            elif default is not dataclasses.MISSING:
                values[name] = default
            else:
                raise ValueError(
                    f"{inner} has no value; bind {cls.__name__}.{name}, "
                    f"which must be {_name(hints[name])}"
                )
        try:
            return cls(**values)
        except ValueError as error:
            places = [f"{b.setting} at {b.where}" for b in bound.values() if b.name in str(error)]
            origin = f" ({', '.join(places)})" if places else ""
            raise ValueError(f"{path}: {error}{origin}") from error

    def _evaluate(self, value: Any, scopes: tuple[str, ...], path: str) -> Any:
        if isinstance(value, _Reference):
            return self._build(value.cls, value.scopes or scopes, None, path)
        if isinstance(value, tuple):
            return tuple(self._evaluate(v, scopes, f"{path}[{i}]") for i, v in enumerate(value))
        if isinstance(value, dict):
            return {k: self._evaluate(v, scopes, f"{path}[{k!r}]") for k, v in value.items()}
        return value

    def _replaced_by_none(self, idle: _Binding) -> bool:
        """Whether a later binding sets what would have held this one to None."""
        later = self.bindings[self.bindings.index(idle) + 1 :]
        return any(
            b.value is None and idle.cls in _reachable(_hints(b.cls)[b.name])
            for b in later
            if (b.scope, b.cls) in self.visited
        )

    def _why_idle(self, idle: _Binding, root: type) -> str:
        scope = f" in scope {idle.scope!r}" if idle.scope else ""
        reference = f"@{idle.scope}/{idle.cls.__name__}()" if scope else f"@{idle.cls.__name__}()"
        holders = [
            f"{cls.__name__}.{name} = {reference}"
            for cls in _reachable(root)
            for name, hint in _hints(cls).items()
            if idle.cls in _classes(hint)
        ]
        where = f"write {' or '.join(holders)}" if holders else f"{root.__name__} holds none"
        return f"no {idle.cls.__name__} is built{scope}: {where}"


def _find_registered(cls: type[T]) -> type[T]:
    if cls not in _REGISTERED.values():
        raise ValueError(f"{cls.__name__} is not registered; call register({cls.__name__})")
    return cls


def _selector(cls: type) -> str:
    """Returns the shortest name that `_find` understands."""
    full = next(name for name, known in _REGISTERED.items() if known is cls)
    same = [known for known in _REGISTERED.values() if known.__name__ == cls.__name__]
    return cls.__name__ if len(same) == 1 else full


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _classes(hint: Any) -> set[type]:
    """Returns the registered classes that a value of this annotation may be or hold."""
    found = {cls for cls in _REGISTERED.values() if isinstance(hint, type) and hint is not object}
    found = {cls for cls in found if typing.get_origin(hint) is None and issubclass(cls, hint)}
    return found.union(*(_classes(arg) for arg in typing.get_args(hint)))


def _reachable(hint: Any) -> list[type]:
    """Returns the registered classes that a value of this annotation may hold at any depth."""
    found = list(_classes(hint))
    for cls in found:
        for inner in _hints(cls).values():
            found.extend(_classes(inner) - set(found))
    return found


def _convert(value: Any, hint: Any) -> Any:
    """Checks a value against an annotation; lists become tuples, and int becomes float for float.

    Raises:
      TypeError: where it doesn't fit; the text says more than the annotation, or is empty.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        items = isinstance(value, list | tuple)
        return tuple(_convert(item, Any) for item in value) if items else value
    if origin in (typing.Union, types.UnionType):
        # An exact match first, so that 1 stays an int where both int and float will do.
        for option in sorted(args, key=lambda option: option is not type(value)):
            with contextlib.suppress(TypeError):
                return _convert(value, option)
        raise TypeError()
    if origin is typing.Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
        text = [a for a in args if isinstance(a, str)]
        raise TypeError(f"; {_nearest(value, text)}" if isinstance(value, str) and text else "")
    if origin in (tuple, list, collections.abc.Sequence):
        if not isinstance(value, list | tuple):
            raise TypeError()
        if origin is tuple and args[-1:] != (...,):
            if len(value) != len(args):
                raise TypeError(f", and has {len(value)} entries")
            return tuple(map(_convert, value, args))
        return tuple(_convert(item, args[0]) for item in value)
    if origin in (dict, collections.abc.Mapping):
        if not isinstance(value, dict):
            raise TypeError()
        return {_convert(k, args[0]): _convert(v, args[1]) for k, v in value.items()}
    if hint is None or hint is type(None):
        fits = value is None
    elif isinstance(value, _Reference):
        fits = isinstance(hint, type) and issubclass(value.cls, hint)
    elif hint is float and type(value) is int:
        return float(value)
    else:
        fits = type(value) is hint
    if not fits:
        raise TypeError()
    return value


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_name(option) for option in typing.get_args(hint))
    if hint is type(None):
        return "None"
    plain = isinstance(hint, type) and typing.get_origin(hint) is None
    return hint.__name__ if plain else str(hint).replace("typing.", "")


def _show(value: Any) -> str:
    if isinstance(value, _Reference):
        return f"@{'/'.join((*value.scopes, value.cls.__name__))}()"
    return repr(value)


def _sections(instance: Any, scopes: tuple[str, ...]) -> Iterator[str]:
    """Yields the lines that bind an instance in its scope, then those of what it holds."""
    cls = _find_registered(type(instance))
    key = "/".join((*scopes, _selector(cls)))
    inner: list[tuple[Any, tuple[str, ...]]] = []

    def literal(value: Any, scope: tuple[str, ...]) -> str:
        if dataclasses.is_dataclass(value):
            inner.append((value, scope))
            return f"@{'/'.join((*scope, _selector(_find_registered(type(value)))))}()"
        if isinstance(value, tuple | list):
            items = [literal(v, (*scope[:-1], f"{scope[-1]}_{i}")) for i, v in enumerate(value)]
            return f"[{', '.join(items)}]"
        if isinstance(value, dict):
            items = [
                f"{k!r}: {literal(v, (*scope[:-1], f'{scope[-1]}_{i}'))}"
                for i, (k, v) in enumerate(value.items())
            ]
            return f"{{{', '.join(items)}}}"
        if isinstance(value, float) and math.isinf(value):
            return "1e999" if value > 0 else "-1e999"
        if value is None or (isinstance(value, bool | int | float | str) and value == value):
            return repr(value)
        raise ValueError(f"{key}.{scope[-1]} = {value!r} can't be written in a gin file")

    yield ""
    for field in _settings(cls):
        value = literal(getattr(instance, field.name), (*scopes, field.name))
        yield f"{key}.{field.name} = {value}"
    for value, scope in inner:
        yield from _sections(value, scope)
