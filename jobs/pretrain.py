"""``python -m jobs.pretrain``: ``zeropp train`` as the entry point of a Ray job.

It differs in two things, both because of what Ray makes of a job. Its working folder is a copy of what was sent, which
Ray removes, so a run folder that is not named in full goes to the home folder. And of how it ends Ray keeps little (a
job that was stopped has no exit code), so the exit code is the last line of the job's log.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jobs.cli import OneLineErrors
from jobs.train import train
from zeropp_ray.config import load_config
from zeropp_ray.errors import ConfigError, NoProgress, Stopped, ZeroppError
from zeropp_ray.files import expanded
from zeropp_ray.uri import place

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the entry point of a job
MEANINGS = {
    0: "done",
    ZeroppError.exit_code: "failed",
    ConfigError.exit_code: "wrong usage or configuration",
    NoProgress.exit_code: "no progress over several recoveries",
    Stopped.exit_code: "stopped with a checkpoint",
}


def last_line(code: int) -> str:
    """What the log of a job ends with: ``exit code 75: stopped with a checkpoint``."""
    return f"exit code {code}: {MEANINGS.get(code, 'killed')}"


def code_in(log: str) -> int | None:
    """The exit code that the log of a job ends with; None if the job's process was killed before it could say."""
    lines = log.rstrip().rsplit("\n", 1)
    found = re.fullmatch(r"exit code (\d+): .*", lines[-1])
    return int(found[1]) if found else None


def _pretrain(file: Path | None, overrides: tuple[str, ...], resume: str | None, **options: Any) -> None:
    if JOB_CONFIG in os.environ:
        if resume is None:
            overrides = _outlasting(file, overrides)
        elif isinstance(where := place(resume), Path) and not where.is_absolute():
            resume = str(next((p for p in (Path.home() / where, Path.home() / "runs" / where) if p.is_dir()), where))
    assert train.callback is not None
    train.callback(file, overrides, resume=resume, **options)


def _outlasting(file: Path | None, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The same settings with a ``run.dir`` that is there when the job is over."""
    folder = load_config(file, overrides).run.dir
    if "://" in folder or expanded(folder, f"run.dir = {folder!r}").is_absolute():
        return overrides
    kept = Path.home() / folder
    click.echo(f"run.dir = {folder!r}: the job's working folder goes with the job; the run's folder is in {kept}")
    return (*overrides, f"run.dir={kept}")


_HELP = f"""Train as `zeropp train` does, as the entry point of a Ray job; `zeropp submit` calls it too.

\b
  ray job submit --address http://HEAD:8265 --working-dir . -- \\
      python -m jobs.pretrain run.toml --set run.dir=/shared/runs

Its log ends with a line such as `{last_line(75)}`, because Ray keeps no exit code of a job that was stopped.
A `run.dir` that is not a whole path lies in the home folder, and not in the job's working folder, which Ray removes.
Give a job that is stopped more than Ray's 3 seconds to save, as `zeropp submit` does:
--runtime-env-json '{{"env_vars": {{"RAY_JOB_STOP_WAIT_TIME_S": "120"}}}}'

Options and what is written: as of `zeropp train`.
"""

pretrain = OneLineErrors("pretrain", params=train.params, callback=_pretrain, help=_HELP)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and in a job end the log with the exit code."""
    try:
        pretrain(arguments, prog_name="python -m jobs.pretrain")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    if JOB_CONFIG in os.environ:
        print(last_line(code), flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
