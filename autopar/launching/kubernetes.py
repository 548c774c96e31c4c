"""Kubernetes objects for an elastic run (`autopar launch kubernetes`).

One pod runs the supervisor. Each other pod is a host with an agent (`autopar worker`).
The pods belong to two Jobs, which are in a JobSet or standalone:

- The agents' Job is indexed and has one index for each possible host. A pod without a
  node waits, and joins the run later.
- An agent that leaves the run ends with the status `SUSPENDED`. An agent ends with
  status 0 only if the run is done. The Job counts an index with status 0 as done; after
  any other end of a pod, another pod takes its place. One index with status 0 completes
  the Job.
- The supervisor's pod saves the run before the pod ends, with the status `SUSPENDED`.
  The pod that replaces it continues from the saved state.
- Pods find the supervisor under the name of a headless Service.
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

# The port of the supervisor, and the folders to which pods write.
PORT = 7000
_FOLDER, CHECKPOINTS = "/autopar", "/checkpoints"
_SECRET_KEY = "secret"
# Saving takes up to 300 s, and workers leave within 60 s.
_SAVE_S, _LEAVE_S = 330, 90
# Seconds that pods wait for the supervisor, whose pod may need minutes to load its
# image.
_AWAY_S = 600
# The most failures of the supervisor's pods, of each host's pods, and of each slot's
# workers.
_RETRIES = 3
# The longest suffixes that Kubernetes and JobSet add are in names of pods:
# "-supervisor-0-0-abcde" and "-workers-0-1023-abcde".
_LONGEST_NAME = 63 - len("-supervisor-0-0-abcde")
_SUPERVISOR_RESOURCES = {"cpu": "500m", "memory": "1Gi"}

# Names by RFC 1035 and RFC 1123, as Kubernetes applies them.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?\d+)?")
# Resources that are not devices; names of devices have a slash.
_NATIVE = re.compile(r"cpu|memory|ephemeral-storage|hugepages-\w+")

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRun:
    """An elastic run on Kubernetes.

    Attributes:
      name: name of the run and, with suffixes, of its objects.
      image: image of all pods, which contains autopar and the script.
      script: path of the script in the image, and its own arguments.
      nodes: least and most number of pods with workers.
      slots: number of workers of each such pod.
      resources: resources of each such pod, by Kubernetes' names.
      namespace: namespace of all objects; '': the user's namespace.
      queue: Kueue's local queue; '': Kueue is not used.
      topology: key of a node label; pods should run on nodes with the same value of
        this label. '': no preference.
      checkpoint_claim: a volume claim that all pods mount; '': none.
      secret: secret of the run, as PEM text; '': a Secret of the cluster holds it.

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
        """Name of the Service under which pods find the supervisor."""
        return f"{self.name}-supervisor"

    @property
    def secret_name(self) -> str:
        """Name of the Secret."""
        return f"{self.name}-secret"


def read_resources(text: str) -> dict[str, str]:
    """Parses the resources of a pod, by Kubernetes' names.

    Args:
      text: such as ``cpu=4,memory=16Gi,nvidia.com/gpu=8``; '': none.

    Raises:
      InputError: the text cannot be parsed.

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
      run: the run.
      plain: whether to use two standalone Jobs instead of a JobSet.
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
            # Kueue starts the Job with fewer pods if its quota allows no more.
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
      run: the run.
      plain: whether to use two standalone Jobs instead of a JobSet.
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
    """Quotes texts that kubectl would read as numbers or booleans, and writes no
    aliases for repeated values.

    PyYAML follows YAML 1.1, but recognises fewer forms than kubectl's reader: kubectl
    reads ``1e3`` as a number and ``y`` as true.
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
    """The labels of an object; labels with a component are also labels of pods."""
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
    """The Service that gives the supervisor its name; it has only the address of the
    supervisor's pod.
    """
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
    """A JobSet, which ends when its supervisor ends."""
    metadata = _metadata(run, run.name)
    if run.queue:
        metadata["labels"] |= _queue_label(run)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # Only the Service above needs a DNS name.
            "network": {"enableDNSHostnames": False},
            "successPolicy": {
                "operator": "All",
                "targetReplicatedJobs": ["supervisor"],
            },
            # The Jobs replace their pods themselves.
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
        # The hook saves the run and waits until it is saved, because the container ends
        # with its process 1.
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
        # The state that a pod saves is lost with the pod, so another pod could not
        # continue.
        return {"backoffLimit": 0, "template": template}
    # After an input error, a new pod would fail in the same way.
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
    """Rules for ends of pods that do not count as failures: the pod left the run, or
    was asked to leave.
    """
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
    """The template of a pod, with the parts that all pods share."""
    reference = {"name": run.secret_name, "key": _SECRET_KEY}
    container["env"] += [
        {"name": "AUTOPAR_SECRET", "valueFrom": {"secretKeyRef": reference}},
        # The user of an image may have no writable home folder.
        {"name": "XDG_STATE_HOME", "value": f"{_FOLDER}/state"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    volumes: list[Object] = [{"name": "autopar", "emptyDir": {}}]
    mounts = [{"name": "autopar", "mountPath": _FOLDER}]
    if component == "workers":
        # By default containers have 64 MiB of shared memory, which is too little for
        # NCCL.
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
    """Prefers nodes with the same value of the label for all pods."""
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
    """Escapes a word of a command, so that Kubernetes replaces no variables in it.

    >>> _literal("$(HOSTNAME)")
    '$$(HOSTNAME)'
    """
    return word.replace("$", "$$")
