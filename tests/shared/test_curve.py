"""CURVE keys: who has none that is known gets nothing, and it shows."""

import asyncio
import dataclasses
import socket
import stat

import pytest
import zmq
import zmq.asyncio

from shared import curve, links
from shared.codec import encode
from shared.curve import ClientKeys, client_keys, make_keys, server_keys
from shared.errors import StartError
from shared.ids import Boot
from shared.links import Dealer, Router
from shared.messages import TO_GATEWAY, TO_SCHEDULER, Heartbeat, Hello
from shared.metrics import REGISTRY


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def strangers_try_again_soon(monkeypatch):
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 500)
    monkeypatch.setattr(links, "CONNECT_AGAIN_S", 0.05)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_address():
    """An address of this machine that is not loopback; loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def refused(reason):
    labels = {"link": "request", "reason": reason}
    return REGISTRY.get_sample_value("splitflap:peers_refused_total", labels) or 0.0


def listen(folder, port, host="127.0.0.1"):
    return Router(
        "request", f"tcp://{host}:{port}", TO_SCHEDULER, keys=server_keys(folder, "gateway")
    )


def dial(keys, port, host="127.0.0.1"):
    return Dealer("request", f"tcp://{host}:{port}", TO_GATEWAY, b"g1", keys=keys)


async def greet(dealer, router):
    while not dealer.send(Hello(Boot(1))):
        await asyncio.sleep(0.01)  # poll for the connection
    assert await router.receive() == (b"g1", Hello(Boot(1)))


@pytest.mark.parametrize("listens_at", ["0.0.0.0", "*", "own"])
async def test_with_keys_messages_go_both_ways_beyond_loopback(folder, port, listens_at):
    address = own_address()
    with (
        listen(folder, port, address if listens_at == "own" else listens_at) as router,
        dial(client_keys(folder, "gateway"), port, address) as dealer,
    ):
        await greet(dealer, router)
        assert router.send(b"g1", Heartbeat(Boot(2), "loading"))
        assert await dealer.receive() == Heartbeat(Boot(2), "loading")


async def test_with_keys_a_name_is_looked_up(folder, port):
    with (
        listen(folder, port) as router,
        dial(client_keys(folder, "gateway"), port, "localhost") as dealer,
    ):
        await greet(dealer, router)


async def test_ipc_has_keys_too(folder, tmp_path):
    endpoint = f"ipc://{tmp_path}/r"
    with (
        Router("request", endpoint, TO_SCHEDULER, keys=server_keys(folder, "gateway")) as router,
        Dealer("request", endpoint, TO_GATEWAY, b"g1", keys=client_keys(folder, "gateway")) as d,
    ):
        await greet(d, router)


async def test_a_key_that_is_added_lets_another_gateway_in(folder, port, tmp_path):
    make_keys(tmp_path / "new")
    (folder / "gateway-new.public").write_bytes((tmp_path / "new/gateway.public").read_bytes())
    (tmp_path / "new/scheduler.public").write_bytes((folder / "scheduler.public").read_bytes())
    with listen(folder, port) as router, dial(client_keys(tmp_path / "new", "gateway"), port) as d:
        await greet(d, router)


def stranger(folder, tmp_path):
    """The scheduler's public key is known to it; its own is known to nobody."""
    make_keys(tmp_path / "other")
    right = client_keys(folder, "gateway")
    return dataclasses.replace(client_keys(tmp_path / "other", "gateway"), server=right.server)


STRANGERS = {
    "the key of an executor": (lambda folder, _: client_keys(folder, "executor"), "unknown_key"),
    "an unknown key": (stranger, "unknown_key"),
    "another scheduler's peer": (
        lambda folder, _: ClientKeys(client_keys(folder, "gateway").secret, b"x" * 32),
        "no_key",
    ),
    "no key": (lambda _folder, _: None, "no_key"),
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_a_stranger_gets_nothing_and_is_counted(folder, port, tmp_path, who):
    make, reason = STRANGERS[who]
    before = refused(reason)
    with listen(folder, port) as router, dial(make(folder, tmp_path), port) as dealer:
        async with asyncio.timeout(10):
            while refused(reason) < before + 2:  # it has tried again
                assert not dealer.send(Hello(Boot(6)))
                assert not router.send(b"g1", Heartbeat(Boot(2)))
                await asyncio.sleep(0.01)
        with dial(client_keys(folder, "gateway"), port) as known:
            await greet(known, router)  # nothing of the stranger's came before


@pytest.mark.parametrize("first", ["unknown", "known", "none"])
@pytest.mark.parametrize("then", ["known", "none"])
async def test_who_was_refused_comes_in_once_both_ends_belong_together(
    folder, port, tmp_path, first, then
):
    """The scheduler is started again with other keys; its gateway is not."""
    make_keys(tmp_path / "other")
    (tmp_path / "other/scheduler.secret").write_bytes((folder / "scheduler.secret").read_bytes())
    kinds = {
        "unknown": server_keys(tmp_path / "other", "gateway"),
        "known": server_keys(folder, "gateway"),
        "none": None,
    }
    if first == then:
        first = "unknown"
    dealer_keys = client_keys(folder, "gateway") if then == "known" else None
    endpoint = f"tcp://127.0.0.1:{port}"
    before = refused("by_scheduler")
    with dial(dealer_keys, port) as dealer:
        with Router("request", endpoint, TO_SCHEDULER, keys=kinds[first]):
            async with asyncio.timeout(10):
                while refused("by_scheduler") == before:
                    assert not dealer.send(Hello(Boot(1)))
                    await asyncio.sleep(0.01)
        with Router("request", endpoint, TO_SCHEDULER, keys=kinds[then]) as router:
            async with asyncio.timeout(20):
                await greet(dealer, router)


async def test_a_stranger_that_does_not_wait_to_be_let_in_is_not_heard(folder, port):
    """Its messages queue at its own end for ever."""
    before = refused("no_key")
    with (
        listen(folder, port) as router,
        zmq.asyncio.Context() as context,
        context.socket(zmq.DEALER) as peer,
    ):
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(f"tcp://127.0.0.1:{port}")
        await peer.send(encode(Hello(Boot(3))))
        async with asyncio.timeout(10):
            while refused("no_key") == before:
                await asyncio.sleep(0.01)
        with dial(client_keys(folder, "gateway"), port) as known:
            await greet(known, router)


async def test_a_scheduler_without_keys_gets_nothing_from_a_gateway_with_keys(folder, port):
    before = refused("by_scheduler")
    with (
        Router("request", f"tcp://127.0.0.1:{port}", TO_SCHEDULER),
        dial(client_keys(folder, "gateway"), port) as dealer,
    ):
        async with asyncio.timeout(10):
            while refused("by_scheduler") == before:
                assert not dealer.send(Hello(Boot(4)))
                await asyncio.sleep(0.01)


# ------------------------------------------------------------------ files


def test_secret_keys_are_for_their_owner_alone_and_public_ones_are_others(folder):
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {name for name, mode in names.items() if mode == 0o600} == {
        "scheduler.secret", "gateway.secret", "executor.secret",
    }  # fmt: skip
    assert len({path.read_text() for path in folder.iterdir()}) == 6
    assert client_keys(folder, "gateway").secret.hex() not in repr(client_keys(folder, "gateway"))


def test_keys_are_never_written_over(folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StartError, match="is there already"):
        make_keys(folder)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_a_scheduler_needs_no_secret_of_its_peers_nor_they_of_it(folder):
    (folder / "gateway.secret").unlink()
    (folder / "executor.public").unlink()
    assert server_keys(folder, "gateway").admitted
    (folder / "scheduler.secret").unlink()
    (folder / "gateway.public").unlink()
    assert client_keys(folder, "executor").server


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644])
def test_a_secret_key_that_others_may_read_is_refused(folder, mode):
    (folder / "gateway.secret").chmod(mode)
    with pytest.raises(StartError, match=r"gateway\.secret is open to others .*chmod 600"):
        client_keys(folder, "gateway")


@pytest.mark.parametrize("text", ["", "# only words\n", "abc\n", "0" * 62, "0" * 64 + "\n1\n", "é"])
def test_what_is_no_key_is_refused_and_not_told(folder, text):
    (folder / "scheduler.public").write_text(text)
    with pytest.raises(StartError, match=r"scheduler\.public is no key: one line of 64 hex"):
        client_keys(folder, "gateway")


def test_what_is_missing_is_named(folder, tmp_path):
    (folder / "executor.public").unlink()
    with pytest.raises(StartError, match=r"has no executor\*\.public, so no executor could"):
        server_keys(folder, "executor")
    with pytest.raises(StartError, match=r"nowhere/gateway\.secret cannot be read.*keys curve"):
        client_keys(tmp_path / "nowhere", "gateway")


def test_without_a_folder_there_are_no_keys():
    assert server_keys(None, "gateway") is None
    assert client_keys(None, "gateway") is None


def test_a_gateway_needs_to_know_where_the_scheduler_is(folder):
    with pytest.raises(StartError, match="where the scheduler is, not where it listens"):
        dial(client_keys(folder, "gateway"), 5555, "*")
