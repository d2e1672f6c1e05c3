"""``zeropp submit``: a run as a job of a Ray cluster, checked here before anything is sent."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from jobs.config import configured, decided
from jobs.package import Package, pack
from jobs.report import plan_table, size
from jobs.train import named
from zeropp_ray import __version__
from zeropp_ray.checkpoint.manifest import CHECKPOINTS
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.errors import ConfigError, Stopped
from zeropp_ray.files import expanded
from zeropp_ray.uri import Place, check_uri, is_uri, place

if TYPE_CHECKING:
    from jobs.submission import Jobs

RUN_FILE = "zeropp-run.toml"  # the run's configuration, in the package
GRACE = "RAY_JOB_STOP_WAIT_TIME_S"  # how long a job that is stopped may take to end; Ray's default is 3 seconds
PATHS = (("run", "dir"), ("data", "path"), ("parallel", "costs"), ("model", "init_from"))  # settings that name files

at_address = click.option(
    "--address",
    metavar="ADDRESS",
    envvar=["RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"],
    show_envvar=True,
    help="The cluster's dashboard, http://HEAD:8265, or HEAD:6379, or 'auto'; else http://127.0.0.1:8265.",
)


@click.command(short_help="Train on a Ray cluster, as a job that outlives this terminal.")
@configured
@click.option("--name", help="Name of the run, and of its folder; short for --set run.name=NAME.")
@click.option("--resume", metavar="RUN", help="Go on from the newest good checkpoint of a run: its folder there.")
@at_address
@click.option("--follow", is_flag=True, help="Show the job's log to its end, and exit with its exit code.")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Give the job this variable, from here."
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not send files or folders of this name or path.")
@click.option("--grace", type=click.IntRange(3), default=120, show_default=True, help="Seconds to save when stopped.")
@click.option(
    "--python", "interpreter", help="Python of the cluster; else this one if the cluster is this machine, or python."
)
@click.option(
    "--entrypoint-cpus",
    "entrypoint_num_cpus",
    type=float,
    metavar="N",
    help="CPUs for the process that starts the run; else none.",
)
@click.option("--entrypoint-gpus", "entrypoint_num_gpus", type=float, metavar="N", help="GPUs for it.")
@click.option("--entrypoint-memory", type=int, metavar="BYTES", help="Memory for it.")
@click.option(
    "--entrypoint-resource",
    "resources",
    multiple=True,
    metavar="NAME=N",
    help="Other resources for it, such as that of a node type.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, show what would be sent, and stop.")
def submit(
    file: Path | None,
    overrides: tuple[str, ...],
    name: str | None,
    resume: str | None,
    address: str | None,
    follow: bool,
    variables: tuple[str, ...],
    exclude: tuple[str, ...],
    grace: int,
    interpreter: str | None,
    resources: tuple[str, ...],
    dry_run: bool,
    **entrypoint: Any,
) -> None:
    """Train on a Ray cluster: FILE is checked here, and runs there as `python -m jobs.pretrain`.

    The job goes on when this terminal closes, or this command is killed. What it needs besides torch and Ray travels
    with it: this package, and what of the folder that you are in is code. Left out are hidden files, keys,
    environments, caches, runs, checkpoints, token stores, weights, archives, what git ignores, and --exclude. Data and
    run folder lie where all nodes of the cluster see them; write whole paths. For a cluster that is this machine, paths
    are as here.

    \b
    Examples:
      zeropp submit run.toml --address http://10.0.0.5:8265 --set run.dir=/shared/runs --follow
      zeropp submit run.toml --name big --env HF_TOKEN --exclude notebooks
      zeropp submit --resume /shared/runs/big --set train.steps=20000
      zeropp jobs
      zeropp logs big --follow
      zeropp stop big

    No variable of this shell reaches the job but those of --env; their values are kept by Ray with the job. A cluster
    that asks for a token gets it from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token.

    Ctrl-C while the log is followed leaves the job running. A job that is stopped has --grace seconds to save.

    Exit code: 0 submitted; 2 wrong usage or configuration: nothing was sent. With --follow that of the run: 0 done, 1
    failed, 2 wrong configuration, 70 no progress over several recoveries, 75 stopped with a checkpoint, 128+N killed by
    signal N.
    """
    from jobs.submission import Jobs, metadata

    environment, needs = _environment(variables), _needs(entrypoint, resources)
    if resume is not None and (file, name) != (None, None):
        raise ConfigError("--resume takes its settings from the checkpoint; leave out FILE and --name, and use --set")
    config = None if resume is not None else _settings(file, overrides, name)
    jobs, package = Jobs(address), pack(Path.cwd(), exclude)
    here = jobs.here
    if config is None:
        run = _resumed(_there(str(resume), "--resume", here, package), overrides)
    else:
        run = _new(_with_paths(config, here, package))
    package.check_size()
    click.echo(f"sends {len(package.files):,} files, {size(package.bytes)}, of {Path.cwd()} and this package")
    if dry_run:
        click.echo("\n".join([*sorted(package.files), "", run.table]))
        return
    python = interpreter or (sys.executable if here else "python")
    with tempfile.TemporaryDirectory(prefix="zeropp-submit-") as scratch:
        archive = Path(scratch) / "package.zip"
        package.write(archive, run.files)
        job = jobs.submit(
            entrypoint=shlex.join([python, "-m", "jobs.pretrain", *run.arguments]),
            submission_id=f"{run.name}-{secrets.token_hex(3)}",
            runtime_env={"working_dir": str(archive), "env_vars": {GRACE: str(grace)} | environment},
            metadata=metadata(run.name, run.folder, run.digest, __version__),
            **needs,
        )
    at = f" --address {shlex.quote(jobs.address)}" if address else ""
    click.echo(f"job {job}: run {run.name}, its files go to {run.folder}")
    if follow:
        follow_job(jobs, job, at)
    click.echo(f"  zeropp logs {job} --follow{at}\n  zeropp stop {job}{at}")


@dataclass(frozen=True)
class _Run:
    """What is submitted: name and folder of the run, the arguments of its entry point, files for it, its plan."""

    name: str
    folder: str
    arguments: list[str]
    files: dict[str, str]
    table: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of its settings; equal ones are equal runs."""
        return hashlib.sha256("\n".join([*self.arguments, *self.files.values()]).encode()).hexdigest()


def _new(config: RunConfig) -> _Run:
    config, table = _checked(config)
    folder = _of_cluster(config.run.dir) / config.run.name
    return _Run(config.run.name, str(folder), [RUN_FILE], {RUN_FILE: config.to_toml()}, table)


def _resumed(folder: str, overrides: Sequence[str]) -> _Run:
    """Its checkpoint is read on the cluster; what is wrong with ``overrides`` is told there, but for a URI that cannot
    be used: it may hold a secret, which Ray would keep with the job.
    """
    for setting in overrides:
        name, _, value = setting.partition("=")
        check_uri(value.strip(" '\""), f"{name.strip()} = {value}")
    where = _of_cluster(folder)
    run = where.parent.parent if where.parent.name == CHECKPOINTS else where
    settings = [word for setting in overrides for word in ("--set", setting)]
    return _Run(run.name, str(run), ["--resume", folder, *settings], {})


def _of_cluster(path: str) -> Place:
    """A place that the job is to find: its home folder is not that of here."""
    return place(path) if is_uri(path) else Path(path)


def follow_job(jobs: Jobs, job: str, at: str) -> NoReturn:
    """Show the log to its end and exit as the run did. ``at``: the option with the address, as a person typed it."""
    from jobs.submission import FOLDER

    try:
        outcome = jobs.follow(job, lambda text: click.echo(text, nl=False))
    except KeyboardInterrupt:
        click.echo(
            f"\nthe job goes on; follow it again: zeropp logs {job} --follow{at}\nstop it: zeropp stop {job}{at}"
        )
        sys.exit(130)
    click.echo(f"job {job}: {outcome.text}")
    folder = (jobs.info(job).metadata or {}).get(FOLDER)
    if outcome.exit_code == Stopped.exit_code and folder:
        click.echo(f"go on with: zeropp submit --resume {shlex.quote(folder)}{at}")
    sys.exit(outcome.exit_code)


def _settings(file: Path | None, overrides: Sequence[str], name: str | None) -> RunConfig:
    overrides = overrides if name is None else (*overrides, f"run.name={name}")
    return named(load_config(file, overrides))


def _checked(config: RunConfig) -> tuple[RunConfig, str]:
    """The run with its automatic values written out, and the table of its plan. Raises ConfigError if it cannot work,
    as far as this machine can tell: a text that is only seen by the cluster is read there.
    """
    from zeropp_ray.data.corpus import load_corpus
    from zeropp_ray.planner.plan import make_plan

    config = decided(config.resolved())
    plan, source = make_plan(config), f"{config.data.path}, on the cluster"
    if not config.data.path or Path(config.data.path).exists():
        source = load_corpus(config, plan.description.vocab).label
    return config, plan_table(plan.table(config), config, source)


def _with_paths(config: RunConfig, here: bool, package: Package) -> RunConfig:
    """The same run, with paths that hold for the job."""
    for section, key in PATHS:
        part = getattr(config, section)
        if value := getattr(part, key):
            part = dataclasses.replace(part, **{key: _there(value, f"{section}.{key} = {value!r}", here, package)})
            config = dataclasses.replace(config, **{section: part})
    return config


def _there(path: str, what: str, here: bool, package: Package) -> str:
    """``path`` as the job is to read it. ConfigError if it is one of this folder that the job would not have, or a URI
    that cannot be used.
    """
    if "://" in path:
        check_uri(path, what)
        return path
    if here:
        return str(expanded(path, what).absolute())
    if Path(path).is_absolute() or path.startswith("~"):
        return path
    inside = Path(path).as_posix()
    if not what.startswith(("run.dir", "--resume")) and any(
        f"{name}/".startswith(f"{inside}/") for name in package.files
    ):
        return path
    raise ConfigError(f"{what}: is not sent with the job; write a whole path that all nodes of the cluster see")


def _environment(variables: Sequence[str]) -> dict[str, str]:
    """From ``NAME`` or ``NAME=VALUE``. ConfigError if a name is not set here."""
    chosen = {}
    for variable in variables:
        name, given, value = variable.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env {name}: no name of a variable; expected NAME or NAME=VALUE")
        if not given and name not in os.environ:
            raise ConfigError(f"--env {name}: is not set here; set it, or write --env {name}=VALUE")
        chosen[name] = value if given else os.environ[name]
    return chosen


def _needs(entrypoint: dict[str, Any], resources: Sequence[str]) -> dict[str, Any]:
    """What Ray is to reserve for the process that starts the run, as arguments of ``submit_job``."""
    needs = {name: amount for name, amount in entrypoint.items() if amount}
    if resources:
        try:
            pairs = [resource.split("=") for resource in resources]
            needs["entrypoint_resources"] = {name: float(amount) for name, amount in pairs}
        except ValueError:
            text = " ".join(resources)
            raise ConfigError(f"--entrypoint-resource {text}: expected NAME=NUMBER, such as head=1") from None
    return needs
