"""An inert pickle machine: it interprets the opcodes of a pickle, and imports and calls nothing.

A global is a pair of names that must be on the caller's exact allow-list; anything else is refused by name
before the next opcode is looked at. What a pickle would call becomes a `Record` (what, with which arguments,
which state), unless the allow-list gives a maker of our own for it (an OrderedDict becomes a dict). The
opcodes are those of protocols 2 to 5 that data needs; those that reach into classes (INST, OBJ, EXT) are hostile,
the text opcodes of protocol 0 are not read.

Limits: every opcode costs at least one byte of input, and opcodes, depth of marks and length of integers are
capped, keys are cheap to hash (`inert_values`). A pickle may still make a small graph that is large
as a tree; who walks the result must count, as `torch_tree` does.

Source of the opcodes: the documentation strings of CPython's `pickletools`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, UnsupportedError, WherryError
from wherry.integrations.containers.inert_values import checked_key
from wherry.integrations.containers.pickle_machine import U1, U8, Machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.integrations.containers.inert_values import Rules


def load(data: bytes, rules: Rules, uri: str, start: int = 0) -> tuple[Any, int]:
    """Interpret one pickle.

    Args:
        data: bytes that hold it.
        rules: what it may say.
        uri: where the bytes come from, for errors.
        start: where it begins.

    Returns:
        The inert value, and the offset after the pickle's last byte.

    Raises:
        HostileError: a global that is not allowed, a class-making opcode, a nested key, a cap that is exceeded.
        UnsupportedError: an opcode or value that is not read.
        CorruptError: the pickle ends early or contradicts itself.
    """
    machine = Machine(data, rules, start)
    try:
        return machine.run(_OPCODES), machine.position
    except WherryError as error:
        error.uri = error.uri or uri
        raise
    except (IndexError, struct.error, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"the pickle contradicts itself at byte {machine.position}: {type(error).__name__}"
        raise CorruptError(what, uri=uri, cure="fetch the file again, or restore it") from error


def _text(form: struct.Struct) -> Callable[[Machine], None]:
    return lambda m: m.push(m.take(m.number(form)).decode("utf-8"))


def _bytes(form: struct.Struct) -> Callable[[Machine], None]:
    return lambda m: m.push(m.take(m.number(form)))


def _constant(make: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda m: m.push(make())


def _number(form: struct.Struct) -> Callable[[Machine], None]:
    return lambda m: m.push(m.number(form))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.push_global(module, name)


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items([key, value])


def _set_items(m: Machine) -> None:
    items = m.pop_mark()
    m.set_items(items)


def _new_object_ex(m: Machine) -> None:
    keywords = m.stack.pop()
    if keywords != {}:
        raise UnsupportedError("a pickle that makes an object with keywords")
    m.call(m.stack.pop())


def _dict_from_mark(m: Machine) -> None:
    items = m.pop_mark()
    m.push({})
    m.set_items(items)


_U2, _U4 = struct.Struct("<H"), struct.Struct("<I")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_OPCODES: dict[int, Callable[[Machine], None]] = {
    ord("\x80"): Machine.protocol,
    ord("\x95"): Machine.frame,
    ord("("): Machine.push_mark,
    ord("0"): Machine.drop,
    ord("1"): Machine.drop_group,
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("N"): _constant(lambda: None),
    ord("\x88"): _constant(lambda: True),
    ord("\x89"): _constant(lambda: False),
    ord("J"): _number(_I4),
    ord("K"): _number(U1),
    ord("M"): _number(_U2),
    ord("G"): _number(_F8),
    ord("\x8a"): lambda m: m.integer(m.number(U1)),
    ord("\x8b"): lambda m: m.integer(m.number(_U4)),
    ord("X"): _text(_U4),
    ord("\x8c"): _text(U1),
    ord("\x8d"): _text(U8),
    ord("B"): _bytes(_U4),
    ord("C"): _bytes(U1),
    ord("\x8e"): _bytes(U8),
    ord("T"): lambda m: m.binary_text(_U4),
    ord("U"): lambda m: m.binary_text(U1),
    ord("]"): _constant(list),
    ord(")"): _constant(tuple),
    ord("}"): _constant(dict),
    ord("\x8f"): _constant(set),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.pop_mark()),
    ord("l"): lambda m: m.push(m.pop_mark()),
    ord("t"): lambda m: m.push(tuple(m.pop_mark())),
    ord("\x85"): lambda m: m.tuple_of(1),
    ord("\x86"): lambda m: m.tuple_of(2),
    ord("\x87"): lambda m: m.tuple_of(3),
    ord("d"): _dict_from_mark,
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("\x90"): lambda m: m.add_items(m.pop_mark()),
    ord("\x91"): lambda m: m.push(frozenset(checked_key(item) for item in m.pop_mark())),
    ord("\x94"): lambda m: m.put(len(m.memo)),
    ord("q"): lambda m: m.put(m.number(U1)),
    ord("r"): lambda m: m.put(m.number(_U4)),
    ord("h"): lambda m: m.push(m.memo[m.number(U1)]),
    ord("j"): lambda m: m.push(m.memo[m.number(_U4)]),
    ord("c"): lambda m: m.push_global(m.line(), m.line()),
    ord("\x93"): _stack_global,
    ord("R"): lambda m: m.call(m.stack.pop()),
    ord("\x81"): lambda m: m.call(m.stack.pop()),
    ord("\x92"): _new_object_ex,
    ord("b"): Machine.build,
    ord("Q"): Machine.persistent,
}
