"""Finds key heads that a step repeats for the query heads of a group.

If several query heads share a key head, a step may repeat keys and values before their
products with queries and weights. A ring would then send the repeated arrays. This
module follows repeated keys and values to the arrays that are repeated, and their
gradients to the sums over the repetitions. Attention in blocks needs neither: its
kernels share keys within a group, and add up the gradients of a group.

The label of repeated heads is split into two parts, one of which counts the
repetitions. With one key head, the whole label counts them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar_passes.graph.attention_products import (
    BARRIER,
    Labels,
    Products,
    Search,
)
from autopar_passes.program.equations import Equation
from autopar_passes.rules.blockwise import LAYOUTS

_SUM = "reduce_sum"
_FOLLOWED = LAYOUTS | {"tile"}
# The number of factors of repeated heads: the key heads, and the heads of a group.
_PARTS = 2
# A sum over the repetitions, and the labels of its result.
Sum = tuple[Equation, Labels]


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatedHeads:
    """Key heads that are repeated.

    Attributes:
      label: the label of the repeated heads.
      parts: the labels of its parts, major to minor.
      sizes: their sizes.
      group: the part that counts the repetitions.
      key: the array that is repeated to make the keys, and its labels.
      value: the same for the values.
      key_gradient: the sum over the gradient of the repeated keys, and the labels of
        its result; None if keys have no gradient.
      value_gradient: the same for the values.
    """

    label: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    group: str
    key: tuple[int, Labels]
    value: tuple[int, Labels]
    key_gradient: Sum | None
    value_gradient: Sum | None

    @property
    def sums(self) -> list[Equation]:
        """The sums over the gradients of repeated keys and values."""
        return [x[0] for x in (self.key_gradient, self.value_gradient) if x]

    def split(self, labels: Labels) -> Labels:
        """Returns the labels of dimensions after the split into parts."""
        return tuple(self.parts if dims == (self.label,) else dims for dims in labels)

    def shape(self, labels: Labels, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an array after the split into parts."""
        return tuple(
            size
            for dims, own in zip(labels, shape, strict=True)
            for size in (self.sizes if dims == (self.label,) else (own,))
        )


def repeated_heads(products: Products) -> RepeatedHeads | None:
    """Returns the key heads that a step repeats; None if it repeats none.

    Keys and values must repeat the same heads in the same order, and each of their
    gradients must be read by nothing but a sum over the repetitions.
    """
    search, parts = products.search, products.parts
    value, value_labels = products.value()
    keys = _source(search, products.key, products.key_labels)
    values = _source(search, value, value_labels)
    if keys is None or values is None or keys[1] != values[1]:
        return None
    heads = keys[1]
    made = RepeatedHeads(*heads, keys[0], values[0], None, None)
    gradients: list[Sum | None] = []
    ends = (parts.of_key, products.depth), (parts.of_value, "E")
    for part, free in ends:
        gradient = None
        if part is not None:
            labels = made.split(products.side(part, free)[2])
            gradient = _summed(search, part[0].outputs[0], labels, made.group)
            if gradient is None:
                return None
        gradients.append(gradient)
    return dataclasses.replace(
        made, key_gradient=gradients[0], value_gradient=gradients[1]
    )


# The label, its parts, their sizes, and the part that counts repetitions.
_Heads = tuple[str, tuple[str, ...], tuple[int, ...], str]


def _source(
    search: Search, value: int, labels: Labels
) -> tuple[tuple[int, Labels], _Heads] | None:
    """The array that is repeated, its labels, and the repeated heads."""
    heads: tuple[str, tuple[str, ...], tuple[int, ...]] | None = None
    while True:
        eqn = search.maker.get(value)
        if eqn is None or eqn.primitive not in _FOLLOWED:
            return None
        if eqn.primitive == BARRIER:
            operand = eqn.inputs[eqn.outputs.index(value)]
            if not isinstance(operand, int):
                return None
            value = operand
            continue
        rule, operand = search.rules.get(eqn.index), eqn.inputs[0]
        if rule is None or len(eqn.inputs) != 1 or not isinstance(operand, int):
            return None
        label: dict[int, tuple[str, ...]] = {}
        for factors, names in zip(rule.results[0], labels, strict=True):
            if len(factors) == _PARTS and len(names) == 1 and heads is None:
                parts = tuple(f"{names[0]}.{k}" for k in range(_PARTS))
                heads = names[0], parts, tuple(rule.sizes[f] for f in factors)
                names = parts
            if len(factors) != len(names):
                return None
            label.update((f, (n,)) for f, n in zip(factors, names, strict=True))
        given = _labels(rule.operands[0], label)
        if given is None:
            return None
        missing = {n for (n,) in label.values()} - set(_names(given))
        if missing:
            (group, *others) = missing
            if heads is None:
                size = next(rule.sizes[f] for f, n in label.items() if n == (group,))
                heads = group, (group,), (size,)
            if others or group[0] != "B" or group not in heads[1]:
                return None
            name, parts, sizes = heads
            return (operand, given), (name, parts, sizes, group)
        value, labels = operand, given


def _summed(search: Search, value: int, labels: Labels, group: str) -> Sum | None:
    """The sum over a part of the heads of a gradient, and the labels of its result."""
    while True:
        readers = search.readers[value]
        if len(readers) != 1 or value in search.region.outputs:
            return None
        (eqn,) = readers
        if eqn.primitive == _SUM:
            axes = eqn.params["axes"]
            if [n for a in axes for n in labels[a]] != [group]:
                return None
            return eqn, tuple(x for a, x in enumerate(labels) if a not in axes)
        rule = search.rules.get(eqn.index)
        if eqn.primitive not in LAYOUTS - {BARRIER} or rule is None:
            return None
        label: dict[int, tuple[str, ...]] = {}
        for factors, names in zip(rule.operands[0], labels, strict=True):
            if len(factors) == 1:
                label[factors[0]] = names
            elif len(factors) == len(names):
                label.update((f, (n,)) for f, n in zip(factors, names, strict=True))
            else:
                return None
        made = _labels(rule.results[0], label)
        if made is None or sorted(_names(made)) != sorted(_names(labels)):
            return None
        (value,), labels = eqn.outputs, made


def _labels(
    dims: tuple[tuple[int, ...], ...], label: Mapping[int, tuple[str, ...]]
) -> Labels | None:
    """The labels of dimensions; None if a factor has none."""
    if any(f not in label for factors in dims for f in factors):
        return None
    return tuple(tuple(n for f in factors for n in label[f]) for factors in dims)


def _names(labels: Labels) -> list[str]:
    return [n for names in labels for n in names]
