"""The values that a pickle may consist of, and checks that keep them small, flat and harmless."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_NODES = 64_000_000
MAX_DEPTH = 200
MAX_KEY = 1 << 16
MAX_INT_KEY = 1 << 60


class PickleError(Exception):
    """The reason why a pickle is not read, as the end of a sentence about it: `calls os.system, …`."""


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a class or function in a pickle, such as `torch.nn.modules.linear.Linear`."""

    name: str


@dataclass(slots=True, eq=False)
class Foreign:
    """An instance of a class that is not imported: only what the pickle holds of it."""

    name: str
    args: tuple[Any, ...] = ()  # the arguments that it was made with
    state: Any = field(default_factory=dict)
    """Its attributes, or another value if the class has its own way of pickling."""
    items: list[Any] = field(default_factory=list)  # its content, if the class is a list
    entries: dict[Any, Any] = field(default_factory=dict)  # its content, if the class is a dictionary


CONTAINERS = frozenset({list, tuple, set, frozenset, dict, Foreign})


def checked_key(key: Any) -> Any:
    """Returns a key of a dictionary or a member of a set; raises PickleError if it is not allowed.

    Keys are short, and their hashes are cheap and cannot be chosen by the file.
    """
    kind = type(key)
    if kind in (str, bytes):
        if len(key) > MAX_KEY:
            raise PickleError(f"has a key of {len(key)} characters")
    elif kind is int:
        if not -MAX_INT_KEY < key < MAX_INT_KEY:
            raise PickleError("has a whole number of more than 60 bits as a key")
    elif kind not in (bool, type(None)):
        raise PickleError(f"has a {described(key)} as a key")
    return key


def clean(name: str) -> str:
    """Returns untrusted text for a message: short, printable and on one line."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:100])


def described(value: Any) -> str:
    """Returns a description of a value for a message.

    It is a whole number, the name of a class, or the type of any other value, which may be large.
    """
    if type(value) is int and abs(value) < MAX_INT_KEY:
        return str(value)
    return value.name if isinstance(value, (Foreign, Named)) else type(value).__name__


def check_shape(root: Any) -> None:
    """Raises PickleError if an object holds itself, is nested too deeply or has too many parts.

    Parts that are shared count each time, as in a tree. This function is not recursive, so that the caller
    may walk `root` with a recursive one.
    """
    finished: dict[int, tuple[int, int]] = {}  # by id: nodes of the tree below, its depth
    above: set[int] = set()
    todo = [root]
    while todo:
        value = todo[-1]
        if id(value) in finished:
            todo.pop()
            continue
        parts = children(value)
        inner = [id(part) for part in parts if type(part) in CONTAINERS]
        if id(value) not in above:
            above.add(id(value))
            if not above.isdisjoint(inner):
                raise PickleError("makes an object that holds itself")
            todo += [part for part in parts if type(part) in CONTAINERS and id(part) not in finished]
            continue
        nodes = 1 + len(parts) + sum(finished[part][0] for part in inner)
        depth = 1 + max((finished[part][1] for part in inner), default=0)
        if nodes > MAX_NODES or depth > MAX_DEPTH:
            raise PickleError(
                "is nested too deeply, or shares its parts so often that they could not be listed"
            )
        finished[id(value)] = nodes, depth
        above.discard(id(value))
        todo.pop()


def children(value: Any) -> tuple[Any, ...]:
    """Returns the parts of a value; keys have no parts."""
    if isinstance(value, Foreign):
        return value.args, value.state, value.items, value.entries
    if type(value) is dict:
        return tuple(value.values())
    return tuple(value) if type(value) in (list, tuple) else ()
