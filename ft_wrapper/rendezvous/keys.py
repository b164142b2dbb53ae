"""Names of the keys of a rendezvous."""

_ROOT = "ft_wrapper/rendezvous/1"

#: RecordRegister: the record. Never deleted.
RECORD_KEY = f"{_ROOT}/state"


def version_key(number: int) -> str:
    """Written once the record has this version: waiters wake and read `RECORD_KEY`."""
    return f"{_ROOT}/version/{number}"


def log_key(epoch: int) -> str:
    """Log: nodes that ask to be let in."""
    return f"{_ROOT}/log/{epoch}"


def count_key(epoch: int) -> str:
    """Counts the admissions of a log. A hint: the log decides."""
    return f"{_ROOT}/count/{epoch}"


def incarnations_key(node_id: str) -> str:
    """Counter: how many agents have had this id."""
    return f"{_ROOT}/incarnations/{node_id}"


def alive_key(name: str) -> str:
    """A node's heartbeat."""
    return f"{_ROOT}/alive/{name}"


def process_key(node_id: str) -> str:
    """Which process the last agent with this id is: see `executor.note_process`."""
    return f"{_ROOT}/process/{node_id}"


def endpoint_key(round_number: int) -> str:
    """Address of the store that the workers of a round use."""
    return f"{_ROOT}/endpoint/{round_number}"


def wake_endpoint(round_number: int) -> str:
    """Set once that is written."""
    return f"{_ROOT}/wake/endpoint/{round_number}"


def agents_prefix(round_number: int) -> str:
    """Prefix of the store that the agents of a round share."""
    return f"{_ROOT}/agents/{round_number}"


def goodbye_key(name: str) -> str:
    """Set once a node has seen that the rendezvous is closed, and no longer needs the store."""
    return f"{_ROOT}/goodbye/{name}"


def gone_key(name: str) -> str:
    """Set once a node has left the store, where the last one removes everything."""
    return f"{_ROOT}/gone/{name}"
