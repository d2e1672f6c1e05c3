"""Imports point one way, jobs -> actors -> zeropp_ray, and the library knows nothing of Ray."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "zeropp_ray": {"ray", "actors", "jobs", "tests"},
    "actors": {"jobs", "tests"},
    "jobs": {"tests"},
}


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imported(file.read_text(encoding="utf-8"))
        if name in FORBIDDEN[package]
    ]
    assert not wrong


def test_an_import_inside_a_function_is_seen() -> None:
    assert list(imported("def f():\n    import ray.util\n    from jobs.x import y\n")) == [(2, "ray"), (3, "jobs")]
