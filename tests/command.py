"""``zeropp train`` as a process of its own, to be watched, hurt and asked what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from zeropp_ray.uri import Place, UriPath

ROOT = Path(__file__).parent.parent


class CommandRun:
    """``zeropp train`` in a process group of its own, with a HOME of its own."""

    def __init__(
        self,
        folder: Path,
        *settings: str,
        resume: bool = False,
        checkpoint: str = "",
        name: str = "victim",
        runs: UriPath | None = None,
    ) -> None:
        """``resume`` the run in folder ``name``, from its newest checkpoint or ``checkpoint``, by a relative path.

        ``runs``: where it is, if not in ``folder``.
        """
        self.folder = folder / "runs" / name
        self.run: Place = runs / name if runs else self.folder
        home = folder / "home"
        home.mkdir(exist_ok=True)
        arguments = (
            ["--resume", f"../runs/{name}" + (f"/checkpoints/{checkpoint}" if checkpoint else "")]
            if resume
            else ["--name", name, "--set", f"run.dir={runs or folder / 'runs'}"]
        )
        if resume and runs:
            arguments = ["--resume", str(self.run)]
        arguments += [x for setting in settings for x in ("--set", setting)]
        self.temporary = Path(tempfile.mkdtemp(prefix="zt-"))  # short: sockets of Ray lie in it
        self.shared_memory = set(Path("/dev/shm").iterdir())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=home if resume else None,
            env={**os.environ, "HOME": str(home), "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            metrics = self.metrics()
            if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
                return
            time.sleep(0.05)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # or its output would not end
        raise AssertionError(f"no step {step}: {self.process.communicate()[0]}")

    def metrics(self) -> Path:
        """Of a run at a URI, those in its working copy."""
        if isinstance(self.run, Path):
            return self.folder / "metrics.jsonl"
        return next(self.temporary.glob("zeropp-*/metrics.jsonl"), self.temporary / "not yet")

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + 120
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + 120
        while not list((self.folder / "checkpoints").glob("step-*")):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def members(self) -> list[dict]:
        return json.loads((self.folder / "members.json").read_text())

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def forget(self) -> None:
        """Remove what may be left: Ray's logs, and after a kill of everything the run's scratch folder."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def end(self, before: list[psutil.Process], within_s: float) -> tuple[int, str]:
        """Exit code and output; asserts that it ended in time and left nothing behind."""
        start = time.monotonic()
        output = self.process.communicate(timeout=within_s + 60)[0]
        seconds = time.monotonic() - start
        assert seconds <= within_s, f"took {seconds:.1f} s\n{output}"
        assert not [p for p in before if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not list(self.temporary.glob("zeropp-*"))
        assert set(Path("/dev/shm").iterdir()) <= self.shared_memory
        return self.process.returncode, output
