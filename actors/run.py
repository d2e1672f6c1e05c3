"""A run from the job process: plan, cluster, driver, and the events on the way. This is what every command calls."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeropp_ray.config import RunConfig
from zeropp_ray.data.corpus import load_corpus
from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.planner.plan import make_plan

Event = dict[str, Any]

OBJECT_STORE_BYTES = 100 * 2**20  # no tensor passes the object store


def run_training(
    config: RunConfig, *, address: str | None, run_dir: Path, on_event: Callable[[Event], None]
) -> dict[str, Any]:
    """Train and return the summary. ``address`` None starts a cluster on this machine, and ends it afterwards.

    Raises ConfigError before anything is started if the run cannot work, and ZeroppError with the cause if it failed.
    """
    plan = make_plan(config)
    load_corpus(config, plan.description.vocab)  # told before Ray starts
    on_event({"kind": "plan", **plan.table(config)})
    scratch = Path(tempfile.mkdtemp(prefix="zeropp-"))
    try:
        with cluster(config, address, on_event):
            return _drive(config, plan, run_dir, scratch, on_event)
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
            num_cpus=max(1, -int(-needed // 1)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **options,
        )
    else:
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


def _drive(
    config: RunConfig, plan: Any, run_dir: Path, scratch: Path, on_event: Callable[[Event], None]
) -> dict[str, Any]:
    import ray

    from actors.driver import RunDriver, RunFolder

    driver = RunDriver.remote()  # type: ignore[attr-defined]
    folder = RunFolder(path=run_dir.resolve(), scratch=scratch, start_directory=str(Path.cwd()))
    try:
        for batch in driver.run.options(num_returns="streaming").remote(config.to_dict(), plan, folder):
            for event in ray.get(batch):
                if event["kind"] == "done":
                    return event["summary"]
                if event["kind"] == "failed":
                    raise ZeroppError(event["error"])
                on_event(event)
    except ray.exceptions.RayActorError as error:
        raise ZeroppError(
            "the driver of the run died (its process was killed or crashed); the members went with it"
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise ZeroppError(f"the driver of the run failed: {error.cause!r}") from error
    finally:
        ray.kill(driver, no_restart=True)
    raise AssertionError("the driver ended without a word")
