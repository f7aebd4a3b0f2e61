"""`xl-export check`: whether an artefact computes on this device what was trained."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.cli.options import (
    device_option,
    folder_argument,
    json_option,
    public_key_option,
    show,
    threads_option,
)
from runtimes.contract.device import Device
from runtimes.tasks.check import check


@click.command("check")
@folder_argument
@threads_option()
@device_option
@click.option(
    "--identity",
    metavar="SHA256",
    help="Accept only the artefact with this identity, which `sha256sum PATH/spec.json` prints.",
)
@public_key_option
@json_option
def check_command(
    path: Path,
    threads: int | None,
    device: Device,
    identity: str | None,
    public_key: Path | None,
    as_json: bool,
) -> None:
    """Check that the artefact at PATH computes what was trained.

    The command runs the tokens in the file reference.json of the artefact and compares every log-probability
    with the one that PyTorch computed at export. If the weights are quantised, it compares with the same
    weights in fp32. The exit code is 0 when all differences are within the tolerance of the precision, 1 when
    one is not, and 2 when the artefact is damaged, is another one, or is not signed.
    """
    report = check(path, threads=threads, device=device, expected_identity=identity, public_key=public_key)
    verdict = "passed" if report.passed else "FAILED"
    lines = [f"{verdict}: {report.sentence}", f"computed by: {report.computed_by}"]
    show(report.to_json(), lines, as_json=as_json)
    if not report.passed:
        raise SystemExit(1)
