"""One setting picks the network interface, and what is ours listens there and nowhere else."""

from __future__ import annotations

import multiprocessing

import psutil
import pytest

from zeropp_ray.comm.gloo import Rendezvous, connect, serve
from zeropp_ray.comm.interface import Interface, choose, interfaces, is_setting
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.layout import Layout, Member


def listening() -> list[str]:
    """The addresses that this process listens on."""
    return [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]


def test_choices() -> None:
    loopback = Interface("lo", "127.0.0.1")
    assert choose("lo", "10.0.0.1") == choose("127.0.0.1", "10.0.0.1") == choose("127.0.0.0/8", "") == loopback
    assert choose("auto", "127.0.0.1") == loopback
    assert choose("auto", "203.0.113.77") == Interface("", "203.0.113.77")
    system = {name: [each.address for each in addresses] for name, addresses in psutil.net_if_addrs().items()}
    assert all(each.address in system[each.name] for each in interfaces())
    with pytest.raises(ConfigError, match=r"resources\.interface = 'nosuch0': .* no such interface; it has .*lo"):
        choose("nosuch0", "127.0.0.1")


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "eth0/8", "a name", "far-too-long-a-name"])
def test_what_is_no_choice_is_refused_when_it_is_read(text: str) -> None:
    assert not is_setting(text)
    with pytest.raises(ConfigError, match=r"resources\.interface = '.*': expected 'auto', the name of an interface"):
        RunConfig.from_dict({"resources": {"interface": text}})


def test_the_store_and_the_groups_listen_on_one_address_only() -> None:
    assert not listening()
    store = serve("127.0.0.1")
    assert listening() == ["127.0.0.1"]
    at = Rendezvous("127.0.0.1", store.port, epoch=0, timeout_s=20)
    layout = Layout(stages=2, chunks=1, shards=1, replicas=1)
    peer = multiprocessing.get_context("spawn").Process(target=_join, args=(at, layout), daemon=True)
    peer.start()
    links = connect(at, layout, Member(0, 0, 0), host="127.0.0.1")
    assert len(listening()) > 1
    assert set(listening()) == {"127.0.0.1"}
    links.close()
    peer.join(20)
    assert peer.exitcode == 0
    del store, links


def _join(at: Rendezvous, layout: Layout) -> None:
    links = connect(at, layout, Member(1, 0, 0), host="127.0.0.1")
    assert set(listening()) == {"127.0.0.1"}
    links.close()
