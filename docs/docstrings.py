"""Shows the parts of docstrings that describe parameters and fields as lists.

Docstrings here describe them in running text, `name: what it is. other: what it is.`, or under a field. The
Python page has one line for each instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

import griffe


class Lists(griffe.Extension):
    """The extension that `mkdocs.yml` names."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            func.docstring.value = listed(func.docstring.value, [each.name for each in func.parameters])

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if not cls.docstring:
            return
        attributes = {
            name: member
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute)
            and name[0] != "_"
            and "init=False" not in str(member.value)
        }
        fields = {name: each for name, each in attributes.items() if "property" not in each.labels}
        init = cls.members.get("__init__")
        parameters = [each.name for each in init.parameters] if isinstance(init, griffe.Function) else []
        text = listed(cls.docstring.value, [*fields, *parameters])
        items = [
            f"- `{name}`: {flat(found)}" for name, each in fields.items() if (found := description(each))
        ]
        described = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^- (.*?): ", text, re.M))))
        others = [f"`{n}`" for n, each in attributes.items() if n not in described and not description(each)]
        if others and "dataclass" in cls.labels:
            items.append(f"- also: {', '.join(others)}")
        between = "\n" if text.rsplit("\n", 1)[-1].startswith("- ") else "\n\n"
        cls.docstring.value = text + between + "\n".join(items)
        for each in fields.values():
            each.docstring = None  # it is in the list, and needs no heading of its own


def description(field: griffe.Attribute) -> str | None:
    """The docstring of a field, or the help of its option, which is in its type."""
    if field.docstring:
        return field.docstring.value
    for node in ast.walk(ast.parse(str(field.annotation), mode="eval")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Option":
            return str(ast.literal_eval(node.args[1]))
    return None


def listed(text: str, names: Iterable[str]) -> str:
    """A docstring with a list item for each `name: description` of its paragraphs, for these names."""
    name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not name:
        return text
    item = re.compile(rf"(?:^|(?<=[.;)] ))((?:{name})(?:, (?:{name}))*)((?: \w+)?(?: \[[^\]]*\])?): ")
    out = []
    for paragraph in text.split("\n\n"):
        parts = item.split(flat(paragraph))
        if len(parts) == 1:
            out.append(paragraph)
            continue
        items, after = [], ""
        for found, shape, description in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            description, raises, errors = description.partition(" Raises ")
            after += f"Raises {errors}" if raises else ""
            shown = ", ".join(f"`{each}`" for each in found.split(", "))
            items.append(f"- {shown}{shape}: {description.strip()}")
        out += [each for each in (parts[0].strip(), "\n".join(items), after) if each]
    return "\n\n".join(out)


def flat(text: str) -> str:
    return " ".join(text.split())
