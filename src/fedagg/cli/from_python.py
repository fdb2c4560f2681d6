"""Runs whose data, network or parts came from Python: the command line cannot access these."""

from __future__ import annotations

from pathlib import Path

from fedagg.config import FROM_PYTHON, Config
from fedagg.errors import SettingError


def keywords(config: Config) -> list[str]:
    """What must be given from Python to make this run."""
    return [word for setting, word in FROM_PYTHON.items() if getattr(config, setting) == "custom"]


def refuse(config: Config, setting: str, folder: Path, call: str) -> None:
    """Refuse a run from Python, and say what to call there instead; `call` has a placeholder for its arguments."""
    if words := keywords(config):
        named = ", ".join(words[:-1]) + (" and " if words[:-1] else "") + words[-1]
        again = call.format(folder=str(folder), given=", ".join(f"{word}=..." for word in words))
        raise SettingError(setting, str(folder), f"the run's {named} came from Python; continue there, with {again}")
