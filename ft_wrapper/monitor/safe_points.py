"""Safe and unsafe points: where an interruption may be raised without skipping a clean-up.

A thread is at a safe point if every frame is, from the innermost one up to the function's. A frame is at an
unsafe point

- by its function: a method of a context manager, a finalizer, a ``close``, logging, an import; or torch's
  call from C++ into Python, through which an exception cannot always pass (the process may abort);
- by its instruction: it makes, enters or leaves a ``with``, or is in a ``finally``, or is between a call and
  the ``try`` that undoes this call.

The unsafe instructions of a code object are worked out once, from its bytecode and exception table. This
module does not import torch, and keeps no state but that cache.
"""

import dis
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

# Unsafe as a whole, and quickly done: the protocols; what threading.Condition calls between releasing its
# lock and waiting, and back; what ExitStack does between entering a context and noting how to leave it.
_PROTOCOLS = frozenset(["__enter__", "__exit__", "__aenter__", "__aexit__", "close", "aclose"])
_SWALLOW = frozenset(["__del__"])  # Python ignores exceptions raised inside
_HALF_WAY = frozenset(["_release_save", "_acquire_restore", "enter_context", "enter_async_context"])
_LOGGING = os.path.dirname(logging.info.__code__.co_filename)
_IMPORT = "<frozen importlib"
# The functions that torch's C++ calls, and the torch modules that such a call passes on its way to them.
_DISPATCH = frozenset(
    ["__torch_dispatch__", "__torch_function__", "find_torch_dispatch_rule", "_get_dispatch"]
)
_ENTRY_MODULES = (
    "_compile.py",
    "_dynamo/",
    "compiler/",
    "_ops.py",
    "_library/",
    "_subclasses/",
    "utils/_python_dispatch.py",
)


class Obstacle(NamedTuple):
    """Why an interruption may not be raised now. Without frames it may.

    Args:
        frames: the frames at an unsafe point, the outermost last.
        for_good: whether no wait makes it safe: an import, or torch's C++ between the frames.
        finalizer: the outermost ``__del__``: Python swallows exceptions raised inside.
    """

    frames: tuple[FrameType, ...]
    for_good: bool
    finalizer: FrameType | None


def obstacle(frame: FrameType | None, end: CodeType) -> Obstacle:
    """Returns why no interruption may be raised in a thread now.

    Args:
        frame: the thread's innermost frame.
        end: the code of the first frame that no longer counts.
    """
    unsafe: list[FrameType] = []
    finalizer = None
    for_good = False
    only_torch = True  # from the innermost frame up to here
    while frame is not None and frame.f_code is not end:
        known = _known(frame.f_code)
        if known.for_good or (known.entered_from_torch and only_torch):
            unsafe.append(frame)
            for_good = True
        elif known.always_unsafe or frame.f_lasti in known.unsafe:
            unsafe.append(frame)
        if known.finalizer:
            finalizer = frame
        only_torch = only_torch and known.torch
        frame = frame.f_back
    return Obstacle(tuple(unsafe), for_good, finalizer)


def prepare(frame: FrameType | None, end: CodeType) -> None:
    """Fills the cache for a later `obstacle` at the same frames.

    Args:
        frame: the innermost frame of a thread, which may run meanwhile.
        end: the code of the first frame that does not count; without such a frame this does nothing.
    """
    codes = []  # not the frames: this thread must not free the objects they hold
    while frame is not None and frame.f_code is not end:
        codes.append(frame.f_code)
        frame = frame.f_back
    if frame is not None:
        for code in codes:
            _known(code)


class _Known(NamedTuple):
    """What is known of a code object.

    Args:
        for_good: whether it is unsafe however long it takes.
        always_unsafe: whether it is unsafe at every instruction.
        finalizer: whether Python swallows exceptions raised inside.
        torch: whether it is torch's.
        entered_from_torch: whether torch's C++ calls it.
        unsafe: offsets of its unsafe instructions.
    """

    for_good: bool
    always_unsafe: bool
    finalizer: bool
    torch: bool
    entered_from_torch: bool
    unsafe: frozenset[int]


# By identity: equal code objects can be of different files. The code is kept so that its id stays its own.
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
        always_unsafe=name in _PROTOCOLS | _SWALLOW | _HALF_WAY or file.startswith(_LOGGING),
        finalizer=name in _SWALLOW,
        torch=is_torch,
        entered_from_torch=is_torch and torch is not None and file.startswith(_ENTRY_MODULES, len(torch)),
        unsafe=unsafe_offsets(code),
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


def unsafe_offsets(code: CodeType) -> frozenset[int]:
    """Returns the offsets (as `f_lasti`) of the instructions that are unsafe points."""
    return _Code(code).unsafe() if code.co_exceptiontable else frozenset()


class _Code:
    """A code object taken apart. Instructions and handlers are numbered by their position in the list."""

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
        self._unsafe: set[int] = set()

    def unsafe(self) -> frozenset[int]:
        copies = self._finally_copies()
        # An exception raised by a tracer at POP_EXCEPT skips the handler that restores the exception handled
        # before.
        self._unsafe |= copies | {k for k, name in enumerate(self.names) if name == "POP_EXCEPT"}
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
        # While a frame calls, its f_lasti is the last inline cache entry before the next instruction.
        ends = [*(each.offset for each in self.instructions[1:]), len(self.code.co_code)]
        return frozenset(
            offset for k in self._unsafe for offset in range(self.instructions[k].offset, ends[k], 2)
        )

    def _after(self, k: int, each: dis.Instruction) -> list[int]:
        """The instructions that may follow one without an exception."""
        found = [k + 1] if each.opname not in _ENDS and k + 1 < len(self.instructions) else []
        if each.opcode in _HAVE_TARGET and each.argval in self.at:
            found.append(self.at[each.argval])
        return found

    # Per instruction: the handlers that an exception passes, and the handlers that it is part of.

    def _from_table(self, entries: Iterable[Any]) -> tuple[list[frozenset[int]], list[frozenset[int]]]:
        innermost: list[int | None] = [None] * len(self.instructions)
        for entry in entries:
            for offset in range(entry.start, entry.end, 2):
                if offset in self.at:
                    innermost[self.at[offset]] = self.at[entry.target]
        # A handler is itself guarded by code that restores the exception handled before: COPY 3, ...
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
        """What a handler is for; None if an interruption passes it."""
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

    # Marking unsafe instructions.

    def _finally_copies(self) -> set[int]:
        """Both copies of each ``finally``: after an exception and, found by its source, without one."""
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
        """Marks the beginning of a handler: its exception does not yet count as being handled."""
        self._unsafe.add(handler)
        k = handler
        if kind == _WITH:
            while self.names[k] != "WITH_EXCEPT_START":
                k += 1
                self._unsafe.add(k)
            self._mark_await(k + 1)
        elif self.names[handler] != "PUSH_EXC_INFO":
            # It restores the exception handled before, and raises its own again.
            for k in self._straight(handler):
                self._unsafe.add(k)
                if self.names[k] in ("RERAISE", "END_ASYNC_FOR", "CLEANUP_THROW"):
                    return

    def _mark_entering(self, k: int) -> None:
        """Marks from a ``with``'s entry back to the call that made the context manager."""
        left, made = [k], list[int]()
        while left:
            k = left.pop()
            if k not in self._unsafe:
                self._unsafe.add(k)
                (made if self.names[k] in _ENTERS else left).extend(self.before[k])
        while made:
            k = made.pop()
            self._unsafe.update(self._call(k))
            if self.names[k] in _MADE or self.names[k].startswith(("STORE_", "JUMP_", "POP_JUMP_")):
                made += [before for before in self.before[k] if before not in self._unsafe]

    def _mark_leaving(self, k: int) -> None:
        """Marks from where a ``with`` is left up to its call of ``__exit__``."""
        for passed in self._straight(k):
            self._unsafe.update(self._call(passed))
            if self._calls(passed):
                self._mark_await(passed + 1)
                return

    def _mark_await(self, k: int) -> None:
        if self.names[k] == "GET_AWAITABLE":
            while self.names[k] in _AWAITS:
                self._unsafe.add(k)
                k += 1

    def _mark_back_to_call(self, k: int, handler: int) -> None:
        """Marks from the start of a ``try`` back to the call before it."""
        left, seen = [k], set[int]()
        while left:
            k = left.pop()
            if k in seen or handler in self.guards[k] or self.names[k] == "FOR_ITER":
                continue
            seen.update(self._call(k))
            if not self._calls(k):
                left += self.before[k]
        self._unsafe |= seen

    def _mark_up_to(self, k: int, copies: set[int]) -> None:
        """Marks from where a ``try`` is left up to its ``finally``, if this path leads there."""
        passed: set[int] = set()
        for each in self._straight(k):
            if each in copies:
                self._unsafe |= passed
                return
            if self._calls(each):
                return
            passed.add(each)

    def _call(self, k: int) -> tuple[int, ...]:
        """The instruction, with its PRECALL if it is a call (Python 3.11)."""
        return (k - 1, k) if k and self.names[k - 1] == "PRECALL" else (k,)

    def _calls(self, k: int) -> bool:
        return self.names[k].startswith("CALL") and not self.names[k].startswith("CALL_INTRINSIC")

    def _straight(self, k: int) -> Iterator[int]:
        """The instructions from one on, up to a branch or an end."""
        seen: set[int] = set()
        while k not in seen:
            seen.add(k)
            yield k
            following = self.after[k]
            if len(following) == 1:
                (k,) = following
