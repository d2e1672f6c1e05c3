"""Models: the layered-model protocol, the built-in families, and how a model is described, cut and built by stages."""

from zeropp_ray.models.build import ModelChunk, OwnedModel, build_owned
from zeropp_ray.models.cut import chunk_costs, cut, cut_model
from zeropp_ray.models.describe import ModelDescription, Part, describe
from zeropp_ray.models.layered import Factory, resolve_factory

__all__ = [
    "Factory",
    "ModelChunk",
    "ModelDescription",
    "OwnedModel",
    "Part",
    "build_owned",
    "chunk_costs",
    "cut",
    "cut_model",
    "describe",
    "resolve_factory",
]
