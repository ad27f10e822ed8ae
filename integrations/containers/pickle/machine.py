"""An inert pickle machine: it interprets the opcodes of a pickle, and imports and calls nothing.

A global is a pair of names that must be on the caller's exact allow-list; any other is refused by name
before the next opcode is read. A call becomes a `CallRecord` (callable, arguments, state), unless the allow-list has a
maker for it (an OrderedDict becomes a dict). The opcodes are those of protocols 0 to 5 that data needs; opcodes that
instantiate classes (INST, OBJ, EXT) are hostile, and are interpreted only to list the globals of a pickle
(`Rules.survey`).

Limits: every opcode takes at least one byte of input; the number of opcodes, the depth of marks and the length of
integers are limited, and keys are cheap to hash (`values.py`). A pickle may still build a small graph that is large
as a tree; code that walks the result must count nodes, as `flatten` of torch does.

The state is stack, marks and memo. The loop executes the most frequent opcodes of large metadata itself (the
`.metadata` of 115,000 chunks is eight million opcodes, six million of them these); all others are functions of the
table.

Source of the opcodes: the documentation strings of CPython's `pickletools`.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable, Mapping
from sys import intern
from typing import Any

from wherry.core.limits import beyond, scale_limit
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import CorruptError, HostileError, UnsupportedError, WherryError
from wherry.integrations.containers.pickle.values import (
    Attributes,
    Buildable,
    CallRecord,
    Far,
    Global,
    Opaque,
    PickleSource,
    Rules,
    checked_key,
    plain_number,
)

MAX_OPCODES = 20_000_000
U1, U8 = struct.Struct("<B"), struct.Struct("<Q")
_MAX_DEPTH = 1000
_MAX_INTEGER = 64  # bytes
MAX_PIECE = 1 << 29  # bytes of one string that is read into memory
_MAX_NAME = 500
_FREE_WORK = 1_000_000
_MOST_BYTES = 288 << 20  # of all values: `.metadata` of 130,000 tensors
_CHECKED = 1 << 16  # opcodes between two checks of memory
DICT_BYTES, LIST_BYTES, SET_BYTES, NUMBER_BYTES = 72, 64, 224, 40  # with the place on the stack
_TUPLE_BYTES, _TEXT_BYTES, _CALL_BYTES, _ITEM_BYTES, _MEMO_BYTES = 60, 64, 96, 24, 100
_WORK_A_BYTE = 4
_LAST_PROTOCOL = 5
_HOSTILE = frozenset(b"io\x82\x83\x84")  # INST OBJ EXT1 EXT2 EXT4
_STOP, _MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _EMPTY_TUPLE, _TUPLE1, _TUPLE2 = b".\x94hjK)\x85\x86"
_MARK, _EMPTY_DICT, _SETITEMS, _LONG_BINPUT, _BUILD = b"(}urb"
# By its name from protocol 3, and before.
_GETATTR = frozenset(Global(module, "getattr") for module in ("builtins", "__builtin__"))
_CALLS = b"\x81R"  # NEWOBJ REDUCE
_OBJECT = b"\x81}("  # NEWOBJ EMPTY_DICT MARK, after EMPTY_TUPLE: an object, and then its attributes
_OBJECT_BEGINS = b")" + _OBJECT
_BININT, _EMPTY_LIST, _BINUNICODE = b"J]X"
# A plain operand: a value of the memo, an integer, or a list of values of the memo. Objects whose attributes are such
# are read at once.
_OPERAND = rb"(h.|j.{4}|K.|M.{2}|J.{4}|\]\((?:h.|j.{4}){1,32}e)"
_OPERANDS, _GETS, _END = re.compile(_OPERAND, re.DOTALL), b"hj", b"ub"  # the last are SETITEMS and BUILD
_NEXT, _MOST_AT_ONCE = (
    9,
    8,
)  # bytes up to the attributes of the next object; objects between two checks of memory
_PLAIN = re.compile(rb"(?:%b){2,32}%b" % (_OPERAND, _END), re.DOTALL)


class SparseMemo(dict[int, Any]):
    """A memo whose numbers have gaps, such as those of Python 2, which begin at 1."""

    def append(self, value: Any) -> None:
        """Store a value under the next number."""
        self[len(self)] = value


class Machine:
    """Stack, marks and memo of one run."""

    def __init__(self, data: PickleSource, rules: Rules, start: int) -> None:
        self.data = data
        self.rules = rules
        self.position = start
        self.start = start
        self.size = len(data)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] | SparseMemo = []
        self.made = 0
        self._most = scale_limit(_MOST_BYTES)
        self._far = rules.far or MAX_PIECE
        self._work = 0
        self._held = data if type(data) is bytes else b""  # in which objects with usual attributes are found
        self._usual = rules.attributes
        self._patterns: dict[Global, re.Pattern[bytes]] = {}  # of such objects
        # The operands and the values of the last one.
        self._before: dict[Global, tuple[tuple[bytes, ...], tuple[Any, ...]]] = {}
        self._recorded: dict[int, Any] = {}  # by identity: classes of which an object is a record
        self._open_getattr: Global | None = None  # was imported, and has named no member so far

    def run(self, table: Mapping[int, Callable[[Machine], None]]) -> Any:  # noqa: C901, PLR0912, PLR0915  each branch saves millions of calls
        """Interpret opcodes up to STOP; return the one value that is then on the stack."""
        data, memo, position, stack = self.data, self.memo, self.position, self.stack
        size, made, short = self.size, 0, min(_MAX_NAME, self._far)
        for _ in range(-(-MAX_OPCODES // _CHECKED)):
            if made + self.made + 8 * (len(self.memo) + len(self.stack)) > self._most:
                raise beyond("the pickle", self._most, "bytes of values in memory")
            for _ in range(_CHECKED):
                if position >= size:
                    raise CorruptError("the pickle is truncated: missing STOP opcode", cure=_AGAIN)
                opcode = data[position]
                position += 1
                if opcode == _MEMOIZE:
                    memo.append(stack[-1])
                elif opcode == _BINGET:
                    stack.append(memo[data[position]])
                    position += 1
                elif opcode == _LONG_BINGET:
                    stack.append(memo[int.from_bytes(data[position : position + 4], "little")])
                    position += 4
                elif opcode == _TUPLE1:
                    stack[-1], made = (stack[-1],), made + _TUPLE_BYTES
                elif opcode in _CALLS:
                    self.position = position
                    self.call(stack.pop())
                elif opcode == _MARK:
                    self.push_mark()
                    stack = self.stack
                elif opcode == _EMPTY_TUPLE:
                    if data[position : position + 3] == _OBJECT:
                        self.position = position + 3
                        self.object_with_attributes()
                        position, stack = self.position, self.stack
                    else:
                        stack.append(())
                elif opcode == _BININT1:
                    stack.append(data[position])
                    position += 1
                elif opcode == _BUILD:
                    self.build()
                elif opcode == _SETITEMS:
                    items = self.pop_mark()
                    stack = self.stack
                    self.set_items(items)
                elif opcode == _EMPTY_DICT:
                    stack.append({})
                    made += DICT_BYTES
                elif opcode == _TUPLE2:
                    last = stack.pop()
                    stack[-1], made = (stack[-1], last), made + _TUPLE_BYTES
                elif opcode == _LONG_BINPUT:
                    self.stack = stack
                    self.put(int.from_bytes(data[position : position + 4], "little"))
                    memo, position = self.memo, position + 4
                elif opcode == _BINUNICODE and (
                    (length := int.from_bytes(data[position : position + 4], "little")) < short
                    and (stop := position + 4 + length) < size
                ):
                    piece = data[position + 4 : stop]
                    made += _TEXT_BYTES + length * (1 if piece.isascii() else 4)
                    stack.append(
                        intern(piece.decode("utf-8", "surrogatepass"))
                    )  # the source has the same names
                    position = stop
                else:
                    self.position = position
                    if opcode == _STOP:
                        return self._result()
                    act = table.get(opcode)
                    if act is None or (opcode in _HOSTILE and self.rules.survey is None):
                        raise _refusal(opcode, position - 1)
                    act(self)
                    position, stack, memo = self.position, self.stack, self.memo
        raise HostileError(
            f"the pickle exceeds the limit of {MAX_OPCODES} opcodes", cure="do not use this file"
        )

    def _result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise CorruptError("invalid pickle: several values at STOP", cure=_AGAIN)
        if self._open_getattr:
            raise self._not_allowed(self._open_getattr)
        return self.stack.pop()

    def push(self, value: Any) -> None:
        """Push a value onto the stack of the current group."""
        self.stack.append(value)

    def drop(self) -> None:
        """Drop the last value, or the mark if no value follows it."""
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def take(self, length: int) -> bytes:
        """The next bytes."""
        start, stop = self.position, self.position + length
        if not start <= stop <= self.size:
            self._after(length)
        if length > MAX_PIECE:
            raise UnsupportedError(f"string of {length} bytes in the pickle exceeds the limit of {MAX_PIECE}")
        self.position = stop
        return self.data[start:stop]

    def _after(self, length: int) -> int:
        stop = self.position + length
        if length < 0 or stop > self.size:
            raise CorruptError(
                f"the pickle is truncated: expected {length} bytes at {self.position}, got {self.size - self.position}",
                cure=_AGAIN,
            )
        return stop

    def string(self, form: struct.Struct, *, text: bool, encoding: str = "utf-8") -> None:
        """A byte string or text after its length; a long one stays in the file, as `Far`."""
        length = self.number(form)
        if self.rules.far is not None and length >= self._far:
            far = Far(self.position, length, text=text and encoding == "utf-8")
            self.position = self._after(length)
            self.stack.append(far)
            return
        piece = self.take(length)
        self.made += _TEXT_BYTES + length * (1 if piece.isascii() or not text else 4)
        self.stack.append(
            piece.decode(encoding, "surrogatepass" if encoding == "utf-8" else "strict") if text else piece
        )

    def number(self, form: struct.Struct) -> int:
        """The next number of this form."""
        (value,) = form.unpack(self.take(form.size))
        return value

    def line(self, most: int = _MAX_NAME, encoding: str = "utf-8") -> str:
        """The next text up to a line end."""
        stop = self.data.find(b"\n", self.position, min(self.position + most, self.size))
        if stop < 0:
            raise CorruptError("invalid pickle: a line has no end", cure=_AGAIN)
        text = self.data[self.position : stop].decode(encoding)
        self.position = stop + 1
        return text

    def pop_mark(self) -> list[Any]:
        """Everything since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def push_mark(self) -> None:
        """Begin a group."""
        if len(self.marks) >= _MAX_DEPTH:
            raise HostileError(f"the pickle nests deeper than {_MAX_DEPTH}", cure="do not use this file")
        self.marks.append(self.stack)
        self.stack = []

    def push_global(self, module: Any, name: Any) -> None:
        """Push a global, which must be allowed."""
        wanted = Global(module, name)
        if self.rules.survey is not None:
            self.rules.survey(Global(str(module)[:_MAX_NAME], str(name)[:_MAX_NAME]), self.position)
        elif type(module) is not str or type(name) is not str:
            raise CorruptError("invalid pickle: the name of a global is not a string", cure=_AGAIN)
        elif wanted in _GETATTR and self.rules.members and not self._open_getattr:
            self._open_getattr = wanted
        elif wanted not in self.rules.allowed and str(wanted) not in self.rules.opaque:
            raise self.rules.refusal(wanted) or self._refused_within(wanted) or self._not_allowed(wanted)
        self.stack.append(wanted)

    def _not_allowed(self, wanted: Global) -> HostileError:
        return HostileError(
            f"the pickle imports {str(wanted)[:_MAX_NAME]!r} at byte {self.position}, which is not allowed",
            cure=Cure(
                "do not load this file with pickle or torch, because it could run code; run {} to list "
                "its imports, or pass {} to read around a harmless class",
                Command("inspect", Argument("pickles")),
                Argument("allow-opaque", Blank("NAME")),
            ),
        )

    def _member(self, wanted: Global, args: tuple[Any, ...]) -> CallRecord:
        """The member of an enumeration that `getattr` names; nothing else is called between its import and that.

        Raises:
            HostileError: it names anything else.
        """
        match args:
            case (Global() as kind, str() as name) if wanted in _GETATTR and name in self.rules.members.get(
                kind, {}
            ):
                return CallRecord(kind, (self.rules.members[kind][name],))
            case _:
                raise self._not_allowed(self._open_getattr or wanted)

    def _refused_within(self, wanted: Global) -> WherryError | None:
        """The error of a global that is not allowed, from the function to whose arguments it belongs."""
        around = self.marks[-1] if self.marks else []
        function = around[-1] if around else None
        found = self.rules.within.get(function) if type(function) is Global else None
        return found and found(wanted, self.stack[-1] if self.stack else None)

    def call(self, args: Any) -> None:
        """Push the result of a call, without calling."""
        wanted = self.stack.pop()
        self.made += _CALL_BYTES
        if self.rules.survey is not None:
            self.stack.append(CallRecord(Global("", "call"), (wanted, args)))
            return
        if type(wanted) is not Global or type(args) is not tuple:
            raise CorruptError("invalid pickle: it calls something other than a global", cure=_AGAIN)
        if wanted.name == "getattr" or self._open_getattr:
            self.stack.append(self._member(wanted, args))
            self._open_getattr = None
            return
        maker = self.rules.allowed.get(wanted)
        for arg in args:  # makers process the items: hostile pickles pass one sequence to many makers
            if type(arg) in _SIZED:
                self.spend(len(arg))
        self.stack.append(CallRecord(wanted, args) if maker is None else maker(args))

    def spend(self, work: int) -> None:
        """Count the work of opcodes beyond their own bytes."""
        self._work += work
        if self._work > _FREE_WORK + (self.position - self.start) * _WORK_A_BYTE:
            raise HostileError("the pickle copies the same data repeatedly", cure="do not use this file")

    def build(self) -> None:
        """Store the state that the pickle sets on an object."""
        state = self.stack.pop()
        target = self.stack[-1]
        kind = type(target)
        if kind is CallRecord:
            target.state = state
        elif kind is Attributes and type(state) is dict:
            target.update(state)
        elif isinstance(target, Buildable):
            target.build(state)
        elif (kind is not dict or type(state) is not dict) and self.rules.survey is None:
            # State of a dict is not among its items and is dropped: torch's `_metadata` of a state dict.
            raise CorruptError("invalid pickle: it sets the state of a plain value", cure=_AGAIN)

    def object_with_attributes(self) -> None:
        """Make an object and set its attributes, as BUILD does, if they are usual ones, as in large metadata.

        What else follows is left to the other opcodes, with the stack as they would have it. Objects of a class that
        follow one another share the values that have the same opcodes, in which no opcode can change anything.
        """
        for left in reversed(range(_MOST_AT_ONCE)):
            self._new_object()
            record = self.stack[-1]
            if not (type(record) is CallRecord and record.kind in self._usual and self._set_usual(record)):
                self.made += DICT_BYTES
                self.stack.append({})
                self.push_mark()
                return
            following = self._held[self.position : self.position + _NEXT]
            if not left or following[:1] != b"j" or following[5:] != _OBJECT_BEGINS:
                return
            self.stack.append(self.memo[int.from_bytes(following[1:5], "little")])
            self.position += _NEXT

    def _set_usual(self, record: CallRecord) -> bool:
        """Set the values of the usual attributes as the state of a record; False if other opcodes follow."""
        kind = record.kind
        pattern = self._patterns.get(kind) or self._learn(kind)
        found = pattern and pattern.match(self._held, self.position)
        if not found:
            return False
        operands, (before, values) = found.groups(), self._before[kind]
        if operands != before:
            other = self._operand
            values = tuple(
                [
                    value if one == known else other(one)
                    for one, known, value in zip(operands, before, values, strict=True)
                ]
            )
            self.made += 16 * len(values)
            self._before[kind] = operands, values
        record.state = values
        self.position = found.end()
        return True

    def _learn(self, kind: Global) -> re.Pattern[bytes] | None:
        """The pattern of an object of this class, from the next one; None if that is none with usual attributes."""
        found = _PLAIN.match(self._held, self.position)
        operands = [] if found is None else _OPERANDS.findall(self._held, self.position, found.end())
        names = operands[::2]
        if list(map(self._operand, names)) != self._usual[kind]:
            return None
        parts = (re.escape(name) + _OPERAND for name in names)
        pattern = self._patterns[kind] = re.compile(b"".join(parts) + _END, re.DOTALL)
        self._before[kind] = (b"",) * len(names), (None,) * len(names)
        return pattern

    def _operand(self, operand: bytes) -> Any:
        """The value of a plain operand."""
        opcode, number = operand[0], operand[1:]
        if opcode in _GETS:
            return self.memo[int.from_bytes(number, "little")]
        if opcode != _EMPTY_LIST:
            return int.from_bytes(number, "little", signed=opcode == _BININT)
        values = [self._operand(one) for one in _OPERANDS.findall(operand, 2)]
        self.made += LIST_BYTES + 8 * len(values)
        return values

    def _new_object(self) -> None:
        """Push an object that is created without arguments; classes without a maker are looked up once."""
        wanted = self.stack[-1]
        if wanted is self._recorded.get(id(wanted)) and not self._open_getattr:
            self.made += _CALL_BYTES
            self.stack[-1] = CallRecord(wanted, ())
            return
        self.call(())
        if (
            type(wanted) is Global
            and self.rules.survey is None
            and self.rules.allowed.get(wanted, "") is None
        ):
            self._recorded[id(wanted)] = wanted

    def set_items(self, items: list[Any]) -> None:
        """Put keys and values into the dict on top of the stack."""
        target = self.stack[-1]
        self.made += _ITEM_BYTES * len(items)
        if type(target) is CallRecord:
            target.add(items)
            return
        if (type(target) is not dict and type(target) is not Attributes) or len(items) % 2:
            raise CorruptError("invalid pickle: it sets items of something other than a dict", cure=_AGAIN)
        for index in range(0, len(items), 2):
            key = items[index]
            plain = type(key) is str or type(key) is CallRecord
            target[key if plain else checked_key(key)] = items[index + 1]

    def extend(self, items: list[Any]) -> None:
        """Append items to the list on top of the stack."""
        target = self.stack[-1]
        self.made += 8 * len(items)
        if type(target) is CallRecord:
            target.add(items)
        elif type(target) is Opaque and type(target.value) is list:
            target.value.extend(items)
        elif type(target) is not list:
            raise CorruptError("invalid pickle: it appends to something other than a list", cure=_AGAIN)
        else:
            target.extend(items)

    def add_items(self, items: list[Any]) -> None:
        """Add members to the set on top of the stack."""
        if type(self.stack[-1]) is not set:
            raise CorruptError("invalid pickle: it adds to something other than a set", cure=_AGAIN)
        self.made += _MEMO_BYTES * len(items)
        self.stack[-1].update(checked_key(item) for item in items)

    def integer(self, length: int) -> None:
        """Push an integer of `length` bytes."""
        if length > _MAX_INTEGER:
            raise HostileError(
                f"integer of {length} bytes in the pickle exceeds the limit of {_MAX_INTEGER}",
                cure="do not use this file",
            )
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def persistent(self, identity: Any) -> None:
        """Push the value of a persistent id, which the format defines."""
        if self.rules.persistent is None:
            raise CorruptError("invalid pickle: unexpected persistent id", cure=_AGAIN)
        self.stack.append(self.rules.persistent(identity))

    def protocol(self) -> None:
        """Check the protocol version."""
        version = self.number(U1)
        if version > _LAST_PROTOCOL:
            raise UnsupportedError(f"unsupported pickle protocol {version}")

    def frame(self) -> None:
        """Check the length of the next frame."""
        length = self.number(U8)
        if length > self.size - self.position:
            raise CorruptError(
                f"the pickle is truncated: expected a frame of {length} bytes, got {self.size - self.position}",
                cure=_AGAIN,
            )

    def put(self, key: int) -> None:
        """Store the last value in the memo; almost all pickles number its entries without gaps, from 0."""
        if key == len(self.memo):
            self.memo.append(self.stack[-1])
            return
        if key > len(self.memo) and type(self.memo) is list:
            self.memo = SparseMemo(enumerate(self.memo))
        self.made += _MEMO_BYTES
        self.memo[key] = self.stack[-1]
        self._usual = {}  # what was learned of the memo may no longer be so


_AGAIN = "restore the file from a backup or download it again"
_SIZED = frozenset({str, bytes, list, tuple, dict, set, frozenset, Attributes})


def _refusal(opcode: int, position: int) -> WherryError:
    where = f"opcode {bytes([opcode])!r} at byte {position}"
    if opcode in _HOSTILE:
        return HostileError(f"the pickle creates objects of classes: {where}", cure="do not use this file")
    return UnsupportedError(f"unsupported pickle: {where}")


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
