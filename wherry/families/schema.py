"""The schema of a family file: canonical parameters, their axes, and how each system stores them.

A family is one TOML file; those in this folder and those that a user passes with `--family-file` have the same form
and pass the same checks. An unknown field is an error.

    name, about, model_types (of Hugging Face configs); extends: another family, of which this one changes parts
    distinction            an expression over the attributes of a Hugging Face config: of several families with one
                           model type it chooses the one for which it is true
    yields_to              a family with the same tensors in other systems: if both fit a checkpoint of such a system,
                           and it names neither, it is one of that family
    [axes]                 axis → meaning
    [constants]            axis → extent that holds for every model of the family whose config does not state another
    [facts]                fact → meaning, or {about, when, outputs, named, fits}: properties of a model other than
                           extents, in one spelling. Every system reads, assumes or absorbs each that changes outputs
    [parameters]           name → "axes", or {axes, optional, tie, part}: canonical, in Hugging Face's order
    [systems.S]
      about, formats       a description; the formats of this system's checkpoints
      like                 a system with the same config file: `config` and `write` are its own, with the changes here.
                           This system's software may ignore what such a config says: a source whose config states
                           another value than `assumes` or `accepts` allow is refused
      yields_to            as of the family, in this system alone
      forms.F              choices of the form on disk (scanned or not): detected in a source, chosen for a
                           target; [choices] or {choices, config, kept}, the first being the default. Models that
                           transformers 5 names otherwise in memory (`wherry.layout.memory_names`) have the form `names`
                           in `huggingface`, with rows of both names, without a declaration
      conventions.C        choices that are not stored on disk (rotary layout): {choices, why, config, facts, default,
                           always, models}; the expressions give a choice from this system's config, or from the facts
                           of the other's
      by_format.N          forms that a format implies
      stacks.K             {axis, form, stacked, unrolled, at}: <K> in a key path is `stacked`, with the axis
                           inserted as dimension `at` (a number or a form), or `unrolled`; of several axes, as of a
                           stack within a stack, each is a dimension
      macros.M             {by, choice = text, …}: <M> in a key path, axes, word or slot, by a form or convention, or by
                           several (then a choice is one of each, separated by spaces); if the text is "-" the layout
                           does not exist
      slots.T              location of the parameters (`params`): a key path with @ for the parameter's own
      optimizers.O         {slots, scalars, written, lists, empties, without, filler}: location of the moments; * stands
                           for a part that varies, and then `written` states where slots and scalars are written:
                           an entry that begins with + is for stacked layers (%axis% is the size of their axis), the
                           others for all other layers; a scalar is repeated for every layer there
      bare                 {empties, zeros, forms}: the target's tree if no moments are carried: its nodes,
                           key path → element type of a number that is 0, and forms other than the default
      scalars.N            key paths of one number that belongs to the run (step); the first is written, all are read
      tied.P               the key path of a second copy of the parameter that P is tied to, which this system stores
      copies.P             key paths of second copies of P that a source of this system may have, and no target gets
      untied               parameter → expression over facts and `there.P`: if it is true this system stores even a tied
                           one, as a copy of the parameter that it is tied to
      names                the system's names for axes, if its checkpoints store names
      layouts.P            [key path, axes, word …] of parameter P; {key, axes, along, each} of several, joined by +;
                           a key path that begins with // is not below a slot
      ignore               [[pattern, reason, when], …]: tensors that do not belong to the model; ** stands for several
                           parts; with `when`, only if this expression over the config's attributes and the facts is
                           true, which may read `index`: the first number for which a * stands
      apart                [[start, mark, reason], …]: modules that only this system has: every tensor whose name begins
                           with `start`, if the name `start` + `mark` exists; a conversion within the system carries
                           them unchanged, another one leaves them out for the reason
      towers               [[start, what], …]: modules for images or sound in addition to a text model: every tensor
                           whose name begins with `start`; a conversion within the system carries them unchanged,
                           another one leaves them out only if the user states `--ignore others`
      accepts              [[expression over the known names, reason, cure], …]: what a target of this system can hold;
                           {F} in the reason stands for fact F of the expression; the cure is the option with which the
                           target can hold the model, if there is one
      assumes              fact → the value that this system's software always uses, whatever the config says (text is
                           an expression): what a checkpoint of it means, and what a target can hold
      presumes             fact → the documented value of this system's models (an expression), used with a warning for
                           a source if nothing states it
      absorbs              fact → why a target holds every value of it: the layout's words put it into the weights
      config               {table, defaults, sizes, facts, require, usual, implied, ignored, run}: the meaning of
                           attributes; others are errors. `systems/S.toml` states what holds for S in every family
      write                the config that accompanies a checkpoint of this system, and how it is loaded: {file, nested,
                           fixed, attributes, replaced, nullable, tabled, defaults, token_ids, notes, words, snippet}.
                           An axis or fact that `config` reads from one attribute is written to it without a
                           declaration; see Write
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeAlias

from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UsageError
from wherry.layout.expr import evaluate

Cases: TypeAlias = tuple[tuple[str, Any], ...]  # expression, and the value if it is true


@dataclass(frozen=True, slots=True)
class Parameter:
    """A canonical parameter.

    Attributes:
        axes: its axes, in canonical order.
        optional: whether it may be missing in a model.
        tie: the parameter that it equals if it is missing.
        part: parameters of one part exist together or not at all (a decoder, gated projections).
    """

    axes: tuple[str, ...]
    optional: bool = False
    tie: str | None = None
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A property of a model that its config states.

    Attributes:
        about: its meaning, for messages.
        when: an expression over the known names; the fact means nothing for a model if it is not true.
        outputs: whether it changes what the model computes; others are carried where both configs state them.
        named: word → expression: values that a user can state by a word.
        fits: an expression over sizes and facts, false if the tensors show that a stated value is not the model's.
    """

    about: str
    when: str | None = None
    outputs: bool = True
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    fits: str | None = None

    def stated(self, text: str) -> Any:
        """The value that a user states: one of the words, JSON, or text."""
        if text in self.named:
            return evaluate(self.named[text], {})
        try:
            return json_value(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class Form:
    """Choices of the form in which a system stores its checkpoints.

    Attributes:
        choices: possible values; the first is the default.
        config: an expression over this system's config.
        kept: whether a target has the form of a source that has a form of this name too.
    """

    choices: tuple[str, ...]
    config: str | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Convention:
    """A property that a checkpoint does not store.

    Attributes:
        choices: possible values.
        why: a description, for the error message.
        config: an expression over this system's config.
        facts: an expression over the facts of the other system's config.
        default: the value if nothing states it, with which every model computes the same; None makes that an error.
        always: the value with which the system's software computes every model, whatever a config states.
        models: choice → the models that have it, for the error message.
    """

    choices: tuple[str, ...]
    why: str
    config: str | None = None
    facts: str | None = None
    default: str | None = None
    always: str | None = None
    models: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def usual(self) -> str:
        """A choice for what does not depend on it, such as the names of tensors."""
        return self.always or self.default or self.choices[0]


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
    """The location of an optimizer's state.

    Attributes:
        slots: moment → key path with @.
        scalars: name → key paths.
        written: slot or scalar → key paths for a target, if the others contain a *.
        lists, empties: nodes of the target's tree that are not tensors.
        without: slot → axes that it does not have (the factored moments of Adafactor).
        filler: element type of the zeros of shape [1] that are stored for a missing moment.
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
        parameters: their names; several are concatenated along a dimension.
        key: the key path, with macros.
        axes: of each parameter.
        along: the dimension, if there are several.
        each: the outermost axis of that dimension for each index of which they follow one another anew.
        words: value words.
    """

    parameters: tuple[str, ...]
    key: str
    axes: tuple[str, ...]
    along: int = 0
    words: tuple[str, ...] = ()
    each: str | None = None


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """The meaning of the attributes of a system's config.

    Attributes:
        defaults: attribute → the value that the system's software uses if the config does not state the attribute (text
            is an expression); a stated null is not a default.
        sizes: axis → expression.
        facts: fact → expression.
        require: expression → the reason of the error if it is false.
        usual: attribute → the only supported value (text is an expression), of attributes that other families or
            versions use; null counts as it.
        implied: optional parameter or part → expression: a model with this config has it if it is true, and does not
            if it is false; `there.P` is whether parameter P exists.
        ignored: attribute → the reason why its value cannot change an output, which begins with its class: record,
            device, data, training or tower; of a family also unread (by the code of its model) and shown (by the
            tensors). A pattern with * does not outrank `usual`, a name does.
        table: the table of the file that describes the model, if it is not the whole file.
        run: files in the run's folder, one above the checkpoint, in which the system's trainer stores it.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    require: tuple[tuple[str, str], ...] = ()
    usual: Mapping[str, Any] = field(default_factory=dict[str, Any])
    implied: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])
    table: str | None = None
    run: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """How a system's config is written.

    Expressions are over axes, facts, forms and conventions of the target, `there.P` (whether parameter P exists),
    `copied.P` (whether it is stored although it is tied),
    `source.C` (forms and conventions of the source), `dtype` (of the parameters) and `moments`. An attribute
    that begins with / is outside of `config.table`; a dot in it leads one table deeper.

    Attributes:
        file: its name, next to the tensors; None if the system has no such file.
        nested: whether the attributes are written into `config.table`.
        fixed: attribute → value for every model of the family.
        attributes: attribute → expression, if it is not simply an axis or a fact; or [[expression, value], …], of
            which the first that is true counts.
        replaced: attributes of a given config that describe the layout of the weights, which the target decides.
        nullable: attributes that are written as null if they have no value.
        tabled: form → the choices that are names of a model whose config has `config.table`.
        defaults: attribute → the system's documented default (text is an expression), used with a warning if nothing
            else states it; not for what changes an output.
        token_ids: attributes with the numbers of special tokens, which a user may state.
        notes: expression → a warning if it is true.
        words: name → expression, for the snippet.
        snippet: how the system loads it: {uri}, {file}, {lines} (attribute=value …) and the words.
    """

    file: str | None = None
    nested: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    attributes: Mapping[str, str | Cases] = field(default_factory=dict[str, "str | Cases"])
    replaced: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    tabled: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    token_ids: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    words: Mapping[str, str] = field(default_factory=dict[str, str])
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """How one system stores the parameters of a family; the module docstring describes the fields."""

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
    copies: Mapping[str, tuple[str, ...]]
    untied: Mapping[str, str]
    empties: Mapping[str, str]
    zeros: Mapping[str, str]
    bare_forms: Mapping[str, str]
    names: Mapping[str, str]
    ignore: tuple[tuple[str, str, str], ...]
    apart: tuple[tuple[str, str, str], ...]
    towers: tuple[tuple[str, str], ...]
    accepts: tuple[tuple[str, str, str], ...]
    assumes: Mapping[str, Any]
    presumes: Mapping[str, str]
    absorbs: Mapping[str, str]
    config: ConfigRules
    write: Write
    like: str | None = None
    yields_to: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model family; the module docstring describes the fields."""

    name: str
    about: str
    model_types: tuple[str, ...]
    distinction: str | None
    yields_to: str | None
    axes: Mapping[str, str]
    constants: Mapping[str, int]
    parameters: Mapping[str, Parameter]
    facts: Mapping[str, Fact]
    systems: Mapping[str, System]

    def yields_in(self, system: str) -> str | None:
        """The family that a checkpoint of this system belongs to if it fits both and names neither."""
        own = self.systems.get(system)
        return (own.yields_to if own else None) or self.yields_to

    def system(self, name: str) -> System:
        """One of the family's systems, by name.

        Raises:
            UsageError: the family has no layouts for it.
        """
        if name not in self.systems:
            raise UsageError(
                f"family {self.name} has no layouts for {name}",
                cure=f"choose one of: {', '.join(self.systems)}",
            )
        return self.systems[name]
