"""An interpreter of pickles that knows only data: it never imports a module or calls a function.

A pickle is a program for a stack machine. `pickle.Unpickler` runs it with real classes, and one overridden
method is all that makes it safe. Even then a short file can make it use gigabytes (a memo index, a length) or
run for hours (a set of nested tuples, which are hashed in 2^n steps). Here `pickletools.genops` decodes the
opcodes, which executes nothing, and this machine knows only data. A global becomes a `Named`. If a pickle
calls something, `allowed_names.py` decides what the result is. Every size is bounded:

- Lengths are compared with the rest of the file before anything is read. Whole numbers have at most 1 KiB.
- Every opcode, and every element that is copied, costs one of `MAX_STEPS`; every container costs one of
  `MAX_CONTAINERS`.
- So a pickle uses at most some hundred bytes of memory for each of its own bytes, and 1.5 GB in all, in
  addition to the text in it.
- Keys, and members of sets, are short scalars.
- No function is recursive. The result holds no cycles and is not deep (`check_shape`).

The extension registry, out-of-band buffers and persistent ids as text are refused: checkpoints have none.
"""

from __future__ import annotations

from collections.abc import Callable
from pickletools import genops
from typing import Any, BinaryIO

from torch import Tensor

from xl_export.importers.pickle.allowed_names import called, named
from xl_export.importers.pickle.tensors import Storages
from xl_export.importers.pickle.values import (
    CONTAINERS,
    Foreign,
    Named,
    PickleError,
    check_shape,
    checked_key,
    clean,
    described,
)

# The vocabulary of the One Billion Word corpus, 800,000 words with counts, takes six million steps.
MAX_STEPS = 10_000_000
MAX_CONTAINERS = 1_000_000
MAX_MEMO = 4_000_000
MAX_LINE = 1 << 16
MAX_INT_BITS = 8 << 10


class BoundedStream:
    """What `genops` reads from: it allocates memory only for a length that the file has."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream = stream
        self.left = size

    def read(self, count: int) -> bytes:
        if count > self.left:
            raise PickleError(
                f"claims {count} bytes where its file has fewer" if count > 256 else "ends in the middle"
            )
        self.left -= count
        return self.stream.read(count)

    def readline(self) -> bytes:
        """Returns the next line; protocol 0 writes lines."""
        line = self.stream.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise PickleError("ends in the middle of a line, or has one that is too long")
        self.left -= len(line)
        return line


class Interpreter:
    """Runs pickles, one after another, from `stream`, which has `size` bytes in all.

    storages: those that the pickles mention.
    """

    def __init__(self, stream: BinaryIO, size: int, storages: Storages) -> None:
        self.stream = BoundedStream(stream, size)
        self.storages = storages
        self.steps = 0
        self.containers = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Returns the object that the next pickle makes; raises PickleError for what is not data.

        The counts of steps and containers continue from one pickle to the next.
        """
        self.stack = []
        self.marks = []
        self.memo = {}
        opcodes = genops(self.stream)  # type: ignore[arg-type]  # it calls read and readline
        while True:
            try:
                opcode, argument, _ = next(opcodes)
            except ValueError as error:
                reason = str(error).removeprefix("at position <unknown>, ")
                raise PickleError(f"is damaged ({clean(reason)})") from error
            if opcode.name == "STOP":
                break
            operation = OPERATIONS.get(opcode.name)
            if operation is None:
                raise PickleError(f"uses {opcode.name}, which a checkpoint does not need")
            self.spend(1)
            operation(self, argument)
        result = self.pop()
        check_shape(result)
        return result

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise PickleError(f"takes more than {MAX_STEPS} steps")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_container(self, value: Any) -> None:
        self.contain()
        self.stack.append(value)

    def contain(self) -> None:
        """Counts a container that is about to be made."""
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise PickleError(f"makes more than {MAX_CONTAINERS} lists, tuples, dictionaries and objects")

    def push_integer(self, value: int) -> None:
        if value.bit_length() > MAX_INT_BITS:
            raise PickleError(f"has a whole number of {value.bit_length()} bits")
        self.stack.append(value)

    def push_text(self, text: str) -> None:
        """Pushes a string of Python 2, which `genops` decodes as Latin-1; it may be UTF-8."""
        try:
            self.stack.append(text.encode("latin-1").decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise PickleError("has text that is not UTF-8") from None

    def pop(self) -> Any:
        if not self.stack:
            raise PickleError("takes more from its stack than is on it")
        return self.stack.pop()

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def pop_or_group(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.group()

    def top(self) -> Any:
        if not self.stack:
            raise PickleError("takes more from its stack than is on it")
        return self.stack[-1]

    def mark(self) -> None:
        self.contain()
        self.marks.append(self.stack)
        self.stack = []

    def group(self) -> list[Any]:
        """Takes the values since the last mark off the stack and returns them."""
        if not self.marks:
            raise PickleError("ends a group that it did not begin")
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        if len(self.memo) >= MAX_MEMO:
            raise PickleError(f"remembers more than {MAX_MEMO} objects")
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise PickleError(f"recalls object {index}, which it did not remember")
        self.push(self.memo[index])

    def push_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleError("names a global by something that is not text")
        self.push(named(module, name))

    def call(self, target: Any, args: Any, keywords: Any = None) -> None:
        if not isinstance(target, Named):
            raise PickleError(f"calls a {described(target)} as if it were a function")
        if type(args) is not tuple or (keywords is not None and (type(keywords) is not dict or keywords)):
            raise PickleError(f"calls {target.name} with arguments that are not a plain tuple")
        for argument in args:  # which the call may copy
            self.spend(1 + _length(argument))
        self.push_container(called(self.storages, target, args))

    def instance(self, full: str) -> None:
        module, name = full.split(" ", 1)
        self.call(named(module, name), tuple(self.group()))

    def object(self, items: list[Any]) -> None:
        if not items:
            raise PickleError("calls nothing")
        self.call(items[0], tuple(items[1:]))

    def dictionary(self, items: list[Any]) -> None:
        self.push_container({})
        self.set_items(items)

    def append(self, values: list[Any]) -> None:
        target = self.top()
        target = target.items if isinstance(target, Foreign) else target
        if type(target) is not list:
            raise PickleError(f"appends to a {described(target)}")
        target.extend(values)

    def set_items(self, values: list[Any] | tuple[Any, ...]) -> None:
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
        """Sets attributes of the object on top of the stack.

        Attributes of a dictionary, such as `_metadata` of a state dict, are dropped.
        """
        target = self.top()
        if type(target) is dict:
            return
        if not isinstance(target, Foreign):
            raise PickleError(f"gives attributes to a {described(target)}")
        # The state is (attributes, slots), or only attributes.
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if type(target.state) is dict and all(part is None or type(part) is dict for part in parts):
            for part in parts:
                self.spend(len(part or ()))
                target.state.update(part or {})
        else:
            target.state = state


def _persistent(storages: Storages, identity: Any) -> Tensor | Named:
    """Returns the storage or the class for a persistent id.

    An id is ("storage", class, key, device, elements[, None]), or ("module", class, file, source) if the
    source of a class was kept. Device and source are ignored: every storage is read to the CPU.
    """
    parts = identity if type(identity) is tuple else ()
    if len(parts) == 4 and type(parts[0]) is str and parts[0] == "module" and isinstance(parts[1], Named):
        return parts[1]
    if (
        len(parts) not in (5, 6)
        or type(parts[0]) is not str
        or parts[0] != "storage"
        or not isinstance(parts[1], Named)
    ):
        raise PickleError("has a persistent id that is not one of a tensor's storage")
    if len(parts) == 6 and parts[5] is not None:
        raise PickleError(
            "has a storage that is a view of another, which PyTorch before 0.4 wrote (save it again)"
        )
    return storages.storage(parts[2], parts[1].name, parts[4])


def _length(value: Any) -> int:
    """Returns the cost of copying a value; an element of a container costs 1."""
    if type(value) in (str, bytes):
        return len(value) // 8
    return len(value) if type(value) in CONTAINERS and not isinstance(value, Foreign) else 0


def _check_protocol(_: Interpreter, version: int) -> None:
    if version > 5:
        raise PickleError(f"is of protocol {version}, which is newer than 5")


# By the name in pickletools; each is called with the machine and the opcode's argument.
OPERATIONS: dict[str, Callable[[Interpreter, Any], Any]] = {
    "PROTO": _check_protocol,
    "FRAME": lambda m, _: None,  # a hint for buffering
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.pop_or_group(),
    "POP_MARK": lambda m, _: m.group(),
    "DUP": lambda m, _: m.push(m.top()),
    # scalars
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4"), Interpreter.push_integer),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"), Interpreter.push),
    # text and bytes
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), Interpreter.push_text),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), Interpreter.push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), Interpreter.push),
    "BYTEARRAY8": lambda m, data: m.push(bytes(data)),
    # containers
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push_container(tuple(m.group())),
    "TUPLE1": lambda m, _: m.push_container(m.pop_many(1)),
    "TUPLE2": lambda m, _: m.push_container(m.pop_many(2)),
    "TUPLE3": lambda m, _: m.push_container(m.pop_many(3)),
    "EMPTY_LIST": lambda m, _: m.push_container([]),
    "LIST": lambda m, _: m.push_container(m.group()),
    "APPEND": lambda m, _: m.append([m.pop()]),
    "APPENDS": lambda m, _: m.append(m.group()),
    "EMPTY_DICT": lambda m, _: m.push_container({}),
    "DICT": lambda m, _: m.dictionary(m.group()),
    "SETITEM": lambda m, _: m.set_items(m.pop_many(2)),
    "SETITEMS": lambda m, _: m.set_items(m.group()),
    "EMPTY_SET": lambda m, _: m.push_container(set()),
    "ADDITEMS": lambda m, _: m.add(m.group()),
    "FROZENSET": lambda m, _: m.push_container(frozenset([checked_key(value) for value in m.group()])),
    # memo
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Interpreter.remember),
    "MEMOIZE": lambda m, _: m.remember(len(m.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Interpreter.recall),
    # objects
    "GLOBAL": lambda m, full: m.push_global(*full.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.push_global(*m.pop_many(2)),
    "REDUCE": lambda m, _: m.call(*m.pop_many(2)),
    "NEWOBJ": lambda m, _: m.call(*m.pop_many(2)),  # without the constructor; there is no difference here
    "NEWOBJ_EX": lambda m, _: m.call(*m.pop_many(3)),
    "INST": Interpreter.instance,
    "OBJ": lambda m, _: m.object(m.group()),
    "BUILD": lambda m, _: m.build(m.pop()),
    "BINPERSID": lambda m, _: m.push(_persistent(m.storages, m.pop())),
}
