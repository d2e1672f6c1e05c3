"""Runs as jobs: what is sent, with which variables, and what the end of a job is taken for; without a cluster."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jobs import pretrain, submission
from jobs.cli import zeropp
from jobs.package import OWN, pack
from jobs.submission import Jobs, Outcome, outcome
from jobs.submit import RUN_FILE
from zeropp_ray.config import load_config
from zeropp_ray.errors import ConfigError, ZeroppError

ROOT = Path(__file__).parent.parent
SETTINGS = ["--set", "model.dim=32", "--set", "model.heads=2", "--set", "model.seq_len=32"]


class Status(str):
    def is_terminal(self) -> bool:
        return self in ("STOPPED", "SUCCEEDED", "FAILED")


def job(status: str, code: int | None = None, **more: Any) -> Any:
    fields = {"submission_id": "first-1", "driver_node_id": "n", "message": None, "metadata": {}, "runtime_env": {}}
    fields |= {"entrypoint": "python -m jobs.pretrain", "start_time": 1000}
    return SimpleNamespace(**fields | {"status": Status(status), "driver_exit_code": code} | more)


class Cluster:
    """In the place of Ray's job client: remembers what it is given, and tells a job's states and logs one by one."""

    def __init__(self) -> None:
        self.submitted: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.looks: list[Any] = []  # a job and its log, or an error, for each time it is looked at; the last one stays
        self.stopped: list[str] = []
        self.hosts = ["head", "worker"]

    def _do_request(self, method: str, path: str) -> Any:
        assert (method, path) == ("GET", "/nodes?view=hostNameList")
        return SimpleNamespace(ok=True, json=lambda: {"data": {"hostNameList": self.hosts}})

    def submit_job(self, **job: Any) -> str:
        with zipfile.ZipFile(job["runtime_env"]["working_dir"]) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}
        self.submitted = job
        return str(job["submission_id"])

    def get_job_info(self, _: str) -> Any:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, BaseException):
            raise look
        self.log = look[1]
        return look[0]

    def get_job_logs(self, _: str) -> str:
        return str(self.log)

    def list_jobs(self) -> list[Any]:
        self.log = self.looks[0][1]
        return [self.looks[0][0]]

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    """A cluster elsewhere, and an empty folder to submit from."""
    cluster = Cluster()

    def connect(self: Jobs, address: str | None) -> None:
        self.address, self._client = address or submission.DEFAULT, cluster  # type: ignore[assignment]

    monkeypatch.setattr(Jobs, "__init__", connect)
    monkeypatch.setattr(submission, "EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)
    for name in submission.ADDRESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return cluster


def run(*arguments: str) -> Result:
    return CliRunner().invoke(zeropp, arguments)


def submit(*arguments: str) -> Result:
    return run("submit", *SETTINGS, "--set", "run.dir=/shared/runs", "--name", "first", *arguments)


# --- what travels


def files(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def sent(folder: Path, *exclude: str) -> set[str]:
    return {name for name in pack(folder, exclude).files if not name.startswith(OWN)}


def test_code_travels_and_what_is_made_or_secret_does_not(tmp_path: Path) -> None:
    files(tmp_path, "mymodel.py", "deep/er/layer.py", "book.txt", "run.toml")
    files(tmp_path, ".env", ".git/config", ".venv/bin/python", "deep/.cache/x", "__pycache__/a.pyc", "old.pyc")
    files(tmp_path, "my-environment/pyvenv.cfg", "my-environment/lib/torch.py")
    files(tmp_path, "elsewhere/first/run-id", "elsewhere/first/log.txt", "runs/second/log.txt")
    files(tmp_path, "tokens/manifest.json", "tokens/part-0.arrow", "weights/model.safetensors", "x.egg-info/PKG-INFO")
    assert sent(tmp_path) == {"mymodel.py", "deep/er/layer.py", "book.txt", "run.toml"}
    assert sent(tmp_path, "er/", "*.txt") == {"mymodel.py", "run.toml"}
    assert sent(tmp_path, "deep/er/layer.py") == {"mymodel.py", "book.txt", "run.toml"}


def test_what_git_ignores_stays_here(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    files(tmp_path, "mymodel.py", "big.dump", "notes/a.md", "notes/keep.md")
    (tmp_path / ".gitignore").write_text("*.dump\n/notes/*\n!/notes/keep.md\n")
    assert sent(tmp_path) == {"mymodel.py", "notes/keep.md"}


def test_repositories_inside_travel_and_so_does_a_folder_that_is_ignored_itself(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "init", "-q", tmp_path / "vendor"], check=True)
    files(tmp_path, "mymodel.py", "vendor/lib.py", "vendor/big.dump", "try/other.py", "try/.env")
    (tmp_path / ".gitignore").write_text("try/\n")
    (tmp_path / "vendor" / ".gitignore").write_text("*.dump\n")
    (tmp_path / "loop").symlink_to(".")
    assert sent(tmp_path) == {"mymodel.py", "vendor/lib.py"}
    assert sent(tmp_path / "try") == {"other.py"}


def test_a_file_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.txt")).write_text("")
    with pytest.raises(ConfigError, match=r"'a\\udcff.txt' cannot be sent: its name is not UTF-8; .*--exclude"):
        pack(tmp_path).write(tmp_path / "1.zip", {})
    assert not sent(tmp_path, "a*")


def test_a_link_travels_with_what_it_leads_to(tmp_path: Path) -> None:
    files(tmp_path, "secret.txt", "here/mymodel.py", "here/.env", "here/huge.dat", "here/deploy.pem")
    for name, to in (("a", "../secret.txt"), ("b", ".env"), ("c", "huge.dat"), ("d", "mymodel.py"), ("e", "..")):
        (tmp_path / "here" / name).symlink_to(to)
    assert sent(tmp_path / "here", "huge.dat") == {"mymodel.py", "d"}


def test_a_folder_named_as_a_package_of_ours_is_refused(tmp_path: Path) -> None:
    files(tmp_path, "jobs/nightly.txt")
    with pytest.raises(ConfigError, match=r"jobs/nightly.txt would be in the place of .* --exclude jobs$"):
        pack(tmp_path)
    assert "jobs/pretrain.py" in pack(tmp_path, ["jobs"]).files


def test_this_package_travels_too(tmp_path: Path) -> None:
    package = pack(tmp_path)
    assert {"zeropp_ray/__init__.py", "actors/driver.py", "jobs/pretrain.py"} <= package.files.keys()
    assert not any("__pycache__" in name for name in package.files)


def test_equal_content_gives_an_equal_package(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    files(tmp_path / "here", "a.py", "b.py")
    pack(tmp_path / "here").write(tmp_path / "1.zip", {"c": "c"})
    os.utime(tmp_path / "here" / "a.py", (1, 1))
    pack(tmp_path / "here").write(tmp_path / "2.zip", {"c": "c"})
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()


def test_too_much_is_refused_with_the_biggest_files(tmp_path: Path) -> None:
    (tmp_path / "huge.dat").write_bytes(b"x" * 3_000_000)
    files(tmp_path, "small.py")
    with pytest.raises(ConfigError, match=r"Ray takes 2\.0 MiB; the biggest are huge\.dat \(2\.9 MiB\), .*--exclude"):
        pack(tmp_path).check_size(2 * 2**20)


# --- what is submitted


def test_a_job_is_what_was_asked_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHOSEN", "yes")
    monkeypatch.setenv("SECRET", "hunter2")
    Path("mymodel.py").write_text("")
    needs = ("--entrypoint-cpus", "1", "--entrypoint-resource", "head=0.5")
    result = submit("--env", "CHOSEN", "--env", "GIVEN=a=b", "--grace", "30", *needs)
    assert result.exit_code == 0, result.output
    job = cluster.submitted
    assert job["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "30", "CHOSEN": "yes", "GIVEN": "a=b"}
    assert shlex.split(job["entrypoint"]) == ["python", "-m", "jobs.pretrain", RUN_FILE]
    assert (job["entrypoint_num_cpus"], job["entrypoint_resources"]) == (1.0, {"head": 0.5})
    metadata = job["metadata"]
    assert (metadata["zeropp_run"], metadata["zeropp_folder"]) == ("first", "/shared/runs/first")
    assert len(metadata["zeropp_config"]) == 64
    assert "mymodel.py" in cluster.files
    Path(RUN_FILE).write_bytes(cluster.files[RUN_FILE])
    config = load_config(Path(RUN_FILE))
    assert (config.run.dir, config.model.dim, config.parallel.unit) == ("/shared/runs", 32, 4)
    assert "sends " in result.output
    assert "hunter2" not in result.output + str(job)
    assert f"zeropp logs {job['submission_id']} --follow" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "parallel.stages=9"], "parallel.stages"),
        (["--set", "run.dir=runs"], "run.dir = 'runs': is not sent with the job"),
        (["--set", "data.path=stores/book"], "data.path = 'stores/book': is not sent with the job"),
        (["--env", "NOT_SET_HERE"], "--env NOT_SET_HERE: is not set here"),
        (["--entrypoint-resource", "head"], "expected NAME=NUMBER"),
        (["--set", "model.factory=nowhere:build"], "nowhere"),
        (["--resume", "/shared/runs/first"], "--resume takes its settings"),
        (["nowhere.toml"], "no such configuration file"),
    ],
)
def test_what_cannot_work_is_not_sent(cluster: Cluster, arguments: list[str], says: str) -> None:
    result = submit(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert says in result.output
    assert result.output.count("\n") == 1
    assert not cluster.submitted


def test_a_text_of_the_folder_goes_along(cluster: Cluster) -> None:
    Path("book.txt").write_text("It was a dark and stormy night. " * 500)
    assert submit("--set", "data.path=book.txt").exit_code == 0
    assert b'path = "book.txt"' in cluster.files[RUN_FILE]
    assert "book.txt" in cluster.files


def test_on_this_machine_paths_are_those_of_here(cluster: Cluster, tmp_path: Path) -> None:
    cluster.hosts = [socket.gethostname()]
    assert submit("--set", "run.dir=runs").exit_code == 0
    assert f'dir = "{tmp_path}/runs"'.encode() in cluster.files[RUN_FILE]
    assert shlex.split(cluster.submitted["entrypoint"])[0] == sys.executable
    assert cluster.submitted["metadata"]["zeropp_folder"] == f"{tmp_path}/runs/first"


def test_a_run_is_resumed_as_a_job(cluster: Cluster) -> None:
    assert run("submit", "--resume", "/shared/runs/first", "--set", "train.steps=9").exit_code == 0
    words = ["-m", "jobs.pretrain", "--resume", "/shared/runs/first", "--set", "train.steps=9"]
    assert shlex.split(cluster.submitted["entrypoint"])[1:] == words
    for named in ("/shared/runs/first", "/shared/runs/first/checkpoints/step-00000007", "s3://bucket/runs/first/"):
        assert run("submit", "--resume", named).exit_code == 0
        folder = cluster.submitted["metadata"]["zeropp_folder"]
        assert (cluster.submitted["metadata"]["zeropp_run"], named.startswith(folder)) == ("first", True)
        assert folder.endswith("runs/first")


def test_a_folder_in_a_store_is_named_with_its_options(cluster: Cluster) -> None:
    assert submit("--set", "run.dir=s3://bucket/runs?region=x").exit_code == 0
    folder = "s3://bucket/runs/first?region=x"
    for again in ([], ["--resume", folder], ["--resume", "s3://bucket/runs/first/checkpoints/step-00000007?region=x"]):
        assert not again or run("submit", *again).exit_code == 0
        assert cluster.submitted["metadata"]["zeropp_folder"] == folder
        assert cluster.submitted["submission_id"].startswith("first-")


@pytest.mark.parametrize("setting", ["", "data.path=", "data.path='", "data.path = "])
def test_a_secret_in_a_uri_is_not_sent(cluster: Cluster, setting: str) -> None:
    uri = "s3://key:hidden@bucket/first"
    arguments = ["--resume", "/shared/first", "--set", f"{setting}{uri}"] if setting else ["--resume", uri]
    result = run("submit", *arguments)
    assert (result.exit_code, cluster.submitted) == (2, {})
    assert "holds credentials" in result.output
    assert "hidden" not in result.output


def test_a_dry_run_sends_nothing(cluster: Cluster) -> None:
    result = submit("--dry-run")
    assert result.exit_code == 0
    assert "2 stages" in result.output
    assert "jobs/pretrain.py" in result.output
    assert not cluster.submitted


def test_an_address_that_is_given_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own client has it the other way round."""
    pytest.importorskip("aiohttp", reason="ray[default] is not installed; make test-all does")
    sdk = pytest.importorskip("ray.job_submission", reason="ray[default] is not installed; make test-all does")
    seen: dict[str, str] = {}

    class Client:
        def __init__(self, address: str) -> None:
            seen.update(os.environ)

    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:1")
    monkeypatch.setattr(sdk, "JobSubmissionClient", Client)
    Jobs("http://here:2")
    assert "RAY_ADDRESS" not in seen
    assert os.environ["RAY_ADDRESS"] == "http://elsewhere:1"


def test_a_dashboard_that_is_silent_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="ray[default] is not installed; make test-all does")
    monkeypatch.setattr(submission, "ANSWER_S", 0.2)
    said = pytest.raises(ConfigError, match=r"no dashboard of a Ray cluster answers there \(.*timed out")
    with socket.create_server(("127.0.0.1", 0)) as deaf, said:
        Jobs(f"http://127.0.0.1:{deaf.getsockname()[1]}")


def test_without_the_dashboard_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    result = run("jobs", "--address", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "pip install 'ray[default]'" in result.output


# --- how it ended


@pytest.mark.parametrize(
    ("record", "log", "code", "says"),
    [
        (job("SUCCEEDED", 0), "…\nexit code 0: done\n", 0, "done"),
        (job("SUCCEEDED", 0), "", 0, "done"),
        (job("FAILED", 1), "error: x\nexit code 1: failed\n", 1, "failed"),
        (job("FAILED", 2), "error: x\nexit code 2: wrong usage or configuration\n", 2, "wrong usage"),
        (job("FAILED", 70), "error: x\nexit code 70: …\n", 70, "no progress"),
        (job("FAILED", 75), "a node was drained\nexit code 75: …\n", 75, "stopped with a checkpoint"),
        (job("FAILED", -9), "step 3/9  loss 1.0\n", 137, "killed by signal 9"),
        (job("FAILED", 137), "step 3/9  loss 1.0\n", 137, "killed by signal 9"),
        (job("FAILED", None, message="no such package\nand more"), "", 1, "no such package"),
        (job("STOPPED"), "error: stopped after step 7\nexit code 75: stopped with a checkpoint\n", 75, "stopped with"),
        (job("STOPPED"), "step 7/9  loss 1.0\n", 1, "killed before it had saved"),
        (job("STOPPED"), "step 9/9  loss 1.0\nexit code 0: done\n", 0, "done"),
    ],
)
def test_the_end_of_a_job(record: Any, log: str, code: int, says: str) -> None:
    end = outcome(record, log)
    assert end.exit_code == code
    assert says in end.text


def test_a_log_is_followed_to_its_true_end(cluster: Cluster) -> None:
    """Its last lines come with the record of its end, or after it; a dashboard that does not answer is asked again."""
    cluster.looks = [
        (job("PENDING", driver_node_id=None), ""),
        (job("RUNNING"), "step 1\n"),
        ConnectionError("starting again"),
        (job("RUNNING"), "step 1\nstep 2\n"),
        (job("FAILED", 1), "step 1\nstep 2\nerror: x\nexit code 1: failed\n"),
    ]
    shown: list[str] = []
    assert Jobs(None).follow("first-1", shown.append, sleep=lambda s: None) == Outcome(1, "failed")
    assert "".join(shown) == "step 1\nstep 2\nerror: x\nexit code 1: failed\n"


def test_a_job_that_waits_says_why_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "PENDING_S", 0.0)
    waiting = job("PENDING", driver_node_id=None, message="Job has not started yet. It may wait for CPUs.")
    cluster.looks = [(waiting, ""), (waiting, ""), (job("SUCCEEDED", 0), "exit code 0: done\n")]
    shown: list[str] = []
    Jobs(None).follow("first-1", shown.append, sleep=lambda s: None)
    assert shown == ["waits to start: Job has not started yet. It may wait for CPUs.\n", "exit code 0: done\n"]


def test_a_cluster_that_is_gone_is_not_followed_for_ever(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "LOST_S", -1.0)
    cluster.looks = [ConnectionError("refused")]
    with pytest.raises(ZeroppError, match=r"no dashboard of a Ray cluster answers there.*the job may well go on"):
        Jobs(None).follow("first-1", print)


def test_follow_exits_as_the_run_did(cluster: Cluster) -> None:
    cluster.looks = [(job("FAILED", 75, metadata={"zeropp_folder": "/r/first"}), "exit code 75: …\n")]
    result = submit("--follow", "--address", "http://h:1")
    assert result.exit_code == 75
    assert "go on with: zeropp submit --resume /r/first --address http://h:1" in result.output


def test_an_interrupt_leaves_the_job_running(cluster: Cluster) -> None:
    cluster.looks = [KeyboardInterrupt()]
    result = submit("--follow")
    assert result.exit_code == 130
    assert "the job goes on; follow it again: zeropp logs first-" in result.output
    assert not cluster.stopped


def test_stop_waits_and_says_what_was_saved(cluster: Cluster) -> None:
    said = "error: stopped after step 7, which is saved; go on with: zeropp train --resume /r/first\n"
    folder = {"zeropp_run": "first", "zeropp_folder": "/r/first"}
    cluster.looks = [
        (job("RUNNING", metadata=folder), ""),
        (job("RUNNING", metadata=folder), ""),
        (job("STOPPED", metadata=folder), f"{said}exit code 75: stopped with a checkpoint\n"),
    ]
    result = run("stop", "first")
    assert cluster.stopped == ["first-1"]
    assert result.exit_code == 0, result.output
    assert "stopped after step 7, which is saved" in result.output
    assert "zeropp submit --resume /r/first" in result.output


TRAINER = """
import sys, time
from pathlib import Path
from actors.events import append_end
from actors.locks import only_job
from actors.stopping import StopSignals

run, asked = Path(sys.argv[1]), []
with StopSignals() as stop, only_job(run):
    stop.hand_to(lambda: asked.append(1))
    print(flush=True)
    while not asked:
        time.sleep(0.01)
    append_end(run, "stopped", 75, "stopped after step 7, which is saved")
"""


def test_a_run_of_this_machine_is_stopped_by_its_process(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", TRAINER, "runs/first"], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        result = run("stop", "first")
    finally:
        process.kill()
        process.communicate()
    assert result.exit_code == 0, result.output
    assert "stopped: stopped after step 7, which is saved" in result.output
    assert not cluster.stopped


def test_stop_fails_if_nothing_was_saved(cluster: Cluster) -> None:
    cluster.looks = [(job("RUNNING"), ""), (job("STOPPED"), "step 7/9\n")]
    assert run("stop", "first-1").exit_code == 1
    result = run("stop", "nobody")
    assert result.exit_code == 2
    assert "nobody: no job of" in result.output


def test_jobs_are_listed_with_the_step_they_are_at(cluster: Cluster) -> None:
    record = job("FAILED", 75, metadata={"zeropp_run": "first"})
    cluster.looks = [(record, "step 1/9  loss 2.0\nstep 8/9  loss 1.0\nexit code 75: …\n")]
    head, line = run("jobs").output.splitlines()
    assert head.split() == ["job", "run", "state", "since", "step"]
    assert line.split()[:3] == ["first-1", "first", "stopped"]
    assert line.endswith("8/9")


# --- the entry point


def entry(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.pretrain", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **more},
        cwd=ROOT,
    )


def test_the_log_of_a_job_ends_with_its_exit_code() -> None:
    done = entry("--set", "a.b=1", **{pretrain.JOB_CONFIG: "{}"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: [a]")
    assert done.stdout.splitlines()[-1] == "exit code 2: wrong usage or configuration"
    assert pretrain.code_in(done.stdout) == 2
    assert entry("--set", "a.b=1").stdout == ""  # by hand the shell has it


def test_a_run_folder_outlasts_the_folder_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(pretrain.train, "callback", lambda file, overrides, **more: given.append((overrides, more)))
    monkeypatch.setenv("HOME", "/home/someone")

    def dir_of(*overrides: str) -> str:
        pretrain._pretrain(None, overrides, None)
        return load_config(None, given[-1][0]).run.dir

    assert dir_of("run.dir=mine") == "mine"
    monkeypatch.setenv(pretrain.JOB_CONFIG, "{}")
    assert dir_of("run.dir=mine") == "/home/someone/mine"
    assert dir_of("run.dir=/shared/runs") == "/shared/runs"


def test_it_takes_what_train_takes() -> None:
    names = {option for parameter in pretrain.pretrain.params for option in parameter.opts}
    assert names >= {"file", "--set", "--name", "--resume", "--address", "--inject"}
