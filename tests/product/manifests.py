"""The manifests for Kubernetes, read as Kubernetes reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
FILES = ("kubernetes.yaml", "jobset.yaml", "trainjob.yaml")

#: What Kubernetes and the controllers set in a pod of a job ``train``, beside what the manifests set.
GIVEN = {
    "JOB_COMPLETION_INDEX": "2",
    "JOB_UID": "d3b5",
    "JOBSET_NAME": "train",
    # Trainer's, with `torch: {}`
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


def objects(file: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of a file, by kind and name."""
    found = list(yaml.safe_load_all((CLUSTER / file).read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


BASE = objects("kubernetes.yaml")


def job_of(file: str) -> dict[str, Any]:
    """The Job's spec in a file, as Kubernetes gets it."""
    everything = objects(file)
    if file == "kubernetes.yaml":
        return dict(everything["Job", "train"]["spec"])
    owner = (
        everything.get(("JobSet", "train")) or everything["TrainingRuntime", "ft-wrapper"]["spec"]["template"]
    )
    (replicated,) = owner["spec"]["replicatedJobs"]
    return dict(replicated["template"]["spec"])


def pod_of(file: str) -> dict[str, Any]:
    """The pod's spec in a file."""
    return dict(job_of(file)["template"]["spec"])


def node_of(file: str) -> dict[str, Any]:
    """The container in which ftrun runs."""
    (container,) = pod_of(file)["containers"]
    return dict(container)


def words_of(file: str, **given: str) -> list[str]:
    """What ftrun is started with.

    Args:
        file: of the manifest.
        given: what is set in this pod rather than `GIVEN`.
    """
    container = node_of(file)
    values = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    words = expanded([*container["command"], *container["args"]], {**values, **GIVEN, **given})
    return words[words.index("ftrun") + 1 :]


def etcd_words(pod: str) -> list[str]:
    """What a member of etcd is started with; the first word is the program."""
    (container,) = BASE["StatefulSet", "train-etcd"]["spec"]["template"]["spec"]["containers"]
    return expanded([*container["command"], *container["args"]], {"POD_NAME": pod})


def expanded(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Words with the values of variables, as Kubernetes puts them in."""
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in words]


def action(file: str, code: int, *, disrupted: bool = False) -> str:
    """What the Job does about a pod that has failed; Count is what it does where no rule fits.

    Args:
        file: of the manifest.
        code: exit code of ftrun.
        disrupted: whether Kubernetes has ended the pod for the sake of something else.
    """
    for rule in job_of(file)["podFailurePolicy"]["rules"]:
        if disrupted if "onPodConditions" in rule else code in rule["onExitCodes"]["values"]:
            return str(rule["action"])
    return "Count"
