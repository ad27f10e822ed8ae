"""An inert pickle machine: it interprets the opcodes of a pickle, and imports and calls nothing.

A global is a pair of names that must be on the caller's exact allow-list; any other is refused by name
before the next opcode is read. A call becomes a `CallRecord` (callable, arguments, state), unless the allow-list has a
maker for it (an OrderedDict becomes a dict). The opcodes are those of protocols 0 to 5 that data needs; opcodes that
instantiate classes (INST, OBJ, EXT) are hostile, and are interpreted only to list the globals of a pickle
(`Rules.survey`).

Limits: every opcode takes at least one byte of input; the number of opcodes, the depth of marks and the length of
integers are limited, and keys are cheap to hash (`values.py`). A pickle may still build a small graph that is large
as a tree; code that walks the result must count nodes, as `flatten` of torch does.

Source of the opcodes: the documentation strings of CPython's `pickletools`.
"""

from __future__ import annotations

import codecs
import struct
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, UnsupportedError, WherryError
from wherry.integrations.containers.pickle.machine import (
    DICT_BYTES,
    LIST_BYTES,
    MAX_PIECE,
    NUMBER_BYTES,
    SET_BYTES,
    U1,
    U8,
    Machine,
)
from wherry.integrations.containers.pickle.values import PickleSource, Rules, checked_key, plain_number

if TYPE_CHECKING:
    from collections.abc import Callable


def load(data: PickleSource, rules: Rules, uri: str, start: int = 0) -> tuple[Any, int]:
    """Interpret one pickle.

    Args:
        data: bytes that contain it; only the bytes of its opcodes are read.
        rules: what it may contain.
        uri: where the bytes come from, for errors.
        start: its offset in `data`.

    Returns:
        The inert value, and the offset after the pickle's last byte.

    Raises:
        HostileError: it has a forbidden global, an opcode that instantiates a class, or a nested key, or
            exceeds a limit.
        UnsupportedError: an opcode or value is not supported.
        CorruptError: the pickle is truncated or invalid.
    """
    machine = Machine(data, rules, start)
    try:
        return machine.run(_OPCODES), machine.position
    except WherryError as error:
        error.uri = error.uri or uri
        raise
    except (
        IndexError,
        struct.error,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        what = f"invalid pickle at byte {machine.position}: {type(error).__name__}"
        raise CorruptError(
            what, uri=uri, cure="restore the file from a backup or download it again"
        ) from error


def is_opcode(first: bytes) -> bool:
    """Whether a byte is an opcode; a pickle that begins with another one cannot be read at all."""
    return bool(first) and first[0] in _OPCODES


def _text(form: struct.Struct) -> Callable[[Machine], None]:
    return lambda m: m.string(form, text=True)


def _bytes(form: struct.Struct) -> Callable[[Machine], None]:
    return lambda m: m.string(form, text=False)


def _old_text(form: struct.Struct) -> Callable[[Machine], None]:
    return lambda m: m.string(form, text=True, encoding="latin-1")


def _empty_list(m: Machine) -> None:
    m.made += LIST_BYTES
    m.stack.append([])


def _number(form: struct.Struct) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        m.made += NUMBER_BYTES
        m.stack.append(m.number(form))

    return push


def _quote(m: Machine) -> None:
    text = m.line(MAX_PIECE, "latin-1")
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":  # noqa: PLR2004
        raise CorruptError(
            "invalid pickle: a string has no quotes",
            cure="restore the file from a backup or download it again",
        )
    m.push(codecs.escape_decode(text[1:-1].encode("latin-1"))[0].decode("latin-1"))


def _decimal(m: Machine) -> None:
    m.made += NUMBER_BYTES
    m.push(plain_number(m.line().removesuffix("L")))


def _empty_set(m: Machine) -> None:
    m.spend(_SET_WORK)
    m.made += SET_BYTES
    m.push(set())


def _tuple3(m: Machine) -> None:
    if len(m.stack) < 3:  # noqa: PLR2004
        raise IndexError(3)
    m.made += 8 * 10
    items = tuple(m.stack[-3:])
    m.stack[-3:] = [items]


def _drop_group(m: Machine) -> None:
    m.pop_mark()


def _extension(form: struct.Struct) -> Callable[[Machine], None]:
    """A number that stands for a global in the registry of the reading process."""
    return lambda m: m.push_global("copyreg", f"extension {m.number(form)}")


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.push_global(module, name)


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items([key, value])


def _call(m: Machine) -> None:
    m.call(m.stack.pop())


def _new_object_ex(m: Machine) -> None:
    keywords = m.stack.pop()
    if keywords != {} and m.rules.survey is None:
        raise UnsupportedError("unsupported pickle: it creates an object with keyword arguments")
    m.call(m.stack.pop())


def _instance(m: Machine) -> None:
    args = m.pop_mark()
    m.push_global(m.line(), m.line())
    m.call(tuple(args))


def _object(m: Machine) -> None:
    wanted, *args = m.pop_mark()
    m.push(wanted)
    m.call(tuple(args))


def _dict_from_mark(m: Machine) -> None:
    items = m.pop_mark()
    m.made += DICT_BYTES
    m.push({})
    m.set_items(items)


def _list(m: Machine) -> None:
    items = m.pop_mark()
    m.made += LIST_BYTES + 8 * len(items)
    m.stack.append(items)


def _tuple(m: Machine) -> None:
    items = m.pop_mark()
    m.made += LIST_BYTES + 8 * len(items)
    m.stack.append(tuple(items))


def _decimal_fraction(m: Machine) -> None:
    m.made += NUMBER_BYTES
    m.push(float(m.line()))


def _line(m: Machine) -> None:
    text = m.line(MAX_PIECE, "raw-unicode-escape")
    m.made += 4 * len(text) + LIST_BYTES
    m.push(text)


def _out_of_band(_m: Machine) -> None:
    raise UnsupportedError(
        "unsupported pickle: its buffers are out of band", cure="save it without a buffer_callback"
    )


_SET_WORK = 32  # an empty set takes 216 bytes of memory for one byte of the pickle
_U2, _U4 = struct.Struct("<H"), struct.Struct("<I")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_OPCODES: dict[int, Callable[[Machine], None]] = {
    ord("\x80"): Machine.protocol,
    ord("\x95"): Machine.frame,
    ord("0"): Machine.drop,
    ord("1"): _drop_group,
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("N"): lambda m: m.push(None),
    ord("\x88"): lambda m: m.push(value=True),
    ord("\x89"): lambda m: m.push(value=False),
    ord("J"): _number(_I4),
    ord("M"): _number(_U2),
    ord("G"): _number(_F8),
    ord("I"): _decimal,
    ord("L"): _decimal,
    ord("F"): _decimal_fraction,
    ord("\x8a"): lambda m: m.integer(m.number(U1)),
    ord("\x8b"): lambda m: m.integer(m.number(_U4)),
    ord("X"): _text(_U4),
    ord("\x8c"): _text(U1),
    ord("\x8d"): _text(U8),
    ord("V"): _line,
    ord("S"): _quote,
    ord("B"): _bytes(_U4),
    ord("C"): _bytes(U1),
    ord("\x8e"): _bytes(U8),
    ord("\x96"): _bytes(U8),
    ord("\x97"): _out_of_band,
    ord("T"): _old_text(_U4),
    ord("U"): _old_text(U1),
    ord("]"): _empty_list,
    ord("\x8f"): _empty_set,
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.pop_mark()),
    ord("l"): _list,
    ord("t"): _tuple,
    ord("\x87"): _tuple3,
    ord("d"): _dict_from_mark,
    ord("s"): _set_item,
    ord("\x90"): lambda m: m.add_items(m.pop_mark()),
    ord("\x91"): lambda m: m.push(frozenset(checked_key(item) for item in m.pop_mark())),
    ord("q"): lambda m: m.put(m.number(U1)),
    ord("p"): lambda m: m.put(int(m.line())),
    ord("g"): lambda m: m.push(m.memo[int(m.line())]),
    ord("c"): lambda m: m.push_global(m.line(), m.line()),
    ord("\x93"): _stack_global,
    ord("R"): _call,
    ord("\x92"): _new_object_ex,
    ord("Q"): lambda m: m.persistent(m.stack.pop()),
    ord("P"): lambda m: m.persistent(m.line()),
    ord("i"): _instance,
    ord("o"): _object,
    ord("\x82"): _extension(U1),
    ord("\x83"): _extension(_U2),
    ord("\x84"): _extension(_U4),
}
