"""Runs the commands of pods: hosts join and leave, and the supervisor's pod is
replaced.
"""

from __future__ import annotations

import pathlib

import pytest
from kubernetes_pods import Cluster, wait_for, why_not

from autopar.elastic.processes.certificates import new_secret
from autopar.launching.kubernetes import KubernetesRun, to_yaml

REASON = why_not()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]


def test_pods_come_and_go(tmp_path: pathlib.Path) -> None:
    """A pod that has left, or whose run was suspended, is none that is done."""
    script = ("elastic_script.py", "/checkpoints/out", "200", "1", "0.03", "saves")
    run = KubernetesRun(
        name="gpt",
        image="image",
        script=script,
        nodes=(2, 3),
        checkpoint_claim="claim",
        secret=new_secret(),
    )
    (tmp_path / "claim").mkdir()
    cluster = Cluster(to_yaml(run), tmp_path)
    try:
        workers = [cluster.start("workers") for _ in range(3)]
        supervisor = cluster.start("supervisor")
        wait_for(lambda: "world of 3" in supervisor.output(), cluster.output)
        assert workers[0].terminate() == 75
        wait_for(lambda: " has left" in supervisor.output(), cluster.output)
        assert supervisor.terminate() == 75, cluster.output()
        assert [pod.wait() for pod in workers] == [75, 75, 75]

        workers = [cluster.start("workers") for _ in range(2)]
        supervisor = cluster.start("supervisor")
        (tmp_path / "claim" / "go").touch()
        assert supervisor.wait() == 0, cluster.output()
        assert [pod.wait() for pod in workers] == [0, 0]
        assert "trains from step 0 on" not in supervisor.output()
    finally:
        cluster.close()
