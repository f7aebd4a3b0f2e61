"""`xl-export serve`: a server for many streams of one or several models."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from runtimes.base.errors import ConfigError, needs
from runtimes.base.folders import refuse_inside
from runtimes.base.options import record_of
from runtimes.cli.group import LongCommand
from runtimes.cli.options import options_of, public_key_option, threads_option
from runtimes.contract.device import Device
from xl_export.serve.core.settings import EngineSettings, Limits, StoreSettings

PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client")


@click.command(
    "serve",
    cls=LongCommand,
    sections={
        "Main options": "--port --host --api-keys --name --state --threads --device --public-key --quiet",
        "Capacity": "--rows --queue --cache --share-cache --waiting-memory",
        "Largest requests": "--max-tokens --max-prompt --max-body",
        "Stored streams": "--stream-memory --max-streams --stream-disk --flush-streams --adopt-streams",
    },
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen at. Any other than this machine's own needs --api-keys.",
)
@click.option("--name", help="The name of the model for clients, if there is only one MODEL.")
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file with `NAME KEY` on each line. Each name has its own streams.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where streams are kept, also while the server is down. Without it they are in a temporary folder, "
    "which is removed when the server ends.",
)
@click.option(
    "--quiet", is_flag=True, help="Write no log. Otherwise standard error gets a line of JSON a request."
)
@threads_option(
    "The number of CPU threads of a step. By default all CPUs that this process may use, but one less for an "
    "artefact of less than 32 MB whose step takes less than a millisecond: the event loop needs a CPU too."
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="What computes, such as cuda. By default the CPU, and for an engine its own GPU.",
)
@public_key_option
@options_of(EngineSettings, Limits, StoreSettings)
def serve_command(
    models: tuple[str, ...],
    port: int,
    host: str,
    name: str | None,
    api_keys: Path | None,
    state: Path | None,
    quiet: bool,
    threads: int | None,
    device: str | None,
    public_key: Path | None,
    **settings: int,
) -> None:
    """Serve MODEL to many clients over HTTP.

    A language model has OpenAI's completions, any other model the Open Inference Protocol, and both have
    stored streams. A MODEL is the folder of an artefact or of a run, or NAME=FOLDER. Clients ask for it by
    its name; the default is the name of the folder. The server only accepts connections from this machine,
    unless --host is given. SIGTERM or Ctrl-C ends it within 5 seconds; streams in --state continue after the
    next start.
    """
    with needs("cpu,serve", *PACKAGES):
        from xl_export.serve.http.base.keys import read_keys
        from xl_export.serve.http.base.server import Log, Server, Source
        from xl_export.serve.http.serving import Address, run
    from runtimes.contract.session import is_language_model

    if settings["flush"] and state is None:
        raise ConfigError(
            "--flush-streams is given without --state, so no stream outlives the server; add --state FOLDER "
            "or leave --flush-streams out."
        )
    if state is not None and state.exists() and not state.is_dir():
        raise ConfigError(f"{state} is a file; expected a folder for the streams: give another --state.")
    if state is not None:
        refuse_inside(state / "streams", give="a --state")  # it would travel with copies
    address = Address(host=host, port=port)
    sources = [
        Source(
            name=own,
            path=path,
            settings=record_of(EngineSettings, settings),
            threads=threads,
            device=Device.parse(device) if device is not None else None,
            public_key=public_key,
        )
        for own, path in named(models, name)
    ]
    server = Server(
        sources,
        limits=record_of(Limits, settings),
        keys=None if api_keys is None else read_keys(api_keys),
        state=state,
        stream_limits=record_of(StoreSettings, settings),
        log=Log(None if quiet else sys.stderr),
    )

    def ready(at: int, _: object) -> None:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{at}/"
        models = ", ".join(server.models)
        kinds = {is_language_model(each.session) for each in server.models.values()}
        interfaces = [f"OpenAI's interface: {url}v1"] if True in kinds else []
        if False in kinds:
            interfaces.append(f"the Open Inference Protocol: {url}v2")
        click.echo(f"{url} serves {models} until Ctrl-C ({', '.join(interfaces)})")

    run(server, address, ready=ready)


def named(models: Sequence[str], name: str | None) -> list[tuple[str, Path]]:
    """The name and the folder of each model; raises ConfigError if names are missing or given twice."""
    if name is not None and len(models) > 1:
        raise ConfigError("--name is given with several models; name each as NAME=FOLDER.")
    found = []
    for model in models:
        own, equals, folder = model.partition("=")
        # A path may have the sign too.
        if not equals or ("/" in own and (Path(model).exists() or not Path(folder).exists())):
            equals = ""
            folder = model
        path = Path(folder)
        chosen = name if name is not None else own if equals else path.resolve().name
        wrong = len(chosen) > 128 or not chosen.strip(".") or not re.fullmatch(r"[\w.-]+", chosen)
        if wrong and (name is not None or equals or path.exists()):  # that it is not there is said elsewhere
            give = "give NAME=FOLDER" if name is None else "give another --name"
            raise ConfigError(
                f"{chosen!r:.80} is no name that clients can ask for; {give}, with at most 128 letters, "
                "digits, -, _ and . in it."
            )
        found.append((chosen, path))
    if len({each for each, _ in found}) != len(found):
        raise ConfigError("two models have one name; give each its own, as NAME=FOLDER.")
    return found
