"""Every name of JAX that is not public, with the JAX version that made it necessary.

The rest of the project imports these names only from this module. A new JAX release
therefore needs changes in one place.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import array as _array
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import effects as _effects
from jax._src import pmap as _pmap
from jax._src import source_info_util as _source_info
from jax._src.cudnn import fused_attention_stablehlo as _fused_attention
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import cuda_versions as _cuda_versions
from jax._src.lib import xla_client as _xc  # pyright: ignore[reportPrivateImportUsage]
from jax._src.random import prng as _prng
from jax._src.state import discharge as _discharge
from jax.experimental import io_callback as _io_callback
from jax.experimental import topologies as _topologies
from jax.experimental import xla_metadata as _xla_metadata
from jax.extend import backend as jex_backend
from jax.extend import core as jex_core
from jaxlib.mlir import ir as _ir

from autopar_errors import InputError

_OURS = str(pathlib.Path(__file__).parent)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")

ConcreteArray: Any = _array.ArrayImpl
aval_of, sharding_of = ConcreteArray.aval.fget, ConcreteArray._sharding.fget
ClosedJaxpr, Jaxpr = jex_core.ClosedJaxpr, jex_core.Jaxpr
Literal = jex_core.Literal


def name_stack(eqn: Any) -> str:
    """Returns the name stack of an equation, such as ``jvp(Model)/layer_0``.

    ``JaxprEqn.source_info`` is not documented (0.10.2).
    """
    return str(eqn.source_info.name_stack)


def source_line(eqn: Any) -> str:
    """Returns ``file.py:line`` of the user's code that made an equation, or ''.

    The line is the innermost line outside of installed packages, such as Flax and
    Optax; without such a line, the innermost line of an installed package. An equation
    that a pass made has no line. ``source_info_util.user_frames`` is private (0.10.2),
    and its argument changed between releases. Any failure therefore only gives ''.
    """
    with contextlib.suppress(Exception):
        return _line_of(eqn.source_info.traceback)
    return ""


@functools.lru_cache(maxsize=1 << 16)
def _line_of(traceback: Any) -> str:
    """The line of `source_line`; equations that a pass copies share a traceback."""
    found = ""
    with contextlib.suppress(Exception):
        for frame in _source_info.user_frames(traceback):
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

    Only the traceback of ``source_info`` has JAX's own frames (0.10.2).
    """
    home, traceback = _prng.__file__.rpartition("/")[0], eqn.source_info.traceback
    return any(f.file_name.startswith(home) for f in getattr(traceback, "frames", ()))


def thread_options() -> list[Any]:
    """Returns contexts that give another thread the JAX options of this thread."""
    own = [x for x in vars(_config).values() if isinstance(x, _config.State)]
    unset = _config.config_ext.unset
    found = [(x, x.get_local()) for x in own if x.get_local() is not unset]
    return [_config.StateContextManager(x, value) for x, value in found]


@contextlib.contextmanager
def source_of(eqn: Any) -> Generator[None]:
    """Binds primitives under the name stack and traceback of ``eqn``.

    ``jax.core.eval_jaxpr`` itself uses ``source_info_util.user_context`` (0.10.2).
    """
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


# The key of XLA's metadata of a loop by which the loop says how often it is expected to
# run, if its number of iterations depends on data.
EXPECTED_RUNS = "autopar_expected_runs"


def expecting_runs(runs: float) -> contextlib.AbstractContextManager[Any]:
    """Traces loops that say how often they are expected to run.

    The number goes with the loop, as ``frontend_attributes`` of XLA, into lowered and
    compiled programs.
    """
    return _xla_metadata.set_xla_metadata(**{EXPECTED_RUNS: str(runs)})


def expected_runs(eqn: Any) -> float | None:
    """The number of `expecting_runs` of a loop's equation; None without one.

    The metadata of an equation is in its context, which is private (0.10.2).
    """
    found = (getattr(eqn.ctx, "xla_metadata", None) or {}).get(EXPECTED_RUNS)
    return None if found is None else float(found)


def with_expected_runs(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """`expecting_runs` with the number of an equation, if it has one."""
    found = expected_runs(eqn)
    return contextlib.nullcontext() if found is None else expecting_runs(found)


def bind(eqn: Any, *args: Any) -> list[Any]:
    """Binds the primitive of ``eqn`` to ``args``; always returns a list."""
    functions, params = _bind_parameters(eqn)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind_parameters(eqn: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Calls ``Primitive.get_bind_params``, which is not in `jax.extend.core` (0.10.2).

    Before 0.10 the method returned called functions separately from the parameters.
    """
    found = eqn.primitive.get_bind_params(eqn.params)
    return found if isinstance(found, tuple) else ((), found)


def bind_anywhere(eqn: Any, *args: Any) -> list[Any]:
    """`bind`, without the mesh that ``eqn`` was traced on.

    Inside a manual ``shard_map`` the shardings in an equation's parameters only name
    that mesh (0.10.2), so they are replaced by None.
    """
    functions, params = _bind_parameters(eqn)
    params = {
        k: None if isinstance(v, jax.sharding.NamedSharding) else v
        for k, v in params.items()
    }
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_with(eqn: Any, params: dict[str, Any], *args: Any) -> list[Any]:
    """`bind`, with parameters that differ from those of ``eqn``.

    The parameters of a Pallas kernel contain no called functions, so the parameters are
    bound unchanged.
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
    """Returns a function that copies arrays to devices with the same partitioning.

    If an array keeps its partitioning, `jax.device_put` calls the same internal
    function, but runs 40 us of Python for each array before (0.10.2). The internal
    function does not check its arguments: it would crash on arrays that were donated or
    deleted. Such arrays and arrays with another sharding therefore go to
    ``device_put``.
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
    """Puts a NumPy array on the devices of a sharding, all of which are local.

    ``jax.jit`` does the same with a NumPy argument. `jax.device_put` does the same too,
    but runs 40 us of Python before (0.10.2).
    """
    (made,) = _pxla.shard_args([sharding], [None], [None], [array])
    return made


def is_on_host(aval: Any) -> bool:
    """Says whether the type of an array places it in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def is_extended(dtype: Any) -> bool:
    """Says whether a dtype is one of JAX's extended ones, such as a PRNG key."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def wrap_keys(words: Any, dtype: Any) -> Any:
    """Returns random keys of a dtype made of their raw words, ``(*shape, words)``.

    The public function ``jax.random.key_impl`` takes keys, not a dtype.
    `jax.eval_shape` makes abstract keys for it.
    """
    found: list[Any] = []

    def read(key: Any) -> Any:
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(read, jax.ShapeDtypeStruct((), dtype))
    return jax.random.wrap_key_data(words, impl=found[0])


def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element; for a PRNG key, the bytes of its raw words.

    The public function ``jax.random.key_data`` gives the shape of the raw words.
    """
    if is_extended(dtype):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(aval.size) * aval.dtype.itemsize
    return int(dtype.itemsize)


@contextlib.contextmanager
def axis_env(sizes: dict[str, int]) -> Generator[None]:
    """Binds names of mesh axes that collectives may use, as ``jax.pmap`` does.

    ``core.extend_axis_env_nd`` is private (0.10.2).
    """
    with _core.extend_axis_env_nd(list(sizes.items())):
        yield


def is_pmapped(function: Any) -> bool:
    """Whether a function was returned by ``jax.pmap``.

    ``jax.pmap`` returns a plain function (0.10.2). Only the file of the function's code
    identifies it.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == _pmap.__file__


def static_argument_names(function: Any) -> frozenset[str]:
    """Names of the arguments that a jitted function declares static.

    ``_jit_info`` of a jitted function is private (0.10.2). If the attribute is missing,
    only the arguments that the caller names are static. ``flax.nnx.jit`` keeps its
    jitted function in ``jitted_fn``.
    """
    info = getattr(getattr(function, "jitted_fn", function), "_jit_info", None)
    return frozenset(getattr(info, "static_argnames", None) or ())


@dataclasses.dataclass(frozen=True, slots=True)
class Coordination:
    """The coordination service of ``jax.distributed``, as seen by one process.

    Attributes:
      client: the client of the service, which stores keys and values.
      index: number of this process.
      count: number of processes.
    """

    client: Any
    index: int
    count: int


def coordination() -> Coordination | None:
    """Returns the coordination service, or None without ``jax.distributed``.

    ``jax.distributed.is_initialized`` is public, but the client is not (0.10.2). Unlike
    ``jax.process_index``, this function starts no backend.
    """
    state = _distributed.global_state
    if state.client is None:
        return None
    return Coordination(state.client, state.process_id, state.num_processes)


def leave_coordination() -> None:
    """Lets this process end without waiting for the other processes to end.

    At exit ``jax.distributed`` waits minutes for all processes (0.10.2). The client and
    the service are deliberately kept alive, because their destructors would wait too.
    """
    state = _distributed.global_state
    for kept in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.service = None


def key_bits(keys: Any) -> Any:
    """Returns the raw words of typed keys; any other array unchanged.

    Unlike ``jax.random.key_data``, this function runs no program. A process that holds
    no part of the keys could not run one. The attribute ``_base_array`` is private
    (0.10.2).
    """
    return keys._base_array if is_extended(keys.dtype) else keys


def bits_struct(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of the array that `key_bits` returns for an array.

    The components of a key dtype are private (0.10.2).
    """
    if not is_extended(dtype):
        return shape, dtype
    return (*shape, *dtype._impl.key_shape), np.dtype(np.uint32)


def with_dtype(bits: Any, dtype: Any) -> Any:
    """Returns the inverse of `key_bits`; like it, runs no program."""
    if not is_extended(dtype):
        return bits
    return _prng.PRNGKeyArray(dtype._impl, bits)


def dtype_of(name: str) -> Any:
    """Returns the dtype of a name such as ``bfloat16`` or ``key<fry>``.

    The registry of key implementations is private (0.10.2).

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
    """Yields the jaxprs in an equation's parameters, with closed jaxprs opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def without_refs(jaxpr: Any) -> Any:
    """Returns the body of a Pallas kernel as a closed jaxpr without refs.

    The refs are the kernel's mutable memory. The inputs of the jaxpr are the initial
    contents of the kernel's refs, then the program ids and grid sizes that the kernel
    asks for. The results are the final contents of the refs.
    ``state.discharge.discharge_state`` is private (0.10.2).
    """
    asked = ("program_id", "num_programs")
    numbers = [e for e in jaxpr.eqns if e.primitive.name in asked]
    pure = jaxpr.replace(
        invars=[*jaxpr.invars, *(v for e in numbers for v in e.outvars)],
        eqns=[e for e in jaxpr.eqns if e not in numbers],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return _discharge.discharge_state(ClosedJaxpr(pure, ()))


# The cuDNN version, in cuDNN's own numbering, that is assumed on hosts without cuDNN.
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
    """Whether JAX's checks get answers for an assumed GPU in this thread."""
    if not _devices.absent:
        return False
    if _cuda_versions is None:
        return True
    return "cuda" not in jex_backend.get_backend().platform_version


class _Checks:
    """Answers JAX's checks for fused attention in threads inside `without_devices`.

    The functions of JAX's module are replaced while at least one thread is inside
    `without_devices`. Every other thread still gets the answers of JAX's own functions.
    """

    def __init__(self) -> None:
        """Starts with JAX's own functions in place."""
        self.inside = 0
        self.own: dict[str, Any] = {}

    def enter(self) -> None:
        """Replaces JAX's functions when the first thread enters."""
        with _checks_lock:
            self.inside += 1
            if self.inside > 1:
                return
            self.own = {name: getattr(_fused_attention, name) for name in _CHECKS}
            _fused_attention.check_cudnn_version = self.version
            _fused_attention.check_compute_capability = self.at_least
            _fused_attention.is_cuda_compute_capability_equal = self.equal

    def leave(self) -> None:
        """Restores JAX's own functions when the last thread leaves."""
        with _checks_lock:
            self.inside -= 1
            if not self.inside:
                for name, function in self.own.items():
                    setattr(_fused_attention, name, function)

    def version(self) -> Any:
        """Returns the version of cuDNN."""
        if _answers():
            return _CUDNN_VERSION
        return self.own["check_cudnn_version"]()

    def at_least(self, capability: str) -> Any:
        """Whether the device's compute capability is at least a given one.

        A Hopper GPU has 9.0.
        """
        if _answers():
            return tuple(map(int, capability.split("."))) <= (9, 0)
        return self.own["check_compute_capability"](capability)

    def equal(self, capability: str) -> Any:
        """Whether the device's compute capability is exactly a given one."""
        if _answers():
            return capability == "9.0"
        return self.own["is_cuda_compute_capability_equal"](capability)


_checks = _Checks()


@contextlib.contextmanager
def without_devices() -> Generator[None]:
    """Lets this thread trace cuDNN's fused attention on a host without cuDNN.

    While JAX traces a step, it asks for cuDNN's version and for the device's compute
    capability (0.10.2). Inside this context the answers are those of a Hopper GPU. The
    traced program does not depend on the answers. JAX's functions are restored after
    the last thread has left, and other threads never see the assumed answers. A host
    with cuDNN keeps JAX's own checks.
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

    JAX lists the primitives of fused attention in
    ``dispatch.prim_requires_devices_during_lowering`` (0.10.2), because JAX may have to
    partition them. In the planned program these primitives are inside a ``shard_map``
    that is manual over all mesh axes, so JAX has nothing to partition. The list is
    restored when the context ends.
    """
    listed = _dispatch.prim_requires_devices_during_lowering
    taken = {p for p in listed if p.name.startswith("dot_product_attention_")}
    listed -= taken
    try:
        yield
    finally:
        listed |= taken


def compile_without_devices(
    modules: Iterable[bytes],
    *,
    platform: str,
    topology: str,
    description: str,
    devices: Sequence[int],
) -> Iterator[tuple[str, dict[str, int]]]:
    """Compiles modules for devices that this host does not have.

    ``jax.experimental.topologies`` describes the devices. JAX's public functions
    compile for such devices only a function of the same process. A module from another
    process goes to ``compiler.backend_compile_and_load``, which is private. The parser
    of modules and the compile options are private too (0.10.2).

    Args:
      modules: bytecode of each lowered program.
      platform: "cuda", "tpu" or "cpu"; "cpu" can have any number of devices.
      topology: the devices, in the compiler's format.
      description: the description of a GPU, in the compiler's format.
      devices: the positions of the devices that run each program.

    Yields:
      The text of each optimized module, and its memory in bytes by kind.
    """
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 1 + max(devices))
        found = jax.devices("cpu")
    else:
        given = {} if platform == "tpu" else {"topology": topology}
        if platform != "tpu":
            given["target_config"] = description
        name = topology if platform == "tpu" else "gpu"
        found = _topologies.get_topology_desc(name, platform, **given).devices
    used = np.array([found[k] for k in devices])
    for module in modules:
        yield _compile_module(module, used)


def _compile_module(module: bytes, used: np.ndarray) -> tuple[str, dict[str, int]]:
    """Compiles a module for devices; returns its text and its memory by kind."""
    with _mlir.make_ir_context():
        parsed = _ir.Module.parse(module)
        options = _compiler.get_compile_options(
            1, len(used), device_assignment=used[None, :], backend=used[0].client
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
    """For each result of a module, whether the compiler may choose its sharding."""
    main = next(
        op for op in module.body.operations if op.attributes["sym_name"].value == "main"
    )
    return ["sdy.sharding" not in d for d in main.attributes["res_attrs"]]


# Host callbacks that run in the order of the program.
#
# JAX orders callbacks by tokens, but only in programs for one device. Here a data
# dependency orders the callbacks on several devices: each callback takes a number that
# the callback before has returned. JAX's functions that bind and lower callbacks are
# private (0.10.2).


# The number that is passed to the first callback.
FIRST = np.int32(0)
_TURN = jax.ShapeDtypeStruct((), np.int32)


def is_ordered(eqn: Any) -> bool:
    """Whether a JAX equation, or an equation inside it, is an ordered host callback."""
    return any(_effects.ordered_effects.contains(x) for x in eqn.effects)


def bind_unordered(eqn: Any, *args: Any) -> list[Any]:
    """Like `bind`, but without the order of callbacks."""
    if not is_ordered(eqn):
        return bind(eqn, *args)
    made, _ = bind_in_turn(eqn, args, FIRST)
    return made


def bind_in_turn(eqn: Any, args: Any, turn: Any) -> tuple[list[Any], Any]:
    """Runs a callback after the callback that returned the number ``turn``.

    Args:
      eqn: the callback.
      args: the operands of the callback.
      turn: the number that the callback before has returned, or `FIRST`.

    Returns:
      The results, and the number for the next callback.

    Raises:
      InputError: the equation has an ordered effect that is not a callback.
    """
    call = _function(eqn)

    def in_turn(number: Any, *given: Any) -> Any:
        return number, tuple(call(*given) or ())

    structs = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)  # pyright: ignore[reportUnknownMemberType]
        for v in eqn.outvars
    ]
    turn, made = _io_callback(in_turn, (_TURN, tuple(structs)), turn, *args)
    return list(made), turn


def _function(eqn: Any) -> Any:
    """Returns the host function that a callback calls with its flat operands."""
    params = eqn.params
    if eqn.primitive.name != "debug_print":
        if "callback" not in params:
            raise InputError(
                f"'{eqn.primitive.name}' has an effect with an order that no planned "
                "step keeps. Call the host by jax.experimental.io_callback."
            )
        return params["callback"]
    # This is the function that JAX's own lowering of the primitive calls.
    shown = functools.partial(
        _debugging._format_print_callback,  # pyright: ignore[reportPrivateUsage]
        params["fmt"],
        dict(params["np_printoptions"]),
        params["has_placeholders"],
        params["logging_record"],
    )
    return _debugging._make_flat_callback(  # pyright: ignore[reportPrivateUsage]
        params["in_tree"], shown, params["static_args"]
    )
