"""Takes private data out of a report: names of users and hosts, folders, secrets, serial numbers.

The rules are blunt on purpose. A folder is only kept where it belongs to the system, and a value of the
environment never, because a report is sent to other people.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.first_hour.results import StepResult

# Folders of the operating system, which say nothing about a person.
SYSTEM = ("usr", "lib", "lib64", "bin", "sbin", "etc", "dev", "proc", "sys")
PLAIN_USERS = ("root", "user", "ubuntu", "debian", "admin", "runner", "nvidia", "jetson", "test", "python")
# What a login is called and numbered (XDG_SESSION_ID, DESKTOP_SESSION) is no secret, and a usual word.
SESSION = r"(?<!DESKTOP_)SESSION(?!_(?:CLASS|DESKTOP|ID|TYPE)$)"
SECRET = re.compile(rf"KEY|TOKEN|SECRET|PASS|AUTH|CRED|COOKIE|PROXY|{SESSION}", re.IGNORECASE)
LEAST = 4  # characters of a value that is taken out; shorter ones are parts of ordinary words
LONG = 12  # characters from which any value of the environment is taken out, unless it is a usual word
USUAL = re.compile(r"[a-z]+[\w.+-]*|[\d.]+", re.ASCII)  # such as xterm-256color or 3.11.2
UNIQUE = (
    re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE),
    re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE),
    re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE),  # of a network card
    re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+"),  # of e-mail
)
# The folders of an absolute path: it does not follow a word, a slash (as in an address) or a placeholder,
# unless it is the address of a file.
PATH = re.compile(r"(?:(?<![\w/.>~-])|(?<=file://))/(?:[^\s/:'\"<>|,;()\[\]{}]+/)+")
BELOW = re.compile(r"(<(?:home|here|temporary|environment)>)/(?:[^\s/:'\"<>|,;()\[\]{}]+/)+")
WINDOWS = re.compile(r"\b[A-Za-z]:\\(?:[^\s\\:'\"<>|]+\\)+")


class Scrubber:
    """Replaces private data in a text by placeholders such as `<home>`; the same object serves a report.

    words: names that are replaced where they stand alone, with their placeholders. parts: the same for
    texts that are replaced wherever they stand, longest first.
    """

    def __init__(self, *, words: Mapping[str, str], parts: Mapping[str, str]) -> None:
        self._words = [
            (re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", re.IGNORECASE), placeholder)
            for word, placeholder in sorted(words.items(), key=lambda pair: -len(pair[0]))
            if len(word) >= LEAST - 1
        ]
        longest = sorted(parts.items(), key=lambda pair: -len(pair[0]))
        self._parts = [(text, placeholder) for text, placeholder in longest if len(text) >= LEAST]

    def __call__(self, text: str) -> str:
        for part, placeholder in self._parts:
            text = text.replace(part, placeholder)
        text = PATH.sub(_shortened, text)
        text = BELOW.sub(r"\1/<folder>/", text)
        text = WINDOWS.sub("<folder>/", text)
        for pattern in UNIQUE:
            text = pattern.sub("<unique>", text)
        for pattern, placeholder in self._words:
            text = pattern.sub(placeholder, text)
        return text

    def clean(self, result: StepResult) -> StepResult:
        """The same result with every text in it scrubbed that a step has written."""
        return replace(
            result,
            sentence=self(result.sentence),
            checks=tuple(
                replace(check, name=self(check.name), sentence=self(check.sentence))
                for check in result.checks
            ),
            facts={self(name): self(value) for name, value in result.facts.items()},
            last_lines=tuple(map(self, result.last_lines)),
        )


def scrubber(folders: Mapping[Path, str], *, environment: Mapping[str, str] | None = None) -> Scrubber:
    """The scrubber for this process. folders: those with a placeholder of their own."""
    environment = os.environ if environment is None else environment
    home = os.path.expanduser("~")
    parts = {str(path): placeholder for path, placeholder in folders.items() if len(path.parts) > 1}
    parts |= {str(path.resolve()): name for path, name in folders.items() if len(path.parts) > 1}
    own = {home: "<home>", sys.prefix: "<python>", tempfile.gettempdir(): "<temporary>"}
    parts |= {text: name for text, name in own.items() if text.count("/") > 1 or name != "<python>"}
    parts.pop("/", None)
    parts |= dict.fromkeys(_values(environment), "<environment>")
    users = {_user(), os.path.basename(home), environment.get("USER", ""), environment.get("LOGNAME", "")}
    words = {name: "<user>" for name in users if name and name.lower() not in PLAIN_USERS}
    words |= dict.fromkeys(_host_names(), "<host>")
    return Scrubber(words=words, parts=parts)


def _values(environment: Mapping[str, str]) -> Iterable[str]:
    """The values of the environment that must not appear: secrets, and whatever is long and no usual word."""
    for name, value in environment.items():
        is_secret = SECRET.search(name) is not None and len(value) >= LEAST
        if is_secret or (len(value) >= LONG and not USUAL.fullmatch(value) and not value.startswith("/")):
            yield value


def _host_names() -> set[str]:
    """The names and addresses of this machine; `localhost` is nobody's."""
    names = {socket.gethostname(), os.uname().nodename}
    names |= {name.partition(".")[0] for name in names}
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
        names |= {address for address in found if not address.startswith(("127.", "::1"))}
    except OSError:  # the name of the host is in no table
        pass
    return {name for name in names if name and name.lower() not in ("localhost", *PLAIN_USERS)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a process without a user name, as in some containers
        return ""


def _shortened(found: re.Match[str]) -> str:
    folder = found[0]
    return folder if folder.split("/")[1] in SYSTEM else "<folder>/"
