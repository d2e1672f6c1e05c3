"""matplotlib where it is installed; results are complete without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot(file: Path) -> Any:
    """``matplotlib.pyplot``, drawing to files; None where it is not installed, and a line that says what is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f"{file.name} is left out: plots need matplotlib, pip install matplotlib")
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
