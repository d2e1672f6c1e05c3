"""Two of our three packages have everyday names, ``actors`` and ``jobs``: say so when a user's own hide them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from zeropp_ray.errors import ConfigError

_ROOT = Path(__file__).resolve().parent.parent


def check_not_shadowed(search: Sequence[str], *packages: str) -> None:
    """Raise ``ConfigError`` if an import along ``search`` would find other packages of these names than ours."""
    for name in packages:
        spec = PathFinder.find_spec(name, search)
        places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
        # Not found on the path at all: an editable install, which has a finder of its own behind it.
        if places and all(Path(place).resolve().parent != _ROOT for place in places):
            raise ConfigError(
                f"{places[0]}: hides the package '{name}' of zeropp-ray; rename it, or start from a folder that does"
                " not hold it and take that out of PYTHONPATH"
            )
