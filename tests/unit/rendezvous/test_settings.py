"""Configuration: what is read, and one error for each mistake that names it and the way out."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from ft_wrapper.rendezvous.backends import TcpBackend
from ft_wrapper.rendezvous.node_ids import node_id_from_environment
from ft_wrapper.rendezvous.settings import (
    Identity,
    RendezvousSettings,
    etcd_address,
    parameters_from_url,
    read_parameters,
    read_timeout,
)
from ft_wrapper.store import TCPStoreServer
from ft_wrapper.store.address import EtcdAddress


def parameters(**config: object) -> RendezvousParameters:
    return RendezvousParameters("ft", "localhost:1", "job", 1, 2, "here", **config)


def test_reads_what_torchrun_hands_over() -> None:
    settings, identity = read_parameters(
        parameters(timeout=900, join_timeout="60", keep_alive_max_attempt="2", is_host="0", node_id="7")
    )
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("job", 1, 2)
    assert (settings.join_timeout, settings.last_call_timeout) == (60.0, 30.0)
    assert settings.keep_alive_timeout == 10.0
    assert identity == Identity("7", "here")


def test_reads_a_url() -> None:
    read = parameters_from_url("ft://host:29500/my%20job?min_workers=1&max_nodes=3&join_timeout=5")
    assert (read.backend, read.endpoint, read.run_id) == ("ft", "host:29500", "my job")
    assert (read.min_nodes, read.max_nodes, read.config) == (1, 3, {"join_timeout": "5"})


def etcd(options: str) -> RendezvousParameters:
    return parameters_from_url(f"etcd://a,b:1/my%20job?min_workers=1&max_workers=3&{options}")


def test_reads_where_etcd_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ETCDCTL_USER", "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"):
        monkeypatch.delenv(variable, raising=False)
    # Programs pass is_host to any backend; torch's etcd takes it too.
    read = etcd("is_host=1&timeout=5&etcd_prefix=/team/&cacert=ca.pem&ttl=60")
    settings, _ = read_parameters(read)
    assert (settings.run_id, settings.max_nodes, settings.join_timeout) == ("my job", 3, 5.0)
    assert etcd_address(read) == EtcdAddress("a:2379,b:1", "team/my job", ca="ca.pem", ttl=60)
    assert read_timeout(read) == 60.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("store_type=tcp", "store_type=tcp: unknown option"),
        ("ttl=5", "ttl=5: must be at least 10 seconds"),
        ("etcd_prefix=/", "etcd_prefix is empty"),
    ],
)
def test_mistakes_on_etcd(options: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_parameters(etcd(options))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"join_timeot": "1"}, "join_timeot=1: unknown option; did you mean join_timeout"),
        ({"xyz": "1"}, "xyz=1: unknown option; there are: join_timeout"),
        ({"join_timeout": "soon"}, "join_timeout=soon: is not a number"),
        ({"join_timeout": "0"}, "join_timeout=0.0 must be more than 0"),
        ({"join_timeout": "inf"}, "join_timeout=inf must be more than 0 seconds, and at most"),
        ({"last_call_timeout": "-1"}, "last_call_timeout=-1.0 must be at least 0"),
        ({"keep_alive_max_attempt": "1.5"}, "keep_alive_max_attempt=1.5: is not a whole number"),
        ({"keep_alive_max_attempt": "0"}, "keep_alive_max_attempt=0 is too small"),
        ({"nproc": "0"}, "nproc=0 is too small"),
        ({"node_id": "a b"}, "node_id='a b' must consist of"),
        ({"store_type": "file"}, "store_type=file: must be tcp"),
        ({"read_timeout": "0"}, "read_timeout=0.0 must be"),
        ({"is_host": "perhaps"}, "is_host"),
    ],
)
def test_mistakes(config: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_parameters(parameters(**config))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("host:1/job", "must look like ft://"),
        ("ft://host:1?min_nodes=1&max_nodes=1", "must look like"),
        ("ft://host:1/job?min_nodes=1", "max_nodes is missing"),
        ("ft://host:1/job?min_nodes=1&max_nodes=2&min_workers=1", "min_nodes is given twice"),
        ("ft://host:1/job?min_nodes=one&max_nodes=2", "min_nodes=one: is not a whole number"),
    ],
)
def test_mistakes_in_a_url(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parameters_from_url(url)


def test_contradictions() -> None:
    with pytest.raises(ValueError, match="min_nodes=3 is more than max_nodes=2; use --nnodes MIN:MAX"):
        RendezvousSettings("job", 3, 2)
    with pytest.raises(TypeError, match=r"min_nodes=1\.5 must be an int"):
        RendezvousSettings("job", 1.5, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="run_id='' must not be empty"):
        RendezvousSettings("", 1, 2)


def test_node_id_of_a_cluster_manager() -> None:
    assert node_id_from_environment({}) is None
    assert node_id_from_environment({"SLURM_PROCID": "0"}) is None, "a batch script's own"
    assert node_id_from_environment({"SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}) == "3"
    assert node_id_from_environment({"JOB_COMPLETION_INDEX": "2"}) == "2"


def test_first_node_of_a_machine_hosts_the_store_and_the_next_one_uses_it() -> None:
    first = TcpBackend("localhost:0")
    second = TcpBackend(f"localhost:{first.port}")
    assert (first.is_host, second.is_host) == (True, False)
    first.connect().set("key", "value")
    assert second.connect().get("key") == b"value"
    assert second.local_address() == "localhost"
    second.close()
    first.close()


def test_endpoints_that_do_not_work() -> None:
    server = TCPStoreServer(0)
    with pytest.raises(RendezvousConnectionError, match="must host the store but cannot"):
        TcpBackend(f"localhost:{server.port}", is_host=True)
    port = server.port
    server.close()
    with pytest.raises(RendezvousConnectionError, match=f"localhost:{port}.*cannot be reached"):
        TcpBackend(f"localhost:{port}", is_host=False, read_timeout=0.1)
    with pytest.raises(ValueError, match="port 0 lets the host"):
        TcpBackend("localhost:0", is_host=False)


def test_entry_point_imports_nothing_of_torch_elastic() -> None:
    code = "import sys, ft_wrapper.rendezvous; print([m for m in sys.modules if 'elastic' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
