"""`xl-export web`: an artefact as a web page."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.cli.options import json_option, show
from xl_export.cli.options import force_option


class Address(click.ParamType):
    """The URL of a page."""

    name = "address"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if not re.match(r"https?://[^/]", value):
            raise UserError(
                f"--url is {value!r:.80}; expected a whole address such as https://me.github.io/tales/."
            )
        return str(value)


@click.command("web")
@click.argument("artefacts", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="ARTEFACT...")
@click.option("--out", type=click.Path(path_type=Path), help="The folder to write.")
@click.option("--title", metavar="TEXT", help="The heading of the page. Links to it show it too.")
@click.option("--about", metavar="TEXT", help="A sentence below the heading. Links to the page show it too.")
@click.option(
    "--opening",
    "openings",
    multiple=True,
    metavar="TEXT",
    help="How a text begins that the page writes by itself; give the option again for more of them, of which "
    "the page picks one. By default the model begins.",
)
@click.option(
    "--url",
    type=Address(),
    metavar="ADDRESS",
    help="Where the page will be, such as https://me.github.io/tales/. Most services need it to show the "
    "picture of a link.",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Serve the site to this machine until Ctrl-C, with the headers that a browser wants before it "
    "computes with several threads. Without --out the folder is temporary.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The port of --serve; 0 chooses a free one.",
)
@click.option(
    "--node-modules",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="A folder of npm packages that holds onnxruntime-web, for machines without a network. By default "
    "its files are downloaded from the npm registry once, verified, and kept in your cache.",
)
@force_option
@json_option
def web_command(
    artefacts: tuple[Path, ...],
    out: Path | None,
    title: str | None,
    about: str | None,
    openings: tuple[str, ...],
    url: str | None,
    serve: bool,
    port: int,
    node_modules: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a web page that runs ARTEFACT in the browser.

    The page is a folder of files. Any web server can serve it, and it asks no other server for anything. With
    several artefacts the page has a list to choose from.
    """
    if out is None and not serve:
        raise UserError("neither --out nor --serve was given; give --out FOLDER, --serve, or both.")
    with needs("cpu", "onnxruntime"):
        from xl_export.web.serve import serving
        from xl_export.web.site import write_site
    with tempfile.TemporaryDirectory(prefix="xl-export-") as scratch:
        folder = out or Path(scratch) / "site"
        site = write_site(
            artefacts,
            folder,
            title=title,
            about=about,
            openings=openings,
            address=url,
            node_modules=node_modules,
            force=force,
        )
        for warning in site.warnings:
            click.echo(f"Warning: {warning}", err=True)
        size = f"{site.num_bytes / 1e6:.1f} MB"
        names = " and ".join(site.models)
        lines = [f"{out} is a web page of {names}, {size}; any web server serves it"] if out else []
        document = {
            "site": str(out) if out else None,
            "models": list(site.models),
            "bytes": site.num_bytes,
            "warnings": list(site.warnings),
        }
        if not serve:
            show(document, lines, as_json=as_json)
            return
        with serving(folder, port=port) as server:
            url = f"http://127.0.0.1:{server.server_port}/"
            show(document | {"url": url}, [*lines, f"{url} serves it until Ctrl-C"], as_json=as_json)
            server.serve_forever()
