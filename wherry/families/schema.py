"""A model family as data: its canonical parameters, their axes, and where each system keeps them.

A family is one TOML file; the ones in this folder and those that a user gives with `--family-file` have the same form
and pass the same checks. A field that this module does not know is an error.

    name, about, model_types (of Hugging Face configs); extends: another family, of which this one changes parts
    [axes]                 axis → meaning
    [constants]            axis → extent that holds for every model of the family
    [parameters]           name → "axes", or {axes, optional, tie, part}: canonical, in Hugging Face's order
    [systems.S]
      about, formats       in words; the formats in which this system's checkpoints lie
      forms.F              choices of how it is spelled on disk (scanned or not): found in a source, chosen for a
                           target; [choices] or {choices, config}, the first being the default
      conventions.C        what is not on disk (rotary layout): {choices, why, config, facts, default}; the
                           expressions give a choice from this system's config, or from the facts of the other's
      by_format.N          forms that a format implies
      stacks.K             {axis, form, stacked, unrolled, at}: <K> in a key path is `stacked`, with the axis
                           inserted as dimension `at` (a number or a form), or `unrolled`
      macros.M             {by, choice = text, …}: <M> in a key path, axes, word or slot, by a form or convention;
                           where the text is "-" the layout does not exist
      slots.T              where the parameters (`params`) lie: a key path with @ for the parameter's own
      optimizers.O         {slots, scalars, written, lists, empties, without, filler}: where the moments lie; * stands
                           for a part that varies, and then `written` says where slots and scalars are written:
                           what begins with + is for stacked layers (%axis% is the size of their axis), the rest
                           for all others; a scalar is repeated for every layer there
      bare                 {empties, zeros}: what stands in the target's tree where no moments are carried: nodes, and
                           key path → element type of a number that is 0
      scalars.N            key paths of one number that belongs to the run (step); the first is written, all are read
      tied.P               the key path of a second copy of what parameter P is tied to, which this system stores
      names                what the system calls axes, where its checkpoints store names
      layouts.P            [key path, axes, word …] of parameter P; {key, axes, along} of several, joined by +;
                           a key path that begins with // is not below a slot
      ignore               [[pattern, reason], …]: tensors that are none of the model; ** stands for several parts
      accepts              [[expression over the facts, reason], …]: what a target of this system can hold
      config               {table, sizes, facts, require, ignored, run}: which attributes say what; others are errors
      write                the config that goes with a checkpoint of this system, and how it is loaded: {file, nested,
                           fixed, attributes, replaced, nullable, cases, defaults, notes, words, snippet}. What
                           `config` reads from one attribute is written to it without being repeated; see Write
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


Cases: TypeAlias = tuple[tuple[str, Any], ...]  # expression, and what holds where it is true


@dataclass(frozen=True, slots=True)
class Parameter:
    """A canonical parameter.

    Attributes:
        axes: its axes, in canonical order.
        optional: whether a model may lack it.
        tie: the parameter that it equals where it is lacking.
        part: parameters of one part are there together or not at all (a decoder, gated projections).
    """

    axes: tuple[str, ...]
    optional: bool = False
    tie: str | None = None
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A choice of how a system spells its checkpoints; the first is the default."""

    choices: tuple[str, ...]
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Convention:
    """What a checkpoint does not say of itself.

    Attributes:
        choices: possible answers.
        why: what it is, for the error that asks for it.
        config: an expression over this system's config.
        facts: an expression over the facts of the other system's config.
        default: where nobody says anything; None asks.
    """

    choices: tuple[str, ...]
    why: str
    config: str | None = None
    facts: str | None = None
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that are one tensor, or one tensor each."""

    axis: str
    stacked: str
    unrolled: str
    form: str | None = None
    at: int | str = 0


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Where an optimizer's state lies.

    Attributes:
        slots: moment → key path with @.
        scalars: name → key paths.
        written: slot or scalar → key paths for a target, where the others hold a *.
        lists, empties: nodes of the tree that hold no tensor of their own, for a target.
        without: slot → axes that it has not (the factored moments of Adafactor).
        filler: element type of the zeros of shape [1] that stand for a moment that a parameter has not.
    """

    slots: Mapping[str, tuple[str, ...]]
    scalars: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    lists: tuple[str, ...] = ()
    empties: Mapping[str, str] = field(default_factory=dict[str, str])
    without: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    filler: str | None = None
    written: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True, slots=True)
class Row:
    """One or several parameters in one system.

    Attributes:
        parameters: their names; several lie one after the other along a dimension.
        key: the key path, with macros.
        axes: of each parameter.
        along: the dimension, where there are several.
        words: value words.
    """

    parameters: tuple[str, ...]
    key: str
    axes: tuple[str, ...]
    along: int = 0
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """What a system's config says, attribute by attribute.

    Attributes:
        sizes: axis → expression.
        facts: fact → expression.
        require: expression → what is wrong where it is false.
        ignored: attributes that do not concern the weights.
        table: the table of the file that describes the model, where it is not the whole.
        run: files in the run's folder, one above the checkpoint, in which the system's trainer leaves it.
    """

    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    require: tuple[tuple[str, str], ...] = ()
    ignored: frozenset[str] = frozenset()
    table: str | None = None
    run: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """How a system's config is written from what is known.

    Expressions are over axes, facts, forms and conventions of the target, `there.P` (whether parameter P is
    there), `source.C` (forms and conventions of the source), `dtype` (of the parameters) and `moments`. An attribute
    that begins with / stands outside of `config.table`, a dot in it goes one table deeper.

    Attributes:
        file: its name beside the tensors; None where the system keeps no such file.
        nested: whether the attributes are written into `config.table`.
        fixed: attribute → value that holds for every model of the family.
        attributes: attribute → expression, where it is not simply an axis or a fact; or [[expression, value], …], of
            which the first holds.
        replaced: attributes of a given config that say how the weights lie, which the target decides.
        nullable: attributes that are written as null where they have no value.
        cases: attribute → [[expression, value], …], where nothing else says: taken with a warning.
        defaults: attribute → the system's documented default (text is an expression): taken with a warning.
        notes: expression → a warning where it is true.
        words: name → expression, for the snippet.
        snippet: how the system loads it: {uri}, {file}, {lines} (attribute=value …) and the words.
    """

    file: str | None = None
    nested: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    attributes: Mapping[str, str | Cases] = field(default_factory=dict[str, "str | Cases"])
    replaced: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    cases: Mapping[str, Cases] = field(default_factory=dict[str, "Cases"])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: tuple[tuple[str, str], ...] = ()
    words: Mapping[str, str] = field(default_factory=dict[str, str])
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """How one system keeps the parameters of a family; the fields are described at the top of this module."""

    name: str
    about: str
    formats: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]]
    layouts: tuple[Row, ...]
    forms: Mapping[str, Form]
    conventions: Mapping[str, Convention]
    by_format: Mapping[str, Mapping[str, str]]
    stacks: Mapping[str, Stack]
    macros: Mapping[str, Mapping[str, str]]
    optimizers: Mapping[str, Optimizer]
    scalars: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]
    empties: Mapping[str, str]
    zeros: Mapping[str, str]
    names: Mapping[str, str]
    ignore: tuple[tuple[str, str], ...]
    accepts: tuple[tuple[str, str], ...]
    config: ConfigRules
    write: Write


@dataclass(frozen=True, slots=True)
class Family:
    """A model family; the fields are described at the top of this module."""

    name: str
    about: str
    model_types: tuple[str, ...]
    axes: Mapping[str, str]
    constants: Mapping[str, int]
    parameters: Mapping[str, Parameter]
    systems: Mapping[str, System]

    def system(self, name: str) -> System:
        """One of its systems.

        Raises:
            UsageError: it has no such system.
        """
        if name not in self.systems:
            raise UsageError(
                f"family {self.name} has no layouts for {name}", cure=f"it has {', '.join(self.systems)}"
            )
        return self.systems[name]
