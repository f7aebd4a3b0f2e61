"""Removes private data from a report: names of users and hosts, folders, secrets, serial numbers.

The rules are blunt on purpose, because a report is sent to other people. Only folders of the system are kept,
and no long value of the environment.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Folders of the operating system, which say nothing about a person.
SYSTEM = ("usr", "lib", "lib64", "bin", "sbin", "etc", "dev", "proc", "sys")
PLAIN_USERS = ("root", "user", "ubuntu", "debian", "admin", "runner", "nvidia", "jetson", "test", "python")
# The kind and number of a login (XDG_SESSION_ID, DESKTOP_SESSION) are not secret, and common words.
SESSION = r"(?<!DESKTOP_)SESSION(?!_(?:CLASS|DESKTOP|ID|TYPE)$)"
SECRET = re.compile(rf"KEY|TOKEN|SECRET|PASS|AUTH|CRED|COOKIE|PROXY|{SESSION}", re.IGNORECASE)
MIN_REMOVED_CHARS = 4  # shorter values are parts of ordinary words
LONG = 12  # characters from which any value of the environment is removed, unless it is a usual word
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
    """Replaces private data in a text by placeholders such as `<home>`.

    words: whole words to replace, with their placeholders. parts: texts to replace anywhere, longest first.
    """

    def __init__(self, *, words: Mapping[str, str], parts: Mapping[str, str]) -> None:
        self._words = [
            (re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", re.IGNORECASE), placeholder)
            for word, placeholder in sorted(words.items(), key=lambda pair: -len(pair[0]))
            if len(word) >= MIN_REMOVED_CHARS - 1
        ]
        longest = sorted(parts.items(), key=lambda pair: -len(pair[0]))
        self._parts = [(text, placeholder) for text, placeholder in longest if len(text) >= MIN_REMOVED_CHARS]

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

    def clean(self, data: Any) -> Any:
        """Parsed JSON with every string in it scrubbed."""
        if isinstance(data, dict):
            return {self(name): self.clean(value) for name, value in data.items()}
        if isinstance(data, list):
            return [self.clean(value) for value in data]
        return self(data) if isinstance(data, str) else data


def scrubber(folders: Mapping[Path, str], *, environment: Mapping[str, str] | None = None) -> Scrubber:
    """The scrubber for this process. folders: their own placeholders."""
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
    """The values of the environment to remove: secrets, and long values that are not usual words."""
    for name, value in environment.items():
        is_secret = SECRET.search(name) is not None and len(value) >= MIN_REMOVED_CHARS
        if is_secret or (len(value) >= LONG and not USUAL.fullmatch(value) and not value.startswith("/")):
            yield value


def _host_names() -> set[str]:
    """The names and addresses of this machine, except `localhost`."""
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
