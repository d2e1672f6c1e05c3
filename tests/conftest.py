"""One thread per process, as a member has, and a Ray that neither reports usage nor asks for a token."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def command(tmp_path):
    """Starts ``zeropp train`` as a process of its own; see tests/command.py."""
    from tests.command import CommandRun

    started = []

    def start(*settings: str, resume: bool = False) -> CommandRun:
        started.append(CommandRun(tmp_path, *settings, resume=resume))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        run.forget()
