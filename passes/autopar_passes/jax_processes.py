"""The names of JAX that are not public and that concern several processes.

`jax.distributed.initialize` starts the coordination service in process 0, and a process
can join only once. A *world* is a set of processes that run JAX together. In this
project the service runs in a process of its own, and a process can join one world after
another (0.10.2). One process can also compile a program that another process runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import transfer as _transfer
from jax.experimental.compilation_cache import compilation_cache as _cache
from jax.extend import backend as _backend
from jaxlib.mlir import ir as _ir

# The supervisor detects failed processes, so JAX's heartbeats must not end a slow
# process.
_HEARTBEAT_S = 24 * 3600
_SHUTDOWN_S = 2

# Holds True if this process was forked from a process in which JAX's threads ran.
# `fork` does not copy threads.
_forked: list[bool] = []


def was_forked() -> bool:
    """Whether JAX cannot run here: it had started before this process was forked."""
    return bool(_forked)


def _after_fork() -> None:
    # The dictionary is read without the lock of `backends_are_initialized`, because at
    # the fork another thread may have held this lock.
    if _xla_bridge._backends:  # pyright: ignore[reportPrivateUsage]
        _forked.append(True)


os.register_at_fork(after_in_child=_after_fork)


def open_service(count: int) -> tuple[str, Any]:
    """Starts a coordination service at a free port; returns address and service.

    The service tells no process when another process dies, and a process that ends does
    not wait for the others.

    Args:
      count: number of processes of the service's world.
    """
    for attempt in range(8):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        try:
            service = _jax.get_distributed_runtime_service(
                address,
                count,
                heartbeat_timeout=_HEARTBEAT_S,
                shutdown_timeout=_SHUTDOWN_S,
                recoverable=True,
            )
        except Exception:
            if attempt == 7:
                raise
            continue
        return address, service
    raise AssertionError


def coordination_client(address: str, index: int, connect_s: int) -> Any:
    """Returns a client that is not connected yet.

    Args:
      address: address of the service.
      index: number of the process.
      connect_s: seconds for which ``connect`` waits for the other processes.
    """
    return _jax.get_distributed_runtime_client(
        address,
        index,
        init_timeout=connect_s,
        heartbeat_timeout=_HEARTBEAT_S,
        shutdown_timeout=_SHUTDOWN_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )


def fill_place(address: str, index: int, connect_s: int) -> None:
    """Connects to a world in place of a process that has died.

    Call this function in a thread, because it may wait for other processes.

    Args:
      address: address of the service, which waits for all processes of its world.
      index: number of the process that has died.
      connect_s: seconds for which the call waits for the other processes.
    """
    with contextlib.suppress(Exception):
        client = coordination_client(address, index, connect_s)
        client.connect()
        client.shutdown()


def enter_world(client: Any, host: str, index: int, count: int) -> None:
    """Lets JAX's next backend use a connected client.

    Args:
      client: client of a coordination service.
      host: address at which the other processes reach this process.
      index: number of this process.
      count: number of processes.
    """
    state = _distributed.global_state
    # If a client is set, JAX itself does not read the address. `transfer_server` reads
    # the host of the address.
    state.client, state.coordinator_address = client, _with_port(host)
    state.process_id, state.num_processes = index, count
    _gloo_at(host)


def _with_port(host: str) -> str:
    return f"[{host}]:1" if ":" in host else f"{host}:1"


def _gloo_at(host: str) -> None:
    """Lets gloo listen at an address of this host.

    By default gloo listens at the address that the host's name resolves to. On many
    hosts this is a loopback address. JAX 0.10.2 has no setting for the address.
    """

    def create_client() -> Any:
        state = _distributed.global_state
        if state.client is None:
            return _xla_bridge.make_cpu_client()
        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=state.client, hostname=host
        )
        return _xla_bridge.make_cpu_client(collectives=collectives)

    _xla_bridge.register_backend_factory(
        "cpu", create_client, priority=0, fail_quietly=False
    )


def leave_world() -> Any:
    """Drops JAX's backend and programs; returns the client, or None if there was none.

    Arrays of the old backend can still be read, and keep the old backend alive.
    """
    state = _distributed.global_state
    client, state.client = state.client, None
    state.coordinator_address = None
    state.process_id, state.num_processes = 0, 1
    jax.clear_caches()
    _backend.clear_backends()
    return client


def local_device_count() -> int:
    """Returns the number of CPU devices that this process will have in any world.

    If no backend has been started, the number comes from JAX's settings.
    """
    asked = getattr(jax.config, "jax_num_cpu_devices", -1)
    if asked >= 0:
        return int(asked)
    found = re.search(
        r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    return int(found[1]) if found else 1


def _cpu_client(address: str, index: int, count: int, local: int) -> tuple[Any, Any]:
    """Returns a connected client of a coordination service, and a CPU backend."""
    client = coordination_client(address, index, connect_s=30)
    client.connect()
    collectives = _jax.make_gloo_tcp_collectives(distributed_client=client)
    backend = _xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=client,
        node_id=index,
        num_nodes=count,
        collectives=collectives,
        num_devices=local,
    )
    return client, backend


def imitated_backend(address: str, count: int, local_devices: int) -> Any:
    """Returns the backend of process 0 of a world, without the other processes.

    Programs can be compiled for the devices of this backend, but not run. While the
    devices are registered, threads of this process stand in for the other processes.

    Args:
      address: address of a coordination service for ``count`` processes.
      count: number of processes.
      local_devices: number of devices of each process.
    """
    made: list[Any] = [None] * count
    errors: list[BaseException] = []

    def make(index: int) -> None:
        try:
            made[index] = _cpu_client(address, index, count, local_devices)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for client, _ in made:
        client.shutdown()
    return made[0][1]


def transfer_server() -> Any:
    """Starts a server that sends arrays to other processes and receives theirs.

    ``jax.experimental.transfer`` is public, but neither documented nor stable (0.10.2).
    The server listens at the address that this process has on the network of the
    coordination service. In JAX only the service's address tells which network the
    processes share.
    """
    host = _own_address(_distributed.global_state.coordinator_address)
    client = jax.local_devices()[0].client
    return _transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])


def _own_address(coordinator: str | None) -> str:
    """The address of this process on the network of the coordination service."""
    host, _, port = (coordinator or "127.0.0.1:1").rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = sorted(found)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # connecting a datagram socket sends nothing
        own = probe.getsockname()[0]
    return f"[{own}]" if family == socket.AF_INET6 else own


_cache_lock = threading.Lock()


def compile_whole(lowered: Any) -> Any:
    """Compiles a program so that it can be saved, without JAX's disk cache.

    A program that XLA:CPU loads from the disk cache runs. If it is saved again, the
    saved program lacks functions, and loading it fails with ``NOT_FOUND: Function ...
    not found`` (0.10.2). JAX decides once per process whether the cache is used, and no
    public function changes this.

    Args:
      lowered: a `jax.stages.Lowered`.

    Returns:
      A `jax.stages.Compiled`.
    """
    with _cache_lock, _config.enable_compilation_cache(False):
        _cache.reset_cache()
        try:
            return lowered.compile()
        finally:
            _cache.reset_cache()


# The type of a function that compiles: from an MLIR module as bytecode, XLA's
# serialised options and the ids of the devices to a compiled program.
CompileBytes = Callable[[bytes, bytes, tuple[int, ...]], bytes]


def compile_by(lowered: Any, compile_bytes: CompileBytes) -> bool:
    """Compiles a lowered program with a given function, for example in another process.

    JAX treats the result like one of ``lowered.compile()``: later calls of the jitted
    function use it. With public functions, JAX can only load a program into an object
    that calls of the jitted function do not use (0.10.2).

    Args:
      lowered: a `jax.stages.Lowered`, for CPU devices of this process.
      compile_bytes: a function that does the work of `compiled_bytes`.

    Returns:
      True if the program was compiled. False if nothing was done, because the program
      contains objects of this process, such as host callbacks, or because another
      process does not have the same devices.
    """
    computation = lowered._lowering
    arguments = computation.compile_args
    client = arguments["backend"]
    ids = [d.id for d in client.devices()]
    own = arguments["host_callbacks"] or arguments["keepalive"]
    if client.platform != "cpu" or client.process_index() or own:
        return False
    if ids != list(range(len(ids))) or client.device_count() != len(ids):
        return False
    arguments["backend"] = _Elsewhere(client, compile_bytes)
    try:
        made = lowered.compile()
    finally:
        arguments["backend"] = client
    made._executable._unloaded_executable.backend = client
    return True


class _Elsewhere:
    """Wraps an XLA client, and compiles with a given function instead."""

    def __init__(self, client: Any, compile_bytes: CompileBytes) -> None:
        self._client, self._compile_bytes = client, compile_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(
        self, module: Any, executable_devices: Any, compile_options: Any
    ) -> Any:
        """Compiles a module; XLA calls this method with these arguments."""
        found = self._compile_bytes(
            _mlir.module_to_bytecode(module),
            compile_options.SerializeAsString(),
            tuple(d.id for d in executable_devices),
        )
        return self._client.deserialize_executable(
            found,
            executable_devices=executable_devices,
            compile_options=compile_options,
        )


def compiled_bytes(module: bytes, options: bytes, devices: tuple[int, ...]) -> bytes:
    """Compiles a module for CPU devices of this process, and returns the program.

    Args:
      module: StableHLO, as MLIR's bytecode.
      options: XLA's compile options, serialised.
      devices: ids of the devices.
    """
    own = jax.devices("cpu")
    client = own[0].client
    with _mlir.make_ir_context():
        made = client.compile_and_load(
            _ir.Module.parse(module),
            executable_devices=_xla_client.DeviceList(tuple(own[k] for k in devices)),
            compile_options=_xla_client.CompileOptions.ParseFromString(options),
        )
    return client.serialize_executable(made)
