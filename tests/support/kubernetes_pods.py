"""Runs the pods of a manifest as processes of this machine (Linux, root).

A pod has its own process and mount namespaces. So its command is process 1, and the
Service's name resolves to an address on loopback. Folders replace volumes: in commands
and variables, their paths replace mount paths.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from checkout import ROOT
from processes import FLAGS

LIMIT_S = 120.0
_ENTER = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
_PLACES = (ROOT, ROOT / "solver", ROOT / "passes", ROOT / "tests" / "support")


def why_not() -> str:
    """The reason why such pods are not available; '' if they are."""
    if os.geteuid() != 0:
        return "namespaces of processes need root"
    for program in ("unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    words = [*_NAMESPACES, "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    made = subprocess.run(words, capture_output=True, text=True)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def wait_for(done: Callable[[], Any], what: Callable[[], str]) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def pod_templates(documents: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates of a manifest's Jobs, by component."""
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        if document["kind"] == "JobSet":
            for job in document["spec"]["replicatedJobs"]:
                found[job["name"]] = job["template"]["spec"]
        elif document["kind"] == "Job":
            labels = document["metadata"]["labels"]
            found[labels["app.kubernetes.io/component"]] = document["spec"]
    return found


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replaces ``$(NAME)`` as Kubernetes does; ``$$`` becomes a dollar."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^()]+)\)", value, text)


class Cluster:
    """Runs the pods of a manifest."""

    def __init__(self, manifest: str, folder: pathlib.Path) -> None:
        self.documents = list(yaml.safe_load_all(manifest))
        self.jobs = pod_templates(self.documents)
        self.folder = folder
        self.pods: list[Pod] = []
        self.hosts = folder / "hosts"
        self.secrets = {
            (d["metadata"]["name"], key): base64.b64decode(value).decode()
            for d in self.documents
            if d["kind"] == "Secret"
            for key, value in d["data"].items()
        }
        bin_ = folder / "bin"
        bin_.mkdir()
        program = bin_ / "autopar"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m autopar "$@"\n')
        program.chmod(0o755)
        self.path = f"{bin_}:{os.environ['PATH']}"
        self.resolve("127.0.0.1")

    def resolve(self, address: str) -> None:
        """Sets the address to which the Service's name resolves."""
        name = next(d for d in self.documents if d["kind"] == "Service")["metadata"]
        with open(self.hosts, "r+" if self.hosts.exists() else "w") as file:
            file.truncate()  # The file stays the same, because pods have it mounted.
            file.write(f"127.0.0.1 localhost\n{address} {name['name']}\n")

    def start(self, component: str) -> Pod:
        """Starts a pod of a Job. The Service's name resolves to a supervisor's pod."""
        number = len(self.pods)
        address = f"127.{1 + os.getpid() % 250}.{1 + number}.1"
        if component == "supervisor":
            self.resolve(address)
        pod = Pod(self, component, f"{component}-{number}", address)
        self.pods.append(pod)
        return pod

    def output(self) -> str:
        """What all pods have printed."""
        return "\n".join(f"--- {p.name}\n{p.output()}" for p in self.pods)

    def close(self) -> None:
        """Kills all pods."""
        for pod in self.pods:
            pod.kill()


class Pod:
    """A running pod with one container."""

    def __init__(
        self, cluster: Cluster, component: str, name: str, address: str
    ) -> None:
        self.cluster, self.name, self.address = cluster, name, address
        self.spec = cluster.jobs[component]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        values = {e["name"]: self._value(e) for e in self.container["env"]}
        variables = {
            **os.environ,
            "PATH": cluster.path,
            "PYTHONPATH": os.pathsep.join(map(str, _PLACES)),
            "XLA_FLAGS": FLAGS,
            "JAX_PLATFORMS": "cpu",
            **{k: self._on_disk(v) for k, v in values.items()},
        }
        words = [expand(w, values) for w in self.container["command"]]
        words = [words[0], *map(self._on_disk, words[1:])]
        enter = ["sh", "-c", _ENTER, "sh", str(cluster.hosts)]
        self._output = cluster.folder / f"{name}.output"
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [*_NAMESPACES, *enter, *words],
                env=variables,
                cwd=ROOT / "tests" / "support",
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return variable["value"]
        source = variable["valueFrom"]
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "status.podIP"
            return self.address
        reference = source["secretKeyRef"]
        return self.cluster.secrets[reference["name"], reference["key"]]

    def _on_disk(self, text: str) -> str:
        """Replaces the mount path of a volume by the path of its folder."""
        volumes = {v["name"]: v for v in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            if not text.startswith(mount["mountPath"] + "/"):
                continue
            claim = volumes[mount["name"]].get("persistentVolumeClaim")
            place = "claim" if claim else f"{self.name}-{mount['name']}"
            rest = text.removeprefix(mount["mountPath"] + "/")
            return str(self.cluster.folder / place / rest)
        return text

    def output(self) -> str:
        return self._output.read_text()

    @property
    def first(self) -> int:
        """The id of the container's process 1 on this machine; 0 if it has ended."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(pathlib.Path(children).read_text().split()[0])
        return 0

    def terminate(self) -> int:
        """Ends the pod as a node does; returns the exit status of the container."""
        end = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            enter = ["nsenter", f"--target={self.first}", "--pid", "--mount"]
            words = [*enter, *hook["exec"]["command"]]
            hooked = subprocess.Popen(words, stderr=subprocess.DEVNULL)
            while self.process.poll() is None and hooked.poll() is None:
                assert time.monotonic() < end, self.cluster.output()
                time.sleep(0.05)
            hooked.kill()  # the container has ended
            hooked.wait()
        with contextlib.suppress(OSError):
            if (first := self.first) and self.process.poll() is None:
                os.kill(first, signal.SIGTERM)
        return self.process.wait(max(0.1, end - time.monotonic()))

    def wait(self) -> int:
        """Waits until the container has ended; returns its exit status."""
        wait_for(lambda: self.process.poll() is not None, self.cluster.output)
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
