"""Runs, checkpoints and data in an object store, against a real server that speaks S3."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load

from actors import checkpoints as checkpoints_module
from actors import lease, mirror
from actors.checkpoints import Checkpoints
from actors.folder import METRICS, RunFolder
from jobs.cli import zeropp
from jobs.train import _check_unused, _remove
from tests.object_store import BUCKET, KEYS, READ_ONLY, ObjectStore
from tests.saved import saved_run
from zeropp_ray import uri
from zeropp_ray.checkpoint.manifest import FileEntry, Progress, folders
from zeropp_ray.checkpoint.reader import find, latest, open_checkpoint
from zeropp_ray.checkpoint.streams import RemoteTensors, save
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.data.corpus import load_corpus
from zeropp_ray.data.prepare import prepare
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.uri import StoreError, UriPath, place

CONFIG = RunConfig.from_dict({"model": {"dim": 32, "heads": 2, "seq_len": 32}, "checkpoint": {"keep": 2}})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    server = ObjectStore(tmp_path_factory.mktemp("object-store") / "data")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def bucket(store: ObjectStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[UriPath]:
    """A place of its own for each test."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    uri._file_system.cache_clear()
    yield UriPath.parse(store.uri(request.node.name))
    uri._file_system.cache_clear()


def test_a_uri_is_used_like_a_folder(bucket: UriPath) -> None:
    assert place(str(bucket)) == bucket
    assert not bucket.exists()
    assert not bucket.is_dir()
    (bucket / "a" / "x y").write_text("text")
    assert [path.name for path in bucket.iterdir()] == ["a"]
    assert bucket.is_dir()
    there = bucket / "a" / "x y"
    assert there.is_file()
    assert place(str(there)).read_text() == "text"  # also as a person would paste it
    assert there.stat().st_size == 4
    assert abs(there.modified() - time.time()) < 60
    with pytest.raises(FileNotFoundError):
        (bucket / "b").read_bytes()
    (bucket / "b").unlink(missing_ok=True)
    (bucket / "a").remove_tree()
    assert not there.exists()
    (bucket / "a").remove_tree()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://key:hidden@bucket/runs", "holds credentials"),
        ("s3://bucket/runs?endpoint_override=http://key:hidden@server", "holds credentials"),
        ("s3://bucket/runs?password=hidden", "has the option password"),
        ("ftp://bucket/hidden?x=hidden", "ftp is not known; use s3, gs, hdfs, or a path"),
        ("s3:///runs", "names no bucket"),
        ("s3://bucket/a/../b", r"holds '\.' or '\.\.'"),
        ("s3://bucket/runs#1", "goes on after a '#'"),
        ("s3://[key:hidden", "is no URI"),
        ("file://runs/first", "names a host; write file:///PATH"),
    ],
)
def test_what_cannot_be_used_is_refused_before_it_is_written_anywhere(text: str, said: str) -> None:
    for setting in ("run.dir", "data.path"):
        with pytest.raises(ConfigError, match=said) as caught:
            load_config(None, [f"{setting}={text}"])
        assert "?" not in str(caught.value)
        assert "key:" not in str(caught.value)
    for setting in ("model.init_from", "data.cache"):
        with pytest.raises(ConfigError, match="a URI does not do here") as caught:
            load_config(None, [f"{setting}=s3://key:hidden@bucket"]).resolved()
        assert "hidden" not in str(caught.value)
    assert place("file:///a%20b") == Path("/a b")


def test_what_is_wrong_is_told_in_one_line(bucket: UriPath, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(what: str, path: UriPath = bucket) -> None:
        uri._file_system.cache_clear()
        with pytest.raises(StoreError, match=what) as caught:
            path.write_text("x")
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)

    refused("make the bucket first", UriPath.parse(str(bucket).replace(f"//{BUCKET}/", "//nothing/")))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused("check the credentials")
    for name, value in READ_ONLY.items():
        monkeypatch.setenv(name, value)
    refused("check the credentials.* may list, read, write and delete")
    result = CliRunner().invoke(zeropp, ["train", "--set", f"run.dir={bucket}"])
    assert result.exit_code == 2, result.output
    assert "check the credentials" in result.output


def test_tensors_are_those_that_the_library_reads(bucket: UriPath) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "half": torch.randn(7).bfloat16(),
        "view": torch.randn(4, 6).t(),
    }
    size, checksum = save(tensors, bucket / "x.safetensors")
    data = (bucket / "x.safetensors").read_bytes()
    assert len(data) == size
    assert uri_checksum(data) == checksum
    read, opened = load(data), RemoteTensors(bucket / "x.safetensors")
    assert set(opened.keys()) == set(tensors) == set(read)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert torch.equal(opened.get_tensor(name), tensor)
        assert opened.get_tensor(name).dtype == tensor.dtype
    for damaged in (data[:4], b"\xff" * 8 + data[8:], data[:-1], data[:9] + b"[" + data[10:]):
        (bucket / "y").write_bytes(damaged)
        with pytest.raises(ValueError, match="header"):
            RemoteTensors(bucket / "y")


def uri_checksum(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def checkpoints(run: UriPath, here: Path, saved: int, token: str = "mine") -> Checkpoints:
    folder = RunFolder(here, here, "", uri=run, lease=token)
    return Checkpoints(CONFIG, run, [], {}, saved, folder.shelf())


def upload(run: Path, to: UriPath) -> None:
    """A run that was made on the disk, as members and driver would have written it."""
    for path in sorted(run.rglob("*"), key=lambda path: path.name == "manifest.json"):
        if path.is_file():
            target = to
            for part in path.relative_to(run).parts:
                target = target / part
            target.write_bytes(path.read_bytes())


@pytest.fixture
def run(bucket: UriPath, tmp_path: Path) -> UriPath:
    """Checkpoints of steps 2, 4 and 9, under our lease."""
    for step in (2, 4, 9):
        saved_run(tmp_path / "run", CONFIG, step=step, scale=step / 100)
    upload(tmp_path / "run", bucket)
    (bucket / lease.NAME).write_text(json.dumps({"token": "mine", "holder": "this test"}))
    (tmp_path / METRICS).write_text("the record\n")
    return bucket


def names(run: UriPath) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if list(path.iterdir()))


def wait_for(reached, what: str) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_checkpoints_are_kept_in_a_store_as_on_a_disk(
    run: UriPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "run"
    assert [path.name for path in folders(run)] == [path.name for path in folders(local)]
    assert latest(run).digest(state=True) == latest(local).digest(state=True)
    half = run / "checkpoints" / "step-00000011" / "weights-000-000.safetensors"
    half.write_bytes(b"as a killed run leaves it")
    assert latest(run).step == 9
    assert half.parent not in folders(run)

    kept = checkpoints(run, tmp_path, saved=4)
    assert names(run) == ["aside-1-step-00000009", "step-00000002", "step-00000004"]
    aside = run / "checkpoints" / "aside-1-step-00000009"
    assert open_checkpoint(aside).verify() == []

    answered = types.SimpleNamespace(wait=lambda files, **_: (files, []), get=lambda files: files)
    monkeypatch.setattr(checkpoints_module, "ray", answered)

    def write(_: str, folder: UriPath) -> list[list[FileEntry]]:
        size, checksum = save({"a": torch.ones(3)}, folder / "weights-000-000.safetensors")
        return [[FileEntry("weights-000-000.safetensors", size, checksum, {"a": [3]})]]

    def saved(step: int) -> list[str]:
        assert kept.begin(Progress(step, step, step, step), write) == []
        return [event["kind"] for event in kept.poll(lambda files: None)]

    assert saved(6) == saved(7) == ["checkpoint"]
    wait_for(lambda: names(run) == ["aside-1-step-00000009", "step-00000006", "step-00000007"], "older ones go")
    assert latest(run).step == 7
    assert (run / "checkpoints" / "step-00000007" / METRICS).read_text() == "the record\n"

    (run / lease.NAME).write_text(json.dumps({"token": "another", "holder": "process 1"}))
    assert saved(8) == ["log"]
    assert "is trained by another job by now (process 1)" in kept.unsaved(Progress(8, 8, 8, 8))
    assert latest(run).step == 7
    assert (tmp_path / lease.LOST).exists(), "whether the job process is awake or not"
    (event,) = kept.begin(Progress(9, 9, 9, 9), lambda *_: pytest.fail("members write nothing"))
    assert "is trained by another job" in event["text"]
    assert not (run / "checkpoints" / "step-00000009").exists()


def test_a_run_does_not_go_on_from_before_what_it_cannot_give_up(
    run: UriPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: UriPath, **_: bool) -> None:
        raise StoreError(f"{self}: ACCESS_DENIED")

    monkeypatch.setattr(UriPath, "unlink", refuse)
    with pytest.raises(StoreError, match="ACCESS_DENIED"):
        checkpoints(run, tmp_path, saved=4)


def test_commands_read_from_a_store_and_find_damage(run: UriPath, tmp_path: Path) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(zeropp, list(arguments))
        return result.exit_code, result.output + str(result.exception or "")

    assert command("checkpoint", "ls", str(run))[1].split()[0] == "step-00000009"
    assert command("checkpoint", "digest", str(run)) == command("checkpoint", "digest", str(tmp_path / "run"))
    assert command("checkpoint", "verify", str(run))[0] == 0
    code, text = command("sample", str(run), "--tokens", "3", "--seed", "1")
    assert code == 0, text
    (run / "config.toml").write_text(CONFIG.to_toml())
    (run / METRICS).write_text('{"step": 9, "loss": 1.5, "tokens_per_s": 10, "seconds": 1}\n')
    status = json.loads(command("status", str(run), "--json")[1])
    assert (status["run"], status["step"], status["checkpoint"]) == (str(run), 9, "step-00000009")
    assert command("status", str(run / "nothing"))[0] == 2
    file = run / "checkpoints" / "step-00000009" / "weights-000-000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, text = command("checkpoint", "verify", str(run))
    assert code == 1
    assert "weights-000-000.safetensors has been altered" in text
    told: list[str] = []
    assert find(str(run), told.append).step == 4
    assert "step-00000009" in told[0]
    file.write_bytes(data[:-1])
    assert "damaged" in command("checkpoint", "ls", str(run))[1]
    with pytest.raises(ConfigError, match="no checkpoint"):
        open_checkpoint(run / "checkpoints" / "step-00000005")


def test_a_lease_is_held_refused_taken_over_and_lost(
    bucket: UriPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.3)
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    monkeypatch.setattr(lease, "SETTLE_S", 0.1)
    told: list[str] = []
    with lease.leased(bucket, tmp_path, told.append) as token:
        lease.check(bucket, token)
        with pytest.raises(ConfigError, match=r"another process trains this run \(process \d+ on"):
            lease.leased(bucket, tmp_path, told.append).__enter__()
        assert len(told) == 1
    assert not (bucket / lease.NAME).exists()

    (bucket / lease.NAME).write_text(json.dumps({"token": "killed", "holder": "process 7"}))
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        with lease.leased(bucket, tmp_path, told.append) as token:
            assert "is held by process 7; waiting up to" in told[1]
            (bucket / lease.NAME).write_text(json.dumps({"token": "other", "holder": "process 8"}))
            assert asked.wait(5), "the run is told to stop"
            assert (tmp_path / lease.LOST).exists(), "and its driver not to save"
            with pytest.raises(ZeroppError, match=r"another job by now \(process 8\)"):
                lease.check(bucket, token)
        assert (bucket / lease.NAME).exists(), "it is the other's"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_who_only_looks_at_the_lease_does_not_make_a_run_look_used(
    bucket: UriPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    monkeypatch.setattr(UriPath, "unlink", lambda *_, **__: None)  # as if it were killed there
    with lease.leased(bucket, tmp_path, print):
        assert len(list(bucket.iterdir())) == 2
        _check_unused(bucket, CONFIG)
        (bucket / "config.toml").write_text("")
        with pytest.raises(ConfigError, match="is not empty"):
            _check_unused(bucket, CONFIG)


def test_what_is_left_of_a_run_that_never_began_is_removed_if_it_is_still_ours(
    bucket: UriPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    monkeypatch.setattr(mirror, "EVERY_S", 0.05)
    told: list[str] = []
    with mirror.held(bucket, told.append) as ours:
        (ours.folder / "config.toml").write_text("")
        wait_for((bucket / "config.toml").is_file, "copied")
        (bucket / "checkpoints" / "step-00000001" / "weights").write_text("")
        _remove(ours)
    assert (list(bucket.iterdir()), told) == ([], [])
    with mirror.held(bucket, told.append) as ours:
        (bucket / lease.NAME).write_text(json.dumps({"token": "other", "holder": "process 8"}))
        (bucket / "run-id").write_text("another job's")
        with pytest.raises(ZeroppError, match="another job by now"):
            _remove(ours)
    assert (bucket / "run-id").exists()


def test_a_run_s_files_are_copied_out_and_fetched_elsewhere(
    run: UriPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "EVERY_S", 0.05)
    here, there, told = tmp_path / "here", tmp_path / "there", []
    here.mkdir()
    there.mkdir()
    with mirror.mirrored(here, run, "mine", told.append):
        (here / METRICS).write_text("1\n")
        (here / ".hidden").write_text("")
        wait_for(lambda: (run / METRICS).is_file() and (run / METRICS).read_text() == "1\n", "copied meanwhile")
        (here / "summary.json").write_text("{}")
    with mirror.mirrored(there, run, "mine", told.append):
        assert sorted(path.name for path in there.iterdir()) == [METRICS, "run-id", "summary.json"]
        (there / "summary.json").unlink()  # as a run that goes on does
    assert not (run / "summary.json").exists()
    assert not told
    with mirror.mirrored(there, run, "mine", told.append):
        (run / lease.NAME).write_text(json.dumps({"token": "other", "holder": "process 8"}))
        (there / METRICS).write_text("2\n")
    assert (run / METRICS).read_text() == "1\n"
    kept = Path(told[0].rpartition(" ")[2])
    assert (kept / METRICS).read_text() == "2\n"
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()


def test_a_token_store_is_made_at_a_uri_and_fetched_once(
    bucket: UriPath, tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some words, and others. " * 4000)
    made = prepare([tmp_path / "text.txt"], tmp_path / "local", tokenizer=bpe, workers=1)
    there = prepare([tmp_path / "text.txt"], bucket / "store", tokenizer=bpe, workers=1)
    assert there.manifest.checksum == made.manifest.checksum
    assert there.verify() == []
    assert not list(tmp_path.glob("zeropp-store-*"))
    with pytest.raises(ConfigError, match="is there already"):
        prepare([tmp_path / "text.txt"], bucket / "store", workers=1)
    prepare([tmp_path / "text.txt"], bucket / "store", tokenizer=bpe, workers=1, overwrite=True)

    cache = tmp_path / "cache"
    values = {"path": str(bucket / "store"), "cache": str(cache)}
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, **values))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=512))
    local = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(tmp_path / "local")))
    ours, theirs = load_corpus(config), load_corpus(local)
    assert ours.checksum == theirs.checksum
    assert (ours.train[:] == theirs.train[:]).all()
    (copy,) = (path for path in cache.iterdir() if path.is_dir())
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    load_corpus(config)
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before

    part = bucket / "store" / made.manifest.parts[0].file
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert there.verify() == [f"{part.name} has been altered: its checksum differs"]
    for path in before:
        path.unlink()
    copy.rmdir()
    with pytest.raises(ConfigError, match="altered"):
        load_corpus(config)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [], "and nothing of it stays"
    text = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(bucket / "nothing")))
    with pytest.raises(ConfigError, match="no token store is there, and raw text is read from disks"):
        load_corpus(text)
