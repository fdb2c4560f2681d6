"""Runs whose data, network or parts were given from Python: the command line has no way to get at them."""

from __future__ import annotations

from pathlib import Path

from fedagg.config import FROM_PYTHON, Config
from fedagg.errors import SettingError


def keywords(config: Config) -> list[str]:
    """What has to be given from Python to make this run."""
    return [word for setting, word in FROM_PYTHON.items() if getattr(config, setting) == "custom"]


def refuse(config: Config, setting: str, folder: Path, call: str) -> None:
    """Say where a run from Python can be had; `call` is what to call there, with a place for what it was given."""
    if words := keywords(config):
        named = ", ".join(words[:-1]) + (" and " if words[:-1] else "") + words[-1]
        again = call.format(folder=str(folder), given=", ".join(f"{word}=..." for word in words))
        raise SettingError(setting, str(folder), f"the run's {named} came from Python; go on there, with {again}")
