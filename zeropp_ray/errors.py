"""Errors that a user can act on. Each is one line that names what is wrong, its value, and what would work."""


class ZeroppError(Exception):
    """Base of every error raised on purpose. The command line prints its text and no traceback."""

    exit_code = 1


class ConfigError(ZeroppError, ValueError):
    """A configuration or input that cannot run: wrong field, value, file or model. Exit code 2."""

    exit_code = 2


class Stopped(ZeroppError):
    """The run was asked to stop and did, after a step that is saved. Exit code 75: resume me."""

    exit_code = 75


class NoProgress(ZeroppError):
    """Several recoveries in a row brought no new step: what fails will fail again. Exit code 70."""

    exit_code = 70


class ScheduleError(ZeroppError):
    """A program that would deadlock, break the order, or exceed its stated memory. Found before any actor starts."""


class MemberError(ZeroppError):
    """A member of a stage failed while running; the text names the member and the instruction.

    ``peer_lost`` says that the member only saw a transfer fail: the cause is elsewhere, at the member it spoke to.
    ``trace`` is the traceback as text, for the log.
    """

    def __init__(self, text: str, peer_lost: bool = False, trace: str = "") -> None:
        super().__init__(text, peer_lost, trace)
        self.text, self.peer_lost, self.trace = text, peer_lost, trace

    def __str__(self) -> str:
        return self.text
