"""Who may write a run in an object store, which knows no locks: a lease, an object that its holder writes anew.

The holder writes it every :data:`BEAT_S`; one that was not written for :data:`LEASE_S`, by the store's own clock, may
be taken. Who takes it reads it again after :data:`SETTLE_S`, and of several that came at once the last one has it. What
this cannot exclude: a taker that stands still for longer than that between looking and writing. Then two jobs go on
until the next beat, or the next checkpoint, which is only made visible under the lease: there the one that lost it
finds the other's name, and stops without saving.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from zeropp_ray.errors import ConfigError, ZeroppError
from zeropp_ray.uri import StoreError, UriPath

NAME = ".lease"  # and what begins so
LOST = ".lease-lost"
BEAT_S = 10.0
LEASE_S = 45.0  # some beats: one that comes late must not lose the run
SETTLE_S = 1.0


@contextmanager
def leased(run: UriPath, folder: Path, tell: Callable[[str], None]) -> Iterator[str]:
    """Hold the run at ``run``; the token of the lease. ``tell`` hears of waiting for one that was left behind.

    ConfigError if another process trains the run, or nothing can be written there. If the lease is lost inside, a file
    :data:`LOST` appears in ``folder``, and this process gets SIGTERM.
    """
    token = secrets.token_hex(8)
    lease, stop = run / NAME, threading.Event()
    text = json.dumps(
        {"token": token, "holder": f"process {os.getpid()} on {socket.gethostname()} since {datetime.now()}"}
    )
    try:
        _await_free(run, token, tell)
        lease.write_text(text)
        time.sleep(SETTLE_S)
        if _read(lease)["token"] != token:
            raise _taken(run)
    except StoreError as error:
        raise ConfigError(str(error)) from None

    def beat() -> None:
        while not stop.wait(BEAT_S):
            try:
                check(run, token)
                lease.write_text(text)
            except (StoreError, OSError):
                pass  # it may come back
            except ZeroppError:
                (folder / LOST).touch()
                os.kill(os.getpid(), signal.SIGTERM)  # to stop; the save that then fails says why
                return

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield token
    finally:
        stop.set()
        thread.join()
        with suppress(ZeroppError, OSError):  # of another job by now, or a store that does not answer
            check(run, token)
            lease.unlink()


def check(run: UriPath, token: str) -> None:
    """ZeroppError if the lease with ``token`` is not the run's any more; StoreError if that cannot be known."""
    held = _read(run / NAME)
    if held["token"] != token:
        raise ZeroppError(f"{run}: is trained by another job by now ({held['holder'] or 'its lease is gone'})")


def holder(run: UriPath) -> str:
    """The process that holds the lease of the run, or did when it was killed; empty if none does."""
    return _read(run / NAME)["holder"]


def _await_free(run: UriPath, token: str, tell: Callable[[str], None]) -> None:
    """Return once nobody holds the lease; ConfigError as soon as its holder shows that it lives."""
    lease = run / NAME
    now = _time_of_store(run / f"{NAME}-{token}")
    try:
        written = lease.modified()
        left = LEASE_S - (now - written)
        if left > 0:
            tell(f"{run} is held by {holder(run)}; waiting up to {left:.0f} s to see whether that lives")
        deadline = time.monotonic() + left
        while time.monotonic() < deadline:
            time.sleep(1.0)
            if lease.modified() != written:
                raise _taken(run)
    except FileNotFoundError:  # it is given back
        return


def _time_of_store(probe: UriPath) -> float:
    probe.write_text("now")
    try:
        return probe.modified()
    finally:
        probe.unlink()


def _taken(run: UriPath) -> ConfigError:
    return ConfigError(f"{run}: another process trains this run ({holder(run)}); wait, or choose another run")


def _read(lease: UriPath) -> dict[str, str]:
    try:
        held = json.loads(lease.read_text())
        return {"token": str(held["token"]), "holder": str(held["holder"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {"token": "", "holder": ""}
