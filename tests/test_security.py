"""Nothing is unpickled, names stay in folders, secrets out of files, and what is ours listens on one address."""

from __future__ import annotations

import ast
import dataclasses
import json
import signal
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from jobs.cli import zeropp
from tests.saved import saved_run
from zeropp_ray.checkpoint.manifest import NAME
from zeropp_ray.checkpoint.reader import find, open_checkpoint
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError

ROOT = Path(__file__).parent.parent
RUNS_CODE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}  # to read with these is to run


def test_nothing_is_read_that_can_run_code() -> None:
    found = []
    for path in [file for folder in ("zeropp_ray", "actors", "jobs") for file in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0], *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                unsafe = called in ("eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load")
                names = ["pickle"] if unsafe or any(word.arg == "allow_pickle" for word in node.keywords) else []
            else:
                continue
            if RUNS_CODE & set(names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize(
    "name", ["../out", "../../out", "/tmp/out", "a/../../out", "..", ".hidden", "a\\b", "-x", "a\nb"]
)
def test_a_run_stays_in_the_folder_of_runs(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.name = .*: it becomes a folder name"):
        RunConfig.from_dict({"run": {"name": name}})
    runs = tmp_path / "a" / "b" / "runs"
    result = CliRunner().invoke(zeropp, ["train", f"--name={name}", "--set", f"run.dir={runs}"])
    assert isinstance(result.exception, ConfigError) or result.exit_code == 2, result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "sub/weights.safetensors", "..", ""])
def test_a_checkpoint_names_files_of_its_folder_only(name: str, tmp_path: Path) -> None:
    saved_run(tmp_path / "run", RunConfig.from_dict({"model": {"dim": 32, "heads": 2}}))
    checkpoint = find(tmp_path / "run")
    (first, entry), *others = checkpoint.manifest.files.items()
    files = {first: dataclasses.replace(entry, name=name), **dict(others)}
    (checkpoint.path / NAME).write_text(dataclasses.replace(checkpoint.manifest, files=files).to_json())
    with pytest.raises(ConfigError, match="which is not in its folder"):
        open_checkpoint(checkpoint.path)


@pytest.mark.ray
def test_a_run_writes_no_secrets_and_listens_on_one_address(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers that are not on the loopback address are Ray's: each of its workers has one."""
    canary = "canary-4c1f-do-not-write"
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_PASSWORD"):
        monkeypatch.setenv(name, canary)
    run = command("train.steps=100000", "model.dim=32", "model.heads=2", "model.seq_len=32", "parallel.shards=1")
    run.wait_for_step(2)
    tree, members = run.tree(), run.members()
    (driver,) = [process for process in tree if "RunDriver" in " ".join(process.cmdline())]
    for process in [driver, *(psutil.Process(member["pid"]) for member in members)]:
        addresses = [each.laddr.ip for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
        assert addresses.count("127.0.0.1") >= 1
        assert len([address for address in addresses if address != "127.0.0.1"]) == 1, addresses
    assert {member["address"] for member in members} == {"127.0.0.1"}
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end(tree, within_s=60)
    assert code == 75, output
    assert "listening on 127.0.0.1: 1 of stage 0, 1 of stage 1" in output
    assert canary not in output
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert {"config.toml", "log.txt", "members.json", "events.jsonl"} <= {path.name for path in written}
    assert not [path for path in written if canary.encode() in path.read_bytes()]
    (placement,) = [
        event
        for event in map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
        if event["kind"] == "placement"
    ]
    assert placement["nodes"][0]["members"] == [[0, 0, 0], [1, 0, 0]]
