"""`xl-export devices`: what this machine can compute on."""

from __future__ import annotations

import click

from runtimes.base.records import to_json
from runtimes.cli.options import json_option, show
from runtimes.tasks.devices import hints, list_devices


@click.command("devices")
@json_option
def devices_command(as_json: bool) -> None:
    """List what this machine can compute on.

    For each device that --device takes there is one line: what computes, or why the device cannot be used and
    what to install. A device that is listed as usable has its packages, its libraries and a driver; whether
    its answers are right is tested when an artefact is opened, and by `xl-export check`.
    """
    found = list_devices()
    said = hints()
    lines = []
    for kind in ("artefacts", "engines", "runs"):
        lines.append(f"{kind}:")
        for report in found:
            if report.computes == kind:
                state = "usable" if report.usable else "-"
                lines.append(f"  {report.device:<17} {state:<7} {report.sentence}")
    document = {"devices": [to_json(report) for report in found], "hints": said}
    show(document, [*lines, *said], as_json=as_json)
