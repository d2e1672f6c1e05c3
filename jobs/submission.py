"""Jobs of a Ray cluster as this project sees them, over Ray's job SDK: reached, listed, followed; how they ended."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from jobs.pretrain import MEANINGS, code_in
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError

DEFAULT = "http://127.0.0.1:8265"  # where Ray's dashboard listens if it is not told otherwise
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
EVERY_S = 1.0  # between two looks at a job
ANSWER_S = 30.0  # how long the dashboard may be silent within an answer
PENDING_S = 10.0  # how long a job may wait to start before it is told why
LOST_S = 60.0  # how long the cluster may not answer while a job is followed
RUN, FOLDER, DIGEST, VERSION = "zeropp_run", "zeropp_folder", "zeropp_config", "zeropp_version"  # of a job's metadata

Job = Any  # ray.job_submission.JobDetails


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the exit code of its entry point, and that in words."""

    exit_code: int
    text: str


class Jobs:
    """The jobs of the cluster whose dashboard is at an address."""

    def __init__(self, address: str | None) -> None:
        """``address``: ``http://HEAD:8265``, ``HEAD:6379`` or ``auto``; None: :data:`DEFAULT`.

        Raises ConfigError if there is none, it asks for another token, or Ray is installed without its job SDK.
        """
        try:
            import aiohttp  # noqa: F401  what Ray's SDK needs of ray[default], and says late or not at all
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise ConfigError(
                f"jobs need Ray with its dashboard, and {error.name} is missing; install it: pip install 'ray[default]'"
            ) from None
        self.address = address or DEFAULT

        class Client(JobSubmissionClient):
            """Ray's own waits without end: for a dashboard that stands still, or behind a tunnel that is broken."""

            def _do_request(self, *request: Any, **more: Any) -> Any:
                return super()._do_request(*request, **{"timeout": ANSWER_S} | more)

        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)
        with _only(self.address), self._explained():
            self._client = Client(self.address)

    @property
    def here(self) -> bool:
        """Whether this machine is all of the cluster. The address does not tell: a tunnel begins at 127.0.0.1 too."""
        with self._explained():
            answer = self._client._do_request("GET", "/nodes?view=hostNameList")
            return answer.ok and set(answer.json()["data"]["hostNameList"]) == {socket.gethostname()}

    def submit(self, **job: Any) -> str:
        """Start a job, with the arguments of Ray's ``submit_job``; its id."""
        with self._explained():
            return str(self._client.submit_job(**job))

    def all(self) -> list[Job]:
        """Those that were submitted, the newest first."""
        with self._explained():
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)

    def named(self, name: str) -> Job:
        """The job with this id, or the newest of the run with this name. Raises ConfigError if there is none."""
        jobs = self.all()
        for job in jobs:
            if job.submission_id == name:
                return job
        for job in jobs:
            if run_of(job) == name:
                return job
        raise ConfigError(f"{name}: no job of {self.address} has this id or runs this run; `zeropp jobs` lists them")

    def info(self, job: str) -> Job:
        with self._explained():
            return self._client.get_job_info(job)

    def log(self, job: str) -> str:
        """All of it so far; empty if its node does not answer, or is gone."""
        with suppress(ZeroppError), self._explained():
            return str(self._client.get_job_logs(job))
        return ""

    def stop(self, job: str) -> None:
        """Ask for it; the end is to be waited for."""
        with self._explained():
            self._client.stop_job(job)

    def follow(self, job: str, show: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> Outcome:
        """Show the job's log from its start to its end, and say how it ended.

        The log is read after the job's record says that it has ended, so its last lines are there. A cluster that does
        not answer is asked again for :data:`LOST_S` seconds; then ZeroppError. Logs of runs are short: a line every
        five seconds at most.
        """
        log, answered = "", time.monotonic()
        patient_until = answered + PENDING_S
        while True:
            began = time.monotonic()
            try:
                info = self.info(job)
            except ZeroppError as error:
                if began - answered > LOST_S:
                    raise ZeroppError(f"{error}; the job may well go on") from None
                sleep(EVERY_S)
                continue
            answered, ended = time.monotonic(), info.status.is_terminal()
            if info.status == "PENDING" and answered > patient_until:
                show(f"waits to start: {_first(info.message)}\n")
                patient_until = math.inf
            if ended or info.driver_node_id:
                shown, log = len(log), self.log(job) or log
                if len(log) > shown:
                    show(log[shown:])
            if ended:
                return outcome(info, log)
            sleep(max(EVERY_S, 10 * (time.monotonic() - began)))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What Ray's SDK raises, as errors of ours."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise ConfigError(
                f"--address {self.address}: the cluster asks for its token: {str(error).split('.')[0]}; set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file"
            ) from None
        except (ConnectionError, requests.exceptions.RequestException) as error:
            raise ConfigError(
                f"--address {self.address}: no dashboard of a Ray cluster answers there ({_first(error)}); give that "
                "of the head node, usually http://HEAD:8265"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise ZeroppError(f"{self.address}: {_first(error)}") from None


def outcome(job: Job, log: str) -> Outcome:
    """How a job that has ended did, from its record and the end of its log. ``ray job submit`` calls a job that was
    stopped a success, and any failure 1.
    """
    said, status, code = code_in(log), str(job.status), job.driver_exit_code
    if said is None and status == "SUCCEEDED":
        said = 0
    if said is None and status == "FAILED" and code is not None:
        said = code if code >= 0 else 128 - code  # as a shell has it
    if said is not None and said > 128:
        return Outcome(said, f"was killed by signal {said - 128}")
    if said is not None:
        return Outcome(said, MEANINGS.get(said, "failed"))
    if status == "STOPPED":
        return Outcome(ZeroppError.exit_code, "was killed before it had saved: the newest checkpoint is an earlier one")
    return Outcome(ZeroppError.exit_code, f"failed: {_first(job.message or 'Ray does not say why')}")


def run_of(job: Job) -> str:
    """The name of the run that a job trains; empty if it does not say."""
    return str((job.metadata or {}).get(RUN, ""))


def state_of(job: Job) -> str:
    """In a word: what Ray calls it, but for a job that ended with a checkpoint, which goes on when it is resumed."""
    return "stopped" if job.driver_exit_code == Stopped.exit_code else str(job.status).lower()


def metadata(run: str, folder: str, digest: str, version: str) -> dict[str, str]:
    return {RUN: run, FOLDER: folder, DIGEST: digest, VERSION: version}


def _first(error: object) -> str:
    """The first line of a message that may be long."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _only(address: str) -> Iterator[Mapping[str, str]]:
    """Inside, Ray's SDK takes the address that it is given: these variables would go before it."""
    kept = {name: os.environ.pop(name) for name in ADDRESS_VARIABLES if name in os.environ}
    try:
        yield kept
    finally:
        os.environ.update(kept)
