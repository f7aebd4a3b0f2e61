"""The rule of sampling in plain Python, one row at a time, and the cases that every implementation answers.

`python -m tests.sampling` writes the cases again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.contract.sampling import SETTINGS, Sampler

CASES = Path(__file__).parent / "data" / "sampling.jsonl"
CLEAR = 1e-6  # how far a case is from every border, so that no rounding decides it


def naive_draw(
    logits: list[float], sampler: Sampler, uniform: float, prompt: list[int], generated: list[int]
) -> tuple[int, float]:
    """The token that is drawn, and how near the draw is to another one."""
    s, z = sampler, list(logits)
    for token in {*prompt, *generated}:
        z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
    for token in set(generated):
        z[token] -= s.presence_penalty + s.frequency_penalty * generated.count(token)
    ids, top = range(len(z)), max(z)
    if s.temperature == 0:
        return z.index(top), math.inf
    weights = [math.exp((each - top) / s.temperature) for each in z]
    margins = []
    if s.top_k is not None and s.top_k < len(z):
        edge = sorted(z, reverse=True)[s.top_k - 1]
        weights = [weights[i] if z[i] >= edge else 0.0 for i in ids]
        margins += [edge - each for each in z if each < edge]
    margins += [abs(weight - s.min_p) for weight in weights if s.min_p > 0]
    weights = [weight if weight >= s.min_p else 0.0 for weight in weights]
    if s.top_p < 1:
        total, before, least = sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            margins.append(abs(before / total - s.top_p))
            if before < s.top_p * total:
                least = weight
            before += weight
        weights = [weight if weight >= least else 0.0 for weight in weights]
    total, before, found = sum(weights), 0.0, -1
    for i in ids:
        before += weights[i]
        margins += [abs(before / total - uniform)] if weights[i] else []
        if found < 0 and before > uniform * total:
            found = i
    return found, min(margins)


def read_cases() -> list[dict[str, Any]]:
    """The cases of the file."""
    return [json.loads(line) for line in CASES.read_text().splitlines()]


def range_cases() -> list[dict[str, Any]]:
    """Values at the ends of each setting's range, and beyond them with the range in words."""
    cases = []
    for name, declared in SETTINGS.items():
        setting = declared.range
        beyond = 2 if name == "top_k" else 0.005  # a top_k of 0 means all tokens in C++
        for value in (setting.least - beyond, setting.least, setting.most, setting.most + beyond):
            expected = None if value in setting else setting.expected
            cases.append({"name": name, "value": value, "expected": expected})
    return cases


def file_cases() -> dict[bytes, Sampler | None]:
    """Contents of a `sampling.json`, and what they say; None for those that every implementation refuses."""
    cases: dict[bytes, Sampler | None] = {
        json.dumps({case["name"]: case["value"]}).encode(): None
        if case["expected"]
        else Sampler(**{case["name"]: case["value"]})
        for case in range_cases()
    }
    cases |= {
        b"{}": Sampler(),
        b' {"top_k" : null,\r\n\t"temperature": 1}\n': Sampler(),
        b'{"t\\u006fp_k": 7, "temperature": 5e-1}': Sampler(top_k=7, temperature=0.5),
        b'{"temperature": -0.0}': Sampler(temperature=0),
    }
    # Numbers that are not whole as they are written, or that no language reads exactly.
    for number in ("0", "-1", "1.0", "1e0", "1.5", "10E1", "9007199254740992", str(1 << 64), "1" * 400):
        cases[f'{{"top_k": {number}}}'.encode()] = None
    for value in ("null", "true", '"1"', "[1]", "{}", "NaN", "Infinity", "1e999", "01", ".5", "1.", "+1"):
        cases[f'{{"temperature": {value}}}'.encode()] = None
    refused = (
        "",
        "[]",
        "null",
        "1",
        "{",
        "{}}",
        '{"top_p": 0.5,}',
        '{"topP": 0.9}',
        '{"heat": 1}',
        "{'top_p': 1}",
    )
    cases |= dict.fromkeys(map(str.encode, refused))
    # Readers differ in which of two equal keys they use, and in whether a byte-order mark is text.
    twice = ('{"top_k": 1, "top_k": 2}', '{"top_p": 0.5, "top_p": 0.5}', '{"top_k": 1, "t\\u006fp_k": 1}')
    cases |= dict.fromkeys(map(str.encode, twice))
    cases |= {b"\xef\xbb\xbf{}": None, b'{"top_p": 0.5}\xff': None, b'{"top_p": 0.5}\0': None}
    return cases


def put_no_file(path: Path, kind: str) -> None:
    """Makes something else than a file where `sampling.json` would be."""
    makers: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path.name),
        "link to nothing": lambda: path.symlink_to("nowhere"),
    }
    makers[kind]()


NO_FILES = ("pipe", "folder", "loop", "link to nothing")


def make_cases() -> list[dict[str, Any]]:
    """Logits with and without ties, every setting alone and with others, short histories."""
    chance = np.random.default_rng(0)
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0.7, 0.7, 1, 1, 2.5, 1e-300],
        "top_k": [None, None, 1, 3, 8, 1000],
        "top_p": [1, 1, 0.9, 0.5, 0.001],
        "min_p": [0, 0, 0.05, 0.3, 1],
        "repetition_penalty": [1, 1, 1.3, 0.8],
        "presence_penalty": [0, 0, 1.5, -0.5],
        "frequency_penalty": [0, 0, 0.4, -0.7],
    }
    cases: list[dict[str, Any]] = []
    while len(cases) < 160:
        size = int(chance.choice([1, 2, 7, 7, 30, 30, 97]))
        steps = chance.choice([8, 1024])  # between two integers: few, so that there are ties, or many
        logits = np.round(chance.normal(size=size) * chance.choice([1, 4]) * steps) / steps
        logits[chance.random(size) < chance.choice([0, 0, 0.4])] = -1000
        settings = {name: values[chance.integers(len(values))] for name, values in choices.items()}
        if len(cases) < 70:  # one setting, and a temperature
            kept = {"temperature", list(choices)[len(cases) % 7]}
            settings = {name: value for name, value in settings.items() if name in kept}
        settings = {name: value for name, value in settings.items() if value != getattr(Sampler, name)}
        prompt, generated = (chance.integers(0, size, chance.integers(0, 6)).tolist() for _ in range(2))
        row = logits.tolist()
        uniform = float(chance.random())
        token, margin = naive_draw(row, Sampler(**settings), uniform, prompt, generated)
        if margin > CLEAR:
            case = {"logits": row, "settings": settings, "prompt": prompt, "generated": generated}
            cases.append({**case, "uniform": uniform, "token": token})
    return cases


if __name__ == "__main__":
    CASES.write_text("".join(json.dumps(case) + "\n" for case in make_cases()))
