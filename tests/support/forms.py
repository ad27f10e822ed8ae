"""Trees in the form of a system: the rule that puts any tree into it, since a system takes no other.

A key path as the source has it is foreign to a system; below `target`, for example, it is one that T5X restores.
"""

from __future__ import annotations

from wherry.formats.registry import find_format

# System → the rule, and the parts that it adds before and after a key path.
FORMS = {
    "maxtext": ("{rest*} -> params/params/decoder/{rest*}", ("params", "params", "decoder"), ()),
    "t5x": ("{rest*} -> target/{rest*}", ("target",), ()),
    "paxml": ("{rest*} -> mdl_vars/params/{rest*}", ("mdl_vars", "params"), ()),
    "huggingface-flax": ("{rest*} -> model/{rest*}/kernel", ("model",), ("kernel",)),
    "penzai": ("{rest*} -> {rest*}/data_array", (), ("data_array",)),
}


def form_of(to):
    """The row of FORMS for a format; without a rule for a container and for other systems."""
    return FORMS.get(find_format(to).system, ("", (), ()))


def names_for(to):
    """The names that a tree must have for a format that cannot get them by a rule."""
    return [path[-1] for path in find_format(to).holds.names]


def options_for(to):
    """The options with which any tree converts to a format."""
    rule = form_of(to)[0]
    return {"rename": rule} if rule else {}
