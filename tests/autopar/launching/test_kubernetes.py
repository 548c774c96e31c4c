"""Tests the Kubernetes objects of an elastic run, and wrong options."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml
from command_line import Run, assert_fails
from kubernetes_pods import expand, pod_templates

from autopar.errors import InputError
from autopar.launching.kubernetes import (
    KubernetesRun,
    objects,
    read_resources,
    to_yaml,
)

WORDS = ["1e3", "y", "0x1f", "010", "", "a: b", "12:30", "$(POD_IP)", "$$", "é\n"]


def run_of(**given: Any) -> KubernetesRun:
    defaults: dict[str, Any] = {
        "name": "gpt",
        "image": "registry.example/gpt:1",
        "script": ("train.py", "--rate", "0.1"),
        "nodes": (2, 8),
    }
    return KubernetesRun(**defaults | given)


@pytest.mark.parametrize("plain", [False, True])
def test_numbers_are_of_workers_and_pods(plain: bool) -> None:
    jobs = pod_templates(objects(run_of(slots=4), plain=plain))
    assert jobs["workers"]["parallelism"] == jobs["workers"]["completions"] == 8
    command = jobs["supervisor"]["template"]["spec"]["containers"][0]["command"]
    given = dict(zip(command[4:10:2], command[5:10:2], strict=True))
    assert given == {"--processes": "8", "--min": "8", "--max": "32"}


@pytest.mark.parametrize("word", WORDS)
def test_words_reach_the_script_as_they_are(word: str) -> None:
    documents = list(yaml.safe_load_all(to_yaml(run_of(script=("train.py", word)))))
    (container,) = pod_templates(documents)["supervisor"]["template"]["spec"][
        "containers"
    ]
    assert expand(container["command"][-1], {"POD_IP": "10.0.0.1"}) == word


def test_words_that_kubectl_reads_as_numbers_are_quoted() -> None:
    text = to_yaml(run_of(script=("train.py", "1e3", "y", "0o7")))
    assert all(f"- '{word}'\n" in text for word in ("1e3", "y", "0o7"))


def test_the_secret_is_in_no_command() -> None:
    text = to_yaml(run_of(secret="-----KEY-----"))
    assert "-----KEY-----" not in text
    assert "LS0tLS1LRVktLS0tLQ==" in text
    assert "kubectl create secret generic gpt-secret" in to_yaml(run_of())


def test_a_run_without_a_claim_does_not_begin_again() -> None:
    assert pod_templates(objects(run_of()))["supervisor"]["backoffLimit"] == 0
    kept = pod_templates(objects(run_of(checkpoint_claim="saves")))["supervisor"]
    actions = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in kept["podFailurePolicy"]["rules"]
    ]
    assert actions == [("FailJob", [2]), ("Ignore", [75]), ("Ignore", None)]


def test_kueue_reads_labels_and_annotations() -> None:
    run = run_of(queue="team", topology="rack")
    *_, job_set = objects(run)
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    pod = pod_templates([job_set])["workers"]["template"]
    assert pod["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-preferred-topology": "rack"
    }
    *_, workers = objects(run, plain=True)
    assert workers["metadata"]["annotations"] == {
        "kueue.x-k8s.io/job-min-parallelism": "2",
        "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
    }
    assert (
        "annotations"
        not in objects(run_of(queue="q", nodes=(2, 2)), plain=True)[-1]["metadata"]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "GPT"}, "such as --name gpt-small"),
        ({"name": "1b"}, "a letter first"),
        ({"name": "a" * 43}, "at most 42"),
        ({"image": ""}, "such as --image"),
        ({"image": "a b"}, "such as --image"),
        ({"queue": "A"}, "such as --queue"),
        ({"namespace": "a.b"}, "such as --namespace"),
        ({"checkpoint_claim": "/saves"}, "such as --checkpoint-claim"),
        ({"topology": "rack 1"}, "such as --topology"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run_of(**given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpu", "NAME=QUANTITY"),
        ("cpu=four", "NAME=QUANTITY"),
        ("cpu=-1", "NAME=QUANTITY"),
        ("memory=16GB", "NAME=QUANTITY"),
        ("gpu=8", "nvidia.com/gpu"),
        ("nvidia.com/gpu=0.5", "whole number"),
        ("cpu=1,cpu=2", "given twice"),
    ],
)
def test_other_resources_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_resources(text)


def test_the_command_prints_yaml(run: Run) -> None:
    words = ("--name", "gpt", "--image", "i", "train.py", "--name", "x")
    found = run("launch", "kubernetes", "--nodes", "2-8", *words)
    assert found.code == 0
    kinds = [d["kind"] for d in yaml.safe_load_all(found.out)]
    assert kinds == ["Service", "JobSet"]
    assert_fails(run("launch", "kubernetes", "--nodes", "8-2", *words), "--nodes 2-8")


def test_the_command_writes_a_secret_for_its_owner(
    run: Run, tmp_path: pathlib.Path
) -> None:
    secret, out = tmp_path / "run.secret", tmp_path / "run.yaml"
    assert run("secret", secret).code == 0
    words = ("--name", "gpt", "--image", "i", "--nodes", 2, "--plain")
    files = ("--secret", secret, "--out", out)
    assert run("launch", "kubernetes", *words, *files, "train.py").code == 0
    kinds = [d["kind"] for d in yaml.safe_load_all(out.read_text())]
    assert kinds == ["Secret", "Service", "Job", "Job"]
    assert out.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("claim", ["", "saves"])
def test_published_schemas_take_it(claim: str) -> None:
    reason = "kubernetes-validate, which has the schemas, is not installed"
    validator: Any = pytest.importorskip("kubernetes_validate", reason=reason)
    run = run_of(
        checkpoint_claim=claim, secret="key", topology="zone", resources={"cpu": "4"}
    )
    for found in objects(run, plain=True):
        validator.validate(found, validator.latest_version(), strict=True)
