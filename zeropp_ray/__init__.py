"""ZeroPP: pipeline parallelism between stages, ZeRO-3 inside each stage, no tensor parallelism.

This package knows nothing of Ray: schedules, sharding, the engine, models and data are usable and testable in one
process. ``actors`` is the Ray layer above it, ``jobs`` the commands. Imports point one way: ``jobs → actors →
zeropp_ray``.
"""

__version__ = "0.1.0"
