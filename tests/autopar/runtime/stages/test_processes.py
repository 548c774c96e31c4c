"""Tests steps in stages over two processes: they train as on one device, and fail
together.
"""

import json
import signal

import cut_codec_cases
import jax
import numpy as np
import pytest
from processes import TIMEOUT_S, run_processes, start_processes
from stage_cases import (
    LOOPS,
    LOSSES,
    adam,
    all_beside_the_step,
    layer_loop,
    looped_layers,
    train,
)

import autopar
from autopar.runtime.comparing import Comparison

pytestmark = pytest.mark.cluster

CLOSE = 2e-5
WORKER = "stages_worker.py"
# Less than JAX waits for a process; a machine may be busy.
AT_ONCE_S = 45


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("stages") / "trained"
    run_processes(WORKER, 2, [str(out), "train"])
    return [json.loads(out.with_name(f"trained_{k}.json").read_text()) for k in (0, 1)]


@pytest.fixture(scope="module")
def one_device():
    def losses(name):
        step, state, _ = adam(LOSSES[name])
        return train(jax.jit(step), state)[1]

    return {name: losses(name) for name in ("mean", "masked")}


def test_both_processes_are_told_the_losses_of_one_device(found, one_device):
    """From a state that is made on its stages; masks are counted over all rows."""
    for process in found:
        np.testing.assert_allclose(process["masked"], one_device["masked"], rtol=CLOSE)


def test_stages_of_both_processes_sum_by_codecs(found, one_device):
    """And both skip a step in which a gradient is not finite."""
    first, second = (process["coded"] for process in found)
    assert first == second
    np.testing.assert_allclose(first["losses"][:3], one_device["mean"], rtol=CLOSE)
    assert first["losses"][3] < first["losses"][0]
    assert len(first["names"]) == len(first["skipped"]) >= 4
    assert set(first["skipped"]) == {1}
    assert first["warned"] == 1


def test_stages_of_both_processes_send_codes(found):
    """They train as the stages of one process do, and send the bytes of the codes."""
    step = autopar.parallelize(
        cut_codec_cases.descended(cut_codec_cases.chain_loss),
        **cut_codec_cases.ASKED,
        stages=2,
        cut_codecs=cut_codec_cases.CODECS,
        donate=False,
        comparison=Comparison(every=3, steps=2),
    )
    params, losses = cut_codec_cases.run(step, cut_codec_cases.weights(), 3)
    for seed in range(3, 6):
        params, _ = step(params, cut_codec_cases.batch(seed))
    (compared,) = step.comparisons
    elements = cut_codec_cases.ROWS * cut_codec_cases.WIDTH
    # By process: activations in 4 bits, cotangents in 8; blocks of 32.
    for process, bits in zip(found, (4, 8), strict=True):
        dense, coded = process["cut_codecs"].values()
        np.testing.assert_allclose(coded["losses"], losses, rtol=CLOSE)
        assert dense["losses"] != coded["losses"]
        means = compared.loss, compared.exact_loss
        np.testing.assert_allclose(coded["compared"], means, rtol=CLOSE)
        assert dense["bytes"] == 4 * elements
        assert coded["bytes"] == elements * (bits / 8 + 2 / 32)


def test_both_processes_are_told_results_of_every_kind(found):
    """Also those of state, of rows and of the batch that lie in the other one."""
    assert all(process["mixed"] < CLOSE for process in found)


def test_state_moves_between_plans_of_one_stage_and_of_several(found, one_device):
    for number, process in enumerate(found):
        losses, held = process["moved"]
        np.testing.assert_allclose(losses, one_device["mean"], rtol=CLOSE)
        # The first layer lies on the first stage, which is the first process's.
        assert held == [2, (2, 0)[number], 2]


def test_a_failure_of_one_process_reaches_all_and_consumes_nothing(found, one_device):
    first, second = (process["refused"] for process in found)
    told = "PlanError: process 1 has failed while running a step: ZeroDivisionError"
    assert [said.startswith(told) for said in first["said"]] == [True]
    assert second["said"] == ["ZeroDivisionError: division by zero"]
    for process in (first, second):
        assert process["seconds"] < AT_ONCE_S
        assert process["loss"] == pytest.approx(one_device["mean"][1], rel=CLOSE)


def test_a_failure_of_an_update_reaches_all(found):
    """Behind the point up to which a step that fails consumes nothing."""
    first, second = (process["late"] for process in found)
    told = "stage 1, update (part 0): ZeroDivisionError: division by zero"
    assert first["said"].startswith(f"StageError: process 1: {told}")
    assert second["said"] == f"StageError: {told}"
    assert max(first["seconds"], second["seconds"]) < 10


@pytest.fixture(scope="module")
def beside():
    """The results of one process, for everything besides a step of two stages."""
    return all_beside_the_step(jax.devices()[:4], lambda rows: slice(rows))


@pytest.mark.parametrize("count", [2, 4])
def test_stages_lie_on_the_devices_of_processes_in_any_way(
    tmp_path, one_device, beside, count
):
    """Also codecs, noise, a policy that tries codecs, evaluation and layer loops."""
    run_processes(WORKER, count, [str(tmp_path / "out"), "laid"])
    for k in range(count):
        found = json.loads((tmp_path / f"out_{k}.json").read_text())
        for how in found["lies"].values():
            np.testing.assert_allclose(how["losses"], one_device["masked"], rtol=CLOSE)
            assert how["far"] < CLOSE
        assert found["beside"].keys() == beside.keys()
        for name, numbers in found["beside"].items():
            # Rounding moves single numbers to another level of a codec.
            wanted = np.ravel(beside[name])[: np.size(numbers)]
            np.testing.assert_allclose(
                np.ravel(numbers), wanted, rtol=1e-2, err_msg=name
            )
        looped = [
            loss
            for layers, _ in LOOPS
            for loss in train(jax.jit(layer_loop), looped_layers(layers))[1]
        ]
        np.testing.assert_allclose(found["beside"]["looped"], looped, rtol=CLOSE)


def test_a_failure_in_a_stage_of_two_processes_ends_both(tmp_path):
    run_processes(WORKER, 2, [str(tmp_path / "out"), "broken"])
    first, second = (
        json.loads((tmp_path / f"out_{k}.json").read_text()) for k in (0, 1)
    )
    told = "StageError: process 1 has failed while running a step: ZeroDivisionError"
    assert [said[: len(told)] for said in first["said"]] == [told, told]
    assert second["said"][0] == "ZeroDivisionError: division by zero"
    assert "process 1 failed before" in second["said"][1]
    assert len(first["said"]) == len(second["said"]) == 2
    assert max(first["seconds"], second["seconds"]) < AT_ONCE_S


def test_a_killed_process_is_an_error_of_the_other(tmp_path):
    first, second = start_processes(WORKER, 2, [str(tmp_path / "out"), "killed"])
    try:
        log, _ = first.communicate(timeout=TIMEOUT_S)
        second.communicate(timeout=TIMEOUT_S)
        assert second.returncode == -signal.SIGKILL
        assert first.returncode == 0, log
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    said = json.loads((tmp_path / "out_0.json").read_text())
    assert "process 0 has lost another process while running a step" in said["said"]
    assert said["seconds"] < AT_ONCE_S


def test_a_process_that_hangs_is_an_error_of_the_other(tmp_path):
    first, second = start_processes(WORKER, 2, [str(tmp_path / "out"), "hangs"])
    try:
        log, _ = first.communicate(timeout=180)
        assert first.returncode == 0, log
        assert second.poll() is None
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    said = json.loads((tmp_path / "out_0.json").read_text())
    assert "for process 1 while running a step" in said["said"]
    assert "it does not answer" in said["said"]
    # What it waits for first depends on which process is ahead.
    waits = ("of stage 1 and microbatch", "for its rows of the batch of process 1")
    assert any(text in said["said"] for text in waits), said["said"]
    assert said["seconds"] < AT_ONCE_S
