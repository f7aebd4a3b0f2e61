"""The server as an object: its models, limits, keys and figures. Every route gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.requests import HTTPConnection

from runtimes.base.errors import ConfigError, UserError
from xl_export.serve.http.base.bridge import refusing
from xl_export.serve.http.base.errors import RefusedError, stopping
from xl_export.serve.http.base.keys import ANYBODY, NO_KEYS, Keys, Tenant
from xl_export.serve.http.base.limits import BodyBytes, Limits, Load
from xl_export.serve.http.base.log import Log
from xl_export.serve.http.base.metrics import Metrics
from xl_export.serve.http.base.models import Model, Source, on_thread
from xl_export.serve.http.base.stores import Stores
from xl_export.serve.streams.facts import StoreSettings

ON_SIGNAL = 3.0  # seconds that the engines have to end their tasks when the server stops
MOST_REPLACED = 2  # versions of one model that were replaced and still serve what began before


class Server:
    """Opens models, knows who may use them, and stops them.

    models: by name; the first is the one that a request without a name gets. state: the folder for what
    outlives the process; without one, streams are in a temporary folder until the server stops. hosts: under
    which names a server without keys is reached; None for any.
    on_open: called on a thread with each model that was opened, before it is served.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        limits: Limits | None = None,
        read_keys: Callable[[], Keys] = lambda: NO_KEYS,
        state: Path | None = None,
        stream_limits: StoreSettings | None = None,
        log: Log | None = None,
    ) -> None:
        self.sources = {source.name: source for source in sources}
        if len(self.sources) != len(sources):
            raise ConfigError("two models have one name; give each its own, as NAME=PATH.")
        self.limits, self.state = limits or Limits(), state
        self._stream_limits = stream_limits or StoreSettings()
        self._read_keys, self.keys = read_keys, read_keys()
        self.log = log or Log(None)
        self.metrics = Metrics(self)
        self.models: dict[str, Model] = {}
        self.on_open: list[Callable[[Model], None]] = []
        self.hosts: frozenset[str] | None = None
        self.requests, self.sockets = Load("requests"), Load("WebSockets")
        self.bodies = BodyBytes(self.limits)
        self.stopping = False
        self._temporary: TemporaryDirectory[str] | None = None  # the streams of a server without `state`
        self._open_models: set[Model] = set()  # those that drain, too
        self._draining: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()

    async def start(self) -> None:
        """Opens all models, one after the other."""
        folder = self.state
        if folder is None:
            # An operation that did not end in time may still write to it while it is removed.
            try:
                self._temporary = TemporaryDirectory(prefix="xl-export-streams-", ignore_cleanup_errors=True)
            except OSError as error:
                raise UserError(
                    f"streams need a folder to write to, and there is no temporary one ({error}); give one "
                    "with --state."
                ) from error
            folder = Path(self._temporary.name)
        stores = await asyncio.to_thread(Stores, folder, self._stream_limits)
        self.on_open.append(stores.attach)
        for name in self.sources:
            self.models[name] = await self._open(name)

    def model(self, name: str | None) -> Model:
        """The model of that name, or the first; raises RefusedError for a name that is not served."""
        if self.stopping:
            raise stopping()
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise RefusedError(
                f"the model {name!r:.80} is not served here; choose one of {', '.join(self.models)}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    def one_more(self, tenant: Tenant, load: Load) -> AbstractContextManager[None]:
        """While the block runs, there is one more of `requests` or of `sockets`; raises RefusedError for one
        too many.
        """
        most = self.limits.sockets if load is self.sockets else self.limits.requests
        return load.one(tenant.name, most, self.limits.tenant_share)

    def hold(self, request: HTTPConnection, model: Model) -> Model:
        """The model, which a reload does not stop before the request has ended."""
        held = request.scope["state"]["held"]
        assert isinstance(held, ExitStack)
        held.enter_context(model.in_use())
        return model

    def refuse_when_full(self, request: HTTPConnection, *, bulk: bool = False) -> None:
        """Raises RefusedError where no model could take a task of this client, before anything of a request
        is read. bulk: whether it yields to tasks that people wait for.
        """
        if self.stopping:
            raise stopping()
        tenant, full = tenant_of(request).name, RefusedError("no model is served here.", status=503)
        for model in self.models.values():
            try:
                with refusing():
                    return model.engine.refuse_more(tenant=tenant, bulk=bulk)
            except RefusedError as refusal:
                full = refusal
        raise full

    async def reload(self, name: str) -> Model:
        """Opens the artefact of a model again, checks it, and puts it in the place of the one that is served.

        Requests that use the old one go on with it. Raises UserError, and changes nothing, where the artefact
        cannot be opened, or where too many replaced versions still serve: each keeps its memory.
        """
        async with self._reloading:
            source = self.sources[name]
            self._refuse_more_replaced(name)
            await on_thread(source.check, source.path)
            fresh = await self._open(name)
            if self.stopping:
                await on_thread(fresh.stop, 0.0)
                raise stopping()
            old, self.models[name] = self.models[name], fresh
        self.log.event(
            "reloaded",
            model=name,
            identity=fresh.session.identity,
            before=old.session.identity,
            threads=fresh.threads,
        )
        task = asyncio.ensure_future(self._drain(old))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        return fresh

    async def reload_changed(self) -> None:
        """Reads the keys again and reloads the models whose folder has changed or whose engine has died. A
        fault is a line of the log, and the others are reloaded nevertheless.
        """
        with self._logged("the keys"):
            self.reload_keys()
        for name, model in list(self.models.items()):
            with self._logged(name):
                stamp = await on_thread(self.sources[name].stamp)
                if stamp and stamp == model.stamp and model.engine.alive:
                    self.log.event("unchanged", model=name)
                else:
                    await self.reload(name)

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except (UserError, RefusedError) as error:
            self.log.event("not reloaded", level="error", what=what, error=str(error))
        except Exception as error:
            self.log.fault("not reloaded", error, what=what)

    def reload_keys(self) -> None:
        """Reads the keys again; raises ConfigError, and changes nothing, where the file is wrong."""
        self.keys = self._read_keys()

    async def stop(self, within: float = ON_SIGNAL) -> None:
        """Ends every task with its state and stops the engines. New requests are refused from now on."""
        self.stopping = True
        for task in self._draining:
            task.cancel()
        try:
            await asyncio.gather(*(on_thread(model.stop, within) for model in self._open_models))
        finally:
            self._open_models.clear()
            if self._temporary is not None:
                await on_thread(self._temporary.cleanup)

    async def _open(self, name: str) -> Model:
        loop = asyncio.get_running_loop()
        model = await on_thread(self.sources[name].open, loop)
        model.requests = self.metrics.of(name)
        self._open_models.add(model)
        try:
            for hook in self.on_open:
                await on_thread(hook, model)
        except BaseException:
            await on_thread(model.stop, 0.0)
            self._open_models.discard(model)
            raise
        model.requests.queued.append(model.engine.facts.queued)
        return model

    def _refuse_more_replaced(self, name: str) -> None:
        replaced = [each for each in self._open_models if each.name == name and each is not self.models[name]]
        if len(replaced) >= MOST_REPLACED:
            users = sum(each.users for each in replaced)
            raise UserError(
                f"{len(replaced)} versions of {name} replaced before still serve {users} request(s), "
                "each with its memory; reload again when these have ended."
            )

    async def _drain(self, model: Model) -> None:
        await model.drained()
        await on_thread(model.stop, ON_SIGNAL)
        self._open_models.discard(model)


def tenant_of(request: HTTPConnection) -> Tenant:
    """Whose request it is, as the guard has found."""
    tenant = request.scope["state"].get("tenant", ANYBODY)
    assert isinstance(tenant, Tenant)
    return tenant


def asked_model(request: HTTPConnection) -> str | None:
    """The query parameter `model`, the only one that a route takes; raises RefusedError for another one."""
    refuse_parameters(request, but="model")
    return request.query_params.get("model")


def refuse_parameters(request: HTTPConnection, *, but: str | None = None) -> None:
    """Raises RefusedError for a query parameter that is not `but`: what it asks for would not be done."""
    expected = "none, since fields belong into the body" if but is None else f"{but}, or none"
    for name in request.query_params:
        if name != but:
            raise RefusedError(
                f"the query parameter {name!r:.60} is not known here; expected {expected}.", param=name[:60]
            )


def has_valid_key(connection: HTTPConnection) -> bool:
    """Whether the key of a connection has not been taken away since it was opened."""
    now = connection.scope["state"]["tenant_now"]()
    return now is not None and now.name == tenant_of(connection).name
