"""fedagg: federated learning with learning rates in closed form."""

from fedagg.config import Config
from fedagg.data import Dataset
from fedagg.federation import Result, run

__version__ = "0.1.0"
__all__ = ["Config", "Dataset", "Result", "run"]
