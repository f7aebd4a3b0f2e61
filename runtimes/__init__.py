"""Runs artefacts without PyTorch: open a session, score, generate, check. Imports only NumPy and ONNX Runtime."""

from runtimes.errors import UserError
from runtimes.generation import Piece, generate
from runtimes.memory import Memory, load_memory, save_memory
from runtimes.reference import CheckReport, check
from runtimes.sampling import Sampler
from runtimes.scoring import Score, evaluate
from runtimes.session import Session, open_session

__all__ = [
    "CheckReport", "Memory", "Piece", "Sampler", "Score", "Session", "UserError",
    "check", "evaluate", "generate", "load_memory", "open_session", "save_memory",
]  # fmt: skip
