"""Tests state that processes keep on their hosts, offer to others, and restore."""

from __future__ import annotations

import pathlib
import socket
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import PlanError
from autopar.elastic.processes import holding, programs, tiles
from autopar.elastic.processes.certificates import new_secret
from autopar.elastic.processes.members import latest_state
from autopar.elastic.processes.network import Network
from autopar.elastic.processes.offers import Fetcher, Offers, Peer, StateSource
from autopar.elastic.processes.team import Copier

TOKEN = "secret"


def sharded(array: Any, *spec: Any, shape: tuple[int, ...] = (8,)) -> Any:
    mesh = Mesh(
        np.array(jax.devices()[: np.prod(shape)]).reshape(shape),
        ("a", "b")[: len(shape)],
    )
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def state() -> dict[str, Any]:
    """Arrays of every kind, split in several ways."""
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "rows": sharded(numbers, "a"),
        "blocks": sharded(numbers.astype(ml_dtypes.bfloat16), "a", "b", shape=(2, 4)),
        "whole": sharded(numbers[:3]),
        "count": sharded(np.int32(7)),
        "empty": sharded(np.zeros((0, 8), np.float32)),
        "keys": sharded(jax.random.split(jax.random.key(1), 8), "a"),
    }


def half(given: holding.Holding, first: bool) -> holding.Holding:
    """The tiles of one of two processes."""
    found: holding.Tiles = {}
    for path, held in given.tiles.items():
        ordered = sorted(held)
        middle = (len(ordered) + 1) // 2
        own = ordered[:middle] if first or len(ordered) == 1 else ordered[middle:]
        found[path] = {tile: held[tile] for tile in own}
    return holding.Holding(
        version=given.version,
        step=3,
        shapes=given.shapes,
        tiles=found,
        extra={"position": 24},
    )


@pytest.fixture(params=[False, True], ids=["loopback", "tls"])
def network(request: pytest.FixtureRequest) -> Network:
    """The network of one machine, and of several hosts."""
    return Network("127.0.0.1", new_secret()) if request.param else Network()


@pytest.fixture
def two(network: Network) -> tuple[Offers, Offers]:
    """Two processes that together hold the state after step 3."""
    held = holding.hold(state(), step=3, generation=2, extra={})
    offers = Offers(TOKEN, network), Offers(TOKEN, network)
    for own, first in zip(offers, (True, False), strict=True):
        own.put(half(held, first))
    return offers


def source_of(offers: tuple[Offers, ...]) -> StateSource:
    found = latest_state({x.address: x.describe() for x in offers})
    assert found is not None
    assert (found["step"], found["extra"]) == (3, {"position": 24})
    return StateSource.from_data(found)


def test_another_layout_is_put_together_from_two_processes(
    two: tuple[Offers, Offers], network: Network
) -> None:
    """Bit by bit; what the process itself holds is not fetched."""
    fetch = Fetcher(source_of(two), two[0], TOKEN, network)
    want = state()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    specs = {"rows": ("y", "x"), "blocks": ("x",), "keys": ("y",)}
    wanted = {
        path: (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            NamedSharding(mesh, PartitionSpec(*specs.get(path, ()))),
        )
        for path, x in want.items()
    }
    found = holding.place(wanted, fetch)
    fetch.close()
    for path, x in want.items():
        assert (found[path].dtype, found[path].sharding) == (x.dtype, wanted[path][1])
        numbers = [
            np.asarray(jax.random.key_data(k) if path == "keys" else k)
            for k in (found[path], x)
        ]
        np.testing.assert_array_equal(*numbers)
    assert fetch.local_bytes > 0
    assert fetch.remote_bytes == fetch.local_bytes - 4 - 3 * 8 * 4  # count and whole


def test_nobody_holds_a_part(two: tuple[Offers, Offers], network: Network) -> None:
    assert latest_state({two[0].address: two[0].describe()}) is None
    fetch = Fetcher(source_of(two), two[0], TOKEN, network)
    with pytest.raises(PlanError, match="no 'other'"):
        fetch("other", ((0,), (4,)))
    two[1].keep(lambda held: False)
    with pytest.raises(ConnectionError, match="holds it no longer"):
        fetch.whole("rows")
    fetch.close()


def test_copies_come_whole(two: tuple[Offers, Offers], network: Network) -> None:
    """Both halves are at one process, once the other's copies have come."""
    copier = Copier(TOKEN, network)
    copier.aim([two[0].address])
    held = holding.hold(state(), step=3, generation=2, extra={"position": 24})
    copier.send(half(held, first=False))
    copier.wait()
    alone = latest_state({two[0].address: two[0].describe()})
    assert alone is not None
    np.testing.assert_array_equal(
        two[0].tiles("3.2")["rows"][((7, 0), (8, 8))],
        np.arange(56, 64, dtype=np.float32)[None],
    )
    assert set(two[0].tiles("3.2")["keys"]) == set(held.tiles["keys"])


def test_a_process_that_is_gone_does_not_stop_copies(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    copier = Copier(TOKEN, network)
    copier.aim([f"127.0.0.1:{port}"])
    copier.send(holding.hold(state(), step=3, generation=2, extra={}))
    copier.wait()


def test_who_has_no_token_gets_nothing(
    two: tuple[Offers, Offers], network: Network
) -> None:
    peer = Peer(two[0].address, "guess", network)
    tile = tiles.whole((8, 8))
    with pytest.raises((ConnectionError, OSError)):
        peer.fetch("3.2", "rows", tile, tile, np.empty((8, 8), np.float32))
    peer.close()


def test_keys_outlive_their_backend() -> None:
    given = (jax.random.key(3), jnp.ones(2), 5)
    key, ones, five = programs.from_host(programs.on_host(given))
    assert jax.random.key_data(key).tolist() == jax.random.key_data(given[0]).tolist()
    assert isinstance(ones, np.ndarray)
    assert five == 5


def test_a_program_comes_from_another_host(
    two: tuple[Offers, Offers], network: Network
) -> None:
    """Whole or not at all, and connections are of use after each answer."""
    kept = {"a": b"", "b": bytes(range(256)) * 5000}
    two[0].program = kept.get
    peer = Peer(two[0].address, TOKEN, network)
    assert [peer.program(name) for name in ("b", "c", "a", "b")] == [
        kept["b"],
        None,
        b"",
        kept["b"],
    ]
    peer.close()


def test_only_names_of_programs_are_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "programs").mkdir(mode=0o700)
    (tmp_path / "secret").write_text("x")
    stored = programs.StoredPrograms(tmp_path / "programs")
    assert stored.content("../secret") is None
    assert stored.content("0" * 32) is None
