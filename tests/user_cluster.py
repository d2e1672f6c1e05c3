"""A Ray cluster as a person starts one, ``ray start --head``, on ports and in folders of its own; ended by its pids."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.command import ROOT

READY_S = 90.0
ENDED_S = 30.0


class UserCluster:
    """``environment``: more variables for its processes, such as those of a token."""

    def __init__(self, cpus: int = 4, **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zc-", dir="/tmp"))  # short: sockets of Ray lie in it
        with ExitStack() as held:
            port, dashboard, client = (_free_port(held) for _ in range(3))
        self.address = f"http://127.0.0.1:{dashboard}"
        self._environment = environment
        options = {
            **{"--port": port, "--dashboard-port": dashboard, "--dashboard-host": "127.0.0.1", "--num-cpus": cpus},
            **{"--temp-dir": self.folder / "ray", "--object-store-memory": 100 * 2**20, "--metrics-export-port": 0},
            **{"--include-dashboard": "true", "--dashboard-agent-listen-port": 0, "--ray-client-server-port": client},
        }
        words = [str(word) for pair in options.items() for word in pair]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), "start", "--head", "--block", *words],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.environment(),
                start_new_session=True,
            )
        try:
            self._wait_until_ready(dashboard)
        except BaseException:
            self.end()
            raise

    def environment(self, **more: str) -> dict[str, str]:
        """Of a person's shell: the commands are found, and nothing says which cluster is meant."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "PYTHONPATH": str(ROOT), "PATH": path}
        kept = {
            name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
        }
        return {**kept, **home, **self._environment, **more}

    def run(self, *words: str, cwd: Path, timeout_s: float = 180, **more: str) -> subprocess.CompletedProcess[str]:
        """A command to its end; ``zeropp`` is this one."""
        return subprocess.run(
            self._command(words),
            cwd=cwd,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def start(self, *words: str, cwd: Path) -> subprocess.Popen[str]:
        """A command that goes on."""
        return subprocess.Popen(
            self._command(words),
            cwd=cwd,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _command(self, words: tuple[str, ...]) -> list[str]:
        if words[0] == "zeropp":
            at = ["--address", self.address] if words[1] in ("submit", "jobs", "logs", "stop") else []
            return [sys.executable, "-m", "zeropp_ray", *words[1:], *at]
        return list(words)

    def _wait_until_ready(self, port: int) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                if "Ray runtime started" in (self.folder / "log").read_text():
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError((self.folder / "log").read_text())

    def end(self) -> None:
        """All that it started, and nothing else."""
        try:
            head = psutil.Process(self._process.pid)
            started = [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            started = []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(started, timeout=ENDED_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=ENDED_S)
        self._process.wait(ENDED_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port(held: ExitStack) -> int:
    """Free, and other than those that are ``held``."""
    probe = held.enter_context(socket.socket())
    probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])
