"""Makes the Kubernetes objects of an elastic run (`autopar launch kubernetes`).

One pod runs the supervisor. Each other pod is a host of the run, with an agent
(`autopar worker`) that starts workers. The supervisor's pod and the agents' pods belong
to two Jobs, in a JobSet or standalone:

- The agents' Job is an indexed Job with one index for each host that the run may have.
  If there is no node for a pod yet, the pod waits, and joins the run later.
- If an agent leaves the run, its exit status is `SUSPENDED`. Only if the run is done,
  it is 0. The Job counts an index as done if its pod ends with status 0. After any
  other status, it starts another pod for the index. One index that is done completes
  the Job.
- Before the supervisor's pod ends, it saves the run, and ends with the status
  `SUSPENDED`. The pod that replaces it continues from the saved state.
- Pods find the supervisor by the DNS name of a headless Service.
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

# The port on which the supervisor listens, and the folders to which pods write.
PORT = 7000
_FOLDER, CHECKPOINTS = "/autopar", "/checkpoints"
_SECRET_KEY = "secret"
# Seconds that Kubernetes must give pods before it kills them: a save takes up to 300 s,
# and workers leave within 60 s.
_SAVE_S, _LEAVE_S = 330, 90
# Seconds for which agents wait for the supervisor. The supervisor's pod may need
# minutes to load its image.
_AWAY_S = 600
# How many failures are allowed of the supervisor's pods, of the pods of each host, and
# of the workers of each slot.
_RETRIES = 3
# The most characters of a run's name. The longest suffixes that Kubernetes and JobSet
# add to it are in the names of pods: "-supervisor-0-0-abcde" and
# "-workers-0-1023-abcde".
_LONGEST_NAME = 63 - len("-supervisor-0-0-abcde")
_SUPERVISOR_RESOURCES = {"cpu": "500m", "memory": "1Gi"}

# What names may look like by RFC 1035 and RFC 1123, as Kubernetes applies these rules.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?\d+)?")
# Names of resources that are not devices. Names of devices have a slash.
_NATIVE = re.compile(r"cpu|memory|ephemeral-storage|hugepages-\w+")

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRun:
    """An elastic run on Kubernetes.

    Attributes:
      name: name of the run and, with suffixes, of its objects.
      image: image of all pods, which contains autopar and the script.
      script: path of the script in the image, and its own arguments.
      nodes: smallest and largest number of pods with workers.
      slots: number of workers in each of these pods.
      resources: Kubernetes' name of a resource -> how much each of these pods gets.
      namespace: namespace of all objects; '': the user's namespace.
      queue: name of the local queue of Kueue; '': Kueue is not used.
      topology: name of a node label. Kubernetes should prefer nodes with the same value
        of this label for all pods. '': no preference.
      checkpoint_claim: name of a persistent volume claim that all pods mount; '': none.
      secret: secret of the run, as PEM text; '': it is already in a Secret in the
        cluster.

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
        """Name of the Service by which pods find the supervisor."""
        return f"{self.name}-supervisor"

    @property
    def secret_name(self) -> str:
        """Name of the Secret."""
        return f"{self.name}-secret"


def read_resources(text: str) -> dict[str, str]:
    """Reads a pod's resources from a text with Kubernetes' names.

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
    """The Kubernetes objects of a run, in the order in which to create them.

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
            # With this annotation, Kueue starts the Job with fewer pods if its quota
            # does not allow more.
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
    """The Kubernetes objects of a run as YAML, with a comment about the secret.

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
    """Writes YAML that kubectl reads correctly: quotes texts that look like numbers or
    booleans, and writes no aliases for repeated values.

    PyYAML alone does not quote enough: kubectl reads ``1e3`` as a number and ``y`` as
    true, and PyYAML does not.
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
    """The labels of an object. With ``component`` they are labels for pods, too."""
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
    """The Service that gives the supervisor a DNS name, which resolves to the
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
            # Pods need no DNS names; the Service has one.
            "network": {"enableDNSHostnames": False},
            "successPolicy": {
                "operator": "All",
                "targetReplicatedJobs": ["supervisor"],
            },
            # The JobSet must not restart: the Jobs replace their pods themselves.
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
        # This hook makes the supervisor save the run, and waits until it is saved. The
        # hook must wait, because the container ends when its process 1 ends.
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
        # Without a volume, the state that a pod saves is lost with the pod. So another
        # pod could not continue.
        return {"backoffLimit": 0, "template": template}
    # Exit status 2 is an input error. A new pod would fail in the same way.
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
    """Rules for which ends of pods do not count as failures: the pod left the run, or
    was asked to leave it.
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
    """The template of a pod, with what all pods have in common."""
    reference = {"name": run.secret_name, "key": _SECRET_KEY}
    container["env"] += [
        {"name": "AUTOPAR_SECRET", "valueFrom": {"secretKeyRef": reference}},
        # The user that an image sets may have no writable home folder.
        {"name": "XDG_STATE_HOME", "value": f"{_FOLDER}/state"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    volumes: list[Object] = [{"name": "autopar", "emptyDir": {}}]
    mounts = [{"name": "autopar", "mountPath": _FOLDER}]
    if component == "workers":
        # By default a container has 64 MiB of shared memory, too little for NCCL.
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
    """Adds a preference for nodes with the same value of the label ``topology`` for all
    pods.
    """
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
    """Escapes a word of a command, so that Kubernetes does not expand variables in it.

    >>> _literal("$(HOSTNAME)")
    '$$(HOSTNAME)'
    """
    return word.replace("$", "$$")
