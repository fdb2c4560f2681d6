"""Install requirements into this Python's environment: `python tools/install.py -c constraints.txt -e '.[dev]'`.

uv does it in a quarter of pip's time. It does not read pip's configuration, so the part that it can follow is handed on. If there
is more than that, or if uv cannot be had or fails, pip does it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
HANDED_ON = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
IGNORED = {"timeout", "default-timeout", "cache-dir", "no-cache-dir", "disable-pip-version-check", "root-user-action"}


def uv_settings(pip_settings: Iterable[str]) -> dict[str, str] | None:
    """Environment variables for uv from the lines of `pip config list`; None if pip is told something that uv is not."""
    found: dict[str, str] = {}
    for line in pip_settings:
        name, _, value = line.partition("=")
        key, words = name.rsplit(".", 1)[-1], shlex.split(value)[0].split()
        # uv and pip choose differently among several indexes. Copies on the disk have nothing that the main one lacks.
        copies = key == "extra-index-url" and all(word.startswith("file:") for word in words)
        if key in HANDED_ON:
            found[HANDED_ON[key]] = ",".join(words)
        elif key not in IGNORED and not copies:
            return None
    return found


def with_uv(arguments: list[str]) -> bool:
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout.split("\n")
    settings = uv_settings(line for line in listed if line)
    if settings is None or subprocess.run([*PIP, "install", "-qq", "uv>=0.9"]).returncode:
        return False
    own = {"VIRTUAL_ENV": sys.prefix, **settings}
    return not subprocess.run([sys.executable, "-m", "uv", "pip", "install", "-q", *arguments], env=os.environ | own).returncode


if __name__ == "__main__":
    if not with_uv(sys.argv[1:]):
        print("installing with pip, which takes a few minutes", flush=True)
        # Of the 20,000 files that are installed, few are ever imported; Python compiles these when they are.
        sys.exit(subprocess.run([*PIP, "install", "-q", "--no-compile", *sys.argv[1:]]).returncode)
