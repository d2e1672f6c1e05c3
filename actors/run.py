"""A run from the job process: plan, cluster, driver, and the events on the way. This is what every command calls."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.events import append_end
from actors.folder import RunFolder
from actors.locks import holder
from actors.scratch import scratch
from actors.stopping import REPEAT_S, StopSignals, interrupt
from zeropp_ray.checkpoint import run_id
from zeropp_ray.checkpoint.manifest import folders
from zeropp_ray.checkpoint.reader import Checkpoint
from zeropp_ray.checkpoint.resume import check_same_data, check_same_parameters, identity_of
from zeropp_ray.config import RunConfig
from zeropp_ray.data.corpus import Corpus, load_corpus
from zeropp_ray.errors import ConfigError, NoProgress, Stopped, ZeroppError
from zeropp_ray.evaluation import Loss, Request
from zeropp_ray.faults import Fault
from zeropp_ray.models.hf import foreign_tokenizer, initial_weights
from zeropp_ray.planner.plan import Plan, make_plan
from zeropp_ray.uri import Place, UriPath

if TYPE_CHECKING:
    from actors.supervisor import Supervisor

Event = dict[str, Any]

CONNECT_S = 5.0  # how long the head of a cluster may take to accept a connection
OBJECT_STORE_BYTES = 100 * 2**20  # no tensor passes the object store


def planned(config: RunConfig, resume: Checkpoint | None = None) -> tuple[Plan, Corpus]:
    """The plan and the text of a run, with all checks that need no cluster; ``resume``: the checkpoint to go on from.

    Raises ConfigError if the run cannot work.
    """
    plan = make_plan(config)
    corpus = load_corpus(config, plan.description.vocab)
    if resume is not None:
        check_same_parameters(resume, plan.description.shapes, plan.description.frozen)
        check_same_data(resume, identity_of(corpus))
    else:
        initial_weights(config)  # their names and sizes are checked
    return plan, corpus


def run_training(
    config: RunConfig,
    *,
    address: str | None,
    run_dir: Path,
    uri: UriPath | None = None,
    lease: str = "",
    on_event: Callable[[Event], None],
    resume: Checkpoint | None = None,
    stop: StopSignals | None = None,
    inject: Sequence[Fault] = (),
) -> dict[str, Any]:
    """Train and return the summary. ``address`` None starts a cluster on this machine, and ends it afterwards.

    ``run_dir``: the folder of the run, or of one that is kept at ``uri`` and written under ``lease`` the working copy.
    ``resume``: the checkpoint to go on from. ``stop``: the signals that stop the run after the step at hand, with a
    checkpoint; a second one ends it at once, and so does the first before a step has begun.
    ``inject``: faults to put in. A driver that dies is followed by another, as ``config.recovery`` allows.

    Raises ConfigError before anything is started if the run cannot work, ZeroppError with the cause if it failed,
    NoProgress if recoveries brought it no further, Stopped if it stopped early and is saved, KeyboardInterrupt if it
    was ended at once. A run that has all its steps, but is not saved or learned nothing, returns with ``error`` in its
    summary.
    """
    stop = stop or StopSignals()
    stop.hand_to(interrupt)
    plan, corpus = planned(config, resume)  # what is wrong is told before Ray starts
    data = identity_of(corpus)
    if resume is None:
        run_id.create(uri or run_dir)
    on_event({"kind": "plan", **plan.table(config)})
    if config.model.init_from and foreign_tokenizer(Path(config.model.init_from), corpus.tokenizer):
        there = config.model.init_from
        text = f"{there} knows other tokens than the text; make them with zeropp data prepare --tokenizer {there}"
        on_event({"kind": "log", "text": text})
    stop.hand_to(None)  # ray.init is not to be interrupted
    with scratch() as temporary, cluster(config, address, on_event):
        checkpoint = resume.path.resolve() if resume else None
        folder = RunFolder(
            run_dir.resolve(), temporary, str(Path.cwd()), checkpoint, job=holder(run_dir), uri=uri, lease=lease
        )
        stop.listen()
        stop.hand_to(interrupt)
        begun = resume.step if resume else 0
        return _recorded(folder, lambda: _drive(config, plan, folder, data, on_event, stop, begun, inject))


def run_evaluation(config: RunConfig, checkpoint: Checkpoint, text: Request, *, address: str | None) -> Loss:
    """The loss of ``checkpoint`` on ``text`` under the pipeline, in the layout of ``config``. Nothing is trained.

    Raises ConfigError before anything is started if it cannot work, and ZeroppError with the cause if it failed.
    """
    plan = make_plan(config)
    check_same_parameters(checkpoint, plan.description.shapes)
    rounds = -(-text.windows(config)[0].count // config.parallel.global_batch)
    import ray

    with scratch() as temporary, cluster(config, address, lambda event: None), _driver() as driver:
        folder = RunFolder(temporary, temporary, str(Path.cwd()), checkpoint.path.resolve(), text)
        return ray.get(driver.evaluate.remote(config.to_dict(), plan, folder, rounds))


@contextmanager
def cluster(config: RunConfig, address: str | None, on_event: Callable[[Event], None]) -> Iterator[None]:
    """A Ray cluster that holds the run: joined at ``address``, or started here with the CPUs the members ask for."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from actors.room import check_room

    needed = (config.parallel.members + config.recovery.spares) * config.resources.cpus
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        cores = os.cpu_count() or 1
        if needed > cores:
            on_event({"kind": "log", "text": f"{needed:g} CPUs for the members on {cores} cores: they take turns"})
        with _left_alone():
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
            with _left_alone():
                ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"--address {address}: no Ray cluster answers there: {str(error).splitlines()[0]}"
            ) from error
    try:
        check_room(config)
        yield
    finally:
        ray.shutdown()


@contextmanager
def _left_alone() -> Iterator[None]:
    """Has ray.init keep off two things that would lose a run which is told to stop. Ray has no settings for them.

    Its processes get a session of their own: what is sent to the group of this one, as by GNU ``timeout`` or a terminal
    that closes, must not end them before the run is saved. (On Linux they end with this process all the same.) And it
    leaves SIGTERM to whoever listens to it already.
    """
    import ray._private.services
    import ray._private.utils

    services: Any = ray._private.services
    utils: Any = ray._private.utils
    popen, take_sigterm = getattr(services, "ConsolePopen", None), getattr(utils, "set_sigterm_handler", None)
    if popen is not None and sys.platform.startswith("linux"):
        services.ConsolePopen = functools.partial(popen, start_new_session=True)
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = popen, take_sigterm


def _check_answers(address: str) -> None:
    """ConfigError if ``address`` is that of something else than a cluster, or nothing listens at HOST:PORT; Ray itself
    would try for minutes.
    """
    if "://" in address:
        raise ConfigError(
            f"--address {address}: is not one to join; give HOST:PORT, usually HEAD:6379, or auto; to a dashboard go "
            "jobs, with zeropp submit"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--address {address}: nothing answers there ({error}); is that Ray cluster running?"
        ) from None


def _drive(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    data: dict[str, Any],
    on_event: Callable[[Event], None],
    stop: StopSignals,
    begun: int,
    inject: Sequence[Fault],
) -> dict[str, Any]:
    """Follow a driver to the end of the run, and after one that dies another. ``begun``: the step it goes on from."""
    from actors.supervisor import DriverDied, Supervisor

    supervisor = Supervisor(config, folder, begun, on_event)
    try:
        while True:
            try:
                with _driver() as driver:
                    run = driver.run.options(num_returns="streaming")
                    batches = run.remote(config.to_dict(), plan, supervisor.folder, data, inject)
                    return _follow(batches, folder, on_event, stop, supervisor)
            except DriverDied as death:
                supervisor.died(str(death))
    finally:
        stop.hand_to(lambda: None)  # there is only left to tidy up


def _follow(
    batches: Any,
    folder: RunFolder,
    on_event: Callable[[Event], None],
    stop: StopSignals,
    supervisor: Supervisor,
) -> dict[str, Any]:
    """Pass on what a driver tells, up to its last word: the summary, or what is raised."""
    import ray

    from actors.supervisor import DriverDied

    def ask() -> None:
        folder.stop.touch()
        more = f"once more, {REPEAT_S:g} s later or more, ends the run at once"
        on_event({"kind": "log", "text": f"stopping after this step, with a checkpoint; {more}"})

    for batch in batches:
        for event in ray.get(batch):
            if event["kind"] == "started":
                supervisor.started()
                stop.hand_to(ask)
            elif event["kind"] == "done":
                return event["summary"]
            elif event["kind"] == "failed":
                print(event["trace"], file=sys.stderr)  # the log, under a command
                if event["early"] and supervisor.ran:  # the run itself is well, and has what to go on from
                    raise DriverDied(event["error"])
                if event["exit_code"] == Stopped.exit_code:  # before it was back at its steps
                    raise supervisor.stopped(event["error"])
                raise _failed(event)
            elif event["kind"] == "stopped":
                raise _stopped(event, folder.run)
            else:
                on_event(event)
    raise AssertionError("the driver ended without a word")


@contextmanager
def _driver() -> Iterator[Any]:
    """The driver of a run, which ends with it; what it fails with is raised as ZeroppError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.driver import RunDriver
    from actors.supervisor import EVIDENCE, DriverDied

    # On this node: the run's folder and the request to stop are files here.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    driver = RunDriver.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    try:
        yield driver
    except ray.exceptions.RayActorError as error:
        print(error, file=sys.stderr)  # the log, under a command
        raise DriverDied(EVIDENCE) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ZeroppError):
            raise ZeroppError(str(error.cause)) from error
        raise ZeroppError(f"the driver of the run failed: {error.cause!r}") from error
    finally:
        ray.kill(driver, no_restart=True)


def _failed(event: Event) -> ZeroppError:
    kind = NoProgress if event.get("exit_code") == NoProgress.exit_code else ZeroppError
    return kind(event["error"])


def _stopped(event: Event, run: Place) -> BaseException:
    """``event["why"]``: what the driver stopped for if nobody asked for it, in words."""
    stopped = f"stopped because {why}" if (why := event.get("why")) else "stopped"
    if not event["step"]:
        return ZeroppError(f"{stopped}, before the first step") if why else KeyboardInterrupt()
    if event["error"]:
        return ZeroppError(f"{stopped}; {event['error']}")
    after = f"after step {event['step']}, which is saved"
    return Stopped(f"{stopped} {after}; go on with: zeropp train --resume {shlex.quote(str(run))}")


def _recorded(folder: RunFolder, drive: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``drive`` returns or raises, once the run's events say how it ended."""
    run = folder.path
    try:
        summary = drive()
    except KeyboardInterrupt:
        saved = next(folders(folder.run), None) is not None
        append_end(run, "interrupted", Stopped.exit_code if saved else ZeroppError.exit_code)
        raise
    except Exception as error:
        code = getattr(error, "exit_code", ZeroppError.exit_code)
        append_end(run, "stopped" if isinstance(error, Stopped) else "failed", code, str(error))
        raise
    wrong = summary["error"]
    append_end(run, "failed" if wrong else "done", ZeroppError.exit_code if wrong else 0, wrong or "")
    return summary
