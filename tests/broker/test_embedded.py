"""The embedded broker with the real server: who starts it, who keeps it, and that nothing is left or lost."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import redis

from broker import embedded
from broker.connection import connect
from broker.embedded import EmbeddedBroker
from protocol import BrokerUnreachable

IDLE_S = 0.3
PATIENCE_S = 20.0
FORK = multiprocessing.get_context("fork")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)


def answers_for(client: redis.Redis, seconds: float) -> None:
    """The server lives through all of that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert client.ping()
        time.sleep(0.05)


class House:
    """A state folder and a runtime folder of one test, and the processes that live on them."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.runtime = root / "run"
        self.holders: list[Holder] = []

    def open(self, **options: float) -> EmbeddedBroker:
        return EmbeddedBroker(self.state, IDLE_S, runtime_dir=self.runtime, **options)

    def holder(self) -> Holder:
        """Another process that holds the broker."""
        holder = Holder(self)
        self.holders.append(holder)
        return holder

    def keepers(self) -> list[psutil.Process]:
        return [process for process in self._processes() if "keeper.py" in " ".join(process.info["cmdline"])]

    def servers(self) -> list[psutil.Process]:
        return [
            process for process in self._processes() if "keeper.py" not in " ".join(process.info["cmdline"])
        ]

    def nothing_runs(self) -> bool:
        return not self._processes()

    def lock_is_free(self) -> bool:
        with (self.state / "lock").open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def _processes(self) -> list[psutil.Process]:
        """Those whose command line names a socket of this house (Valkey writes its own into its title)."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and f"{self.runtime}/" in " ".join(process.info["cmdline"] or ())
        ]


class Holder:
    """A forked process with an open `EmbeddedBroker`: it can close it, or be killed."""

    def __init__(self, house: House) -> None:
        self._ours, theirs = FORK.Pipe()
        self._process = FORK.Process(target=self._hold, args=(house, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def url(self) -> str:
        """Where it is connected, once it is."""
        assert self._ours.poll(PATIENCE_S), "no broker"
        answer = self._ours.recv()
        assert isinstance(answer, str)
        return answer

    def start(self) -> Holder:
        """Let it begin; several can so begin at one moment."""
        self._ours.send("open")
        return self

    def close(self) -> None:
        self._ours.send("close")
        assert self._ours.poll(PATIENCE_S), "close hangs"
        assert self._ours.recv() == "closed"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @staticmethod
    def _hold(house: House, orders: Connection) -> None:
        orders.recv()
        broker = house.open()
        orders.send(broker.url)
        orders.recv()
        broker.close()
        orders.send("closed")


@pytest.fixture
def house() -> Iterator[House]:
    """Paths short enough for sockets. Afterwards nothing may run there."""
    root = Path(tempfile.mkdtemp(prefix="ms-"))
    house = House(root)
    yield house
    for holder in house.holders:
        holder.kill()
    try:
        wait_for(house.nothing_runs, "the end of keeper and server")
    finally:
        for process in house.keepers() + house.servers():
            process.kill()
        shutil.rmtree(root)


def test_the_first_starts_it_the_second_adopts_it_the_last_stops_it(house: House) -> None:
    first = house.open()
    second = house.open()
    assert second.url == first.url
    assert len(house.servers()) == len(house.keepers()) == 1

    first.close()
    with connect(second.url) as client:
        assert client.ping()
    second.close()

    wait_for(house.nothing_runs, "the stop after the last close")
    assert list(house.runtime.iterdir()) == []
    second.close()


def test_it_keeps_its_data_and_its_promises(house: House) -> None:
    with house.open() as broker, connect(broker.url) as client:
        client.set("kept", "yes")
        settings = client.config_get("*")
        assert settings["maxmemory-policy"] == "noeviction"
        assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "everysec")
        assert (settings["hash-max-listpack-value"], settings["latency-tracking"]) == ("4096", "no")
        assert settings["port"] == "0"
        assert stat.S_IMODE(house.runtime.stat().st_mode) == stat.S_IMODE(house.state.stat().st_mode) == 0o700
    with house.open() as broker, connect(broker.url) as client:
        assert client.get("kept") == b"yes"


def test_of_many_who_race_one_starts_it(house: House) -> None:
    holders = [house.holder() for _ in range(8)]
    for holder in holders:
        holder.start()
    assert len({holder.url for holder in holders}) == 1
    assert len(house.servers()) == len(house.keepers()) == 1

    for holder in holders[:-1]:
        holder.close()
    assert len(house.servers()) == 1
    holders[-1].close()
    wait_for(house.nothing_runs, "the stop after the last close")


def _open_and_count(house: House) -> None:
    for _ in range(5):
        with house.open() as broker, connect(broker.url) as client:
            client.incr("openings")


def test_opening_while_another_stops_it_loses_nothing(house: House) -> None:
    processes = [FORK.Process(target=_open_and_count, args=(house,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    with house.open() as broker, connect(broker.url) as client:
        assert client.get("openings") == b"15"


def test_a_killed_owner_leaves_its_data_and_the_server_stops_when_idle(house: House) -> None:
    owner = house.holder().start()
    with connect(owner.url) as client:
        client.set("kept", "yes")
        answers_for(client, 2 * IDLE_S)
    killed_at = time.monotonic()
    owner.kill()
    wait_for(house.nothing_runs, "the idle stop")
    assert time.monotonic() - killed_at >= IDLE_S
    with house.open() as broker, connect(broker.url) as client:
        assert client.get("kept") == b"yes"


def test_a_killed_owner_does_not_disturb_the_others(house: House) -> None:
    owner = house.holder().start()
    url = owner.url
    with house.open() as broker, connect(url) as client:
        server = house.servers()
        owner.kill()
        assert broker.url == url
        answers_for(client, 3 * IDLE_S)
        assert house.servers() == server


def test_a_bare_connection_puts_off_the_idle_stop(house: House) -> None:
    owner = house.holder().start()
    with connect(owner.url) as client:
        client.set("kept", "yes")
        owner.kill()
        answers_for(client, 3 * IDLE_S)
    wait_for(house.nothing_runs, "the idle stop")


def test_a_server_that_nobody_came_to_hold_stops(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = EmbeddedBroker._launch

    def launch_and_die(broker: EmbeddedBroker) -> None:
        launch(broker)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(EmbeddedBroker, "_launch", launch_and_die)
    launcher = FORK.Process(target=house.open)
    launcher.start()
    launcher.join(PATIENCE_S)
    assert launcher.exitcode == -signal.SIGKILL
    assert house.keepers()  # two while it starts the server, which is a copy of it until it has become Valkey
    wait_for(house.nothing_runs, "the idle stop")


def test_a_killed_keeper_takes_the_server_with_it(house: House) -> None:
    broker = house.open()
    with connect(broker.url) as client:
        client.set("kept", "yes")
    house.keepers()[0].kill()
    wait_for(house.nothing_runs, "the end of the server")
    with house.open() as again, connect(again.url) as client:
        assert client.get("kept") == b"yes"
    broker.close()


def test_a_killed_server_ends_the_keeper(house: House) -> None:
    broker = house.open()
    with connect(broker.url) as client:
        client.set("kept", "yes")
    house.servers()[0].kill()
    wait_for(house.nothing_runs, "the end of the keeper")
    with house.open() as again, connect(again.url) as client:
        assert client.get("kept") == b"yes"
    broker.close()


def test_sigterm_to_the_keeper_stops_both(house: House) -> None:
    broker = house.open()
    house.keepers()[0].send_signal(signal.SIGTERM)
    wait_for(house.nothing_runs, "the end of keeper and server")
    assert "ready to exit" in (house.state / "server.log").read_text()
    broker.close()


def test_the_lock_lives_as_long_as_the_server(house: House) -> None:
    """With its keeper killed and the server held up before it can end, nobody else may open its files."""
    broker = house.open()
    with connect(broker.url) as client:
        client.set("kept", "yes")
    server = house.servers()[0]
    server.suspend()
    house.keepers()[0].kill()
    wait_for(lambda: not house.keepers(), "the end of the keeper")
    assert not house.lock_is_free()
    with pytest.raises(BrokerUnreachable, match=r"another process.* holds its lock"):
        house.open(start_timeout_s=0.1)
    server.resume()
    with house.open() as again, connect(again.url) as client:
        assert client.get("kept") == b"yes"
        assert not house.lock_is_free()
    wait_for(house.lock_is_free, "the lock")
    broker.close()


def test_one_folder_is_one_server_by_whatever_path(house: House) -> None:
    with house.open() as broker:
        alias = house.state.with_name("alias")
        alias.symlink_to(house.state)
        other_runtime = house.runtime.with_name("run2")
        with EmbeddedBroker(alias, IDLE_S, runtime_dir=other_runtime) as same:
            assert same.url == broker.url
        assert len(house.servers()) == 1


def append_only_file(state: Path) -> Path:
    (found,) = (state / "appendonlydir").glob("*.incr.aof")
    return found


def test_a_torn_tail_is_repaired(house: House) -> None:
    with house.open() as broker, connect(broker.url) as client:
        client.set("kept", "yes")
        client.set("torn", "yes")
    file = append_only_file(house.state)
    os.truncate(file, file.stat().st_size - 3)
    with house.open() as broker, connect(broker.url) as client:
        assert client.mget("kept", "torn") == [b"yes", None]


def test_damage_is_told_in_one_line(house: House) -> None:
    with house.open() as broker, connect(broker.url) as client:
        client.set("a", "1" * 1000)
    file = append_only_file(house.state)
    file.write_bytes(b"*garbage\r\n" + file.read_bytes())
    with pytest.raises(BrokerUnreachable) as caught:
        house.open()
    message = str(caught.value)
    assert "\n" not in message
    assert "Bad file format reading the append only file" in message
    assert str(house.state / "server.log") in message


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [(b"", 0o600, "cannot run"), (b"#!/bin/sh\necho out of luck\nexit 7\n", 0o700, "out of luck")],
)
def test_a_server_that_cannot_start_is_told_in_one_line(
    house: House, monkeypatch: pytest.MonkeyPatch, content: bytes, mode: int, said: str
) -> None:
    binary = house.state.parent / "valkey-server"
    binary.write_bytes(content)
    binary.chmod(mode)
    monkeypatch.setattr(embedded, "server_binary", lambda: binary)
    with pytest.raises(BrokerUnreachable, match=said) as caught:
        house.open()
    assert "\n" not in str(caught.value)
    wait_for(house.lock_is_free, "the lock")


def test_a_socket_path_too_long_for_the_system_is_refused(house: House) -> None:
    fits = 107 - len(f"{house.runtime}/") - len("/0123456789abcdef.hold")
    with EmbeddedBroker(house.state, IDLE_S, runtime_dir=house.runtime / ("x" * fits)) as broker:
        assert connect(broker.url).ping()
    with pytest.raises(BrokerUnreachable, match=r"108 bytes.*shorter"):
        EmbeddedBroker(house.state, IDLE_S, runtime_dir=house.runtime / ("x" * (fits + 1)))


def test_a_runtime_folder_of_somebody_else_is_refused(house: House) -> None:
    house.state.mkdir()
    house.runtime.symlink_to(house.state)
    with pytest.raises(BrokerUnreachable, match="own folder"):
        house.open()


def test_a_state_folder_that_is_none_is_refused(house: House) -> None:
    house.state.write_text("a file")
    with pytest.raises(BrokerUnreachable, match="File exists"):
        house.open()


def test_who_comes_as_the_last_one_leaves_is_not_told_that_it_runs(house: House) -> None:
    """Both lie before the keeper at once: it stops, and says nothing to the one that it will not serve."""
    with house.open() as leaving:
        (keeper,) = house.keepers()
        keeper.suspend()
        wait_for(lambda: keeper.status() == psutil.STATUS_STOPPED, "the keeper stands still")
        assert leaving._hold is not None
        leaving._hold.sendall(b"bye\n")
        with socket.socket(socket.AF_UNIX) as coming, suppress(ConnectionResetError):
            coming.settimeout(PATIENCE_S)
            coming.connect(str(leaving._hold_path))
            keeper.resume()
            assert coming.recv(64) == b""
        with house.open() as broker, connect(broker.url) as client:
            assert client.ping()
