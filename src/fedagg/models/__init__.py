"""The networks known by name: those of the paper's experiments, and some others from federated papers."""

from fedagg.models.heads import has_body, head, head_parameters
from fedagg.models.layers import has_dropout, is_deep, is_linear, is_normalised
from fedagg.models.registry import ARCHITECTURES, PUBLISHED, build, names, register
from fedagg.models.text import LSTM

__all__ = [
    "ARCHITECTURES",
    "LSTM",
    "PUBLISHED",
    "build",
    "has_body",
    "has_dropout",
    "head",
    "head_parameters",
    "is_deep",
    "is_linear",
    "is_normalised",
    "names",
    "register",
]
