"""An interpreter of pickles that knows only data: it never imports a module or calls a function.

A pickle is a program for a stack machine. `pickle.Unpickler` runs it with real classes, and one overridden
method is all that makes it safe. Even then a short file can make it use gigabytes (a memo index, a length) or
run for hours (a set of nested tuples, which are hashed in 2^n steps). This machine knows only data. A global
becomes a `Named`. Where a pickle calls something, a function that the caller passes decides what the result
is. Every size is bounded:

- Lengths are compared with the rest of the file before anything is read. Whole numbers have at most 1 KiB.
- Every opcode, and every element that is copied, costs one of `MAX_STEPS`; every container costs one of
  `MAX_CONTAINERS`.
- So a pickle uses at most some hundred bytes of memory for each of its own bytes, and 1.5 GB in all, in
  addition to the text in it.
- Keys, and members of sets, are short scalars.
- No function is recursive. The result holds no cycles and is not deep (`check_shape`).

The opcodes are in `opcodes.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, BinaryIO

from xl_export.importers.pickle.values import CONTAINERS, Foreign, Named, PickleError, checked_key, described

# The vocabulary of the One Billion Word corpus, 800,000 words with counts, takes six million steps.
MAX_STEPS = 10_000_000
MAX_CONTAINERS = 1_000_000
MAX_MEMO = 4_000_000
MAX_LINE = 1 << 16
# Nodes of OmegaConf point to the node that holds them, and a result here has no cycles.
POINTS_BACK = "omegaconf."


class Interpreter:
    """Runs pickles, one after another, from `stream`, which has `size` bytes in all.

    named(module, name): returns the global, or raises PickleError where the name is not allowed.
    called(target, args): returns the result of a call. persistent(id): returns the value of a persistent id.
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

    def begin(self) -> None:
        """Forgets the previous pickle; the counts of steps and containers go on."""
        self.stack, self.marks, self.memo = [], [], {}

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
        """Returns the next `count` bytes; memory is taken only where the file has so many."""
        if count > 256 and count > self.size - self.stream.tell():
            raise PickleError(f"claims {count} bytes where its file has fewer")
        data = self.stream.read(count)
        if len(data) != count:
            raise PickleError("ends in the middle")
        return data

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.exact(layout.size))[0]

    def line(self) -> bytes:
        """Returns the bytes before the next line feed; protocol 0 writes lines."""
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
        """Takes the values since the last mark off the stack and returns them."""
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
        """Sets attributes of the object on top of the stack.

        Those of a dictionary, such as `_metadata` of a state dict, are dropped.
        """
        target = self.top()
        if type(target) is dict:
            return
        if not isinstance(target, Foreign):
            raise PickleError(f"gives attributes to a {described(target)}")
        # The state is (attributes, slots), or attributes alone.
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if type(target.state) is dict and all(part is None or type(part) is dict for part in parts):
            for part in parts:
                self.spend(len(part or ()))
                target.state.update(part or {})
            if target.name.startswith(POINTS_BACK):
                target.state.pop("_parent", None)
        else:
            target.state = state


def _length(value: Any) -> int:
    """Returns the cost of copying a value, where an element of a container costs 1."""
    if type(value) in (str, bytes):
        return len(value) // 8
    return len(value) if type(value) in CONTAINERS and not isinstance(value, Foreign) else 0
