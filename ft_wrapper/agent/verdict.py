"""What the end of a job means for what has started it: the exit code says what to do, the file says why."""

import dataclasses
import json
from collections.abc import Iterable

# What there is to do: nothing; mend the program, for the same would happen again; mend the command line; try
# again here, for a machine, a network or a process was lost (EX_TEMPFAIL of sysexits.h); try on another node.
DONE, PROGRAM, COMMAND_LINE, INFRASTRUCTURE, BAD_NODE = 0, 1, 2, 75, 76
_NAMES = {0: "done", 1: "program", 2: "command line", 75: "infrastructure", 76: "bad node"}


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How a job has ended; or a node's part in it, if that ended before the job.

    Args:
        exit_code: for whatever has started it; see docs/launching.md.
        why: in a line, for people; empty if there is nothing to say.
        culprit: the rank whose failure it was; empty if it was none's.
        verdict: the exit code in a word; follows from the code if it is empty.
    """

    exit_code: int
    why: str = ""
    culprit: str = ""
    verdict: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self.verdict or _NAMES.get(self.exit_code, "signal"))

    def to_text(self) -> str:
        """The result as a JSON object, of one line."""
        return json.dumps(vars(self))

    @classmethod
    def from_text(cls, text: str) -> "JobResult | None":
        """Reads a result; None if the text is none."""
        return cls(**json.loads(text)) if text.startswith("{") else None


def worst(results: Iterable[JobResult | None]) -> JobResult | None:
    """The result of all together: one that says not to try again counts first, the first of equal ones.

    Args:
        results: what each node has said; None if one has said nothing.

    Returns:
        None if no node has said anything.
    """
    said = [result for result in results if result is not None]
    return min(said, key=lambda result: (result.exit_code == DONE, result.exit_code), default=None)
