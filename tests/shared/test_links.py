"""Links between processes: typed, never blocking, and deaf to noise."""

import asyncio
import fcntl
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
import zmq.asyncio

from shared.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, encode
from shared.errors import StartError
from shared.ids import Boot
from shared.links import HIGH_WATER_MARK, LONG_MESSAGE_BYTES, Dealer, Router, check_endpoint
from shared.messages import TO_GATEWAY, TO_SCHEDULER, Heartbeat, Hello
from shared.metrics import REGISTRY


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/requests.ipc"


def dropped(reason):
    labels = {"link": "request", "reason": reason}
    return REGISTRY.get_sample_value("splitflap:messages_dropped_total", labels) or 0.0


async def connected(endpoint, router):
    """A dealer that has reached the router (the router has heard its hello)."""
    dealer = Dealer("request", endpoint, TO_GATEWAY, identity=b"g1")
    while not dealer.send(Hello(Boot(1))):
        await asyncio.sleep(0.01)  # poll for the connection
    assert await router.receive() == (b"g1", Hello(Boot(1)))
    return dealer


async def test_messages_go_both_ways(endpoint):
    with (
        Router("request", endpoint, TO_SCHEDULER) as router,
        await connected(endpoint, router) as d,
    ):
        assert router.send(b"g1", Heartbeat(Boot(2), "loading"))
        assert await d.receive() == Heartbeat(Boot(2), "loading")


async def test_a_long_message_does_not_wait_for_what_other_threads_do(endpoint):
    free = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, free.wait)
    phase = "x" * LONG_MESSAGE_BYTES
    with (
        Router("request", endpoint, TO_SCHEDULER) as router,
        await connected(endpoint, router) as dealer,
    ):
        try:
            assert router.send(b"g1", Heartbeat(Boot(2), phase))
            async with asyncio.timeout(30):
                assert await dealer.receive() == Heartbeat(Boot(2), phase)
            assert not busy.done()
        finally:
            free.set()
            await busy


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([encode(Hello(Boot(1)))[:-1]], "malformed"),
        ([b""], "malformed"),
        ([b"x", b"y"], "malformed"),
        ([encode(Hello(Boot(1))).replace(b"Hello", b"Hullo")], "unknown"),
        ([bytes([0x93, PROTOCOL_VERSION + 1]) + encode(Hello(Boot(1)))[2:]], "version"),
        ([bytes(MAX_MESSAGE_BYTES + 1)], "oversized"),
    ],
)
async def test_noise_is_dropped_and_counted_and_the_next_message_arrives(endpoint, frames, reason):
    before = dropped(reason)
    with (
        Router("request", endpoint, TO_SCHEDULER) as router,
        zmq.asyncio.Context() as context,
        context.socket(zmq.DEALER) as peer,
    ):
        peer.setsockopt(zmq.IDENTITY, b"g2")
        peer.connect(endpoint)
        await peer.send_multipart(frames)
        await peer.send(encode(Hello(Boot(3))))
        assert await router.receive() == (b"g2", Hello(Boot(3)))
    assert dropped(reason) == before + 1


async def test_a_send_to_nobody_is_refused_at_once(endpoint):
    with Router("request", endpoint, TO_SCHEDULER) as router:
        assert not router.send(b"who", Heartbeat(Boot(1)))
    with Dealer("request", endpoint, TO_GATEWAY, identity=b"g1") as dealer:
        assert not dealer.send(Hello(Boot(1)))


async def test_a_full_peer_is_refused_not_waited_for(endpoint):
    with Router("request", endpoint, TO_SCHEDULER) as router, await connected(endpoint, router):
        beat = Heartbeat(Boot(1), "x" * 100_000)  # nobody reads: the peer's queue must fill up
        most = 4 * HIGH_WATER_MARK  # more than the queues of both ends hold
        sent = next((count for count in range(most) if not router.send(b"g1", beat)), most)
        assert 0 < sent < most


def test_a_path_in_use_is_refused_and_keeps_working(endpoint):
    with (
        Router("request", endpoint, TO_SCHEDULER),
        pytest.raises(StartError, match="another process listens there"),
    ):
        Router("request", endpoint, TO_SCHEDULER, "--request-endpoint")
    Router("request", endpoint, TO_SCHEDULER).close()  # and free again afterwards


def test_a_socket_left_by_the_dead_is_taken_over(endpoint, tmp_path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "requests.ipc"))
    dead.close()
    assert stat.S_ISSOCK((tmp_path / "requests.ipc").stat().st_mode)
    Router("request", endpoint, TO_SCHEDULER).close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_socket_is_left_alone(endpoint, tmp_path):
    (tmp_path / "requests.ipc").write_text("precious")
    with pytest.raises(StartError, match="is no socket"):
        Router("request", endpoint, TO_SCHEDULER)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("requests.ipc", "precious")
    ]


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        ("ipc://relative", "absolute"),
        ("ipc:///" + "x" * 107, "at most 107 bytes"),
        ("tcp://0.0.0.0:5555", "loopback"),
        ("tcp://example.org:5555", "loopback.*splitflap keys curve --out DIR.*--curve-key-dir"),
        ("tcp://*:5555", "loopback"),
        ("tcp://10.0.0.1:5555", "loopback"),
        ("tcp://127.0.0.1", "address:port"),
        ("tcp://127.0.0.1:99999", "address:port"),
        ("tcp://127.0.0.1:0", "address:port"),
        ("tcp://127.0.0.1:5555/x", "address:port"),
        ("tcp://:5555", "address:port"),
        ("http://x", "use ipc"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(endpoint, complaint):
    with pytest.raises(StartError, match=complaint):
        check_endpoint(endpoint, "--request-endpoint")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_tcp_works_on_loopback(host):
    with socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET) as probe:
        probe.bind((host.strip("[]"), 0))
        endpoint = f"tcp://{host}:{probe.getsockname()[1]}"
    with (
        Router("request", endpoint, TO_SCHEDULER) as router,
        await connected(endpoint, router) as d,
    ):
        assert router.send(b"g1", Heartbeat(Boot(2)))
        assert await d.receive() == Heartbeat(Boot(2))


def test_a_dealer_refuses_what_a_router_refuses():
    with pytest.raises(StartError, match=r"--request-endpoint tcp://10\.0\.0\.1:5555.*loopback"):
        Dealer("request", "tcp://10.0.0.1:5555", TO_GATEWAY, b"g1", "--request-endpoint")


def test_a_lock_that_its_last_owner_removed_is_no_lock(endpoint, tmp_path, monkeypatch):
    """The owner leaves between our opening the lock file and locking it."""
    first = Router("request", endpoint, TO_SCHEDULER)
    flock = fcntl.flock

    def leave_then_lock(lock, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.close()
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", leave_then_lock)
    with (
        Router("request", endpoint, TO_SCHEDULER),
        pytest.raises(StartError, match="another process listens there"),
    ):
        Router("request", endpoint, TO_SCHEDULER)


def test_a_folder_where_others_may_write_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StartError, match="others may write"):
        Router("request", f"ipc://{tmp_path}/open/requests.ipc", TO_SCHEDULER)


def test_a_busy_tcp_port_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match="cannot listen there"):
            Router("request", endpoint, TO_SCHEDULER, "--request-endpoint")
