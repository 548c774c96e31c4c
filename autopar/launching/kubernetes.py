"""Objects of Kubernetes for an elastic run (`autopar launch kubernetes`).

One pod has the supervisor, and each other pod is a host with an agent (`autopar
worker`). Both are pods of Jobs, in a JobSet or on their own:

- The agents' Job is indexed, with as many indexes as there may be hosts. A pod that has
  no node yet waits, and joins the run later.
- An agent that leaves ends with `SUSPENDED`, and with 0 only when the run is done. An
  index with status 0 is done for the Job, so any other end of a pod makes room for
  another pod. One index with status 0 completes the Job.
- The supervisor's pod has the run saved before it ends. Its status is `SUSPENDED` then,
  and a pod that takes its place goes on from what was saved.
- Pods find the supervisor by the name of a headless Service.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml

from autopar.elastic.processes.members import SUSPENDED
from autopar.errors import InputError

# Where the supervisor listens, and where pods keep what they write.
PORT = 7000
_FOLDER, CHECKPOINTS = "/autopar", "/checkpoints"
_SECRET_KEY = "secret"
# Saving takes up to 300 s, and workers leave within 60 s.
_SAVE_S, _LEAVE_S = 330, 90
# A pod may need minutes for its image before the supervisor is there.
_AWAY_S = 600
# Pods of the supervisor that may fail, pods of each host, and workers of each slot.
_RETRIES = 3
# The longest suffixes of Kubernetes and JobSet are those of pods:
# "-supervisor-0-0-abcde", and "-workers-0-1023-abcde".
_LONGEST_NAME = 63 - len("-supervisor-0-0-abcde")
_SUPERVISOR_RESOURCES = {"cpu": "500m", "memory": "1Gi"}

# RFC 1035 and RFC 1123, as Kubernetes reads them.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?\d+)?")
# Resources that are no devices; the names of devices have a slash.
_NATIVE = re.compile(r"cpu|memory|ephemeral-storage|hugepages-\w+")

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRun:
    """An elastic run on Kubernetes.

    Attributes:
      name: of the run and, with suffixes, of its objects.
      image: of all pods; it has autopar and the script.
      script: path of the script in the image, and its own arguments.
      nodes: fewest and most pods with workers.
      slots: number of workers of each of them.
      resources: of each of them, by Kubernetes' names.
      namespace: of all objects; '': that of the user.
      queue: Kueue's local queue; '': Kueue takes no part.
      topology: key of the node label that pods should have in common; '': any.
      checkpoint_claim: a volume claim that all pods mount; '': none.
      secret: of the run, as PEM text; '': a Secret of the cluster has it.

    Raises:
      InputError: an option is wrong.
    """

    name: str
    image: str
    script: tuple[str, ...]
    nodes: tuple[int, int]
    slots: int = 1
    resources: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    namespace: str = ""
    queue: str = ""
    topology: str = ""
    checkpoint_claim: str = ""
    secret: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        """Checks the names."""
        if not (_LABEL.fullmatch(self.name) and len(self.name) <= _LONGEST_NAME):
            raise InputError(
                f"--name {self.name!r}: Kubernetes takes lower-case letters, digits "
                "and dashes, with a letter first and no dash last, and at most "
                f"{_LONGEST_NAME} of them, such as --name gpt-small."
            )
        if not self.image or re.search(r"\s", self.image):
            raise InputError(
                f"--image {self.image!r}: expected the image that has autopar and "
                "the script, such as --image registry.example/gpt:1."
            )
        for option, value, form, example in (
            ("--namespace", self.namespace, _LABEL, "research"),
            ("--queue", self.queue, _SUBDOMAIN, "team-queue"),
            ("--checkpoint-claim", self.checkpoint_claim, _SUBDOMAIN, "gpt-saves"),
            ("--topology", self.topology, _KEY, "topology.kubernetes.io/zone"),
        ):
            if value and not form.fullmatch(value):
                raise InputError(
                    f"{option} {value!r} is no name that Kubernetes takes; give one "
                    f"such as {option} {example}."
                )

    @property
    def service(self) -> str:
        """Name of the Service, by which pods find the supervisor."""
        return f"{self.name}-supervisor"

    @property
    def secret_name(self) -> str:
        """Name of the Secret."""
        return f"{self.name}-secret"


def read_resources(text: str) -> dict[str, str]:
    """The resources of a pod, by Kubernetes' names.

    Args:
      text: such as ``cpu=4,memory=16Gi,nvidia.com/gpu=8``; '': none.

    Raises:
      InputError: it does not parse.

    >>> read_resources("cpu=4,nvidia.com/gpu=8")
    {'cpu': '4', 'nvidia.com/gpu': '8'}
    """
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, separator, amount = (x.strip() for x in part.partition("="))
        if not (separator and _KEY.fullmatch(name) and _QUANTITY.fullmatch(amount)):
            raise InputError(
                f"--resources: {part!r} is no NAME=QUANTITY; give some such as "
                "--resources cpu=4,memory=16Gi,nvidia.com/gpu=8."
            )
        if "/" not in name and not _NATIVE.fullmatch(name):
            raise InputError(
                f"--resources: Kubernetes has no resource {name!r}. Devices are named "
                "by their plugin, such as nvidia.com/gpu, google.com/tpu or "
                "amd.com/gpu."
            )
        if "/" in name and not amount.isdigit():
            raise InputError(
                f"--resources: {part!r} must be a whole number of devices, such as "
                f"{name}=8."
            )
        if name in found:
            raise InputError(f"--resources: {name} is given twice; give it once.")
        found[name] = amount
    return found


def objects(run: KubernetesRun, *, plain: bool = False) -> list[Object]:
    """The objects of a run, in the order in which they are created.

    Args:
      run: what is run.
      plain: whether there are two Jobs in place of a JobSet.
    """
    made = [_secret(run)] if run.secret else []
    made.append(_service(run))
    jobs = {"supervisor": _supervisor_job(run), "workers": _workers_job(run)}
    if not plain:
        return [*made, _job_set(run, jobs)]
    for component, spec in jobs.items():
        metadata = _metadata(run, f"{run.name}-{component}", component)
        if run.queue:
            metadata["labels"] |= _queue_label(run)
        if run.queue and component == "workers" and run.nodes[0] < run.nodes[1]:
            # Kueue starts the Job with fewer pods where its quota has no more.
            metadata["annotations"] = {
                "kueue.x-k8s.io/job-min-parallelism": str(run.nodes[0]),
                "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
            }
        made.append(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
            | {"spec": spec}
        )
    return made


def to_yaml(run: KubernetesRun, *, plain: bool = False) -> str:
    """The objects of a run as YAML, with a comment on its secret.

    Args:
      run: what is run.
      plain: whether there are two Jobs in place of a JobSet.
    """
    where = f"--namespace {run.namespace} " if run.namespace else ""
    comment = (
        "# This file has the secret of the run. Keep it from others.\n"
        if run.secret
        else "# The pods read the run's secret from a Secret. Create it first:\n"
        "#   autopar secret run.secret\n"
        f"#   kubectl {where}create secret generic {run.secret_name} "
        f"--from-file={_SECRET_KEY}=run.secret\n"
    )
    return comment + yaml.dump_all(
        objects(run, plain=plain),
        Dumper=_Dumper,
        explicit_start=True,
        sort_keys=False,
        width=88,
    )


class _Dumper(yaml.SafeDumper):
    """Quotes what kubectl would read as a number or a truth value, and repeats values.

    PyYAML follows YAML 1.1 with fewer forms than kubectl's reader has: to that, ``1e3``
    is a number and ``y`` is true.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "'" if re.match(r"[-+.]?[\d.]|[yYnN]$", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _metadata(run: KubernetesRun, name: str, component: str = "") -> Object:
    place = {"namespace": run.namespace} if run.namespace else {}
    return {"name": name, **place, "labels": _labels(run, component)}


def _labels(run: KubernetesRun, component: str = "") -> dict[str, str]:
    """The labels of an object; those with a component are of pods, too."""
    labels = {
        "app.kubernetes.io/name": "autopar",
        "app.kubernetes.io/instance": run.name,
    }
    return labels | ({"app.kubernetes.io/component": component} if component else {})


def _queue_label(run: KubernetesRun) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": run.queue}


def _secret(run: KubernetesRun) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(run, run.secret_name),
        "type": "Opaque",
        "data": {_SECRET_KEY: base64.b64encode(run.secret.encode()).decode()},
    }


def _service(run: KubernetesRun) -> Object:
    """The name of the supervisor: it has the address of that pod alone."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run, run.service, "supervisor"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(run, "supervisor"),
            "ports": [{"name": "run", "port": PORT}],
        },
    }


def _job_set(run: KubernetesRun, jobs: Mapping[str, Object]) -> Object:
    """A JobSet, which ends with its supervisor."""
    metadata = _metadata(run, run.name)
    if run.queue:
        metadata["labels"] |= _queue_label(run)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # The Service above is all that has to have a name.
            "network": {"enableDNSHostnames": False},
            "successPolicy": {
                "operator": "All",
                "targetReplicatedJobs": ["supervisor"],
            },
            # The Jobs replace their own pods.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": component, "replicas": 1, "template": {"spec": spec}}
                for component, spec in jobs.items()
            ],
        },
    }


def _supervisor_job(run: KubernetesRun) -> Object:
    least, most = (n * run.slots for n in run.nodes)
    claim = run.checkpoint_claim
    folder = f"{CHECKPOINTS}/{run.name}-run" if claim else f"{_FOLDER}/run"
    container = {
        "name": "supervisor",
        "image": run.image,
        "command": [
            *("autopar", "run", "--listen", f"$(POD_IP):{PORT}"),
            *("--processes", str(least), "--min", str(least), "--max", str(most)),
            *("--restarts", str(_RETRIES * most), "--folder", folder),
            *map(_literal, run.script),
        ],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        ],
        "ports": [{"name": "run", "containerPort": PORT}],
        "resources": {
            "requests": dict(_SUPERVISOR_RESOURCES),
            "limits": {"memory": _SUPERVISOR_RESOURCES["memory"]},
        },
        # Has the run saved, and waits for that: the container ends with its process 1.
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": ["sh", "-c", "while kill -USR1 1; do sleep 1; done"]
                }
            }
        },
    }
    template = _pod(run, "supervisor", container, _SAVE_S)
    if not claim:
        # What a pod has saved is lost with it: another one could not go on.
        return {"backoffLimit": 0, "template": template}
    # Wrong input stays wrong.
    wrong = {"action": "FailJob", **_on_status("supervisor", 2)}
    return {
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {"rules": [wrong, *_ignore_exits("supervisor")]},
        "template": template,
    }


def _workers_job(run: KubernetesRun) -> Object:
    most = run.nodes[1]
    container = {
        "name": "worker",
        "image": run.image,
        "command": [
            *("autopar", "worker", "--supervisor", f"{run.service}:{PORT}"),
            *("--slots", str(run.slots), "--folder", f"{_FOLDER}/worker"),
            *("--grace", str(_AWAY_S), "--leave-status", str(SUSPENDED)),
        ],
        "env": [],
        "resources": (
            {"requests": dict(run.resources), "limits": dict(run.resources)}
            if run.resources
            else {}
        ),
    }
    template = _pod(run, "workers", container, _LEAVE_S)
    if run.topology:
        _prefer_topology(run, template)
    return {
        "completionMode": "Indexed",
        "parallelism": most,
        "completions": most,
        "backoffLimit": _RETRIES * most,
        "podFailurePolicy": {"rules": _ignore_exits("worker")},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": template,
    }


def _ignore_exits(container: str) -> list[Object]:
    """Ends of pods that are no failures: they have left, or were asked to go."""
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return [
        {"action": "Ignore", **_on_status(container, SUSPENDED)},
        {"action": "Ignore", "onPodConditions": disrupted},
    ]


def _on_status(container: str, status: int) -> Object:
    return {
        "onExitCodes": {
            "containerName": container,
            "operator": "In",
            "values": [status],
        }
    }


def _pod(run: KubernetesRun, component: str, container: Object, grace_s: int) -> Object:
    """The template of a pod, with what all pods have."""
    reference = {"name": run.secret_name, "key": _SECRET_KEY}
    container["env"] += [
        {"name": "AUTOPAR_SECRET", "valueFrom": {"secretKeyRef": reference}},
        # The user of an image may have no home that can be written to.
        {"name": "XDG_STATE_HOME", "value": f"{_FOLDER}/state"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    volumes: list[Object] = [{"name": "autopar", "emptyDir": {}}]
    mounts = [{"name": "autopar", "mountPath": _FOLDER}]
    if component == "workers":
        # Containers have 64 MiB there, which is too little for NCCL.
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if run.checkpoint_claim:
        claim = {"claimName": run.checkpoint_claim}
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
        mounts.append({"name": "checkpoints", "mountPath": CHECKPOINTS})
    container["volumeMounts"] = mounts
    return {
        "metadata": {"labels": _labels(run, component)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace_s,
            "containers": [container],
            "volumes": volumes,
        },
    }


def _prefer_topology(run: KubernetesRun, template: Object) -> None:
    """Asks for nodes with one value of the label, for as many pods as there are."""
    if run.queue:
        key = "kueue.x-k8s.io/podset-preferred-topology"
        template["metadata"]["annotations"] = {key: run.topology}
        return
    term = {
        "topologyKey": run.topology,
        "labelSelector": {"matchLabels": _labels(run, "workers")},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    template["spec"]["affinity"] = {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    }


def _literal(word: str) -> str:
    """A word of a command, of which Kubernetes replaces nothing.

    >>> _literal("$(HOSTNAME)")
    '$$(HOSTNAME)'
    """
    return word.replace("$", "$$")
