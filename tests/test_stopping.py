"""Requests to stop: one is one, however many signals it comes as."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from actors import stopping
from actors.stopping import REPEAT_S, StopSignals, interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(stopping, "time", clock := Clock())
    return clock


@pytest.fixture(autouse=True)
def started_by_a_shell() -> Iterator[None]:
    """Whatever the tests were started by: under nohup, or in the background, some of the signals are ignored."""
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_request_is_handed_on_and_the_next_one_interrupts(clock: Clock, number: signal.Signals) -> None:
    asked = []
    with StopSignals() as stop:
        stop.hand_to(lambda: asked.append(1))
        for _ in range(3):  # of one request
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            clock.now += 0.4 * REPEAT_S
        assert asked == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # belongs to the one before, and does not disturb the tidying up


def test_a_request_before_there_is_anyone_to_hand_it_to_waits(clock: Clock) -> None:
    asked = []
    with StopSignals() as stop:
        stop.check()
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            clock.now += REPEAT_S
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        stop.hand_to(lambda: asked.append(1))
        assert asked == [1]
        with pytest.raises(KeyboardInterrupt):
            stop.hand_to(interrupt)


def test_handlers_are_put_back_and_nohup_is_respected() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals():
        assert all(signal.getsignal(number) != handler for number, handler in zip(SIGNALS, before, strict=True))
    assert [signal.getsignal(number) for number in SIGNALS] == before
    ignoring = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, ignoring)
