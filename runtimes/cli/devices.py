"""`xl-export devices`: what this machine can compute on."""

from __future__ import annotations

import click

from runtimes.base.records import to_json
from runtimes.cli.options import echo, echo_json, json_option
from runtimes.tasks.devices import hints, list_devices


@click.command("devices")
@json_option
def devices_command(as_json: bool) -> None:
    """List what this machine can compute on.

    For each device that --device takes there is one line: what computes, or why the device cannot be used and
    what to install. A device that is listed as usable has its packages, its libraries and a driver; whether
    its answers are right is tested when an artefact is opened, and by `xl-export check`.
    """
    found, said = list_devices(), hints()
    for kind in ("artefacts", "engines", "runs"):
        echo(f"{kind}:")
        for report in found:
            if report.computes == kind:
                echo(f"  {report.device:<17} {'usable' if report.usable else '-':<7} {report.sentence}")
    for hint in said:
        echo(hint)
    echo_json({"devices": [to_json(report) for report in found], "hints": said}, as_json)
