"""Real federations: every method of the package on Flower, with data that never leaves the nodes."""

from __future__ import annotations

try:
    import flwr  # noqa: F401
except ModuleNotFoundError:
    from fedagg.errors import MissingError

    raise MissingError("fedagg.flower", "flwr", "flower") from None

from fedagg.flower.client import client_app
from fedagg.flower.data import cached
from fedagg.flower.privacy import Privacy
from fedagg.flower.server import server_app
from fedagg.flower.strategy import FedAggStrategy

__all__ = ["FedAggStrategy", "Privacy", "cached", "client_app", "server_app"]
