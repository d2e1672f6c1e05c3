"""Faults that are injected: how they are written, when they are due, that each is real, and a drill."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import psutil
import pytest
from click.testing import CliRunner

from actors.injection import corrupt
from jobs.cli import zeropp
from jobs.drill import Outcome, usual
from tests import harness
from tests.fault_member import MESH, PROGRAM, fault, steps
from tests.saved import saved_run
from zeropp_ray.checkpoint.reader import open_checkpoint
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.faults import RANDOM, Fault, Faults, Sockets, Trigger, read_faults
from zeropp_ray.layout import Member
from zeropp_ray.vote import decide

ALONE = load_config(None, ["parallel.stages=1", "parallel.chunks=1", "parallel.shards=1"])


# --- how they are written


def test_a_fault_is_read():
    text = "kill  at=B member=3 step=5 stage=1 nth=2"
    assert read_faults([text], MESH) == (
        Fault(
            "kill", stage=1, shard=1, replica=1, step=5, at="B", nth=2, text="kill at=B member=3 step=5 stage=1 nth=2"
        ),
    )


def test_what_is_left_out():
    (fault,) = read_faults(["hang step=20"], MESH)
    assert (fault.member, fault.at, fault.nth) == (Member(0, 0, 0), "F", 1)


def test_several_faults():
    faults = read_faults(["slow=2.5x step=1; stop stage=2 step=3 at=vote for=0.5", "driver step=4"], MESH)
    assert [(fault.kind, fault.step) for fault in faults] == [("slow", 1), ("stop", 3), ("driver", 4)]
    assert (faults[0].factor, faults[1].seconds) == (2.5, 0.5)
    (full,) = read_faults(["disk-full step=2"], MESH)
    assert full.at == "checkpoint"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is no fault; known are kill, stop"),
        ("kil step=1", "'kil' is no fault; did you mean kill?"),
        ("kill", "step is missing: a step of the run, from 1 to 20"),
        ("kill step=21", "step=21: expected a step of the run, from 1 to 20"),
        ("kill step=-1", "step=-1: expected"),
        ("kill step=1 stage=3", "stage=3: expected a stage, from 0 to 2"),
        ("kill step=1 member=4", "member=4: expected a member of the stage, f·R + r, from 0 to 3"),
        ("kill step=1 step=2", "'step=2': expected step=VALUE, and once"),
        ("kill step", "'step': expected step=VALUE, and once"),
        ("kill step=1 stge=1", "'stge=1': kill takes stage, member, step, at, nth"),
        ("kill step=1 for=2", "'for=2': kill takes stage"),
        ("driver step=1 stage=1", "'stage=1': driver takes step"),
        ("kill step=1 at=votes", "at=votes: did you mean vote?"),
        ("kill step=1 at=F,B", "at=F,B: expected one place"),
        ("kill step=1 at=RF", "at=RF: no forward runs again with parallel.recompute = 'none'; try at=F"),
        ("kill step=1 at=W nth=9", "nth=9: expected which W of the step, from 1 to 8"),
        ("kill step=1 at=checkpoint member=1", "replica 1 saves nothing"),
        ("kill step=1 at=copy", "at=copy: replicas are each other's copies"),
        ("disk-full step=1 member=3", "replica 1 saves nothing"),
        ("stop step=1 for=soon", "for=soon: expected a number above 0, such as for=2"),
        ("slow step=1", "slow=: expected a number above 1, such as slow=3x"),
        ("slow=1x step=1", "slow=1: expected a number above 1"),
        ("kill=3x step=1", "'kill=3x': only slow takes a value; write kill"),
        ("random seed=1", "rate is missing"),
        ("random rate=2", "rate=2: expected a number above 0"),
        ("random rate=nan", "rate=nan: expected a number above 0"),
        ("random rate=0.1 kinds=kill,slow", "kinds=slow: "),
        ("kill step=3; stop step=3 at=B", "'stop step=3 at=B': 'kill step=3' hits it in that step"),
    ],
)
def test_what_is_wrong_is_named_with_what_works(text, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        read_faults([text], MESH)
    assert str(caught.value).startswith("--inject '")


def test_what_this_run_does_not_have():
    for text, problem in (
        ("net step=1", "the only member of a run has no connections"),
        ("kill step=1 at=send", "a single stage sends nothing"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_faults([text], ALONE)
    for setting, text in (("copy_every=0", "kill step=1 at=copy"), ("enabled=false", "kill step=1 at=recovery")):
        with pytest.raises(ConfigError, match=setting.replace("=", " = ")):
            read_faults([text], load_config(None, [f"recovery.{setting}"]))
    with pytest.raises(ConfigError, match="from 8 to 20"):
        read_faults(["kill step=7"], MESH, first=8)


def test_a_member_is_hit_once_in_a_step_and_again_in_the_recovery():
    assert len(read_faults(["kill step=3; kill step=3 at=recovery; kill stage=1 step=3"], MESH)) == 3


def test_random_faults_follow_from_the_seed_and_the_step():
    drawn = read_faults(["random seed=7 rate=0.5"], MESH)
    assert 4 < len(drawn) < 16
    assert drawn == read_faults(["random seed=7 rate=0.5"], MESH)
    assert drawn != read_faults(["random seed=8 rate=0.5"], MESH)
    assert [f for f in drawn if f.step >= 10] == list(read_faults(["random seed=7 rate=0.5"], MESH, first=10))
    assert len({fault.step for fault in drawn}) == len(drawn)
    every = read_faults(["random rate=1"], load_config(None, ["train.steps=400", "parallel.recompute=full"]))
    assert len(every) == 400
    assert {fault.kind for fault in every} == set(RANDOM)
    assert {fault.at for fault in every} > {"F", "RF", "W", "send", "vote", "commit"}
    assert {fault.member for fault in every} == {Member(p, f, 0) for p in (0, 1) for f in (0, 1)}
    assert {fault.kind for fault in read_faults(["random rate=1"], ALONE)} == {"kill", "stop", "hang"}


# --- when they are due


def test_each_is_handed_out_once(tmp_path):
    texts = [
        "kill stage=1 step=2",
        "stop step=2",
        "kill step=2 at=recovery",
        "driver step=2",
        "corrupt-checkpoint step=2",
    ]
    read = read_faults(texts, MESH)
    faults = Faults(read, noted=tmp_path / "noted")
    assert (faults.due(1), faults.due_at_driver(1), faults.due_in_recovery(), faults.due_at_checkpoint(1)) == (
        {},
        [],
        {},
        [],
    )
    assert faults.due(2) == {Member(1, 0, 0): read[0], Member(0, 0, 0): read[1]}
    assert faults.due(2) == {}  # the step is taken again
    assert faults.due_at_driver(2) == [read[3]]
    later = Faults(read, noted=tmp_path / "noted")  # that driver was killed
    assert (later.due(2), later.due_at_driver(2)) == ({}, [])
    assert later.due_in_recovery() == {Member(0, 0, 0): read[2]}
    assert later.due_in_recovery() == {}
    assert later.due_at_checkpoint(4) == [read[4]]  # the first one from its step on


def test_a_fault_of_a_recovery_waits_for_its_step():
    faults = Faults(read_faults(["kill step=5 at=recovery", "kill step=6 at=recovery"], MESH))
    faults.due(4)
    assert not faults.due_in_recovery()
    faults.due(7)
    assert [fault.step for fault in faults.due_in_recovery().values()] == [5]
    assert [fault.step for fault in faults.due_in_recovery().values()] == [6]


# --- that they are real

spawning = multiprocessing.get_context("spawn")


@pytest.fixture
def member():
    """Starts :func:`steps`; the process and the end of its pipe."""
    started = []

    def start(text: str) -> tuple[psutil.Process, Connection]:
        ours, theirs = spawning.Pipe()
        started.append(spawning.Process(target=steps, args=(text, theirs), daemon=True))
        started[-1].start()
        theirs.close()
        return psutil.Process(started[-1].pid), ours

    yield start
    for process in started:
        process.kill()
        process.join()


def positions(pipe: Connection, last: int = -1) -> list[int]:
    """What a member told, up to position ``last`` or its end."""
    told: list[int] = []
    while last not in told and pipe.poll(10):
        try:
            heard = pipe.recv()
        except EOFError:
            break
        told += [heard] if heard != "beat" else []
    return told


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_before_its_instruction(member):
    process, pipe = member("kill step=1 at=F nth=2")
    assert positions(pipe) == [0, 1, 2, 3]
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("at", "last"), [("F nth=8", 3), ("send", 2), ("recv", 6)])
def test_the_last_if_there_are_fewer_and_the_end_if_there_is_none(at, last, monkeypatch):
    told, killed = [], []
    monkeypatch.setattr("os.kill", lambda *_: killed.append(told[-1]))
    before = Trigger(fault(f"kill step=1 at={at}"), PROGRAM, Sockets()).watch(told.append)
    for position in [*range(len(PROGRAM) + 1), *range(len(PROGRAM) + 1)]:
        before(position)
    assert killed == [last]  # once


def test_stopped_and_continued_by_another_process(member):
    process, pipe = member("stop step=1 at=B for=1")
    assert positions(pipe, last=5)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert not process.children()
    assert positions(pipe, last=6) == [6]


def test_hung_with_the_interpreter_lock(member):
    process, pipe = member("hang step=1")
    assert positions(pipe, last=1) == [0, 1]
    wait_until(lambda: not pipe.poll(0.5) or pipe.recv() is None)
    assert not pipe.poll(1)  # no other thread runs
    assert process.status() == psutil.STATUS_SLEEPING


def test_a_fault_is_carried_out_once():
    hits = []
    trigger = Trigger(fault("disk-full step=1"), PROGRAM, Sockets())
    for point in ("vote", "checkpoint", "checkpoint"):
        try:
            trigger(point)
        except OSError as error:
            hits.append((point, error.errno))
    assert hits == [("checkpoint", 28)]


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_slow_from_then_on(monkeypatch):
    clock, told = Clock(), []
    monkeypatch.setattr("zeropp_ray.faults.time", clock)
    before = Trigger(fault("slow=3x step=1 at=send"), PROGRAM, Sockets()).watch(lambda position: told.append(clock.now))
    for _ in range(2):
        for position in range(len(PROGRAM)):
            before(position)
            clock.sleep(1)
        before(len(PROGRAM))
    took = [end - begin for begin, end in itertools.pairwise(told)]
    assert took == [1, 1, 3, 3, 1, 3, 0, 3, 3, 3, 3, 1, 3]  # WAIT is for others


def test_connections_are_cut_at_both_ends_and_no_others():
    listener = socket.create_server(("127.0.0.1", 0))
    kept = socket.create_connection(listener.getsockname()), listener.accept()[0]
    sockets = Sockets()
    with sockets.made():
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        pair = socket.socketpair()
        closed = socket.create_connection(listener.getsockname())
        listener.accept()[0].close()
    number = closed.fileno()
    closed.close()
    after = socket.create_connection(listener.getsockname())  # takes the number of the closed one
    assert after.fileno() == number
    peer, _ = listener.accept()
    trigger = Trigger(fault("net step=1 at=commit"), PROGRAM, sockets)
    trigger("vote")
    mine.sendall(b"x")
    assert theirs.recv(1) == b"x"
    trigger("commit")
    for end in (mine, theirs):
        end.settimeout(5)
        assert end.recv(1) == b""
    for left, right in (kept, pair, (after, peer)):
        left.sendall(b"y")
        assert right.recv(1) == b"y"


def test_a_member_says_what_it_reaches(tmp_path):
    model = {"layers": 1, "dim": 16, "heads": 2, "seq_len": 8}
    parallel = {"stages": 1, "chunks": 1, "shards": 1, "microbatches": 2, "microbatch_size": 1}
    config = RunConfig.from_dict({"model": model, "parallel": parallel})
    reached = []
    with harness.members(config, harness.Samples(config.model.vocab_size, 8, config.parallel.global_batch)) as run:
        run.pipes[0][1]._member.reached = reached.append
        votes = run.call("advance", 1, None)
        run.call("flush", decide(1, votes, 1.0))
        run.call("flush", None)
        run.save(tmp_path, 1, 1)
    assert reached == ["vote", "commit", "checkpoint", "checkpoint"]  # the weights are written, and the moments


def test_an_altered_checkpoint_is_found_by_its_checksum(tmp_path):
    saved_run(tmp_path, ALONE, step=4)
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert not open_checkpoint(path).verify()
    corrupt(path)
    assert open_checkpoint(path).verify() == ["weights-000-000.safetensors has been altered: its checksum differs"]


# --- the command


def test_the_usual_faults_fit_any_run():
    for config in (ALONE, MESH, RunConfig()):
        assert all(read_faults([text], config) for text in usual(config))


def test_what_differs_is_told():
    twin = Outcome("a", [(1, 5.0, None)], [])
    recoveries = [
        {"noticed_s": 0.03, "resumed_s": 2.0, "replayed": 1},
        {"noticed_s": 4.0, "resumed_s": 1.0, "replayed": 3},
    ]
    same = Outcome("a", [(1, 5.0, None)], recoveries)
    assert same.equals(twin)
    assert same.against(twin) == ("2", "4.00 s", "2.00 s", "4", "equal", "equal")
    other = Outcome("b", [(1, 5.0, None), (1, 5.0, None)], [])
    assert not other.equals(twin)
    assert other.against(twin) == ("0", "-", "-", "0", "differs", "differ")
    assert not Outcome("a", [(1, 5.0, None)], [], "died").equals(twin)
    unknown = Outcome("a", [], [{"noticed_s": None, "resumed_s": 1.0, "replayed": 0}])
    assert unknown.against(twin)[1:3] == ("-", "1.00 s")


def test_a_wrong_fault_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["train"], ["drill"]):
        result = CliRunner().invoke(zeropp, [*command, "--inject", "kill step=0"])
        assert result.exit_code == 2, result.output
        assert "step=0: expected a step of the run, from 1 to" in result.output
        assert not list(tmp_path.iterdir())


@pytest.mark.ray
def test_a_drill(tmp_path):
    small = ["train.steps=8", "parallel.shards=1", "model.dim=32", "model.heads=2", "model.seq_len=32"]
    arguments = [word for setting in [*small, f"run.dir={tmp_path}"] for word in ("--set", setting)]
    result = CliRunner().invoke(zeropp, ["drill", *arguments, "--inject", "kill stage=1 member=0 step=5 at=B"])
    assert result.exit_code == 0, result.output
    row = result.output.splitlines()[-1]
    assert re.fullmatch(r"kill stage=1 member=0 step=5 at=B +1 +\d+\.\d\d s +\d+\.\d\d s +\d +equal +equal", row), row
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["1-kill", "undisturbed"]
    events = [json.loads(line) for line in (folder / "1-kill" / "events.jsonl").read_text().splitlines()]
    assert [event["cause"] for event in events if event["kind"] == "recovery"] == ["death"]


@pytest.mark.full
@pytest.mark.ray
def test_a_drill_that_loses_a_node(tmp_path):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):  # two for the members, and one that takes over
            cluster.add_node(num_cpus=1)
        settings = [word for setting in ("parallel.shards=1", f"run.dir={tmp_path}") for word in ("--set", setting)]
        drill = ["drill", *settings, "--address", cluster.address, "--inject", "node stage=1 step=6"]
        result = CliRunner().invoke(zeropp, drill)
    finally:
        cluster.shutdown()
    assert result.exit_code == 0, result.output
    assert re.search(r"node stage=1 step=6 +1 .* equal +equal", result.output)
