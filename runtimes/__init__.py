"""Runs artefacts without PyTorch: open a session, score, generate, check.

It imports only NumPy and ONNX Runtime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtimes.base.errors import UserError
from runtimes.contract.memory import Memory
from runtimes.contract.sampling import Sampler
from runtimes.contract.saved_streams import load_memory, save_memory
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session

if TYPE_CHECKING:
    from runtimes.tasks.beams import Continuation, beam_search, best_of
    from runtimes.tasks.check import CheckReport, check
    from runtimes.tasks.evaluate import Score, evaluate
    from runtimes.tasks.generate import Piece, generate
    from runtimes.tasks.n_best import BestText, best_of_groups
    from runtimes.tasks.sample import Draw
    from runtimes.tasks.score_texts import TextScore, score_texts
    from runtimes.tasks.text_rows import TextToScore

__all__ = [
    "BestText",
    "CheckReport",
    "Continuation",
    "Draw",
    "Memory",
    "Piece",
    "Sampler",
    "Score",
    "Session",
    "TextScore",
    "TextToScore",
    "UserError",
    "beam_search",
    "best_of",
    "best_of_groups",
    "check",
    "evaluate",
    "generate",
    "load_memory",
    "open_session",
    "save_memory",
    "score_texts",
]

# The module in `runtimes.tasks` of each name that is imported when first used: a program that only steps a
# session starts faster without them.
_TASKS = {
    "BestText": "n_best",
    "CheckReport": "check",
    "Continuation": "beams",
    "Draw": "sample",
    "Piece": "generate",
    "Score": "evaluate",
    "TextScore": "score_texts",
    "TextToScore": "text_rows",
    "beam_search": "beams",
    "best_of": "beams",
    "best_of_groups": "n_best",
    "check": "check",
    "evaluate": "evaluate",
    "generate": "generate",
    "score_texts": "score_texts",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _TASKS:
        raise AttributeError(f"module 'runtimes' has no attribute {name!r}")
    return getattr(import_module(f"runtimes.tasks.{_TASKS[name]}"), name)
