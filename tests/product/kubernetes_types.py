"""The fields of JobSet's and Kubeflow Trainer's objects, as far as our examples may use them.

Read from the Go types that the projects publish:

- JobSet 0.12.0 (b16bcb1b7b23), ``api/jobset/v1alpha2/jobset_types.go``
- Kubeflow Trainer 2.3.0 (658725bdae5c), ``pkg/apis/trainer/v1alpha1/trainingruntime_types.go`` and
  ``trainjob_types.go``

Left out: status, and patches of a runtime. Types of Kubernetes itself are validated by its own schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ANY = "any"  # a plain value, or what nothing here looks into
JOB = "batchv1.JobTemplateSpec"
CLAIM = "corev1.PersistentVolumeClaim"

_OBJECT = {"apiVersion": ANY, "kind": ANY, "metadata": ANY}

#: Type of each field, by the type that has it. ``[T]`` is a list of ``T``; a set holds all allowed values.
FIELDS: dict[str, dict[str, str | set[str]]] = {
    "JobSet": {**_OBJECT, "spec": "JobSetSpec"},
    "JobSetSpec": {
        "replicatedJobs": "[ReplicatedJob]",
        "network": "Network",
        "successPolicy": "SuccessPolicy",
        "failurePolicy": "FailurePolicy",
        "startupPolicy": "StartupPolicy",
        "suspend": ANY,
        "coordinator": "Coordinator",
        "managedBy": ANY,
        "ttlSecondsAfterFinished": ANY,
        "volumeClaimPolicies": "[VolumeClaimPolicy]",
    },
    "ReplicatedJob": {
        "name": ANY,
        "groupName": ANY,
        "template": JOB,
        "replicas": ANY,
        "dependsOn": "[DependsOn]",
    },
    "DependsOn": {"name": ANY, "status": {"Ready", "Complete"}},
    "Network": {"enableDNSHostnames": ANY, "subdomain": ANY, "publishNotReadyAddresses": ANY},
    "SuccessPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": ANY},
    "FailurePolicy": {
        "maxRestarts": ANY,
        "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
        "rules": "[FailurePolicyRule]",
    },
    "FailurePolicyRule": {
        "name": ANY,
        "action": {
            "FailJobSet",
            "RestartJobSet",
            "RestartJobSetAndIgnoreMaxRestarts",
            "RestartJob",
            "RestartJobAndIgnoreMaxRestarts",
        },
        "onJobFailureReasons": ANY,
        "onJobFailureMessagePatterns": ANY,
        "targetReplicatedJobs": ANY,
    },
    "StartupPolicy": {"startupPolicyOrder": {"AnyOrder", "InOrder"}},
    "Coordinator": {"replicatedJob": ANY, "jobIndex": ANY, "podIndex": ANY},
    "VolumeClaimPolicy": {"templates": f"[{CLAIM}]", "retentionPolicy": "VolumeRetentionPolicy"},
    "VolumeRetentionPolicy": {"whenDeleted": {"Delete", "Retain"}},
    "TrainingRuntime": {**_OBJECT, "spec": "TrainingRuntimeSpec"},
    "TrainingRuntimeSpec": {
        "mlPolicy": "MLPolicy",
        "podGroupPolicy": ANY,
        "template": "JobSetTemplateSpec",
    },
    "JobSetTemplateSpec": {"metadata": ANY, "spec": "JobSetSpec"},
    "MLPolicy": {
        "numNodes": ANY,
        "torch": "TorchMLPolicySource",
        "mpi": ANY,
        "flux": ANY,
        "jax": ANY,
        "xgboost": ANY,
    },
    "TorchMLPolicySource": {"envInjection": "EnvInjection"},
    "EnvInjection": {"targets": "[EnvInjectionTarget]"},
    "EnvInjectionTarget": {"jobName": ANY, "containerNames": ANY},
    "TrainJob": {**_OBJECT, "spec": "TrainJobSpec"},
    "TrainJobSpec": {
        "runtimeRef": "RuntimeRef",
        "initializer": ANY,
        "trainer": "Trainer",
        "runtimePatches": ANY,
        "suspend": ANY,
        "activeDeadlineSeconds": ANY,
        "managedBy": ANY,
    },
    "RuntimeRef": {"name": ANY, "apiGroup": ANY, "kind": {"TrainingRuntime", "ClusterTrainingRuntime"}},
    "Trainer": {
        "image": ANY,
        "command": ANY,
        "args": ANY,
        "env": ANY,
        "numNodes": ANY,
        "resourcesPerNode": ANY,
        "numProcPerNode": ANY,
    },
}

#: Status of a TrainJob that a container reports, from the same file.
STATUS: dict[str, set[str]] = {
    "UpdateTrainJobStatusRequest": {"trainerStatus"},
    "TrainerStatus": {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"},
    "Metric": {"name", "value"},
}

#: ``apiVersion`` of each kind.
VERSIONS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}


def wrong(value: Any, kind: str | set[str], where: str) -> Iterator[str]:
    """What does not fit the types, with its place.

    Args:
        value: as YAML has it.
        kind: the type that it should have.
        where: its place, for the message.
    """
    if isinstance(kind, set):
        if value not in kind:
            yield f"{where}: {value} is none of {sorted(kind)}"
    elif kind.startswith("["):
        for number, each in enumerate(value):
            yield from wrong(each, kind[1:-1], f"{where}[{number}]")
    elif kind in FIELDS:
        for field, each in value.items():
            if field in FIELDS[kind]:
                yield from wrong(each, FIELDS[kind][field], f"{where}.{field}")
            else:
                yield f"{where}: {kind} has no field {field}"
