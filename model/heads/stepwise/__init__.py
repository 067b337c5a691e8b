"""Heads that take a pass per depth, on what `beam` does for them all: eagle, mlp and glide."""

from .beam import StepwiseConfig, StepwiseHead
from .eagle import EagleConfig, EagleHead
from .glide import GlideConfig, GlideHead
from .mlp import MlpConfig, MlpHead

__all__ = [
    "EagleConfig",
    "EagleHead",
    "GlideConfig",
    "GlideHead",
    "MlpConfig",
    "MlpHead",
    "StepwiseConfig",
    "StepwiseHead",
]
