"""dataclass: the decorator of the standard library, whose methods are compiled when they are first called.

The one of Python 3.11 and 3.12 compiles six methods of each class with `exec`, which took a third of the processor time
of a small conversion: it imports 200 such classes and makes objects of a part of them. Here `__init__`, `__eq__` and
`__hash__` are compiled when they are first called, and the other methods are functions that all classes share.
`fields`, `replace`, `asdict`, pickles, copies, subclasses and `inspect.signature` work as ever.
"""

from __future__ import annotations

import dataclasses
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass  # noqa: PLC0414  it is given on
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        eq: bool = True,
        kw_only: bool = False,
        **others: Any,
    ) -> Any:
        """See `dataclasses.dataclass`."""

        def made(cls: type) -> type:
            if others or any(map(dataclasses.is_dataclass, cls.__bases__)):
                whole = {"frozen": frozen, "slots": slots, "eq": eq, "kw_only": kw_only, **others}
                return dataclasses.dataclass(cls, **whole)
            if cls.__doc__ is None:
                cls.__doc__ = cls.__name__  # else it would be the signature, which takes time
            own = set(vars(cls))
            if "__eq__" in own and vars(cls)["__hash__"] is None:  # Python has put it there
                own.remove("__hash__")
            cls = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
            _add_methods(cls, own, frozen=frozen, slots=slots, eq=eq)
            return cls

        return made if cls is None else made(cls)


def _add_methods(cls: Any, own: set[str], *, frozen: bool, slots: bool, eq: bool) -> None:
    """Give a class the methods that it does not have itself, as `dataclasses` does."""
    params = cls.__dataclass_params__  # by which `dataclasses` judges subclasses
    params.init, params.repr, params.eq, params.frozen = True, True, eq, frozen
    if "__init__" not in own:
        cls.__init__ = _late(cls, "__init__", _compiled_init)
        cls.__signature__ = _Signature()
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if eq:
        if "__eq__" not in own:
            cls.__eq__ = _late(cls, "__eq__", _compiled_eq)
        if "__hash__" not in own:
            cls.__hash__ = _late(cls, "__hash__", _compiled_hash) if frozen else None
    if frozen:
        assert not own & {"__setattr__", "__delattr__"}
        cls.__setattr__, cls.__delattr__ = _setattr, _delattr
        if slots and "__getstate__" not in own:
            cls.__getstate__, cls.__setstate__ = _getstate, _setstate


def _late(cls: Any, name: str, compiled: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A method that puts the compiled one in its place when it is first called."""

    def method(self: Any, /, *args: Any, **named: Any) -> Any:
        found = compiled(cls)
        found.__qualname__, found.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
        setattr(cls, name, found)
        return found(self, *args, **named)

    return method


class _Signature:
    """The signature of a class, made when somebody asks for it: notebooks and help do."""

    def __get__(self, _object: object, cls: Any) -> Any:
        import inspect

        defined_by = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if "__signature__" not in vars(defined_by):  # a subclass has an `__init__` of its own
            found = inspect.signature(defined_by.__init__)
            return found.replace(parameters=[*found.parameters.values()][1:])
        rows = [one for one in dataclasses.fields(defined_by) if one.init]
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(
                one.name, kinds[bool(one.kw_only)], default=_shown_default(one), annotation=one.type
            )
            for one in sorted(rows, key=lambda one: bool(one.kw_only))
        ]
        return inspect.Signature(parameters, return_annotation=None)


def _shown_default(field: dataclasses.Field[Any]) -> Any:
    """The default of an argument; `...` if it is made for each object."""
    if field.default is not dataclasses.MISSING:
        return field.default
    from inspect import Parameter

    return ... if field.default_factory is not dataclasses.MISSING else Parameter.empty


def _compiled_init(cls: Any) -> Callable[..., None]:
    scope: dict[str, Any] = {"_set_": object.__setattr__, "_absent_": dataclasses.MISSING}
    positional, by_name, body = ["self", "/"], ["*"], ["pass"]
    for one in dataclasses.fields(cls):
        name, value, argument = one.name, one.name, one.name
        if one.default is not dataclasses.MISSING:
            scope[default := f"_default_{name}_"] = one.default
            argument, value = f"{name}={default}", name if one.init else default
        elif one.default_factory is not dataclasses.MISSING:
            scope[new := f"_new_{name}_"] = one.default_factory
            argument = f"{name}=_absent_"
            value = f"{new}() if {name} is _absent_ else {name}" if one.init else f"{new}()"
        elif not one.init:
            continue
        if one.init:
            (by_name if one.kw_only else positional).append(argument)
        frozen = cls.__dataclass_params__.frozen
        body.append(f"_set_(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join([*positional, *(by_name if len(by_name) > 1 else ())])
    return _compile_method(f"__init__({arguments})", body, scope)


def _compiled_eq(cls: Any) -> Callable[..., Any]:
    names = [one.name for one in dataclasses.fields(cls) if one.compare]
    own, others = ("".join(f"{one}.{name}, " for name in names) for one in ("self", "other"))
    body = [
        "if other.__class__ is not self.__class__: return NotImplemented",
        f"return ({own}) == ({others})",
    ]
    return _compile_method("__eq__(self, other)", body, {})


def _compiled_hash(cls: Any) -> Callable[..., Any]:
    fields = dataclasses.fields(cls)
    names = [one.name for one in fields if (one.compare if one.hash is None else one.hash)]
    return _compile_method(
        "__hash__(self)", [f"return hash(({''.join(f'self.{name}, ' for name in names)}))"], {}
    )


def _compile_method(signature: str, body: list[str], scope: dict[str, Any]) -> Callable[..., Any]:
    exec(f"def {signature}:\n " + "\n ".join(body), scope)  # noqa: S102  of names of fields
    return scope[signature.partition("(")[0]]


@recursive_repr()
def _repr(self: Any) -> str:
    values = [f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr]
    return f"{self.__class__.__qualname__}({', '.join(values)})"


def _setattr(self: Any, name: str, value: Any) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delattr(self: Any, name: str) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_fixed(self: Any, name: str) -> bool:
    """Whether an attribute is one of a frozen class; a subclass that is no dataclass may have others."""
    cls = self.__class__
    return "__dataclass_fields__" in vars(cls) or name in cls.__dataclass_fields__


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in dataclasses.fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
