"""Which operators keep a partial result partial."""

from __future__ import annotations

# Operators that make partial results when a factor they reduce is split.
CONTRACTIONS = frozenset(
    {"dot_general", "reduce_sum", "conv_general_dilated", "scatter-add"}
)
# The sum of their two operands.
ADDITIONS = frozenset({"add", "add_any"})
# Linear in every operand together.
ADDITIVE = ADDITIONS | {"sub", "concatenate"}
# Linear in their first operand, the others only say how.
UNARY = frozenset(
    {
        "neg", "transpose", "reshape", "convert_element_type", "reduce_sum", "copy",
        "squeeze", "expand_dims", "rev", "slice", "split", "div",
    }
)  # fmt: skip
# They scale by a constant where all operands but one are constants.
SCALING = frozenset({"mul", "div", "neg", "convert_element_type"})
