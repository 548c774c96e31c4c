"""Every name of JAX that is not public, with the version that forced it.

The rest of the project imports these names from here only, so that a new JAX
release is met in one place.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import pathlib
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

# The class of all concrete arrays but keys, whose properties can be read of a list of
# arrays without a step of Python for each (0.10.2).
from jax._src import array as _array

# Compiling a module from another process for described devices (0.10.2):
# `compile_without_devices` says why.
from jax._src import compiler as _compiler

# Options that a thread sets for itself (``with jax.enable_x64(True)``) can be read and
# set for another one by the objects of `jax._src.config` alone (0.10.2).
from jax._src import config as _config

# jax.extend.core exports ClosedJaxpr and Literal (public since 0.4.36). What is
# missing there in 0.10.2 is the name stack of an equation and how to bind an
# equation under one; both live in `jax._src.source_info_util`.
from jax._src import core as _core
from jax._src import dispatch as _dispatch

# The client of the coordination service is in `jax._src.distributed` alone (0.10.2).
from jax._src import distributed as _distributed
from jax._src import pmap as _pmap
from jax._src import source_info_util as _source_info

# The checks of cuDNN's version and of the device in front of its fused attention are
# functions of this module, looked up when a step is traced (0.10.2).
from jax._src.cudnn import fused_attention_stablehlo as _fused_attention
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import cuda_versions as _cuda_versions
from jax._src.lib import xla_client as _xc  # pyright: ignore[reportPrivateImportUsage]
from jax._src.random import prng as _prng
from jax._src.state import discharge as _discharge
from jax.experimental import topologies as _topologies
from jax.extend import backend as jex_backend
from jax.extend import core as jex_core
from jaxlib.mlir import ir as _ir

from autopar_errors import InputError

_OURS = str(pathlib.Path(__file__).parent)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")

ConcreteArray: Any = _array.ArrayImpl
aval_of, sharding_of = ConcreteArray.aval.fget, ConcreteArray._sharding.fget
ClosedJaxpr = jex_core.ClosedJaxpr
Literal = jex_core.Literal


def name_stack(eqn: Any) -> str:
    """Returns the name stack of an equation, such as ``jvp(Model)/layer_0``.

    ``JaxprEqn.source_info`` is not documented (0.10.2).
    """
    return str(eqn.source_info.name_stack)


def source_line(eqn: Any) -> str:
    """Returns ``file.py:line`` of the user's code that made an equation, or ''.

    That is the innermost line outside of installed packages, such as Flax and Optax;
    where there is none, theirs. What a pass has made itself has no line.
    ``source_info_util.user_frames`` is private (0.10.2) and changed its
    argument between releases, so a failure only loses the line.
    """
    found = ""
    with contextlib.suppress(Exception):
        for frame in _source_info.user_frames(eqn.source_info.traceback):
            path = frame.file_name
            if path.startswith(_OURS):
                break
            line = f"{path.rsplit('/', 1)[-1]}:{frame.start_line}"
            if not _INSTALLED.search(path):
                return line
            found = found or line
    return found


def is_of_random(eqn: Any) -> bool:
    """Whether a sampler of `jax.random` made an equation.

    JAX's own frames stand in the traceback of ``source_info`` alone (0.10.2).
    """
    home, traceback = _prng.__file__.rpartition("/")[0], eqn.source_info.traceback
    return any(f.file_name.startswith(home) for f in getattr(traceback, "frames", ()))


def thread_options() -> list[Any]:
    """Returns contexts of the options of JAX that this thread has set for itself."""
    own = [x for x in vars(_config).values() if isinstance(x, _config.State)]
    unset = _config.config_ext.unset
    found = [(x, x.get_local()) for x in own if x.get_local() is not unset]
    return [_config.StateContextManager(x, value) for x, value in found]


@contextlib.contextmanager
def source_of(eqn: Any) -> Generator[None]:
    """Binds primitives under the name stack and traceback of ``eqn``.

    ``source_info_util.user_context`` is what ``jax.core.eval_jaxpr`` itself
    uses (0.10.2).
    """
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


def bind(eqn: Any, *args: Any) -> list[Any]:
    """Binds the primitive of ``eqn`` to ``args``; always returns a list."""
    functions, params = _bind_parameters(eqn)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind_parameters(eqn: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """``Primitive.get_bind_params``, no part of `jax.extend.core` (0.10.2).

    Before 0.10 the functions that a primitive calls come beside its parameters.
    """
    found = eqn.primitive.get_bind_params(eqn.params)
    return found if isinstance(found, tuple) else ((), found)


def bind_anywhere(eqn: Any, *args: Any) -> list[Any]:
    """`bind`, without the mesh that ``eqn`` was traced on.

    Inside a manual ``shard_map`` the shardings in parameters say nothing but the name
    of that mesh (0.10.2).
    """
    functions, params = _bind_parameters(eqn)
    params = {
        k: None if isinstance(v, jax.sharding.NamedSharding) else v
        for k, v in params.items()
    }
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_with(eqn: Any, params: dict[str, Any], *args: Any) -> list[Any]:
    """`bind`, with other parameters than those of ``eqn``.

    A Pallas kernel has no calls in its parameters, so they are bound as they are.
    """
    return list(eqn.source.primitive.bind(*args, **params))


def renamed_mesh(mesh: Any, names: tuple[str, ...]) -> Any:
    """Returns a mesh over the same devices whose axes have other names."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return jax.sharding.AbstractMesh(
            mesh.axis_sizes, names, axis_types=mesh.axis_types
        )
    return jax.sharding.Mesh(mesh.devices, names, axis_types=mesh.axis_types)


def copier(
    source: Sequence[Any], target: Sequence[Any]
) -> Callable[[list[Any]], list[Any]]:
    """Returns a function that copies arrays to devices that get the same parts.

    For such arrays `jax.device_put` calls the same function, after 40 us of Python for
    each (0.10.2). It trusts its caller, so arrays that lie otherwise are left to
    ``device_put``, and so are consumed ones, by which it would crash.
    """
    devices = [sharding._internal_device_list for sharding in target]
    how = [_xc.ArrayCopySemantics.REUSE_INPUT] * len(devices)
    copied = _xc.batched_copy_array_to_devices_with_sharding

    def copy(arrays: list[Any]) -> list[Any]:
        pairs = zip(arrays, source, strict=True)
        if any(x.is_deleted() or x.sharding != lies for x, lies in pairs):
            return jax.device_put(arrays, list(target))
        with _config.explicit_device_put_scope():
            return list(copied(arrays, devices, list(target), how))

    return copy


def put(array: np.ndarray, sharding: Any) -> jax.Array:
    """Returns an array of NumPy's on the devices of a sharding, all of this process.

    It is what ``jax.jit`` does with such an argument. `jax.device_put` does the same
    after 40 us of Python (0.10.2).
    """
    (made,) = _pxla.shard_args([sharding], [None], [None], [array])
    return made


def is_extended(dtype: Any) -> bool:
    """Says whether a dtype is one of JAX's extended ones, such as a PRNG key."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element; a PRNG key counts its raw words.

    ``jax.random.key_data`` gives the public shape of the raw words.
    """
    if is_extended(dtype):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(aval.size) * aval.dtype.itemsize
    return int(dtype.itemsize)


@contextlib.contextmanager
def axis_env(sizes: dict[str, int]) -> Generator[None]:
    """Binds names of axes that collectives may use, as ``jax.pmap`` does.

    ``core.extend_axis_env_nd`` is private (0.10.2).
    """
    with _core.extend_axis_env_nd(list(sizes.items())):
        yield


def is_pmapped(function: Any) -> bool:
    """Whether a function was returned by ``jax.pmap``.

    It is a plain function (0.10.2); only the file of its code tells.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == _pmap.__file__


def static_argument_names(function: Any) -> frozenset[str]:
    """Names of the arguments that a jitted function was told are static.

    ``_jit_info`` of a jitted function is private (0.10.2): without it nothing is
    static but what the caller names. ``flax.nnx.jit`` keeps its jitted function in
    ``jitted_fn``.
    """
    info = getattr(getattr(function, "jitted_fn", function), "_jit_info", None)
    return frozenset(getattr(info, "static_argnames", None) or ())


@dataclasses.dataclass(frozen=True, slots=True)
class Coordination:
    """The coordination service of ``jax.distributed``, as one process sees it.

    Attributes:
      client: of the service; stores keys and values.
      index: number of this process.
      count: number of processes.
    """

    client: Any
    index: int
    count: int


def coordination() -> Coordination | None:
    """Returns the coordination service, or None without ``jax.distributed``.

    ``jax.distributed.is_initialized`` is public, the client is not (0.10.2). No
    backend is started, as ``jax.process_index`` would.
    """
    state = _distributed.global_state
    if state.client is None:
        return None
    return Coordination(state.client, state.process_id, state.num_processes)


def leave_coordination() -> None:
    """Makes this process end without waiting for the others to end.

    At exit ``jax.distributed`` waits minutes for all processes (0.10.2). Client and
    service are kept alive on purpose: their destructors would wait too.
    """
    state = _distributed.global_state
    for kept in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.service = None


def key_bits(keys: Any) -> Any:
    """The numbers of typed keys; other arrays as they are.

    Unlike ``jax.random.key_data`` this runs no program, which a process could not that
    has no part of the keys. What it reads is private (0.10.2).
    """
    return keys._base_array if is_extended(keys.dtype) else keys


def bits_struct(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of `key_bits` of an array.

    What a dtype of keys is made of is private (0.10.2).
    """
    if not is_extended(dtype):
        return shape, dtype
    return (*shape, *dtype._impl.key_shape), np.dtype(np.uint32)


def with_dtype(bits: Any, dtype: Any) -> Any:
    """The array of which `key_bits` gave the numbers; it runs no program either."""
    if not is_extended(dtype):
        return bits
    return _prng.PRNGKeyArray(dtype._impl, bits)


def dtype_of(name: str) -> Any:
    """The dtype of a name such as ``bfloat16`` or ``key<fry>``.

    The registry of kinds of keys is private (0.10.2).

    Raises:
      InputError: there is no such dtype.
    """
    if not name.startswith("key<"):
        try:
            return jax.numpy.dtype(name)
        except TypeError as error:
            raise InputError(f"no dtype is called '{name}'.") from error
    for impl in _prng.prngs.values():
        if f"key<{impl.tag}>" == name:
            return _prng.KeyTy(impl)
    raise InputError(f"no dtype is called '{name}'.")


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs in the parameters of an equation, closed ones opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def without_refs(jaxpr: Any) -> Any:
    """Returns the body of a Pallas kernel as a pure function, closed.

    Its inputs are what its refs hold first, then the numbers of the point of its grid;
    its results are what its refs hold last. ``state.discharge.discharge_state`` is
    private (0.10.2).
    """
    asked = ("program_id", "num_programs")
    numbers = [e for e in jaxpr.eqns if e.primitive.name in asked]
    pure = jaxpr.replace(
        invars=[*jaxpr.invars, *(v for e in numbers for v in e.outvars)],
        eqns=[e for e in jaxpr.eqns if e not in numbers],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return _discharge.discharge_state(ClosedJaxpr(pure, ()))


# The version that steps are traced for where there is no cuDNN, as the library counts.
_CUDNN_VERSION = 91200


class _Devices(threading.local):
    """Whether this thread traces for devices that the host does not have."""

    absent = False


_devices = _Devices()
_checks_lock = threading.Lock()
_CHECKS = (
    "check_cudnn_version",
    "check_compute_capability",
    "is_cuda_compute_capability_equal",
)


def _answers() -> bool:
    """Whether this thread gets the answers of a device that the host lacks."""
    if not _devices.absent:
        return False
    if _cuda_versions is None:
        return True
    return "cuda" not in jex_backend.get_backend().platform_version


class _Checks:
    """Answers the checks of fused attention for the threads that ask it to.

    The functions of JAX's module are replaced while at least one thread is inside
    `without_devices`; any other thread still gets the answers of JAX's own.
    """

    def __init__(self) -> None:
        """Replaces nothing yet."""
        self.inside = 0
        self.own: dict[str, Any] = {}

    def enter(self) -> None:
        """Replaces the functions, if this is the first thread."""
        with _checks_lock:
            self.inside += 1
            if self.inside > 1:
                return
            self.own = {name: getattr(_fused_attention, name) for name in _CHECKS}
            _fused_attention.check_cudnn_version = self.version
            _fused_attention.check_compute_capability = self.at_least
            _fused_attention.is_cuda_compute_capability_equal = self.equal

    def leave(self) -> None:
        """Puts JAX's own functions back, if this is the last thread."""
        with _checks_lock:
            self.inside -= 1
            if not self.inside:
                for name, function in self.own.items():
                    setattr(_fused_attention, name, function)

    def version(self) -> Any:
        """The version of cuDNN."""
        if _answers():
            return _CUDNN_VERSION
        return self.own["check_cudnn_version"]()

    def at_least(self, capability: str) -> Any:
        """Whether the device has at least a compute capability: Hopper has."""
        if _answers():
            return tuple(map(int, capability.split("."))) <= (9, 0)
        return self.own["check_compute_capability"](capability)

    def equal(self, capability: str) -> Any:
        """Whether the device has exactly a compute capability."""
        if _answers():
            return capability == "9.0"
        return self.own["is_cuda_compute_capability_equal"](capability)


_checks = _Checks()


@contextlib.contextmanager
def without_devices() -> Generator[None]:
    """Lets this thread trace cuDNN's fused attention on a host without cuDNN.

    JAX asks for cuDNN's version and the device's compute capability while it traces
    (0.10.2). Inside, the answers are those of a Hopper GPU; the traced program does
    not depend on them. JAX's functions are back after the last thread has left, and
    other threads never see the answers. A host with cuDNN keeps JAX's own checks.
    """
    if _devices.absent:
        yield
        return
    _checks.enter()
    _devices.absent = True
    try:
        yield
    finally:
        _devices.absent = False
        _checks.leave()


@contextlib.contextmanager
def lowered_without_devices() -> Generator[None]:
    """Lets cuDNN's fused attention be lowered over an abstract mesh.

    Its primitives are listed in ``dispatch.prim_requires_devices_during_lowering``
    (0.10.2), because JAX may have to partition them. The planned program has them
    inside a manual ``shard_map`` over all axes, where there is nothing to partition.
    The list is put back as it was.
    """
    listed = _dispatch.prim_requires_devices_during_lowering
    taken = {p for p in listed if p.name.startswith("dot_product_attention_")}
    listed -= taken
    try:
        yield
    finally:
        listed |= taken


def compile_without_devices(
    module: bytes, *, platform: str, topology: str, description: str, devices: int
) -> tuple[str, dict[str, int]]:
    """Compiles a module for devices that this host does not have.

    ``jax.experimental.topologies`` describes the devices. What JAX compiles with it is
    one of its own functions; a module from another process goes to
    ``compiler.backend_compile_and_load``, which is private, as are the parser of
    modules and the options (0.10.2).

    Args:
      module: bytecode of a lowered program.
      platform: "cuda", "tpu" or "cpu", which has as many devices as are wanted.
      topology: the devices, in the compiler's form.
      description: of a GPU, in the compiler's form.
      devices: how many of them run the program, the first ones.

    Returns:
      The text of the optimized module, and the bytes of its memory by kind.
    """
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", devices)
        found = jax.devices("cpu")
    else:
        given = {} if platform == "tpu" else {"topology": topology}
        if platform != "tpu":
            given["target_config"] = description
        name = topology if platform == "tpu" else "gpu"
        found = _topologies.get_topology_desc(name, platform, **given).devices
    used = np.array(found[:devices])
    with _mlir.make_ir_context():
        parsed = _ir.Module.parse(module)
        options = _compiler.get_compile_options(
            1, devices, device_assignment=used[None, :], backend=used[0].client
        )
        built = options.executable_build_options
        built.allow_spmd_sharding_propagation_to_output = _free_results(parsed)
        program = _compiler.backend_compile_and_load(
            used[0].client, parsed, _xc.DeviceList(tuple(used)), options, []
        )
    memory = program.get_compiled_memory_stats()
    kinds = ("argument", "output", "alias", "temp")
    sizes = {f"{k}_bytes": getattr(memory, f"{k}_size_in_bytes") for k in kinds}
    return program.hlo_modules()[0].to_string(), sizes


def _free_results(module: Any) -> list[bool]:
    """Says of each result of a module whether its sharding is left to the _compiler."""
    main = next(
        op for op in module.body.operations if op.attributes["sym_name"].value == "main"
    )
    return ["sdy.sharding" not in d for d in main.attributes["res_attrs"]]
