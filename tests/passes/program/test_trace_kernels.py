"""Tests that cuDNN's attention is traced without cuDNN, and JAX is not changed."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused_attention
from kernel_cases import BATCH, DIM, HEADS, SEQ, cudnn, gradient, struct

from autopar_passes.jax_compat import without_devices
from autopar_passes.program.trace import trace

CHECKS = (
    "check_cudnn_version",
    "check_compute_capability",
    "is_cuda_compute_capability_equal",
)
ARRAY = struct(BATCH, SEQ, HEADS, DIM)


def checks() -> list[Any]:
    return [getattr(fused_attention, name) for name in CHECKS]


def test_forward_and_backward_are_traced() -> None:
    traced = trace(gradient(cudnn(is_causal=True)), (ARRAY, ARRAY, ARRAY))

    names = [e.primitive for e in traced.program.body.equations]
    assert "dot_product_attention_fwd_wrapper" in names
    assert "dot_product_attention_bwd_wrapper" in names


def test_the_checks_are_back_afterwards() -> None:
    before = checks()

    trace(cudnn(), (ARRAY, ARRAY, ARRAY))
    assert checks() == before
    with without_devices():
        assert checks() != before
    assert checks() == before
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        jax.eval_shape(cudnn(), ARRAY, ARRAY, ARRAY)


def test_other_threads_get_the_answers_of_the_host() -> None:
    found: list[BaseException | Any] = []

    def ask() -> None:
        try:
            found.append(fused_attention.check_cudnn_version())
        except RuntimeError as error:
            found.append(error)

    with without_devices():
        assert fused_attention.check_compute_capability("9.0")
        assert not fused_attention.check_compute_capability("10.0")
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    (answer,) = found
    assert isinstance(answer, RuntimeError)


def test_a_thread_may_leave_while_another_is_inside() -> None:
    before = checks()
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with without_devices():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait(60)
    with without_devices(), without_devices():
        assert fused_attention.check_cudnn_version() > 0
    assert checks() != before
    leave.set()
    thread.join()

    assert checks() == before
