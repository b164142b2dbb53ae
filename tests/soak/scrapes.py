"""Reads the metrics of agents as Prometheus does, and looks whether they make sense."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections import defaultdict

try:
    from prometheus_client.parser import text_string_to_metric_families
except ImportError:
    text_string_to_metric_families = None

TIMEOUT = 10.0  # seconds for an answer, of an agent that is busy on a busy machine
COUNTED = ("_total", "_count", "_sum", "_bucket")
RESTARTS = "ft_wrapper_restarts_total"

Sample = tuple[str, tuple[tuple[str, str], ...]]  # name and labels


class Scrapes:
    """What was read of the agents, and what was wrong with it."""

    def __init__(self) -> None:
        self.count = 0
        self.wrong: list[str] = []
        self._newest: dict[int, dict[Sample, float]] = defaultdict(dict)  # by the agent's process

    def take(self, agent: int, port: int, *, is_starting: bool = False) -> None:
        """Reads once.

        Args:
            agent: its process.
            port: where it answers, on this host.
            is_starting: whether it may not answer yet.
        """
        if text_string_to_metric_families is None:
            return
        try:
            found = parse(read(port))
        except (OSError, http.client.HTTPException) as error:
            if not is_starting:
                self.wrong.append(f"agent {agent} does not tell its metrics: {error!r}")
            return
        except ValueError as error:
            self.wrong.append(f"the metrics of agent {agent} cannot be read: {error}")
            return
        self.count += 1
        for (name, labels), value in self._newest[agent].items():
            now = found.get((name, labels))
            if name.endswith(COUNTED) and (now is None or now < value):
                self.wrong.append(f"agent {agent}: {name}{dict(labels)} went from {value} to {now}")
        self._newest[agent] = found

    def restarts(self) -> int:
        """How many restarts the agents have counted together, up to the last look at each."""
        every = (
            value for found in self._newest.values() for (name, _), value in found.items() if name == RESTARTS
        )
        return int(sum(every))


def read(port: int) -> str:
    """Reads the metrics of an agent on this host.

    Raises:
        OSError: it does not answer, or with an error.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT) as answer:
        return answer.read().decode()


def parse(text: str) -> dict[Sample, float]:
    """The values by name and labels.

    Raises:
        ValueError: it is not what Prometheus reads.
    """
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
