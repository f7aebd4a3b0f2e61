"""The files of `deploy/` agree with each other, as far as that shows without a cluster."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path

import pytest
import yaml

from xl_export.cli.serve import serve_command

DEPLOY = Path(__file__).parents[2] / "deploy"
RANGE = re.compile(r"(?:(\d+(?:\.\d+)?)%|\*)\s+(xl-export-\d+);")


def documents(name: str) -> dict[str, dict]:
    """The documents of a file of Kubernetes, by kind and name."""
    loaded = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8"))
    return {f"{each['kind']} {each['metadata']['name']}": each for each in loaded}


def ranges(lines: str) -> list[tuple[float, str]]:
    """The ranges of a list of nginx's `split_clients`: where each ends, from 0 to 100, and its server."""
    found, end = [], 0.0
    for share, server in RANGE.findall(lines):
        end = 100.0 if not share else end + float(share)
        found.append((end, server))
    return found


def server_at(place: float, found: list[tuple[float, str]]) -> str:
    return next(server for end, server in found if place < end)


def test_the_proxy_sends_sessions_to_each_server_that_there_is() -> None:
    conf = documents("proxy.yaml")["ConfigMap xl-export-proxy"]["data"]["nginx.conf"]
    servers = documents("serve.yaml")
    named = [server for _, server in ranges(conf[conf.index("split_clients $session") :])]
    replicas = servers["StatefulSet xl-export"]["spec"]["replicas"]
    assert named == [f"xl-export-{number}" for number in range(replicas)]
    port = servers["Service xl-export-servers"]["spec"]["ports"][0]["port"]
    addresses = re.findall(r"proxy_pass http://\$server_of_session\.([\w-]+)\.default\S*:(\d+);", conf)
    assert addresses == [("xl-export-servers", str(port))] * 2


def test_buffers_fit() -> None:
    pod = documents("serve.yaml")["StatefulSet xl-export"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    megabytes = {}
    for argument in server["args"]:
        if found := re.fullmatch(r"--(waiting|stream)-memory=(\d+)", argument):
            megabytes[found[1]] = int(found[2])
    most = int(server["resources"]["limits"]["memory"].removesuffix("Gi")) << 10
    assert 4 * megabytes["waiting"] + megabytes["stream"] <= most // 2, "the rest is for the model"


def test_a_third_server_gets_a_third_of_the_sessions() -> None:
    conf = documents("proxy.yaml")["ConfigMap xl-export-proxy"]["data"]["nginx.conf"]
    begin = conf.index("split_clients $session")
    two, three = ranges(conf[begin:]), ranges(conf[:begin])
    assert len(two) == 2
    assert len(three) == 4
    places = [number / 100 for number in range(10_000)]
    moved = [place for place in places if server_at(place, two) != server_at(place, three)]
    assert {server_at(place, three) for place in moved} == {"xl-export-2"}
    assert abs(len(moved) / len(places) - 1 / 3) < 0.001
    shares = [sum(server_at(place, three) == f"xl-export-{n}" for place in places) for n in range(3)]
    assert max(shares) - min(shares) < 10


def test_the_unit_starts_the_command_as_a_user_without_rights() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "xl-export.service", encoding="utf-8")
    service = unit["Service"]
    assert service["ExecStart"].split()[:2] == ["/opt/xl-export/bin/xl-export", "serve"]
    assert service["NoNewPrivileges"] == "yes"
    assert "User" in service or service.get("DynamicUser") == "yes"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.nvidia"])
def test_images_name_existing_extras_and_options(name: str) -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    content = (DEPLOY / name).read_text(encoding="utf-8")
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"\$\{wheel\}\[([\w,]+)\]", content)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (command,) = re.findall(r"^CMD (.*)$", content, flags=re.MULTILINE)
    known = {option for parameter in serve_command.params for option in parameter.opts}
    used = [word for word in json.loads(command) if word.startswith("--")]
    assert used
    assert set(used) <= known
