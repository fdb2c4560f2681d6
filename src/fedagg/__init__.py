"""fedagg: federated learning without a learning rate to choose."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedagg.adapters import lora, merge_lora
    from fedagg.algorithms import Algorithm, option, register
    from fedagg.clients import Clients, Outcome
    from fedagg.comparison import Comparison, compare
    from fedagg.config import Config
    from fedagg.data import Dataset
    from fedagg.errors import FedaggError, SettingError
    from fedagg.federation import run
    from fedagg.flat import Layout, Model
    from fedagg.loading import load
    from fedagg.result import Result
    from fedagg.stopping import Patience, StopAt
    from fedagg.tuning import Swept, Tuned, sweep, tune
    from fedagg.work import Chunk, Client, Learner, Work

__version__ = "0.1.0"
__all__ = [
    "Algorithm", "Chunk", "Client", "Clients", "Comparison", "Config", "Dataset", "FedaggError", "Layout", "Learner",
    "Model", "Outcome", "Patience", "Result", "SettingError", "StopAt", "Swept", "Tuned", "Work", "compare", "load", "lora",
    "merge_lora", "option", "register", "run", "sweep", "tune",
]  # fmt: skip

HOMES = {
    "lora": "adapters", "merge_lora": "adapters",
    "Algorithm": "algorithms", "option": "algorithms", "register": "algorithms", "Clients": "clients", "Outcome": "clients",
    "Comparison": "comparison", "compare": "comparison", "Config": "config",
    "Dataset": "data", "FedaggError": "errors", "SettingError": "errors",
    "Result": "result", "load": "loading", "run": "federation",
    "Patience": "stopping", "StopAt": "stopping", "Layout": "flat", "Model": "flat", "Chunk": "work",
    "Client": "work", "Learner": "work", "Work": "work", "Swept": "tuning", "Tuned": "tuning", "sweep": "tuning", "tune": "tuning",
}  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import names and modules on first use, so that `import fedagg` alone does not load torch."""
    if name in HOMES:
        value = getattr(importlib.import_module(f"fedagg.{HOMES[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"fedagg.{name}") is not None:
        value = importlib.import_module(f"fedagg.{name}")
    else:
        raise AttributeError(f"module 'fedagg' has no attribute {name!r}")
    globals()[name] = value
    return value
