"""What README and docs tell people to type: every command exists with these options; and, in the long tests, runs.

A block after a comment ``<!-- not run by the tests: why -->`` is only looked at.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from jobs.cli import zeropp
from tests.object_store import ObjectStore
from tests.user_cluster import UserCluster

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run by the tests: [^>]+ -->\n+)?```sh\n(.*?)```", re.DOTALL)

# Small enough for a test: a run of two steps.
SMALL = " ".join(
    f"--set {setting}"
    for setting in ("model.dim=32", "model.heads=2", "model.seq_len=32", "train.steps=8", "train.eval_sequences=8")
)


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def every_command() -> list:
    found = []
    for page in PAGES:
        for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            found += [pytest.param(words, id=f"{page.stem}: {' '.join(words)}") for words in commands(block)]
    return found


@pytest.mark.parametrize("words", every_command())
def test_a_documented_command_exists(words):
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif words[0] == "zeropp":
        command, context, arguments = zeropp, click.Context(zeropp), words[1:]
        arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
        while isinstance(command, click.Group) and arguments:
            name, command, arguments = command.resolve_command(context, arguments)
            context = click.Context(command, info_name=name, parent=context)
        command.make_parser(context).parse_args(list(arguments))  # raises UsageError for an unknown option


@pytest.fixture
def bucket(page, tmp_path):
    """What finds ``s3://my-bucket``, for pages that name it: the environment of a server."""
    if "s3://" not in page.read_text(encoding="utf-8"):
        yield {}
        return
    server = ObjectStore(tmp_path / "object-store")
    try:
        yield server.environment
    finally:
        server.stop()


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_commands_run(page, tmp_path, bpe, bucket, request):
    """In order, in a copy of the repository's examples, with a small model and few steps."""
    (tmp_path / "tokenizer.json").symlink_to(bpe)
    (tmp_path / "texts").mkdir()
    for place in (ROOT / "docs").glob("*.md"):
        (tmp_path / "texts" / place.name).write_text(place.read_text())
    (tmp_path / "reviews.jsonl").write_text("".join(f'{{"body": "{i} of 5 stars"}}\n' for i in range(1000)))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "book.txt").write_text((ROOT / "README.md").read_text() * 20)
    for name, block in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(block)
    shim = tmp_path / "bin" / "zeropp"
    shim.parent.mkdir()
    shim.write_text(
        "#!/bin/sh\n"
        'case " $* " in\n'
        '  *" --resume "*) ;;\n'
        f'  " train "* | " submit "*) command=$1; shift; set -- $command {SMALL} "$@" ;;\n'
        "esac\n"
        f'exec {sys.executable} -m zeropp_ray "$@"\n'
    )
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"HOME": str(tmp_path), **bucket}
    if page.stem == "clusters":  # as after `ray start --head`
        pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed; make test-all does")
        cluster = UserCluster()
        request.addfinalizer(cluster.end)
        environment["RAY_API_SERVER_ADDRESS"] = cluster.address
    for skipped, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if skipped:
            continue
        script = "set -e\n" + "\n".join(
            re.sub(r"train\.steps=(\d+)", lambda m: f"train.steps={max(2, int(m[1]) // 10)}", line)
            for line in block.splitlines()
        )
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
