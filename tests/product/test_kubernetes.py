"""The manifests for Kubernetes, as far as that can be tried without one: schemas, types, what has to agree.

What ftrun does in a pod is in ``pods/``.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate as validate
import pytest
from kubernetes_types import CLAIM, FIELDS, JOB, STATUS, VERSIONS, wrong
from manifests import BASE, CLUSTER, FILES, GIVEN, job_of, node_of, objects, pod_of, words_of

from ft_wrapper.agent.options import Options, parse_args
from ft_wrapper.agent.rounds import BAD_NODE, COMMAND_LINE, INFRASTRUCTURE, PROGRAM
from ft_wrapper.rendezvous.node_ids import NODE_ID_ENV

TIMEOUT = 60.0


def parsed(file: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """What ftrun makes of its command line in a pod, with the script and the secret in a folder."""
    (folder / "secret").write_text("0123456789abcdef")
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    for name, value in GIVEN.items():
        if file == "trainjob.yaml" or not name.startswith("PET_"):
            monkeypatch.setenv(name, value)
    for entry in node_of(file)["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", "-"))
    monkeypatch.setenv(NODE_ID_ENV, GIVEN["JOB_COMPLETION_INDEX"])  # as --supervise sets it for the agent
    assert "--supervise" in words_of(file)
    return parse_args([word.replace("/etc/train/", f"{folder}/") for word in words_of(file)])


def least_version(file: str) -> str:
    """The version of Kubernetes that a file's head names."""
    head = (CLUSTER / file).read_text().partition("apiVersion")[0]
    (found,) = re.findall(r"Kubernetes (1\.\d+) or later", head)
    return str(found)


def versions(file: str) -> list[str]:
    """From the least version to the newest one that there is a schema of, three in all."""
    least, newest = (int(text.split(".")[1]) for text in (least_version(file), validate.latest_version()))
    return [f"1.{least}", f"1.{(least + newest) // 2}", f"1.{newest}"]


def parts(file: str) -> Iterator[dict[str, Any]]:
    """What Kubernetes has a schema for: objects, and the Jobs and claims inside of the others."""

    def inside(value: Any, kind: str | set[str]) -> Iterator[dict[str, Any]]:
        if kind in (JOB, CLAIM):
            name = "Job" if kind == JOB else "PersistentVolumeClaim"
            version = "batch/v1" if kind == JOB else "v1"
            yield {"apiVersion": version, "kind": name, "metadata": {}, **value}
        elif isinstance(kind, str) and kind.startswith("["):
            for each in value:
                yield from inside(each, kind[1:-1])
        elif isinstance(kind, str) and kind in FIELDS:
            for field, each in value.items():
                yield from inside(each, FIELDS[kind].get(field, ""))

    for each in objects(file).values():
        yield from inside(each, each["kind"]) if each["kind"] in FIELDS else [each]


@pytest.mark.parametrize("file", FILES)
def test_objects_follow_the_schemas_of_kubernetes(file: str) -> None:
    found = list(parts(file))
    assert "Job" in [each["kind"] for each in found]
    for each in found:
        for version in versions(file):
            validate.validate(each, version, strict=True)


@pytest.mark.parametrize("file", ["jobset.yaml", "trainjob.yaml"])
def test_objects_have_the_fields_of_the_published_types(file: str) -> None:
    for (kind, name), each in objects(file).items():
        assert each["apiVersion"] == VERSIONS[kind]
        assert list(wrong(each, kind, name)) == []


def test_an_unknown_field_is_found() -> None:
    (jobset,) = objects("jobset.yaml").values()
    jobset["spec"]["failurePolicy"].update(maxRestart=3, restartStrategy="InPlace")
    assert list(wrong(jobset, "JobSet", "train")) == [
        "train.spec.failurePolicy.restartStrategy: InPlace is none of "
        "['BlockingRecreate', 'InPlaceRestart', 'Recreate']",
        "train.spec.failurePolicy: FailurePolicy has no field maxRestart",
    ]


# ftrun's command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_ftrun_takes_the_options(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(file, tmp_path, monkeypatch)
    assert options.rendezvous is not None
    own = str(options.rendezvous.local_addr)
    # Of this machine it is the name that is not known.
    assert [text for text in options.warnings if own not in text] == []
    assert options.rendezvous.backend == "etcd" and options.rendezvous.run_id == GIVEN["JOB_UID"]
    assert options.rendezvous.max_nodes == job_of(file).get("completions", int(GIVEN["PET_NNODES"]))
    assert options.job.nproc == 8 and options.secret == b"0123456789abcdef"
    prefix = "train" if file == "kubernetes.yaml" else "train-node-0"
    assert own == f"{prefix}-2.train"
    if file != "trainjob.yaml":
        assert str(options.job.nproc) == node_of(file)["resources"]["limits"]["nvidia.com/gpu"]
    grace = pod_of(file)["terminationGracePeriodSeconds"]
    assert options.drain_timeout + options.shutdown_timeout <= options.notice_grace < grace


@pytest.mark.parametrize("file", FILES)
def test_exit_codes_lead_to_what_ftrun_means_by_them(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = job_of(file)["podFailurePolicy"]["rules"]
    assert [condition["type"] for condition in rules[0]["onPodConditions"]] == ["DisruptionTarget"]
    assert rules[0]["action"] == "Ignore"
    actions = {}
    for rule in rules[1:]:
        assert rule["onExitCodes"]["containerName"] == node_of(file)["name"]
        actions.update(dict.fromkeys(rule["onExitCodes"]["values"], rule["action"]))
    restarted = {
        code
        for rule in node_of(file).get("restartPolicyRules", [])
        for code in rule["exitCodes"]["values"]
        if rule["action"] == "Restart"
    }
    actions.update(dict.fromkeys(restarted, "Restart"))
    drained = parsed(file, tmp_path, monkeypatch).drained_exit_code
    assert actions == {
        PROGRAM: "FailJob",
        COMMAND_LINE: "FailJob",
        INFRASTRUCTURE: "Restart" if file == "jobset.yaml" else "Count",
        BAD_NODE: "Count",
        drained: "Ignore",
    }
    assert pod_of(file)["restartPolicy"] == "Never"  # or there is no podFailurePolicy


# What has to agree ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_names_of_volumes_ports_and_secrets_agree(file: str) -> None:
    pod, container = pod_of(file), node_of(file)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert ("PersistentVolumeClaim", volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]) in BASE
    secret = BASE["Secret", volumes["secret"]["secret"]["secretName"]]
    (key,) = secret["stringData"]
    words = words_of(file)
    assert f"--job-secret-file={mounts['secret']}/{key}" in words
    assert any(word.startswith(f"--events={mounts['checkpoints']}/") for word in words)
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["TMPDIR"] == mounts["scratch"] and mounts["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    (port,) = container["ports"]
    assert f"--metrics=0.0.0.0:{port['containerPort']}" in words
    probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}
    longest = int(values["TORCHELASTIC_HEALTH_CHECK_TIMEOUT"])
    assert min(probe["timeoutSeconds"] for probe in probes) > longest
    labels = job_of(file)["template"]["metadata"]["labels"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == labels


def test_the_job_and_its_service_agree() -> None:
    service, job = BASE["Service", "train"], BASE["Job", "train"]
    spec, pod = job["spec"], pod_of("kubernetes.yaml")
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert service["spec"]["ports"] == [{"name": "metrics", "port": 9464}]
    assert spec["completions"] == spec["parallelism"] and spec["podReplacementPolicy"] == "Failed"


def test_etcd_agrees_with_itself_and_with_ftrun() -> None:
    etcd = BASE["StatefulSet", "train-etcd"]
    spec, pod = etcd["spec"], etcd["spec"]["template"]["spec"]
    name, labels = etcd["metadata"]["name"], spec["template"]["metadata"]["labels"]
    service = BASE["Service", spec["serviceName"]]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
    (container,) = pod["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    members = [f"{name}-{number}.{spec['serviceName']}" for number in range(spec["replicas"])]
    peers = [f"{member.split('.')[0]}=http://{member}:{ports['peer']}" for member in members]
    assert f"--initial-cluster={','.join(peers)}" in container["args"]
    assert (
        f"--advertise-client-urls=http://$(POD_NAME).{spec['serviceName']}:{ports['client']}"
        in container["args"]
    )
    endpoint = ",".join(f"{member}:{ports['client']}" for member in members)
    for file in FILES:
        assert f"--rdzv-endpoint={endpoint}" in words_of(file)
    budget = BASE["PodDisruptionBudget", name]["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert budget["minAvailable"] == spec["replicas"] // 2 + 1
    allowed = BASE["NetworkPolicy", name]["spec"]
    assert allowed["podSelector"]["matchLabels"] == labels
    sources = [source["podSelector"]["matchLabels"] for source in allowed["ingress"][0]["from"]]
    for file in FILES:
        assert job_of(file)["template"]["metadata"]["labels"] in sources
    assert labels in sources
    (mount,), (claim,) = container["volumeMounts"], spec["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"]
    assert f"--data-dir={mount['mountPath']}/etcd" in container["args"]


def test_what_all_jobs_share_has_one_label() -> None:
    labelled = {key for key, each in BASE.items() if each["metadata"].get("labels") == {"base": "train"}}
    assert BASE.keys() - labelled == {("Service", "train"), ("Job", "train")}
    for file in ("jobset.yaml", "trainjob.yaml"):
        assert "kubectl apply -l base=train -f kubernetes.yaml" in (CLUSTER / file).read_text()


def test_pods_are_locked_down() -> None:
    pods = [pod_of(file) for file in FILES] + [BASE["StatefulSet", "train-etcd"]["spec"]["template"]["spec"]]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]["memory"] and container["resources"]["limits"]["memory"]


def test_the_trainjob_uses_its_runtime() -> None:
    everything = objects("trainjob.yaml")
    runtime, job = everything["TrainingRuntime", "ft-wrapper"], everything["TrainJob", "train"]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": VERSIONS["TrainingRuntime"].partition("/")[0],
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # What Trainer's webhook wants of a runtime.
    assert replicated["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert replicated["replicas"] == 1 and node_of("trainjob.yaml")["name"] == "node"
    assert job["spec"]["trainer"]["args"] == node_of("trainjob.yaml")["args"]
    known = {entry["name"] for entry in node_of("trainjob.yaml")["env"]}
    assert {entry["name"] for entry in job["spec"]["trainer"]["env"]} <= known


# Progress ---------------------------------------------------------------------------------------------------

METRICS = """# TYPE ft_wrapper_step gauge
ft_wrapper_step{run_id="train"} 250.0
ft_wrapper_restarts_total{cause="exception",run_id="train"} 2.0
ft_wrapper_restarts_total{cause="join",run_id="train"} 1.0
ft_wrapper_last_progress_timestamp_seconds{run_id="train"} 1.7e+09
"""


class Trainer(http.server.BaseHTTPRequestHandler):
    """ftrun's metrics, and Trainer's server of a status."""

    def do_GET(self) -> None:
        self._answer(METRICS.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, self.headers["Authorization"], body))  # type: ignore[attr-defined]
        self._answer(b"{}")
        self.server.has_got.set()  # type: ignore[attr-defined]

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_progress_is_reported_in_trainers_own_fields(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trainer)
    server.got, server.has_got = [], threading.Event()  # type: ignore[attr-defined]
    (tmp_path / "token").write_text("t0\n")
    url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    reporter = subprocess.Popen(
        [sys.executable, CLUSTER / "trainer_progress.py", "--metrics", f"{url}/metrics", "--steps", "1000"],
        env={
            **os.environ,
            "KUBEFLOW_TRAINER_SERVER_URL": f"{url}/status",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        },
        stderr=subprocess.PIPE,
    )
    try:
        assert server.has_got.wait(TIMEOUT), "no status was posted"  # type: ignore[attr-defined]
    finally:
        reporter.kill()
        reporter.communicate()
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, authorization, body),) = server.got  # type: ignore[attr-defined]
    assert (path, authorization) == ("/status", "Bearer t0")
    assert body.keys() <= STATUS["UpdateTrainJobStatusRequest"]
    status = body["trainerStatus"]
    assert status.keys() <= STATUS["TrainerStatus"] and status["progressPercentage"] == 25
    assert {"name": "restarts", "value": "3"} in status["metrics"]
    assert all(metric.keys() == STATUS["Metric"] for metric in status["metrics"])


def test_progress_ends_where_trainer_takes_none() -> None:
    environment = {name: value for name, value in os.environ.items() if "KUBEFLOW" not in name}
    ended = subprocess.run(
        [sys.executable, CLUSTER / "trainer_progress.py", "--metrics", "http://localhost/", "--steps", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (ended.returncode, ended.stderr) == (
        0,
        "Trainer takes no status: its feature gate TrainJobStatus is off\n",
    )
