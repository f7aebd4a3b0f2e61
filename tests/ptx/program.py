"""PTX text as a program: the parameters of its kernel, and its instructions with their operands."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; base is a register, a parameter or a variable."""

    base: str
    offset: int


# A name of a register, a label or a variable; an immediate value as text; a vector `{a, b}`; or an address.
Operand = str | tuple[str, ...] | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction. guard: the predicate on which it depends, or None; negated: it runs if that is false.
    opcode: the parts between its dots. text: as written, for messages.
    """

    text: str
    guard: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Program:
    """One kernel. parameters: their names. threads: of a block. labels: the instruction after each."""

    parameters: tuple[str, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(ptx: str, kernel: str) -> Program:
    """The program of a kernel of this name in the text."""
    text = re.sub(r"//[^\n]*", "", ptx)
    head, _, rest = text.split(f".entry {kernel}(")[1].partition("{")
    body = rest[: rest.rindex("}")]
    threads = re.search(r"\.reqntid (\d+)", head)
    assert threads, f"{kernel} does not say how many threads a block has"
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        statement = statement.strip()
        while label := re.match(r"(\$\w+):\s*", statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :]
        if statement and not statement.startswith("."):  # such as `.reg`
            instructions.append(_instruction(statement))
    parameters = re.findall(r"\.param [^,)]*?(\w+)\s*(?=[,)])", head)
    return Program(tuple(parameters), int(threads[1]), tuple(instructions), labels)


def _instruction(statement: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    assert found, f"cannot parse {statement!r}"
    negated, guard, opcode, rest = found.groups()
    # Commas inside of braces and brackets do not separate operands.
    operands = tuple(_operand(one) for one in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", rest))
    return Instruction(" ".join(statement.split()), guard, bool(negated), tuple(opcode.split(".")), operands)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(text.strip("{} ").replace(" ", "").split(","))
    if text.startswith("["):
        base, _, offset = text.strip("[]").replace(" ", "").partition("+")
        return Address(base, int(offset or "0", 0))
    return text
