"""The machine that pickles are written for, with nothing in it that could import or call.

A pickle is a program for a stack machine. `pickle.Unpickler` runs it with real classes: what keeps it safe is one
overridden method, and still a short file can make it take gigabytes (a memo index, a length) or run for hours (a set of
nested tuples, which hash in 2^n steps). This machine knows only data. A global becomes a `Named`, and where a pickle
would call something, a function that the caller gives decides. Everything that it holds is bounded:

- lengths are compared with what is left of the file before anything is read; whole numbers have at most 1 KiB;
- every opcode, and every element that is copied, costs one of `MAX_STEPS`; every container one of `MAX_CONTAINERS`;
- so a pickle takes at most some hundred bytes of memory for each of its own, and 1.5 GB in all;
- keys and members of sets are short scalars;
- nothing recurses, and what comes out holds no cycles and is not deep (`check_shape`).

The opcodes are those of protocols 0 to 5 without the extension registry and the out-of-band buffers. Source: CPython's
`Lib/pickletools.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, BinaryIO

from xl_export.importers.values import CONTAINERS, Foreign, Named, PickleError, check_shape, checked_key, described

MAX_STEPS = 16_000_000  # the vocabulary of the One Billion Word corpus, 800,000 words with counts, takes six million
MAX_CONTAINERS = 1_000_000
MAX_MEMO = 4_000_000
MAX_LINE = 1 << 16
MAX_INT_BYTES = 1 << 10
REFUSED = {b"P": "PERSID", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER"}


class Machine:
    """Runs pickles, one after another, from `stream`, which has `size` bytes in all.

    named(module, name): the global, or PickleError where it may not occur. called(target, args): what a call gives.
    persistent(id): what a persistent id stands for.
    """

    def __init__(
        self,
        stream: BinaryIO,
        size: int,
        *,
        named: Callable[[str, str], Named],
        called: Callable[[Named, tuple[Any, ...]], Any],
        persistent: Callable[[Any], Any],
    ) -> None:
        self.stream, self.size = stream, size
        self.named, self.called, self.persistent = named, called, persistent
        self.steps = self.containers = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The object that the next pickle makes; raises PickleError for anything that is not data."""
        self.stack, self.marks, self.memo = [], [], {}
        while (code := self.stream.read(1)) != b".":
            operation = OPERATIONS.get(code)
            if operation is None:
                raise PickleError(_unknown(code))
            self.spend(1)
            operation(self)
        result = self.pop()
        check_shape(result)
        return result

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise PickleError(f"takes more than {MAX_STEPS} steps")

    def contain(self) -> None:
        """Counts a container that is about to be made."""
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise PickleError(f"makes more than {MAX_CONTAINERS} lists, tuples, dictionaries and objects")

    def exact(self, count: int) -> bytes:
        """The next `count` bytes, which are known to be there before memory is taken for them."""
        if count > 256 and count > self.size - self.stream.tell():
            raise PickleError(f"claims {count} bytes where its file has fewer")
        data = self.stream.read(count)
        if len(data) != count:
            raise PickleError("ends in the middle")
        return data

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.exact(layout.size))[0]

    def line(self) -> bytes:
        """The bytes before the next line feed, in which protocol 0 writes."""
        data = self.stream.readline(MAX_LINE)
        if not data.endswith(b"\n"):
            raise PickleError("ends in the middle of a line, or has one that is too long")
        return data[:-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_container(self, value: Any) -> None:
        self.contain()
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack:
            raise PickleError("takes more from its stack than is on it")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack:
            raise PickleError("takes more from its stack than is on it")
        return self.stack[-1]

    def mark(self) -> None:
        self.contain()
        self.marks.append(self.stack)
        self.stack = []

    def group(self) -> list[Any]:
        """What was pushed since the last mark, taken off the stack."""
        if not self.marks:
            raise PickleError("ends a group that it did not begin")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        if len(self.memo) >= MAX_MEMO:
            raise PickleError(f"remembers more than {MAX_MEMO} objects")
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise PickleError(f"recalls object {index}, which it did not remember")
        self.push(self.memo[index])

    def global_(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleError("names a global by something that is not text")
        self.push(self.named(module, name))

    def call(self, target: Any, args: Any, keywords: Any = None) -> None:
        if not isinstance(target, Named):
            raise PickleError(f"calls a {described(target)} as if it were a function")
        if type(args) is not tuple or (keywords is not None and (type(keywords) is not dict or keywords)):
            raise PickleError(f"calls {target.name} with arguments that are not a plain tuple")
        for argument in args:  # which the call may copy
            self.spend(1 + _length(argument))
        self.push_container(self.called(target, args))

    def append(self, values: list[Any]) -> None:
        target = self.top()
        target = target.items if isinstance(target, Foreign) else target
        if type(target) is not list:
            raise PickleError(f"appends to a {described(target)}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        target = target.entries if isinstance(target, Foreign) else target
        if type(target) is not dict:
            raise PickleError(f"sets items of a {described(target)}")
        if len(values) % 2:
            raise PickleError("gives a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[checked_key(key)] = value

    def add(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not set:
            raise PickleError(f"adds members to a {described(target)}")
        target.update([checked_key(value) for value in values])

    def build(self, state: Any) -> None:
        """Gives attributes to the object on top; those of a dictionary (`_metadata` of a state dict) are dropped."""
        target = self.top()
        if type(target) is dict:
            return
        if not isinstance(target, Foreign):
            raise PickleError(f"gives attributes to a {described(target)}")
        parts = state if type(state) is tuple and len(state) == 2 else (state,)  # (attributes, slots) or attributes
        if type(target.state) is dict and all(part is None or type(part) is dict for part in parts):
            for part in parts:
                self.spend(len(part or ()))
                target.state.update(part or {})
        else:
            target.state = state


def _length(value: Any) -> int:
    """What it costs to copy a value, where an element of a container costs 1."""
    if type(value) in (str, bytes):
        return len(value) // 8
    return len(value) if type(value) in CONTAINERS and not isinstance(value, Foreign) else 0


def _unknown(code: bytes) -> str:
    if not code:
        return "ends in the middle"
    if code in REFUSED:
        return f"uses {REFUSED[code]}, which a checkpoint does not need"
    return f"has the unknown opcode {code!r}"


U1, U2, U4, U8 = (struct.Struct("<" + kind) for kind in "BHIQ")
I4, F8 = struct.Struct("<i"), struct.Struct(">d")


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise PickleError("has text that is not UTF-8") from None


def _quoted(data: bytes) -> str:
    if len(data) < 2 or data[:1] not in (b"'", b'"') or data[-1:] != data[:1] or b"\\" in data:
        raise PickleError("has an old form of text that is not read here (pickle it again with protocol 2)")
    return _text(data[1:-1])


def _escaped(data: bytes) -> str:
    try:
        return data.decode("raw-unicode-escape")
    except UnicodeDecodeError:
        raise PickleError("has text with a broken escape") from None


def _decimal(data: bytes, kind: Callable[[bytes], Any] = int) -> Any:
    try:
        if len(data) > MAX_INT_BYTES:
            raise ValueError
        return kind(data)
    except ValueError:
        raise PickleError(f"has the number {data[:20]!r}") from None


def _integer(data: bytes) -> bool | int:
    booleans = {b"00": False, b"01": True}
    return booleans[data] if data in booleans else int(_decimal(data))


def _long(machine: Machine, layout: struct.Struct) -> int:
    count = machine.number(layout)
    if count > MAX_INT_BYTES:
        raise PickleError(f"has a whole number of {count} bytes")
    return int.from_bytes(machine.exact(count), "little", signed=True)


def _tuple(machine: Machine, count: int) -> None:
    machine.push_container(tuple(reversed([machine.pop() for _ in range(count)])))


def _reduce(machine: Machine) -> None:
    args, target = machine.pop(), machine.pop()
    machine.call(target, args)


def _new_with_keywords(machine: Machine) -> None:
    keywords, args, target = machine.pop(), machine.pop(), machine.pop()
    machine.call(target, args, keywords)


def _instance(machine: Machine) -> None:
    module, name = _text(machine.line()), _text(machine.line())
    args = tuple(machine.group())
    machine.call(machine.named(module, name), args)


def _object(machine: Machine) -> None:
    items = machine.group()
    if not items:
        raise PickleError("calls nothing")
    machine.call(items[0], tuple(items[1:]))


def _stack_global(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.global_(module, name)


def _global(machine: Machine) -> None:
    module, name = _text(machine.line()), _text(machine.line())
    machine.global_(module, name)


def _pair(machine: Machine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


def _protocol(machine: Machine) -> None:
    if (version := machine.number(U1)) > 5:
        raise PickleError(f"is of protocol {version}, which is newer than 5")


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.group()


OPERATIONS: dict[bytes, Callable[[Machine], Any]] = {
    b"\x80": _protocol,
    b"\x95": lambda m: m.exact(8),  # FRAME: a hint for buffering
    b"(": Machine.mark,
    b"0": _pop,
    b"1": Machine.group,  # POP_MARK
    b"2": lambda m: m.push(m.top()),  # DUP
    # scalars
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": lambda m: m.push(_integer(m.line())),
    b"L": lambda m: m.push(_decimal(m.line().removesuffix(b"L"))),
    b"F": lambda m: m.push(_decimal(m.line(), float)),
    b"J": lambda m: m.push(m.number(I4)),
    b"K": lambda m: m.push(m.number(U1)),
    b"M": lambda m: m.push(m.number(U2)),
    b"\x8a": lambda m: m.push(_long(m, U1)),
    b"\x8b": lambda m: m.push(_long(m, U4)),
    b"G": lambda m: m.push(m.number(F8)),
    # text and bytes
    b"S": lambda m: m.push(_quoted(m.line())),
    b"T": lambda m: m.push(_text(m.exact(m.number(U4)))),
    b"U": lambda m: m.push(_text(m.exact(m.number(U1)))),
    b"V": lambda m: m.push(_escaped(m.line())),
    b"X": lambda m: m.push(_text(m.exact(m.number(U4)))),
    b"\x8c": lambda m: m.push(_text(m.exact(m.number(U1)))),
    b"\x8d": lambda m: m.push(_text(m.exact(m.number(U8)))),
    b"B": lambda m: m.push(m.exact(m.number(U4))),
    b"C": lambda m: m.push(m.exact(m.number(U1))),
    b"\x8e": lambda m: m.push(m.exact(m.number(U8))),
    b"\x96": lambda m: m.push(m.exact(m.number(U8))),  # BYTEARRAY8
    # containers
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push_container(tuple(m.group())),
    b"\x85": lambda m: _tuple(m, 1),
    b"\x86": lambda m: _tuple(m, 2),
    b"\x87": lambda m: _tuple(m, 3),
    b"]": lambda m: m.push_container([]),
    b"l": lambda m: m.push_container(m.group()),
    b"a": lambda m: m.append([m.pop()]),
    b"e": lambda m: m.append(m.group()),
    b"}": lambda m: m.push_container({}),
    b"d": lambda m: _dict(m),
    b"s": lambda m: m.set_items(_pair(m)),
    b"u": lambda m: m.set_items(m.group()),
    b"\x8f": lambda m: m.push_container(set()),
    b"\x90": lambda m: m.add(m.group()),
    b"\x91": lambda m: m.push_container(frozenset([checked_key(value) for value in m.group()])),
    # memo
    b"p": lambda m: m.remember(_decimal(m.line())),
    b"q": lambda m: m.remember(m.number(U1)),
    b"r": lambda m: m.remember(m.number(U4)),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"g": lambda m: m.recall(_decimal(m.line())),
    b"h": lambda m: m.recall(m.number(U1)),
    b"j": lambda m: m.recall(m.number(U4)),
    # objects
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,  # NEWOBJ: without the constructor, which is all the same here
    b"\x92": _new_with_keywords,
    b"i": _instance,
    b"o": _object,
    b"b": lambda m: m.build(m.pop()),
    b"Q": lambda m: m.push(m.persistent(m.pop())),
}


def _dict(machine: Machine) -> None:
    items = machine.group()
    machine.push_container({})
    machine.set_items(items)
