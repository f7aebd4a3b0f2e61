"""Runs artefacts without PyTorch: open a session, score, generate, check.

It imports only NumPy and ONNX Runtime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtimes.base.errors import UserError
from runtimes.contract.memory import Memory
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session

if TYPE_CHECKING:
    from runtimes.contract.saved_streams import load_memory, save_memory
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

# The module of each name that is imported when first used: a program that only steps a session starts faster
# without them.
_WHEN_USED = {
    "BestText": "tasks.n_best",
    "CheckReport": "tasks.check",
    "Continuation": "tasks.beams",
    "Draw": "tasks.sample",
    "Piece": "tasks.generate",
    "Score": "tasks.evaluate",
    "TextScore": "tasks.score_texts",
    "TextToScore": "tasks.text_rows",
    "beam_search": "tasks.beams",
    "best_of": "tasks.beams",
    "best_of_groups": "tasks.n_best",
    "check": "tasks.check",
    "evaluate": "tasks.evaluate",
    "generate": "tasks.generate",
    "load_memory": "contract.saved_streams",
    "save_memory": "contract.saved_streams",
    "score_texts": "tasks.score_texts",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module 'runtimes' has no attribute {name!r}")
    return getattr(import_module(f"runtimes.{_WHEN_USED[name]}"), name)
