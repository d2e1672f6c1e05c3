"""A run from the job process: plan, cluster, driver, and the events on the way. This is what every command calls."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.folder import RunFolder
from actors.processes import running
from zeropp_ray.checkpoint.reader import Checkpoint
from zeropp_ray.checkpoint.resume import check_same_data, check_same_parameters, identity_of
from zeropp_ray.config import RunConfig
from zeropp_ray.data.corpus import load_corpus
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError
from zeropp_ray.evaluation import Loss, Request
from zeropp_ray.models.hf import foreign_tokenizer, initial_weights
from zeropp_ray.planner.plan import Plan, make_plan

Event = dict[str, Any]

CONNECT_S = 5.0  # how long the head of a cluster may take to accept a connection
OBJECT_STORE_BYTES = 100 * 2**20  # no tensor passes the object store


def run_training(
    config: RunConfig,
    *,
    address: str | None,
    run_dir: Path,
    on_event: Callable[[Event], None],
    resume: Checkpoint | None = None,
) -> dict[str, Any]:
    """Train and return the summary. ``address`` None starts a cluster on this machine, and ends it afterwards.

    ``resume``: the checkpoint to go on from. SIGINT, SIGTERM and SIGHUP stop the run after the step at hand,
    with a checkpoint.

    Raises ConfigError before anything is started if the run cannot work, ZeroppError with the cause if it failed,
    Stopped if it was asked to stop.
    """
    plan = make_plan(config)
    corpus = load_corpus(config, plan.description.vocab)  # told before Ray starts
    data = identity_of(corpus.train, corpus.validation)
    if resume is not None:
        check_same_parameters(resume, plan.description.shapes)
        check_same_data(resume, data)
    else:
        initial_weights(config)  # their names and sizes are checked
    on_event({"kind": "plan", **plan.table(config)})
    if config.model.init_from and foreign_tokenizer(Path(config.model.init_from), corpus.tokenizer):
        there = config.model.init_from
        text = f"{there} knows other tokens than the text; make them with zeropp data prepare --tokenizer {there}"
        on_event({"kind": "log", "text": text})
    with _scratch() as scratch, cluster(config, address, on_event):
        folder = RunFolder(run_dir.resolve(), scratch, str(Path.cwd()), resume.path.resolve() if resume else None)
        with _stopping_on_signals(folder, on_event):
            return _drive(config, plan, folder, data, on_event)


def run_evaluation(config: RunConfig, checkpoint: Checkpoint, text: Request, *, address: str | None) -> Loss:
    """The loss of ``checkpoint`` on ``text`` under the pipeline, in the layout of ``config``. Nothing is trained.

    Raises ConfigError before anything is started if it cannot work, and ZeroppError with the cause if it failed.
    """
    plan = make_plan(config)
    check_same_parameters(checkpoint, plan.description.shapes)
    rounds = -(-text.windows(config)[0].count // config.parallel.global_batch)
    import ray

    with _scratch() as scratch, cluster(config, address, lambda event: None), _driver() as driver:
        folder = RunFolder(scratch, scratch, str(Path.cwd()), checkpoint.path.resolve(), text)
        return ray.get(driver.evaluate.remote(config.to_dict(), plan, folder, rounds))


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder of this process. Those of processes that were killed are removed on the way."""
    for left in Path(tempfile.gettempdir()).glob("zeropp-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"zeropp-{os.getpid()}-"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def cluster(config: RunConfig, address: str | None, on_event: Callable[[Event], None]) -> Iterator[None]:
    """A Ray cluster that holds the run: joined at ``address``, or started here with the CPUs the members ask for."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    needed = config.parallel.members * config.resources.cpus
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        cores = os.cpu_count() or 1
        if needed > cores:
            on_event({"kind": "log", "text": f"{needed:g} CPUs for the members on {cores} cores: they take turns"})
        ray.init(
            address="local",
            num_cpus=max(1, -int(-needed // 1)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **options,
        )
    else:
        _check_answers(address)
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"--address {address}: no Ray cluster answers there: {str(error).splitlines()[0]}"
            ) from error
    try:
        have = ray.cluster_resources().get("CPU", 0)
        if have < needed:
            raise ConfigError(
                f"resources.cpus = {config.resources.cpus:g}: {config.parallel.members} members need {needed:g} CPUs "
                f"and the cluster has {have:g}; lower resources.cpus, parallel.stages, parallel.shards or "
                "parallel.replicas, or add nodes"
            )
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """ConfigError if nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--address {address}: nothing answers there ({error}); is that Ray cluster running?"
        ) from None


@contextmanager
def _stopping_on_signals(folder: RunFolder, on_event: Callable[[Event], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP ask the driver to stop at the next commit; a second one ends the run at once."""

    def ask(number: int, frame: Any) -> None:
        if folder.stop.exists():
            raise KeyboardInterrupt
        folder.stop.touch()
        on_event({"kind": "log", "text": "stopping after this step, with a checkpoint; once more ends the run at once"})

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _drive(
    config: RunConfig, plan: Plan, folder: RunFolder, data: dict[str, Any], on_event: Callable[[Event], None]
) -> dict[str, Any]:
    import ray

    with _driver() as driver:
        for batch in driver.run.options(num_returns="streaming").remote(config.to_dict(), plan, folder, data):
            for event in ray.get(batch):
                if event["kind"] == "done":
                    return event["summary"]
                if event["kind"] == "failed":
                    print(event["trace"], file=sys.stderr)  # the log, under a command
                    raise ZeroppError(event["error"])
                if event["kind"] == "stopped":
                    raise Stopped(_stopped(event, folder.path))
                on_event(event)
    raise AssertionError("the driver ended without a word")


@contextmanager
def _driver() -> Iterator[Any]:
    """The driver of a run, which ends with it; what it fails with is raised as ZeroppError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.driver import RunDriver

    # On this node: the run's folder and the request to stop are files here.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    driver = RunDriver.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    try:
        yield driver
    except ray.exceptions.RayActorError as error:
        raise ZeroppError(
            "the driver of the run died (its process was killed or crashed); the members went with it"
        ) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ZeroppError):
            raise ZeroppError(str(error.cause)) from error
        raise ZeroppError(f"the driver of the run failed: {error.cause!r}") from error
    finally:
        ray.kill(driver, no_restart=True)


def _stopped(event: Event, run: Path) -> str:
    if not event["step"]:
        return "stopped before the first step"
    if not event["saved"]:
        return f"stopped after step {event['step']}, which could not be saved; see the messages above"
    return (
        f"stopped after step {event['step']}, which is saved; go on with: zeropp train --resume {shlex.quote(str(run))}"
    )
