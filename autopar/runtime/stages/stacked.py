"""Arrays of stacked layers: one array between steps, a piece for each stage in them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar.runtime import placement
from autopar.runtime.stages.routes import Route
from autopar.runtime.stages.transport import Links
from autopar_passes import jax_compat
from autopar_passes.layer_loops.paths import ranges


@dataclasses.dataclass(frozen=True, eq=False)
class StackedArray:
    """An array whose pieces are arguments of a pipeline.

    Where every stage has an equal piece, the array is split over the stages, and its
    pieces are made of its shards without a copy. Otherwise it is whole on one stage,
    which cuts it, and sends the pieces of others to them and gets them back.

    Attributes:
      places: the flat arguments that are its pieces.
      results: the flat results that are their next values.
      sizes: layers of each piece.
      shape: of the array.
      sharding: where the array lies between steps.
      pieces: where each piece lies.
    """

    places: tuple[int, ...]
    results: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    sharding: NamedSharding
    pieces: tuple[NamedSharding, ...]

    @property
    def spread(self) -> bool:
        """Whether the array is split over stages."""
        return any(p.device_set < self.sharding.device_set for p in self.pieces)

    @property
    def cut_pieces(self) -> list[NamedSharding]:
        """Where each piece lies on the stage that has the whole array."""
        home = self.sharding
        return [p if p.device_set == home.device_set else home for p in self.pieces]

    def apart(self, array: Any, links: Links | None = None) -> list[Any]:
        """The pieces of the array, which lies as it does between steps.

        Args:
          array: the array.
          links: to the other processes; None: there are none.
        """
        if self.spread:
            shards = {
                x.device: x.data for x in jax_compat.key_bits(array).addressable_shards
            }
            return [
                self._make_array(array.dtype, (n, *self.shape[1:]), where, shards)
                for n, where in zip(self.sizes, self.pieces, strict=True)
            ]
        here = bool(self.sharding.addressable_devices)
        cut = list(self._cut(array)) if here else None
        if links is None:
            return jax.device_put(cut, list(self.pieces))
        structs = [
            jax.ShapeDtypeStruct((n, *self.shape[1:]), array.dtype) for n in self.sizes
        ]
        routes = self._routes(links, structs, self.cut_pieces, self.pieces)
        return links.move_arrays(("apart", self.places), cut, routes)

    def join_pieces(self, pieces: Sequence[Any], links: Links | None = None) -> Any:
        """The array of its pieces; arguments are as of `apart`."""
        dtype = pieces[0].dtype
        if self.spread:
            shards = {
                x.device: x.data
                for piece in pieces
                for x in jax_compat.key_bits(piece).addressable_shards
            }
            return self._make_array(dtype, self.shape, self.sharding, shards)
        if links is None:
            return self._put_together(*jax.device_put(list(pieces), self.cut_pieces))
        routes = self._routes(links, pieces, self.pieces, self.cut_pieces)
        moved = links.move_arrays(("joined", self.places), pieces, routes)
        if self.sharding.addressable_devices:
            return self._put_together(*moved)
        return placement.absent(jax.ShapeDtypeStruct(self.shape, dtype), self.sharding)

    @staticmethod
    def _routes(
        links: Links,
        structs: Sequence[Any],
        source: Sequence[NamedSharding],
        target: Sequence[NamedSharding],
    ) -> list[Route]:
        """How the pieces go."""
        return [
            links.route(tuple(s.shape), s.dtype, a, b)
            for s, a, b in zip(structs, source, target, strict=True)
        ]

    def _make_array(
        self,
        dtype: Any,
        shape: tuple[int, ...],
        sharding: NamedSharding,
        shards: Mapping[Any, Any],
    ) -> Any:
        """An array of shards that lie on its devices; this process has some of them."""
        struct, bits = jax_compat.bits_struct(shape, dtype)
        devices = list(sharding.mesh.devices.flat)  # type: ignore[union-attr]
        mine = [shards[d] for d in devices if d in shards]
        if not mine:
            return placement.absent(jax.ShapeDtypeStruct(shape, dtype), sharding)
        made = jax.make_array_from_single_device_arrays(
            struct, sharding, mine, dtype=bits
        )
        return jax_compat.with_dtype(made, dtype)

    @functools.cached_property
    def _cut(self) -> Any:
        def cut(array: Any) -> list[Any]:
            return [array[a:b] for a, b in ranges(self.sizes)]

        return jax.jit(cut, out_shardings=self.cut_pieces)

    @functools.cached_property
    def _put_together(self) -> Any:
        def together(*pieces: Any) -> Any:
            return jnp.concatenate(pieces)

        return jax.jit(together, out_shardings=self.sharding)

    def clear_cache(self) -> None:
        """Frees compiled code."""
        if not self.spread:
            self._cut.clear_cache()
            self._put_together.clear_cache()


@dataclasses.dataclass(frozen=True, eq=False)
class WithStacked:
    """A function of flat arguments in pieces, as one of the arguments as written.

    Attributes:
      function: of the arguments in pieces.
      arrays: flat argument as written -> the array.
      inputs: how many flat arguments there are in pieces.
      outputs: how many flat results there are as written.
      links: to the other processes; None: there are none.
    """

    function: Any
    arrays: Mapping[int, StackedArray]
    inputs: int
    outputs: int
    links: Links | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Runs a step; what comes behind its arguments is handed on, and back."""
        given = self._apart(arguments)
        behind = arguments[self._own :]
        returned = self.function(*given, *behind)
        made, *rest = returned if behind else (returned,)
        out = list(made[: self.outputs])
        for array in self.arrays.values():
            pieces = [made[r] for r in array.results]
            out[array.results[0]] = array.join_pieces(pieces, self.links)
        return (out, *rest) if behind else out

    def gradients(self, *arguments: Any) -> dict[str, Any]:
        """The partial gradients of a step (`autopar.runtime.stages.feed.Feed`)."""
        return self.function.gradients(*self._apart(arguments))

    @property
    def _own(self) -> int:
        """How many flat arguments there are as written."""
        more = sum(len(array.places) - 1 for array in self.arrays.values())
        return self.inputs - more

    def _apart(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments in pieces."""
        own = self._own
        given: list[Any] = [*arguments[:own], *([None] * (self.inputs - own))]
        for k, array in self.arrays.items():
            pieces = array.apart(arguments[k], self.links)
            for place, piece in zip(array.places, pieces, strict=True):
                given[place] = piece
        return given

    def clear_cache(self) -> None:
        """Frees compiled code."""
        self.function.clear_cache()
        for array in self.arrays.values():
            array.clear_cache()
