"""The networks of the paper's experiments, sized for 28×28 and 32×32 images."""

from fedagg.models.heads import has_body, head, head_parameters
from fedagg.models.registry import ARCHITECTURES, PUBLISHED, build, names, register

__all__ = ["ARCHITECTURES", "PUBLISHED", "build", "has_body", "head", "head_parameters", "names", "register"]
