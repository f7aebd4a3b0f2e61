"""Ray: a cluster that runs or one that is started here, and actors that work on units with one model."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runtimes.base.errors import ConfigError, UserError, first_line, needs
from runtimes.base.machine import available_cpus
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session

LOCAL = "local"
Facts = dict[str, Any]
MOST_TASKS = 10_000  # of one dataset; with more units a task has several of them


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A finished unit."""

    number: int
    content: bytes
    began: float  # when its actor began it, by the clock of that machine
    ended: float  # when its actor finished it


def _worker(work: type[Any], options: dict[str, Any]) -> type[Any]:
    """The class of an actor that makes `work(**options)` once and answers batches of one unit.

    Its constructor has no arguments: Ray could not restart an actor whose arguments it has lost.
    """

    class Worker:
        def __init__(self) -> None:
            try:
                self._work: Callable[[Any], bytes] | UserError = work(**options)
            except UserError as error:
                self._work = error

        def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
            number = int(batch["number"][0])
            unit = batch["unit"][0]
            content = b""
            error = ""
            began = time.time()
            try:
                if isinstance(self._work, UserError):
                    raise self._work
                content = self._work(unit)
            except UserError as fault:  # Ray would wrap it in a traceback
                error = str(fault)
            return {
                "number": [number],
                "content": [content],
                "error": [error],
                "began": [began],
                "ended": [time.time()],
            }

    return Worker


@contextlib.contextmanager
def cluster(address: str, *, cpus: int) -> Iterator[None]:
    """Connects to the Ray cluster at an address; `local` starts one on this machine, and ends it afterwards.

    cpus: how many the actors need together. Raises UserError if the cluster cannot be reached or has less.
    """
    # Ray sends usage statistics to its makers unless this is set.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it warns of what Ray Data does itself
    with needs("ray", "ray", "pyarrow", "fsspec"):
        import ray
        import ray.data

    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        options |= {"num_cpus": max(cpus, available_cpus()), "include_dashboard": False}
    try:
        with _silent():
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--ray is {address}, and no Ray cluster answers there ({first_line(error):.200}); give the "
            "address of one, such as ray://head:10001 or auto, or local."
        ) from error
    try:
        held = int(ray.cluster_resources().get("CPU", 0))
        if held < cpus:
            raise UserError(
                f"the actors take {cpus} CPUs and the cluster has {held}; give fewer --actors or --threads."
            )
        for name in ("ray", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discards what C++ libraries write to standard error: Ray prints there how much it will print."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def in_tasks(function: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`function(*arguments)` for each of the arguments, computed by tasks of the cluster, in order.

    Raises the first UserError that one of them raises.
    """
    import ray

    answers: list[Any] = ray.get([ray.remote(_answered).remote(function, own) for own in arguments])
    for answer in answers:
        if isinstance(answer, UserError):
            raise answer
    return answers


def _answered(function: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except UserError as error:
        return UserError(str(error))


def finished_units(
    units: Sequence[tuple[int, Any]], work: type[Any], options: dict[str, Any], *, actors: int, threads: int
) -> Iterator[Unit]:
    """Yields each unit as soon as an actor has finished it.

    units: numbers and what `work(**options)` is called with. An actor that dies is replaced, and its unit is
    done again. Raises UserError as `work` does.
    """
    import ray.data

    if not units:
        return
    rows = [{"number": number, "unit": unit} for number, unit in units]
    done = ray.data.from_items(rows, override_num_blocks=min(len(rows), MOST_TASKS)).map_batches(
        _worker(work, options),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(rows))),
        num_cpus=threads,
    )
    for row in done.iter_rows():
        if row["error"]:
            raise UserError(row["error"])
        yield Unit(number=int(row["number"]), content=row["content"], began=row["began"], ended=row["ended"])


def facts_of(model: str, device: str, threads: int, rule: MemoryRule | None = None) -> Facts:
    """The identity of a model, and what computes it on this machine, for a plan.

    rule: to compute under, or None for the model's own.
    """
    return _opened(model, device, threads, rule)[1]


def open_same(model: str, device: str, threads: int, facts: Facts, rule: MemoryRule | None = None) -> Session:
    """A session of the model; raises ConfigError if its `facts_of` are not `facts`."""
    session, here = _opened(model, device, threads, rule)
    if here["model"] != facts["model"]:
        raise ConfigError(
            f"{model} is another model for this actor than for the call ({here['model'][:12]} and "
            f"{facts['model'][:12]}); put the same files at this path on every machine, and leave them alone "
            "until the call ends."
        )
    if here != facts:
        raise ConfigError(
            f"this actor computes with {here['computed_by']}, and the call began with "
            f"{facts['computed_by']}; give a --device that all machines have, and build the fused operator "
            "on all of them or on none."
        )
    return session


def _opened(model: str, device: str, threads: int, rule: MemoryRule | None) -> tuple[Session, Facts]:
    session = open_session(model, threads=threads, device=device)
    if rule is not None:
        session = session.with_rule(rule)
    return session, {"model": session.identity, "computed_by": session.computed_by}
