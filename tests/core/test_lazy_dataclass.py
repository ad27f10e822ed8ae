"""The decorator whose methods are compiled late makes classes that do what those of the standard library do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from itertools import product
from typing import ClassVar

import pytest

from wherry.core import lazy_dataclass

OPTIONS = [
    dict(zip(("frozen", "slots", "eq", "kw_only"), values, strict=True))
    for values in product((False, True), repeat=4)
]


def made(decorator, options):
    """A class with fields of every kind that wherry has."""

    @decorator(**options)
    class Sample:
        shared: ClassVar[int] = 3
        first: int
        second: str = "b"
        third: list[int] = field(default_factory=lambda: [1])
        unseen: object = field(default=None, repr=False, compare=False)
        late: int = field(init=False)
        counted: dict[str, int] = field(init=False, default_factory=dict)
        named: float = field(default=0.5, kw_only=True)

        def __post_init__(self):
            object.__setattr__(self, "late", self.first + 1)

    return Sample


def pair(options):
    return made(dataclasses.dataclass, options), made(lazy_dataclass.dataclass, options)


def outcome(call):
    """The result of a call, or the class and text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


CALLS = [
    lambda kind: repr(kind(first=1)),
    lambda kind: repr(kind(first=1, second="x", third=[2], named=2.0)),
    lambda kind: repr(kind(1, "x", [2])),
    lambda kind: kind(),
    lambda kind: kind(1, 2, 3, 4, 5, 6),
    lambda kind: kind(first=1, wrong=2),
    lambda kind: kind(first=1, late=2),
    lambda kind: kind(first=1) == kind(first=1, unseen=7),
    lambda kind: kind(first=1) == kind(first=2),
    lambda kind: kind(first=1) == 1,
    lambda kind: hash(kind(first=1)) == 0,
    lambda kind: setattr(kind(first=1), "first", 2),
    lambda kind: outcome(lambda: setattr(kind(first=1), "other", 2)) is None,  # errors differ with slots
    lambda kind: delattr(kind(first=1), "first"),
    lambda kind: repr(dataclasses.replace(kind(first=1), second="z")),
    lambda kind: dataclasses.replace(kind(first=1), late=3),
    lambda kind: dataclasses.asdict(kind(first=1)),
    lambda kind: repr(copy.deepcopy(kind(first=1))),
    lambda kind: kind(first=1).third is kind(first=1).third,
    lambda kind: (kind.__match_args__, kind.shared, hasattr(kind(first=1), "__dict__")),
    lambda kind: kind(first=1) and str(inspect.signature(kind)).replace("<factory>", "_"),
    lambda kind: type("Sub", (kind,), {})(first=1) == kind(first=1),
    lambda kind: repr(type("Sub", (kind,), {})(first=1)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(k for k, v in options.items() if v))
def test_it_does_what_the_one_of_the_standard_library_does(options):
    standard, lazy = pair(options)
    for number, call in enumerate(CALLS):
        expected, found = (outcome(lambda kind=kind, call=call: call(kind)) for kind in (standard, lazy))
        if "signature" in call.__code__.co_names:
            expected, found = (list(inspect.signature(kind).parameters) for kind in (standard, lazy))
        assert found == expected, number
    assert dataclasses.is_dataclass(lazy)
    assert [one.name for one in dataclasses.fields(lazy)] == [
        one.name for one in dataclasses.fields(standard)
    ]
    assert (lazy.__hash__ is None) == (standard.__hash__ is None)


def test_what_a_class_defines_itself_stays():
    @lazy_dataclass.dataclass(frozen=True, slots=True)
    class Own:
        value: float

        def __repr__(self):
            return "own"

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 7

    assert (repr(Own(1)), Own(1) == Own(2), hash(Own(1))) == ("own", True, 7)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_class_that_only_compares_itself_has_the_same_hash(frozen):
    def kind(decorator):
        @decorator(frozen=frozen)
        class Compared:  # noqa: PLW1641  the decorator adds it
            value: int

            def __eq__(self, other):
                return True

        return Compared

    standard, lazy = kind(dataclasses.dataclass), kind(lazy_dataclass.dataclass)
    assert outcome(lambda: hash(lazy(3)) == hash((3,))) == outcome(lambda: hash(standard(3)) == hash((3,)))
    assert lazy(1) == lazy(2)


@lazy_dataclass.dataclass(frozen=True, slots=True)
class Stored:
    values: tuple[int, ...]
    nested: Stored | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Derived(Stored):
    more: int = 1


@lazy_dataclass.dataclass(frozen=True, slots=True)
class DerivedToo(Stored):
    more: int = 1


def test_objects_are_pickled_and_compared():
    one = Stored((1, 2), Stored(()))
    assert pickle.loads(pickle.dumps(one)) == copy.copy(one) == one
    assert hash(pickle.loads(pickle.dumps(one))) == hash(one)
    nan = float("nan")
    assert Stored(nan) == Stored(nan)
    assert Stored((1,)) != Stored((2,))
    assert len({one, copy.deepcopy(one), Stored((3,))}) == 2


@pytest.mark.parametrize("kind", [Derived, DerivedToo])
def test_a_class_can_be_derived_with_either_decorator(kind):
    one = kind((1,), None, 2)
    assert (one.values, one.more, one) == ((1,), 2, kind((1,), more=2))
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.more = 3
    assert one != Stored((1,))


def test_an_object_that_holds_itself_is_printed():
    @lazy_dataclass.dataclass
    class Ring:
        inner: object = None

    ring = Ring()
    ring.inner = ring
    assert "..." in repr(ring)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_signature_is_known_before_an_object_is_made(options):
    standard, late = (inspect.signature(one).parameters.values() for one in pair(options))
    assert [(one.name, one.kind, one.annotation, one.default is inspect.Parameter.empty) for one in late] == [
        (one.name, one.kind, one.annotation, one.default is inspect.Parameter.empty) for one in standard
    ]


def test_a_subclass_with_its_own_init_has_its_own_signature():
    @lazy_dataclass.dataclass
    class Base:
        first: int

    class Own(Base):
        def __init__(self, other):
            super().__init__(first=other)

    assert str(inspect.signature(Own)) == "(other)"
    assert str(inspect.signature(Base)) == "(first: 'int') -> None"
