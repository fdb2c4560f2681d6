"""The ServerApp: reads a run's settings from Flower's run configuration, and plays all rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedagg import config, seeding, trackers
from fedagg.config import Config
from fedagg.errors import SettingError
from fedagg.flower.monitor import log_as_json
from fedagg.flower.privacy import Privacy
from fedagg.flower.scores import OwnMetric
from fedagg.flower.strategy import FedAggStrategy

OWN: dict[str, type] = {
    "out": str,
    "timeout": float,
    "quorum": int,
    "wait": float,
    "patience": float,
    "close-at": float,
    "fewer-epochs": bool,
    "test-apart": bool,
    "secure": bool,
    "log": str,
    "track": str,
}
PRIVACY: dict[str, type] = {"clipping-norm": float, "noise-multiplier": float, "delta": float, "epsilon-max": float, "ledger": str}
KINDS = {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}
FIELD_BITS = 3  # default bits of FedAgg's mean field: within 0.3 points of exact, at 1.05 times FedAvg's bytes
CUSTOM = {"dataset": "custom", "model": "custom", "partition": "custom", "participation": 1.0}


def server_app(model: Callable[[], nn.Module], *, metric: OwnMetric | None = None) -> ServerApp:
    """A ServerApp that trains the network which `model` makes, with the settings in `[tool.flwr.app.config]`.

    Settings are the command line's options (`algorithm`, `rounds`, `lr`, `downlink-bits`, ...), of which `clients`, the number of
    nodes, is required. There are some more: `out`, the run folder; `timeout`, seconds for an answer; `quorum`, answers that a round
    needs; `wait`, seconds to wait for all nodes before the first round; `patience`, seconds to wait for nodes when none are left;
    `close-at`, share of answers that end a round; `fewer-epochs`, for nodes that are too slow for it; `test-apart`, to test in
    separate messages; `secure`, to aggregate under SecAgg+; `log`, text or json; `track`, trackers as in `fedagg run`; and for
    differential privacy `clipping-norm`, `noise-multiplier`, `delta`, `epsilon-max` and `ledger`. `metric` is your own metric for
    the run; give it to `client_app` as well.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings, own = split(dict(context.run_config))
        wait = float(own.pop("wait", 600.0))
        if own.pop("log", "text") == "json":
            log_as_json()
        own["callbacks"] = [trackers.make(name, Path(own["out"])) for name in trackers.split_names(own.pop("track", ""))]
        with seeding.seeded_global(seeding.derive(settings.seed, "model"), torch.device("cpu")):
            module = model()
        FedAggStrategy(module, settings, metric=metric, **own).run(grid, wait=wait)

    return app


def split(given: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The run's configuration, and the settings that only a real federation has."""
    own: dict[str, Any] = {}
    for name, kind in (OWN | PRIVACY).items():
        if name in given:
            value = given.pop(name)
            fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise SettingError(name, value, f"give {KINDS[kind]}")
            own[name] = kind(value)
    if "clients" not in given:
        raise SettingError("clients", None, "set it in [tool.flwr.app.config] to the number of nodes")
    hidden = {name.replace("-", "_"): own.pop(name) for name in PRIVACY if name in own}
    if hidden:
        own["privacy"] = Privacy(**{"clipping_norm": 0.0, "noise_multiplier": 0.0} | hidden)
    if own.get("log", "text") not in ("text", "json"):
        raise SettingError("log", own["log"], "choose text or json")
    if not own.get("out", "x"):
        del own["out"]
    if not Path(own.get("out", "/")).is_absolute():
        raise SettingError("out", own["out"], "give an absolute path: the server does not run in your folder")
    own = {name.replace("-", "_"): value for name, value in own.items()}
    given = {key: value for key, value in given.items() if value or key not in ("task", "metric")}  # "" stands for none
    settings = {**CUSTOM, **{key.replace("-", "_"): value for key, value in given.items()}}
    if settings.get("algorithm", Config.model_fields["algorithm"].default) == "fedagg":
        settings.setdefault("downlink_bits", FIELD_BITS)
    made = config.make(settings)  # this loads the plugin, if there is one
    for name in trackers.split_names(own.get("track", "")):
        trackers.TRACKERS.find(name)
        if "out" not in own:
            raise SettingError("track", own["track"], "give `out`, the run folder, because trackers write there")
    return made, own
