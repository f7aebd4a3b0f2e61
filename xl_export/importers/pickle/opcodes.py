"""The opcodes of pickles, protocols 0 to 5, each as a function on the machine.

The extension registry, out-of-band buffers and persistent ids as text are left out. Source: CPython's
`Lib/pickletools.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from xl_export.importers.pickle.interpreter import Interpreter
from xl_export.importers.pickle.values import PickleError, check_shape, checked_key

MAX_INT_BYTES = 1 << 10
REFUSED = {
    b"P": "PERSID",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
}


def run(machine: Interpreter) -> Any:
    """Returns the object that the machine's next pickle makes; raises PickleError for what is not data."""
    machine.begin()
    while (code := machine.stream.read(1)) != b".":
        operation = OPERATIONS.get(code)
        if operation is None:
            raise PickleError(_unknown(code))
        machine.spend(1)
        operation(machine)
    result = machine.pop()
    check_shape(result)
    return result


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


def _long(machine: Interpreter, layout: struct.Struct) -> int:
    count = machine.number(layout)
    if count > MAX_INT_BYTES:
        raise PickleError(f"has a whole number of {count} bytes")
    return int.from_bytes(machine.exact(count), "little", signed=True)


def _tuple(machine: Interpreter, count: int) -> None:
    machine.push_container(tuple(reversed([machine.pop() for _ in range(count)])))


def _reduce(machine: Interpreter) -> None:
    args, target = machine.pop(), machine.pop()
    machine.call(target, args)


def _new_with_keywords(machine: Interpreter) -> None:
    keywords, args, target = machine.pop(), machine.pop(), machine.pop()
    machine.call(target, args, keywords)


def _instance(machine: Interpreter) -> None:
    module, name = _text(machine.line()), _text(machine.line())
    args = tuple(machine.group())
    machine.call(machine.named(module, name), args)


def _object(machine: Interpreter) -> None:
    items = machine.group()
    if not items:
        raise PickleError("calls nothing")
    machine.call(items[0], tuple(items[1:]))


def _stack_global(machine: Interpreter) -> None:
    name, module = machine.pop(), machine.pop()
    machine.global_(module, name)


def _global(machine: Interpreter) -> None:
    module, name = _text(machine.line()), _text(machine.line())
    machine.global_(module, name)


def _pair(machine: Interpreter) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


def _protocol(machine: Interpreter) -> None:
    if (version := machine.number(U1)) > 5:
        raise PickleError(f"is of protocol {version}, which is newer than 5")


def _pop(machine: Interpreter) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.group()


def _dict(machine: Interpreter) -> None:
    items = machine.group()
    machine.push_container({})
    machine.set_items(items)


OPERATIONS: dict[bytes, Callable[[Interpreter], Any]] = {
    b"\x80": _protocol,
    b"\x95": lambda m: m.exact(8),  # FRAME: a hint for buffering
    b"(": Interpreter.mark,
    b"0": _pop,
    b"1": Interpreter.group,  # POP_MARK
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
    b"d": _dict,
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
    b"\x81": _reduce,  # NEWOBJ: a call without the constructor; there is no difference here
    b"\x92": _new_with_keywords,
    b"i": _instance,
    b"o": _object,
    b"b": lambda m: m.build(m.pop()),
    b"Q": lambda m: m.push(m.persistent(m.pop())),
}
