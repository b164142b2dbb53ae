"""Names of all keys of a rendezvous."""

_ROOT = "ft_wrapper/rendezvous/1"

#: Register: the record. Never deleted.
RECORD_KEY = f"{_ROOT}/state"


def version_key(number: int) -> str:
    """Notification key: the record has this version. Waiters wake and read `RECORD_KEY`."""
    return f"{_ROOT}/version/{number}"


def log_key(epoch: int) -> str:
    """Log: admissions of nodes."""
    return f"{_ROOT}/log/{epoch}"


def count_key(epoch: int) -> str:
    """Counter: the admissions of a log. A hint; the log decides."""
    return f"{_ROOT}/count/{epoch}"


def incarnations_key(node_id: str) -> str:
    """Counter: number of agents that have had this id."""
    return f"{_ROOT}/incarnations/{node_id}"


def alive_key(name: str) -> str:
    """Counter or lease: a node's heartbeat."""
    return f"{_ROOT}/alive/{name}"


def process_key(node_id: str) -> str:
    """The process of the last agent with this id: see `executor.note_process`."""
    return f"{_ROOT}/process/{node_id}"


def endpoint_key(round_number: int) -> str:
    """Address of the store that the workers of a round use."""
    return f"{_ROOT}/endpoint/{round_number}"


def wake_endpoint(round_number: int) -> str:
    """Notification key of `endpoint_key`."""
    return f"{_ROOT}/wake/endpoint/{round_number}"


def agents_prefix(round_number: int) -> str:
    """Prefix of the store that the agents of a round share."""
    return f"{_ROOT}/agents/{round_number}"


def goodbye_key(name: str) -> str:
    """Set once a node has seen that the rendezvous is closed and no longer needs the store."""
    return f"{_ROOT}/goodbye/{name}"


def gone_key(name: str) -> str:
    """On etcd: set once a node has left the store; the last node to leave removes all keys."""
    return f"{_ROOT}/gone/{name}"


# In the store that the agents of a round share


def done_key(name: str) -> str:
    """Set once a node is done."""
    return f"done/{name}"


def end_key(node_id: str) -> str:
    """How a node's ranks have ended; empty if that is not known."""
    return f"end/{node_id}"
