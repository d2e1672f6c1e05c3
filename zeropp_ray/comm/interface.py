"""The network interface that a member listens on, from ``resources.interface``."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

from zeropp_ray.errors import ConfigError

AUTO, LOOPBACK = "auto", "127.0.0.1"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_NAME = re.compile(r"[^\s/]{1,15}")


class Interface(NamedTuple):
    """Its ``name`` is empty where the system does not tell; ``address``: IPv4."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} ({self.name})" if self.name else self.address


def is_setting(text: str) -> bool:
    """Whether ``text`` can choose an interface: ``auto``, a name, an address or a network in CIDR form."""
    return _network(text) is not None or _NAME.fullmatch(text) is not None


def choose(setting: str, node_address: str) -> Interface:
    """The interface of this machine that ``setting`` chooses; ``auto``: the one of ``node_address``.

    Raises ConfigError if there is none.
    """
    here = interfaces()
    if setting == AUTO:
        return next((each for each in here if each.address == node_address), Interface("", node_address))
    network = _network(setting)
    for each in here:
        if each.name == setting or (network is not None and ipaddress.ip_address(each.address) in network):
            return each
    known = ", ".join(map(str, here)) or "none that the system tells of"
    raise ConfigError(
        f"resources.interface = {setting!r}: {socket.gethostname()} has no such interface; it has {known}"
    )


def interfaces() -> list[Interface]:
    """All with an IPv4 address. Linux only: empty elsewhere."""
    if not sys.platform.startswith("linux"):
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket, _ADDRESS_OF, request)
                found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return found


def _network(setting: str) -> ipaddress.IPv4Network | None:
    with suppress(ValueError):
        return ipaddress.IPv4Network(setting, strict=False)
    return None
