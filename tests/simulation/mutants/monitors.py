"""Mistakes in what a rank's monitor does: heartbeats, silence, deaths, keeping the store in order."""

from __future__ import annotations

from .mutant import Mutant

NEIGHBOURS = "protocol/neighbours.py"
DEATH = "protocol/deaths.py"
HOUSEKEEPER = "protocol/housekeeping.py"
HEART = "monitor/heart.py"


def _job(name: str, file: str, old: str, new: str, why: str) -> Mutant:
    return Mutant(name, file, old, new, "job", why)


MUTANTS = [
    _job(
        "left-out-though-listed",
        NEIGHBOURS,
        "self.left_out = own - self._listed(self._head)",
        "self.left_out = own",
        "who is listed in a later iteration is on its way there",
    ),
    _job(
        "end-is-not-left-to-the-left-out",
        NEIGHBOURS,
        "        if self.left_out:\n            self._agreement.ends.end_iteration(view.n, FAULT)\n",
        "",
        "what the others did may have been deleted before a paused rank saw it",
    ),
    _job(
        "end-is-not-passed-on",
        NEIGHBOURS,
        "                self._agreement.ends.pass_on_end(view.n)\n",
        "                pass\n",
        "who ended the iteration may have died before it woke anybody",
    ),
    _job(
        "last-watches-nobody",
        NEIGHBOURS,
        "return (view.members[(start + step) % size] for step in range(1, size))",
        "return (view.members[start + step] for step in range(1, size - start))",
        "the members watch each other in a ring",
    ),
    _job(
        "watches-only-the-next",
        NEIGHBOURS,
        "                if stillness > (0.0 if still else self._timeout / _SOON):\n",
        "                if stillness >= self._timeout:\n",
        "behind a member that stands still the next one is watched at once",
    ),
    _job(
        "silent-too-early",
        NEIGHBOURS,
        "if stillness >= self._timeout:",
        "if stillness >= self._timeout / 2:",
        "silence is heartbeat_timeout without a heartbeat",
    ),
    _job(
        "silent-spare-ends",
        NEIGHBOURS,
        "active = sorted(silent - self._known_spares(view, watcher, silent)) if outcome is None else []",
        "active = sorted(silent) if outcome is None else []",
        "a spare's silence ends nothing",
    ),
    _job(
        "suspect-is-not-left-out",
        NEIGHBOURS,
        "if not self._agreement.iterations.advance(view, watcher, silent=silent):",
        "if not self._agreement.iterations.advance(view, watcher):",
        "who saw a silence goes on without the silent, once its rank has left",
    ),
    _job(
        "hearts-behind-are-not-looked-at",
        NEIGHBOURS,
        "if peer in own or (is_new and new >= max(1, _AHEAD * still)):",
        "if peer in own or new >= 1:",
        "behind a heart that stands still others are looked at",
    ),
    _job(
        "silence-ends-nothing",
        NEIGHBOURS,
        "if active or outcome is not None:",
        "if outcome is not None:",
        "a lost host ends the iteration",
    ),
    _job(
        "death-counted-before-it-is-logged",
        DEATH,
        """            ends.log_deaths(n, inside, ends=active, returns=returns)
            iterations.count_deaths(view, len(inside))
""",
        """            iterations.count_deaths(view, len(inside))
            ends.log_deaths(n, inside, ends=active, returns=returns)
""",
        "who makes the count full finds the death in the log",
    ),
    _job(
        "death-uncounted",
        DEATH,
        "            iterations.count_deaths(view, len(inside))\n",
        "",
        "who logs the last death decides at once",
    ),
    _job(
        "told-once",
        DEATH,
        "            kept |= iterations.arrivals_of(n) & inside.keys()\n",
        "",
        "a proposal that was under way may have kept the dead member",
    ),
    _job(
        "told-once-before-the-first",
        DEATH,
        "if view is None or ends.outcome_of(n) is not None:",
        "if view is not None and ends.outcome_of(n) is not None:",
        "the first decision may have been under way",
    ),
    _job(
        "told-once-of-a-joiner",
        DEATH,
        "if view is None or ends.outcome_of(n) is not None:",
        "if view is None:",
        "a proposal that was under way may let the dead joiner in",
    ),
    _job(
        "told-of-the-iteration-before",
        DEATH,
        "if head is not None and (view is None or head != view.head):",
        "if head is not None and view is None:",
        "the death is logged where the member is listed now",
    ),
    _job(
        "spare-by-an-old-iteration",
        DEATH,
        "            active = any(agreement.entering.may_be_active(view.n, member) for member in dead)\n",
        "",
        "who was a spare may be active in the next iteration",
    ),
    _job(
        "nobody-cleans-up",
        HOUSEKEEPER,
        "            self._past = past_keys(self._store, view, names)\n",
        "",
        "the keys of past iterations are deleted",
    ),
    _job(
        "lists-too-often",
        HOUSEKEEPER,
        "            names = self._store.list_keys()\n",
        "            names = sorted(set(name for _ in view.members * 30 for name in self._store.list_keys()))\n",
        "listing all keys is one member's work",
    ),
    _job(
        "keeps-house-before-the-rank-is-known",
        HEART,
        "if rank.rank == 0 and rank.view is not None:",
        "if not rank.rank and rank.view is not None:",
        "as long as the rank is not known it may be 0",
    ),
    _job(
        "view-is-not-told",
        "restart/loop.py",
        "                self.process.enter_iteration(self.member.view)\n",
        "",
        "the monitor knows the iteration before the ranks are assigned",
    ),
]
