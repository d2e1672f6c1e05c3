"""``zeropp`` and ``python -m zeropp_ray``: the door to the commands in ``jobs``.

It stands here because this name is ours alone: it can say so when ``jobs`` is somebody else's.
"""

from __future__ import annotations

import importlib
import sys

from zeropp_ray.errors import ConfigError
from zeropp_ray.shadow import check_not_shadowed


def main() -> None:
    """Run the command line, after making sure that it is ours."""
    try:
        check_not_shadowed(sys.path, "actors", "jobs")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    importlib.import_module("jobs.cli").main()


if __name__ == "__main__":
    main()
