"""Codes of the arrays that one pipeline stage sends to another.

The sending stage encodes an array as bytes, and the receiving stage decodes the bytes,
each within the compiled program of its task. The codecs are the blockwise codecs of
gradients (`autopar.compression.codecs.quantise`), and ``topk``, which keeps the largest
elements (`autopar.compression.cut_top`). The last dims of an array, together
at least `ROW` elements, are a row. A row is divided into the blocks of the codec, so
blocks never extend over two samples unless a sample is shorter than a row. The encoded
array has the remaining dims of the array, followed by one dim of bytes.

Rounding is to the nearest number, and there is no error feedback: a residual belongs to
the samples of its own batch. So the same array always has the same code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.quantise import Blockwise
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.codecs.sparse import TopK
from autopar.compression.cut_top import TopRows
from autopar_errors import InputError

# The codec of a cut whose values are sent exactly.
EXACT = "dense"
# The two kinds of values that cross stage cuts.
KINDS = ("activations", "cotangents")
# The least number of elements of a row, if the array has as many. Shorter rows would
# have many scales: one for each row and block.
ROW = 128


@dataclasses.dataclass(frozen=True, slots=True)
class CutCode:
    """The code of an array with a given shape.

    Attributes:
      codec: text of the codec.
      shape: shape of the array.
      dtype: name of the array's dtype, a real floating-point type.
      masked: whether the elements that another code keeps are kept, so that their
        positions are not sent. Only for codecs that keep some elements.
    """

    codec: str
    shape: tuple[int, ...]
    dtype: str
    masked: bool = False

    @property
    def lead(self) -> int:
        """The number of leading dims that the array and its code have in common.

        >>> CutCode("int8", (4, 16, 32), "float32").lead
        1
        >>> CutCode("int8", (4, 16, 64, 2), "float32").lead
        2
        """
        lead = max(0, len(self.shape) - 1)
        while lead > 1 and math.prod(self.shape[lead:]) < ROW:
            lead -= 1
        return lead

    @property
    def elements(self) -> int:
        """The number of elements of a row."""
        return math.prod(self.shape[self.lead :])

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the code."""
        width = _row_bytes(self.codec, self.elements, masked=self.masked)
        return jax.ShapeDtypeStruct((*self.shape[: self.lead], width), jnp.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the code.

        >>> CutCode("int8:block=32", (4, 32), "float32").nbytes
        136
        """
        return math.prod(self.struct.shape)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the array without the code."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def encode(self, array: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Encodes the array as bytes, with shape and dtype of `struct`.

        Args:
          array: the array.
          mask: if ``masked``, the code of another array of this shape.
        """
        codec, elements = cut_codec(self.codec), self.elements

        def encode_rows(rows: jax.Array, *masks: jax.Array) -> jax.Array:
            if isinstance(codec, TopRows):
                return codec.encode(rows, *masks)
            lengths = jnp.full(rows.shape[:1], elements, jnp.int32)
            return codec.encode(rows, lengths, jnp.uint32(0))

        rows = array.astype(jnp.float32).reshape(*self.shape[: self.lead], elements)
        return self._over_rows(encode_rows)(rows, *self._masks(mask))

    def decode(self, code: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Decodes bytes to an array of the shape and dtype that was encoded.

        Args:
          code: the bytes.
          mask: as for `encode`.
        """
        codec, elements = cut_codec(self.codec), self.elements

        def decode_rows(rows: jax.Array, *masks: jax.Array) -> jax.Array:
            return codec.decode(rows, elements, *masks)

        made = self._over_rows(decode_rows)(code, *self._masks(mask))
        return made.reshape(self.shape).astype(self.dtype)

    def _masks(self, mask: jax.Array | None) -> tuple[jax.Array, ...]:
        assert (mask is not None) == self.masked
        return () if mask is None else (mask,)

    def _over_rows(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Extends a function of rows, (m, _) to (m, _), to all leading dims.

        The leading dims are not joined, because each may be split over devices.
        """
        if not self.lead:
            return lambda *arrays: function(*(array[None] for array in arrays))[0]
        for _ in range(self.lead - 1):
            function = jax.vmap(function)
        return function


@functools.lru_cache(maxsize=1 << 10)
def cut_codec(text: str) -> Blockwise | TopRows:
    """The codec that a text names, if it can encode arrays that cross stage cuts.

    Raises:
      InputError: there is no such codec, or it cannot encode such arrays.
    """
    codec: Codec = parse_codec(text)
    if isinstance(codec, TopK):
        if codec != TopK(ratio=codec.ratio):
            raise InputError(
                f"codec {text!r}: at stage cuts, topk sends values as int8; leave "
                "values= out."
            )
        return TopRows(codec.ratio)
    offered = "'int8' or 'eden:levels=32', or 'topk:ratio=0.1'"
    return _of_blocks(codec, text, "values that cross stage cuts", offered)


@functools.lru_cache(maxsize=1 << 10)
def gather_codec(text: str) -> Blockwise:
    """The codec that a text names, if it can encode parameters that are gathered.

    Raises:
      InputError: there is no such codec, or it cannot encode such arrays.
    """
    offered = "'int8', 'fp8' or 'int4:block=64'"
    return _of_blocks(parse_codec(text), text, "parameters that are gathered", offered)


def _of_blocks(codec: Codec, text: str, what: str, offered: str) -> Blockwise:
    """Checks that a codec encodes blocks, and the same value always alike.

    Args:
      codec: the codec.
      text: its text.
      what: the arrays to encode, in words.
      offered: codecs that can encode them, in words.

    Raises:
      InputError: it does not.
    """
    if not isinstance(codec, Blockwise):
        raise InputError(
            f"codec {text!r} encodes gradients that are summed, and {what} are not: "
            f"take a codec of blocks, such as {offered}."
        )
    if getattr(codec, "rounding", "nearest") != "nearest":
        raise InputError(
            f"codec {text!r}: {what} are rounded to the nearest number, so that the "
            "same value always has the same code; leave rounding= out."
        )
    return codec


def array_codecs(text: str) -> tuple[str, ...]:
    """The codecs of the arrays that leave a stage at a cut, the largest array first.

    The last codec is also that of all smaller arrays.

    >>> array_codecs("topk:ratio=0.03+int8")
    ('topk:ratio=0.03', 'int8')
    """
    return tuple(part.strip() for part in text.split("+"))


def by_size(text: str, sizes: Mapping[int, float]) -> dict[int, str]:
    """The codec of each array of a cut in one direction.

    Args:
      text: the codecs (`array_codecs`).
      sizes: array -> its bytes.

    >>> by_size("topk:ratio=0.03+int8", {7: 400.0, 5: 900.0, 6: 100.0})
    {5: 'topk:ratio=0.03', 7: 'int8', 6: 'int8'}
    """
    codecs = array_codecs(text)
    order = sorted(sizes, key=lambda value: -sizes[value])
    return {v: codecs[min(k, len(codecs) - 1)] for k, v in enumerate(order)}


def keeps_some(text: str) -> bool:
    """Whether a codec keeps some elements of a row, and can have a mask."""
    return isinstance(cut_codec(text), TopRows)


def cut_codecs_text(given: str | Mapping[str, str]) -> str:
    """The text of codecs for stage cuts, from a text or a mapping.

    >>> cut_codecs_text({"activations": "int4", "cotangents": "int8"})
    'int4/int8'
    >>> cut_codecs_text({"cotangents": "int8"})
    'dense/int8'

    Raises:
      InputError: a key or a codec is unknown.
    """
    if not isinstance(given, str):
        if unknown := [key for key in given if key not in KINDS]:
            raise InputError(
                f"unknown key {unknown[0]!r}; the keys are {' and '.join(KINDS)}."
            )
        parts = [given.get(kind, EXACT) for kind in KINDS]
        if wrong := [part for part in parts if not isinstance(part, str)]:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"{wrong[0]!r} is not the text of a codec.")
        given = "/".join(parts)
    if given not in ("none", "auto"):
        parse_cut_codecs(given)
    return given


def parse_cut_codecs(text: str) -> tuple[str, str]:
    """The codecs of activations and of cotangents that a text names.

    The text is one codec for both, or the two codecs with a slash between them. In
    place of a codec, several may be given for arrays of different sizes, joined by
    ``+`` (`array_codecs`).

    >>> parse_cut_codecs("int8")
    ('int8', 'int8')
    >>> parse_cut_codecs("int4:block=64/dense")
    ('int4:block=64', 'dense')

    Raises:
      InputError: a codec is unknown, or cannot encode what crosses stage cuts.
    """
    parts = [part.strip() for part in text.split("/")]
    if len(parts) > len(KINDS):
        raise InputError(
            f"{text!r} names {len(parts)} codecs; write one for all, or one for "
            "activations and one for cotangents, such as 'int4/int8'."
        )
    for part in parts:
        check_array_codecs(part)
    return parts[0], parts[-1]


def check_array_codecs(text: str) -> None:
    """Checks the codecs of one direction of a cut, as a text.

    Raises:
      InputError: a codec is unknown, or cannot encode what crosses stage cuts.
    """
    for codec in array_codecs(text):
        if codec != EXACT:
            cut_codec(codec)


@functools.lru_cache(maxsize=1 << 12)
def _row_bytes(text: str, elements: int, *, masked: bool) -> int:
    """The number of bytes of a row."""
    codec = cut_codec(text)
    if isinstance(codec, TopRows):
        return codec.row_bytes(elements, masked=masked)
    assert not masked
    made = jax.eval_shape(
        codec.encode,
        jax.ShapeDtypeStruct((1, elements), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.uint32),
    )
    return int(made.shape[1])
