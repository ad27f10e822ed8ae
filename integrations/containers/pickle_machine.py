"""The inert pickle machine's parts: stack, marks, memo, and what each kind of opcode does to them.

`inert_pickle` has the table of opcodes and the promises; nothing here imports or calls what a pickle names.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, HostileError, UnsupportedError, WherryError
from wherry.integrations.containers.inert_values import Attributes, Global, Record, Rules, checked_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_OPCODES = 20_000_000
STOP = ord(".")
U1, U8 = struct.Struct("<B"), struct.Struct("<Q")
_MAX_DEPTH = 1000
_MAX_INTEGER = 64  # bytes
_MAX_NAME = 500
_FREE_WORK = 1_000_000
_LAST_PROTOCOL = 5
_HOSTILE = frozenset(b"io\x82\x83\x84")  # INST OBJ EXT1 EXT2 EXT4


class Machine:
    """Stack, marks and memo of one run."""

    def __init__(self, data: bytes, rules: Rules, start: int) -> None:
        self.data = data
        self.rules = rules
        self.position = start
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._work = _FREE_WORK + len(data) * 4

    def run(self, table: Mapping[int, Callable[[Machine], None]]) -> Any:
        """Interpret opcodes up to STOP; the one value that is then on the stack."""
        data = self.data
        for _ in range(MAX_OPCODES):
            if self.position >= len(data):
                raise CorruptError(
                    "the pickle ends before its STOP", cure="fetch the file again, or restore it"
                )
            opcode = data[self.position]
            self.position += 1
            if opcode == STOP:
                return self._result()
            act = table.get(opcode)
            if act is None:
                raise _refused(opcode, self.position - 1)
            act(self)
        raise HostileError(f"more than {MAX_OPCODES} opcodes", cure="do not use this file")

    def _result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise CorruptError("the pickle leaves several values", cure="fetch the file again, or restore it")
        return self.stack.pop()

    def push(self, value: Any) -> None:
        """A value onto the present group's stack."""
        self.stack.append(value)

    def drop(self) -> None:
        """Forget the last value."""
        self.stack.pop()

    def drop_group(self) -> None:
        """Forget everything since the last mark."""
        self.pop_mark()

    def take(self, length: int) -> bytes:
        """The next bytes."""
        stop = self.position + length
        if length < 0 or stop > len(self.data):
            raise CorruptError(
                f"the pickle announces {length} bytes at {self.position} and has {len(self.data) - self.position}",
                cure="fetch the file again, or restore it",
            )
        piece = self.data[self.position : stop]
        self.position = stop
        return piece

    def number(self, form: struct.Struct) -> int:
        """The next number of this form."""
        (value,) = form.unpack(self.take(form.size))
        return value

    def line(self) -> str:
        """The next text up to a line end."""
        stop = self.data.find(b"\n", self.position, self.position + _MAX_NAME)
        if stop < 0:
            raise CorruptError("a name in the pickle has no end", cure="fetch the file again, or restore it")
        text = self.data[self.position : stop].decode()
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
        """A name that must be allowed."""
        wanted = Global(module, name)
        if type(module) is not str or type(name) is not str:
            raise CorruptError("the pickle imports something whose name is no text", cure="restore the file")
        if wanted not in self.rules.allowed:
            raise self.rules.refusal(wanted) or HostileError(
                f"the pickle wants {str(wanted)[:_MAX_NAME]!r} (at byte {self.position}), which is not allowed",
                cure="do not load this file with pickle or torch; it could run code",
            )
        self.stack.append(wanted)

    def call(self, args: Any) -> None:
        """What a call gives, without calling."""
        wanted = self.stack.pop()
        if type(wanted) is not Global or type(args) is not tuple:
            raise CorruptError("the pickle calls something that is not a global", cure="restore the file")
        maker = self.rules.allowed[wanted]
        self._charge(args)
        self.stack.append(Record(wanted, args) if maker is None else maker(args))

    def _charge(self, args: tuple[Any, ...]) -> None:
        """Count what makers go through: honest pickles hand each sequence to one maker, hostile ones to many."""
        self._work -= sum(
            len(arg) for arg in args if isinstance(arg, (str, bytes, list, tuple, dict, set, frozenset))
        )
        if self._work < 0:
            raise HostileError("the pickle copies the same data again and again", cure="do not use this file")

    def build(self) -> None:
        """Keep the state that would be set."""
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Record:
            target.state = state
        elif type(target) is Attributes and type(state) is dict:
            target.update(state)
        elif type(target) is not dict or type(state) is not dict:
            raise CorruptError("the pickle sets the state of a plain value", cure="restore the file")
        # Attributes of a dict (torch's `_metadata` of a state dict: class versions) are not among its items.

    def set_items(self, items: list[Any]) -> None:
        """Keys and values into the dict below."""
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise CorruptError("the pickle sets items of something that is no dict", cure="restore the file")
        for index in range(0, len(items), 2):
            target[checked_key(items[index])] = items[index + 1]

    def extend(self, items: list[Any]) -> None:
        """Items into the list below."""
        if type(self.stack[-1]) is not list:
            raise CorruptError("the pickle appends to something that is no list", cure="restore the file")
        self.stack[-1].extend(items)

    def add_items(self, items: list[Any]) -> None:
        """Members into the set below."""
        if type(self.stack[-1]) is not set:
            raise CorruptError("the pickle adds to something that is no set", cure="restore the file")
        self.stack[-1].update(checked_key(item) for item in items)

    def integer(self, length: int) -> None:
        """An integer of so many bytes."""
        if length > _MAX_INTEGER:
            raise HostileError(f"an integer of {length} bytes", cure="do not use this file")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def persistent(self) -> None:
        """A value of the format's own."""
        if self.rules.persistent is None:
            raise CorruptError("a persistent id in a pickle that has none", cure="restore the file")
        self.stack.append(self.rules.persistent(self.stack.pop()))

    def protocol(self) -> None:
        """Which protocol follows."""
        version = self.number(U1)
        if version > _LAST_PROTOCOL:
            raise UnsupportedError(f"pickle protocol {version}")

    def frame(self) -> None:
        """How long the next frame says it is."""
        length = self.number(U8)
        if length > len(self.data) - self.position:
            raise CorruptError(f"the pickle announces a frame of {length} bytes", cure="restore the file")

    def tuple_of(self, count: int) -> None:
        """A tuple of the last few."""
        if count > len(self.stack):
            raise IndexError(count)
        items = tuple(self.stack[-count:])
        self.stack[-count:] = [items]

    def put(self, key: int) -> None:
        """Remember the last value."""
        self.memo[key] = self.stack[-1]

    def binary_text(self, form: struct.Struct) -> None:
        """Bytes of Python 2, as text."""
        self.stack.append(self.take(self.number(form)).decode("latin-1"))


def _refused(opcode: int, position: int) -> WherryError:
    where = f"opcode {bytes([opcode])!r} at byte {position}"
    if opcode in _HOSTILE:
        return HostileError(f"the pickle makes objects of classes: {where}", cure="do not use this file")
    return UnsupportedError(f"not a pickle that this version reads: {where}")
