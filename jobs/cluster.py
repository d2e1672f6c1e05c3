"""``zeropp jobs``, ``zeropp logs`` and ``zeropp stop``: runs that are jobs of a Ray cluster, or of this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from actors.locks import holder
from jobs.status import process_of, read_status, run_folder
from jobs.submit import GRACE, at_address, follow_job
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError
from zeropp_ray.files import expanded
from zeropp_ray.uri import is_uri

if TYPE_CHECKING:
    from jobs.submission import Jobs

LATE_S = 30.0  # how much longer than its grace the end of a stopped job is waited for
COLUMNS = ("job", "run", "state", "since", "step")


@click.command(name="jobs", short_help="The runs that are jobs of a Ray cluster.")
@at_address
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="The newest so many.")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def list_jobs(address: str | None, limit: int, as_json: bool) -> None:
    """List the runs that were submitted to a Ray cluster, the newest first: by `zeropp submit`, or by `ray job submit`
    with `python -m jobs.pretrain`.
    """
    from jobs.submission import Jobs

    jobs = Jobs(address)
    rows = [_row(jobs, job) for job in jobs.all() if "jobs.pretrain" in job.entrypoint][:limit]
    if as_json:
        click.echo(json.dumps(rows))
        return
    cells = [COLUMNS, *([str(row[column] or "-") for column in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _row(jobs: Jobs, job: Any) -> dict[str, Any]:
    from jobs.submission import run_of, state_of

    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.start_time / 1000)) if job.start_time else ""
    return {
        "job": job.submission_id,
        "run": run_of(job),
        "state": state_of(job),
        "since": begun,
        "step": _step(jobs, job),
    }


def _step(jobs: Jobs, job: Any) -> str:
    """The last step that the job's log tells of; empty if none, or if the log's node is gone."""
    try:
        steps = re.findall(r"^step (\d+/\d+) ", jobs.log(job.submission_id), re.MULTILINE)
    except ZeroppError:
        return ""
    return steps[-1] if steps else ""


@click.command(short_help="The log of a job.")
@click.argument("job", metavar="JOB|RUN")
@at_address
@click.option("--follow", is_flag=True, help="To its end; exit with the exit code of the run.")
def logs(job: str, address: str | None, follow: bool) -> None:
    """Show the log of a job, named by its id or by its run.

    With --follow, Ctrl-C leaves the job running, and the exit code is that of the run, as of `zeropp submit --follow`.
    """
    from jobs.submission import Jobs

    jobs = Jobs(address)
    found = jobs.named(job).submission_id
    if follow:
        follow_job(jobs, found, _at(jobs, address))
    click.echo(jobs.log(found), nl=False)


@click.command(short_help="Stop a run after the step at hand, with a checkpoint.")
@click.argument("run", metavar="JOB|RUN")
@at_address
def stop(run: str, address: str | None) -> None:
    """Stop a run: it ends the step at hand, saves, and says how to go on. RUN is a folder, or a name under runs/, of
    this machine, whoever started it; or else, and always with --address, the id or the run of a job.

    Waits until it has. A job has the grace that it was submitted with, after which Ray kills it (3 s for a plain `ray
    job submit`).

    Exit code: 0 it is saved, or was done already; else 1, or that of the run if it had failed.
    """
    with suppress(ConfigError):
        folder = run_folder(expanded(run)) if address is None and not is_uri(run) else None
        if folder is not None and (process := process_of(holder(folder))):
            _stop_here(folder, process)
    _stop_job(run, address)


def _stop_here(run: Path, process: int) -> NoReturn:
    os.kill(process, signal.SIGTERM)
    click.echo(f"{run} is asked to stop: process {process}")
    while process_of(holder(run)) == process:
        time.sleep(0.2)
    found = read_status(run)
    click.echo(f"{run}: {found['state']}" + (f": {found['why']}" if found["why"] else ""))
    sys.exit(0 if found["state"] in ("done", "stopped") else ZeroppError.exit_code)


def _stop_job(name: str, address: str | None) -> NoReturn:
    from jobs.submission import FOLDER, Jobs, outcome

    jobs = Jobs(address)
    record = jobs.named(name)
    found, ended = record.submission_id, record.status.is_terminal()
    if not ended:
        jobs.stop(found)
        grace = float(((record.runtime_env or {}).get("env_vars") or {}).get(GRACE, 3))
        click.echo(f"job {found} is asked to stop; it has {grace:g} s to save")
        deadline = time.monotonic() + grace + LATE_S
        while not (record := jobs.info(found)).status.is_terminal():
            if time.monotonic() > deadline:
                raise ZeroppError(f"job {found} was asked to stop and still runs; see: zeropp logs {found}")
            time.sleep(0.5)
    log = jobs.log(found)
    end = outcome(record, log)
    said = re.findall(r"^error: (stopped .*)", log, re.MULTILINE)
    click.echo(f"job {found}: " + ("had ended before: " if ended else "") + (said[-1] if said else end.text))
    folder = (record.metadata or {}).get(FOLDER)
    if end.exit_code == Stopped.exit_code and folder:
        click.echo(f"or as a job: zeropp submit --resume {shlex.quote(folder)}{_at(jobs, address)}")
    sys.exit(0 if end.exit_code == Stopped.exit_code else end.exit_code)


def _at(jobs: Jobs, address: str | None) -> str:
    """The address as an option, if it was given."""
    return f" --address {shlex.quote(jobs.address)}" if address else ""
