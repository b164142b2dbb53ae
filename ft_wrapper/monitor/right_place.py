"""Where an interrupt may be raised, so that it skips nothing that would be undone later.

Every frame from the innermost up to the function's counts. A frame is at a wrong place

- by what it is: a method of a context manager, a finalizer, a ``close``, logging, an import; or torch's call
  from C++ into Python, through which an exception may not pass at every moment (the process would abort);
- by its instruction: it makes, enters or leaves a ``with``, has not yet begun the ``try`` that undoes the
  last call, or is in a ``finally``.

The instructions are worked out once per code object, from its bytecode and exception table. Nothing here
imports torch, nor keeps any state but that cache.
"""

import dis
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

# Quickly passed, and not to be left half-way: the protocols; what threading.Condition calls between releasing
# its lock and waiting, and back; what ExitStack does between entering and noting how to leave.
_PROTOCOLS = frozenset(["__enter__", "__exit__", "__aenter__", "__aexit__", "close", "aclose"])
_SWALLOW = frozenset(["__del__", "unraisable_hook"])  # Python ignores what is raised in there
_HALF_WAY = frozenset(["_release_save", "_acquire_restore", "enter_context", "enter_async_context"])
_LOGGING = os.path.dirname(logging.info.__code__.co_filename)
_IMPORT = "<frozen importlib"
# What torch's C++ calls, and the modules that such a call goes through before it comes to one of these.
_DISPATCH = frozenset(
    ["__torch_dispatch__", "__torch_function__", "find_torch_dispatch_rule", "_get_dispatch"]
)
_DOORS = (
    "_compile.py",
    "_dynamo/",
    "compiler/",
    "_ops.py",
    "_library/",
    "_subclasses/",
    "utils/_python_dispatch.py",
)


class Obstacle(NamedTuple):
    """Why an interrupt may not be raised now; without frames it may.

    Args:
        frames: the frames at a wrong place, the outermost last.
        for_good: whether waiting long changes nothing: an import, or torch's C++ in between.
        finalizer: the outermost ``__del__`` or ``sys.unraisablehook``: what is raised inside is swallowed.
    """

    frames: tuple[FrameType, ...]
    for_good: bool
    finalizer: FrameType | None


def obstacle(frame: FrameType | None, end: CodeType) -> Obstacle:
    """Returns why nothing may be raised in a thread that stands here.

    Args:
        frame: the thread's innermost frame.
        end: the code of the frame that is outside, and all that called it.
    """
    wrong: list[FrameType] = []
    finalizer = None
    for_good = False
    only_torch = True  # from the innermost frame up to here
    while frame is not None and frame.f_code is not end:
        known = _known(frame.f_code)
        if known.for_good or (known.door and only_torch):
            wrong.append(frame)
            for_good = True
        elif known.passing or frame.f_lasti in known.wrong:
            wrong.append(frame)
        if known.finalizer:
            finalizer = frame
        only_torch = only_torch and known.torch
        frame = frame.f_back
    return Obstacle(tuple(wrong), for_good, finalizer)


def prepare(frame: FrameType | None, end: CodeType) -> None:
    """Works out beforehand what `obstacle` would have to, for a thread that stands here.

    Args:
        frame: the innermost frame, of a thread that may go on meanwhile.
        end: the code of the frame that is outside; nothing is done where no frame has it.
    """
    codes = []  # and no frames: what they hold is not to be freed in this thread
    while frame is not None and frame.f_code is not end:
        codes.append(frame.f_code)
        frame = frame.f_back
    if frame is not None:
        for code in codes:
            _known(code)


class _Known(NamedTuple):
    for_good: bool
    passing: bool
    finalizer: bool
    torch: bool
    door: bool
    wrong: frozenset[int]


# By identity: equal code objects can be of different files. Each is kept, so that no other gets its identity.
_cache: dict[int, tuple[CodeType, _Known]] = {}
_CACHE_SIZE = 4096


def _known(code: CodeType) -> _Known:
    found = _cache.get(id(code))
    if found is None:
        if len(_cache) >= _CACHE_SIZE:
            _cache.clear()
        found = _cache[id(code)] = (code, _look_at(code))
    return found[1]


def _look_at(code: CodeType) -> _Known:
    name, file = code.co_name, code.co_filename
    root = getattr(sys.modules.get("torch"), "__file__", None)
    torch = os.path.dirname(root) + os.sep if root else None
    is_torch = torch is not None and file.startswith(torch)
    return _Known(
        for_good=file.startswith(_IMPORT) or name in _DISPATCH,
        passing=name in _PROTOCOLS | _SWALLOW | _HALF_WAY or file.startswith(_LOGGING),
        finalizer=name in _SWALLOW,
        torch=is_torch,
        door=is_torch and torch is not None and file.startswith(_DOORS, len(torch)),
        wrong=wrong_offsets(code),
    )


# ---- from the bytecode

_HAVE_TARGET = frozenset(dis.hasjrel)
_JUMPS = frozenset(["JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"])
_ENDS = _JUMPS | frozenset(["RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"])
_ENTERS = frozenset(["BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL"])
_YIELDS = frozenset(["SEND", "YIELD_VALUE", "RESUME", "JUMP_BACKWARD_NO_INTERRUPT", "END_SEND"])
_AWAITS = _YIELDS | frozenset(["GET_AWAITABLE", "LOAD_CONST"])
# Between making a context manager and entering it: `with a() as b`, `with (b := a())`, `with a() or b()`.
_MADE = _AWAITS | frozenset(["NOP", "COPY", "SWAP", "EXTENDED_ARG", "LOAD_SPECIAL"])
_MATCHES = frozenset(["CHECK_EXC_MATCH", "CHECK_EG_MATCH"])

_WITH, _FINALLY, _EXCEPT_ALL = "with", "finally", "except all"


def wrong_offsets(code: CodeType) -> frozenset[int]:
    """Returns the offsets of the instructions (as `f_lasti`) at which a frame must not be interrupted."""
    return _Code(code).wrong() if code.co_exceptiontable else frozenset()


class _Code:
    """A code object taken apart; instructions go by their position in the list, handlers by theirs."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        bytecode: Any = dis.Bytecode(code)
        self.instructions: list[dis.Instruction] = list(bytecode)
        self.names = [each.opname for each in self.instructions]
        self.at = {each.offset: k for k, each in enumerate(self.instructions)}
        self.after = [self._after(k, each) for k, each in enumerate(self.instructions)]
        self.before: list[list[int]] = [[] for _ in self.instructions]
        for k, following in enumerate(self.after):
            for after in following:
                self.before[after].append(k)
        self.guards, self.handles = self._from_table(bytecode.exception_entries)
        self.kinds = {handler: self._kind(handler) for handler in frozenset().union(*self.guards)}
        self._wrong: set[int] = set()

    def wrong(self) -> frozenset[int]:
        copies = self._finally_copies()
        # What a tracer raises at POP_EXCEPT goes past the handler that would restore what was handled before.
        self._wrong |= copies | {k for k, name in enumerate(self.names) if name == "POP_EXCEPT"}
        for handler, kind in self.kinds.items():
            self._mark_handler(handler, kind)
        for k, guards in enumerate(self.guards):
            for after in self.after[k]:
                if self.guards[after] is guards:
                    continue  # as nearly everywhere
                for handler in self.guards[after] - guards:
                    if self.kinds[handler] == _WITH:
                        self._mark_entering(k)
                    elif self.kinds[handler] is not None:
                        self._mark_back_to_call(k, handler)
                for handler in guards - self.guards[after]:
                    if self.kinds[handler] == _WITH:
                        self._mark_leaving(after)
                    elif self.kinds[handler] == _FINALLY:
                        self._mark_up_to(after, copies)
        # A frame that calls stands at the last of the inline caches, which come before the next instruction.
        ends = [*(each.offset for each in self.instructions[1:]), len(self.code.co_code)]
        return frozenset(
            offset for k in self._wrong for offset in range(self.instructions[k].offset, ends[k], 2)
        )

    def _after(self, k: int, each: dis.Instruction) -> list[int]:
        """Where an instruction goes on without an exception."""
        found = [k + 1] if each.opname not in _ENDS and k + 1 < len(self.instructions) else []
        if each.opcode in _HAVE_TARGET and each.argval in self.at:
            found.append(self.at[each.argval])
        return found

    # Per instruction: the handlers that an exception goes through, and those that it is part of.

    def _from_table(self, entries: Iterable[Any]) -> tuple[list[frozenset[int]], list[frozenset[int]]]:
        innermost: list[int | None] = [None] * len(self.instructions)
        for entry in entries:
            for offset in range(entry.start, entry.end, 2):
                if offset in self.at:
                    innermost[self.at[offset]] = self.at[entry.target]
        # A handler's own instructions are guarded by what restores the exception handled before: COPY 3, ...
        restored = {
            restores: handler
            for handler in {each for each in innermost if each is not None}
            if (restores := innermost[handler]) is not None and self.names[restores] == "COPY"
        }
        # One set for all instructions with the same innermost handler.
        chains: dict[int | None, tuple[frozenset[int], frozenset[int]]] = {}
        for first in set(innermost):
            chain: set[int] = set()
            handler = first
            while handler is not None and handler not in chain:
                chain.add(handler)
                handler = innermost[handler]
            handled = (restored[each] for each in chain & restored.keys())
            chains[first] = frozenset(chain), frozenset(each for each in handled if each not in chain)
        guards = [chains[first][0] for first in innermost]
        return guards, [chains[first][1] for first in innermost]

    def _kind(self, handler: int) -> str | None:
        """What a handler is for; None where it does nothing about an interrupt."""
        rest = iter(self.names[handler:])
        if next(rest) != "PUSH_EXC_INFO":
            return None
        name = next(rest)
        if name == "WITH_EXCEPT_START":
            return _WITH
        if name == "POP_TOP":
            return _EXCEPT_ALL
        while name.startswith(("LOAD_", "CALL", "PRECALL", "BUILD_", "LIST_", "PUSH_", "EXTENDED")):
            name = next(rest)
        if name in _MATCHES:
            return _EXCEPT_ALL if "BaseException" in self.code.co_names else None
        return _FINALLY

    # What is marked as wrong.

    def _finally_copies(self) -> set[int]:
        """Both copies of each ``finally``: the one after an exception, and by its source the one without."""
        finals = {handler for handler, kind in self.kinds.items() if kind == _FINALLY}
        if not finals:
            return set()
        inside = {k for k, handlers in enumerate(self.handles) if not finals.isdisjoint(handlers)}
        sources = [None if line is None else (line, *rest) for line, *rest in self.code.co_positions()]
        artificial = ("PUSH_EXC_INFO", "RERAISE", "COPY", "POP_EXCEPT")
        copied = {
            sources[self.instructions[k].offset // 2] for k in inside if self.names[k] not in artificial
        }
        copied.discard(None)
        copies = inside | {
            k for k, each in enumerate(self.instructions) if sources[each.offset // 2] in copied
        }
        for k, before in enumerate(self.before):  # jumps have no source
            if before and sources[self.instructions[k].offset // 2] is None and copies.issuperset(before):
                copies.add(k)
        return copies

    def _mark_handler(self, handler: int, kind: str | None) -> None:
        """The beginning of a handler: its exception is not yet the one that is being handled."""
        self._wrong.add(handler)
        k = handler
        if kind == _WITH:
            while self.names[k] != "WITH_EXCEPT_START":
                k += 1
                self._wrong.add(k)
            self._mark_await(k + 1)
        elif self.names[handler] != "PUSH_EXC_INFO":
            # It restores what was there before, and goes on with the exception.
            for k in self._straight(handler):
                self._wrong.add(k)
                if self.names[k] in ("RERAISE", "END_ASYNC_FOR", "CLEANUP_THROW"):
                    return

    def _mark_entering(self, k: int) -> None:
        """Back from where a ``with`` is entered to the call that made the context manager."""
        left, made = [k], list[int]()
        while left:
            k = left.pop()
            if k not in self._wrong:
                self._wrong.add(k)
                (made if self.names[k] in _ENTERS else left).extend(self.before[k])
        while made:
            k = made.pop()
            self._wrong.update(self._call(k))
            if self.names[k] in _MADE or self.names[k].startswith(("STORE_", "JUMP_", "POP_JUMP_")):
                made += [before for before in self.before[k] if before not in self._wrong]

    def _mark_leaving(self, k: int) -> None:
        """From where a ``with`` is left up to its call of ``__exit__``."""
        for passed in self._straight(k):
            self._wrong.update(self._call(passed))
            if self._calls(passed):
                self._mark_await(passed + 1)
                return

    def _mark_await(self, k: int) -> None:
        if self.names[k] == "GET_AWAITABLE":
            while self.names[k] in _AWAITS:
                self._wrong.add(k)
                k += 1

    def _mark_back_to_call(self, k: int, handler: int) -> None:
        """Back from where a ``try`` begins to the call before it."""
        left, seen = [k], set[int]()
        while left:
            k = left.pop()
            if k in seen or handler in self.guards[k] or self.names[k] == "FOR_ITER":
                continue
            seen.update(self._call(k))
            if not self._calls(k):
                left += self.before[k]
        self._wrong |= seen

    def _mark_up_to(self, k: int, copies: set[int]) -> None:
        """From where a ``try`` is left up to its ``finally``, if there is one on this way."""
        passed: set[int] = set()
        for each in self._straight(k):
            if each in copies:
                self._wrong |= passed
                return
            if self._calls(each):
                return
            passed.add(each)

    def _call(self, k: int) -> tuple[int, ...]:
        """The instruction, and what belongs to it if it is a call (Python 3.11: PRECALL, CALL)."""
        return (k - 1, k) if k and self.names[k - 1] == "PRECALL" else (k,)

    def _calls(self, k: int) -> bool:
        return self.names[k].startswith("CALL") and not self.names[k].startswith("CALL_INTRINSIC")

    def _straight(self, k: int) -> Iterator[int]:
        """From an instruction on as long as there is one way to go on."""
        seen: set[int] = set()
        while k not in seen:
            seen.add(k)
            yield k
            following = self.after[k]
            if len(following) == 1:
                (k,) = following
