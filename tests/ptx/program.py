"""PTX text as a program: the parameters of its kernel, and its instructions with their operands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; base is a register, a parameter or a variable."""

    base: str
    offset: int


# A name of a register, a label or a variable; an immediate value as text; a vector `{a, b}`; or an address.
Operand = str | tuple[str, ...] | Address
# Instructions without a target register; all others have it first.
NO_TARGET = {"st", "stmatrix", "cp", "bar", "fence", "bra", "ret"}
CARRYING = {"mov", "add", "sub", "mul", "fma", "mad", "div", "max", "min", "neg"}


@dataclass(frozen=True)
class Instruction:
    """One instruction. guard: the predicate on which it depends, or None; negated: it runs if that is false.
    opcode: the parts between its dots. reads, writes: the registers among its operands. text: as written, for
    messages.
    """

    text: str
    guard: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    reads: frozenset[str]
    writes: frozenset[str]

    @property
    def carries_undefined(self) -> bool:
        """Whether the result is undefined where an operand is. All others must have defined operands."""
        return self.opcode[0] in CARRYING

    @property
    def left_matrix(self) -> frozenset[str]:
        """The registers with the left matrix of a wgmma, if it is not in shared memory."""
        left = self.operands[1]
        return frozenset(left) if isinstance(left, tuple) else frozenset()


@dataclass(frozen=True)
class Program:
    """One kernel. parameters: their names. threads: of a block. labels: the instruction after each.
    of_products: the registers with matrices of wgmma. grain: bytes of the smallest access to shared memory.
    """

    parameters: tuple[str, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    of_products: frozenset[str]
    grain: int


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
    products = [ins for ins in instructions if ins.opcode[:2] == ("wgmma", "mma_async")]
    bytewise = any(ins.opcode[1:] == ("shared", "b8") for ins in instructions)
    return Program(
        parameters=tuple(parameters),
        threads=int(threads[1]),
        instructions=tuple(instructions),
        labels=labels,
        of_products=frozenset().union(*(ins.writes | ins.left_matrix for ins in products)),
        grain=1 if bytewise else 2,
    )


def _instruction(statement: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    assert found, f"cannot parse {statement!r}"
    negated, guard, opcode, rest = found.groups()
    # Commas inside of braces and brackets do not separate operands.
    operands = tuple(_operand(one) for one in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", rest))
    targets = 0 if opcode.split(".")[0] in NO_TARGET else 1
    return Instruction(
        text=" ".join(statement.split()),
        guard=guard,
        negated=bool(negated),
        opcode=tuple(opcode.split(".")),
        operands=operands,
        reads=frozenset(_registers(operands[targets:])),
        writes=frozenset(_registers(operands[:targets])),
    )


def _registers(operands: Iterable[Operand]) -> Iterator[str]:
    """The numbered registers in operands; others, such as %tid.x, are never written."""
    for operand in operands:
        names = operand if isinstance(operand, tuple) else (getattr(operand, "base", operand),)
        yield from (name for name in names if name[0] == "%" and name[-1].isdigit())


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(text.strip("{} ").replace(" ", "").split(","))
    if text.startswith("["):
        base, _, offset = text.strip("[]").replace(" ", "").partition("+")
        return Address(base, int(offset or "0", 0))
    return text
