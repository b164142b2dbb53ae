"""Where an interrupt may be raised: tried at every instruction of small functions, and of all that they call.

Each function takes something and gives it back; most are drawn from what a function may consist of. What is
raised at an instruction that is called safe must leave nothing taken; and so that this says something, there
must be unsafe ones that do leave it.
"""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
from support.apart import apart
from support.nightly import at_night

from ft_wrapper.monitor import safe_points
from ft_wrapper.monitor.safe_points import obstacle, unsafe_offsets

DRAWS = 60
"""Functions that are drawn for a test."""


class Interrupt(BaseException):
    pass


class Ledger:
    """Counts what is taken, in Python, so that each step of it can be interrupted."""

    def __init__(self) -> None:
        self.taken = 0
        self.worked = 0

    def take(self) -> None:
        self.taken += 1

    def give(self) -> None:
        self.taken -= 1

    def work(self) -> bool:
        self.worked += 1
        return True

    def taking(self) -> Taking:
        return Taking(self)

    def taken_when_made(self) -> TakenWhenMade:
        return TakenWhenMade(self)

    @contextlib.contextmanager
    def generator(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.give()


class Taking:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __enter__(self) -> Ledger:
        self.ledger.take()
        return self.ledger

    def __exit__(self, *_: object) -> None:
        self.ledger.give()

    async def __aenter__(self) -> Ledger:
        await Pause()
        self.ledger.take()
        return self.ledger

    async def __aexit__(self, *_: object) -> None:
        self.ledger.give()
        await Pause()


class TakenWhenMade(Taking):
    """As torch.set_grad_enabled: the constructor has the effect."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        ledger.take()

    def __enter__(self) -> Ledger:
        return self.ledger


class Aliased(Taking):
    """As threading.Semaphore: entering does not happen under the name ``__enter__``."""

    def acquire(self) -> None:
        self.ledger.take()

    __enter__ = acquire  # type: ignore[assignment]


class Pause:
    def __await__(self) -> Iterator[None]:
        yield


WITHS = (
    "ledger.taking()",
    "ledger.taking() as entered",
    "ledger.taking() as ledger.entered",
    "ledger.taken_when_made()",
    "ledger.taken_when_made() as entered",
    "ledger.generator()",
    "Aliased(ledger)",
    "ledger.taken_when_made() if ledger.work() else ledger.taking()",
    "(entered := ledger.taken_when_made())",
    "ledger.taken_when_made() as one, ledger.taking() as two",
    "contextlib.suppress(KeyError), ledger.taking()",
)
GIVES = (["ledger.give()"], ["for i in range(3):", "    if i == 2:", "        ledger.give()"])


class Drawn:
    """Draws the lines of a function that gives back what it takes."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)

    def function(self) -> Callable[[Ledger], object]:
        lines = [*self.taking(depth=2, loops=False), "ledger.work()"]
        names = {**globals()}
        exec("\n".join(["def drawn(ledger):", *indented(lines)]), names)
        return names["drawn"]

    def block(self, depth: int, loops: bool) -> list[str]:
        """One to three statements, the last of which may leave what is around them."""
        lines = []
        for _ in range(self.choose.randint(1, 2)):
            kind = self.choose.choice(("work", "take", "if", "for")) if depth else "work"
            if kind == "take":
                lines += self.taking(depth, loops)
            elif kind == "if":
                lines += [f"if ledger.worked % 2 == {self.choose.randrange(2)}:"]
                lines += [*indented(self.block(depth - 1, loops)), "else:", "    ledger.work()"]
            elif kind == "for":
                lines += ["for _ in range(2):", *indented(self.block(depth - 1, True))]
            else:
                lines += ["ledger.work()"]
        leaves = ("continue", "break", "return ledger.work()") if loops else ("return",)
        return [*lines, self.choose.choice(leaves)] if self.choose.random() < 0.25 else lines

    def taking(self, depth: int, loops: bool) -> list[str]:
        """Takes, has a block, and gives back."""
        inner = indented(self.block(depth - 1, loops))
        give = self.choose.choice(GIVES)
        match self.choose.choice(("with", "with", "finally", "except", "raises")):
            case "with":
                return [f"with {self.choose.choice(WITHS)}:", *inner]
            case "finally":
                return ["ledger.take()", "try:", *inner, "finally:", *indented(give)]
            case "except":
                caught = self.choose.choice(("except BaseException:", "except:"))
                cleans_up = [caught, *indented([*give, "raise"])]
                rest = ["try:", "    ledger.work()", "finally:", "    ledger.give()"]
                return ["ledger.take()", "try:", "    ledger.work()", *cleans_up, *rest]
        lines = ["ledger.take()", "try:", "    raise KeyError", "finally:", *indented(give)]
        # No `inner`: CPython 3.11's table leaves out the first instruction of a `try` in an `except`.
        return ["try:", *indented(lines), "except KeyError:", "    ledger.work()"]


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def taken_in_an_if(ledger: Ledger) -> None:
    if ledger.work():
        ledger.take()
    else:
        return
    try:
        ledger.work()
    finally:
        ledger.give()


def condition_wait(ledger: Ledger) -> None:
    saved = ledger.take()
    ok = False
    try:
        ledger.work()
        ok = True
    finally:
        ledger.give()
        if not ok:
            del saved


def decorated(ledger: Ledger) -> None:
    ledger.generator()(ledger.work)()


def exit_stack(ledger: Ledger) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(ledger.generator())
        stack.enter_context(ledger.taking())
        ledger.work()


def comprehensions(ledger: Ledger) -> None:
    with ledger.taking():
        assert [ledger.work() for _ in range(2)]
    assert {i: ledger.work() for i in range(2)}
    ledger.take()
    try:
        assert any(ledger.work() for _ in [ledger.work() for _ in range(2)])
    finally:
        ledger.give()


def asynchronous_with(ledger: Ledger) -> None:
    async def body() -> None:
        async with ledger.taking() as entered:
            entered.work()
            await Pause()
        ledger.work()

    drive(body())


def asynchronous_try(ledger: Ledger) -> None:
    async def take() -> None:
        await Pause()
        ledger.take()

    async def body() -> None:
        await take()
        try:
            await Pause()
            ledger.work()
        finally:
            ledger.give()

    drive(body())


def drive(coroutine: Any) -> None:
    with contextlib.suppress(StopIteration):
        while True:
            coroutine.send(None)


SPELLED = (
    *(condition_wait, decorated, exit_stack, comprehensions, taken_in_an_if),
    *(asynchronous_with, asynchronous_try),
)


class Try:
    """Runs a function and raises at the n-th instruction that runs; None where it ended before."""

    def __init__(self, fn: Callable[[Ledger], object], n: int) -> None:
        self.ledger = Ledger()
        self.raised_in: CodeType | None = None
        self.left = n
        self.is_safe = False
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one such frame when tracing begins
        previous = sys.gettrace()
        sys.settrace(self.trace)
        try:
            self.outside(fn)
        except Interrupt:
            pass
        finally:
            sys.settrace(previous)
            sys._getframe().f_trace_opcodes = False
        self.handled = sys.exc_info()[1]

    def outside(self, fn: Callable[[Ledger], object]) -> None:
        fn(self.ledger)

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        # What waits for a coroutine is outside of it: a suspended one is closed, not interrupted.
        if frame.f_code in (Try.outside.__code__, Try.__init__.__code__, drive.__code__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self.left == 0:
                self.raised_in = frame.f_code
                self.is_safe = not obstacle(frame, Try.outside.__code__).frames
                raise Interrupt
            self.left -= 1
        return self.trace


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("fn", SPELLED, ids=lambda fn: fn.__name__)
def test_nothing_is_left_at_safe_points(fn: Callable[[Ledger], object]) -> None:
    worked, steps = check(fn)
    assert worked >= set(range(steps)), "between two steps there is no safe point"


@pytest.mark.parametrize("first", [0, *at_night("those of the first seeds run always", [100, 200, 300])])
def test_nothing_is_left_at_safe_points_of_drawn_functions(first: int) -> None:
    for seed in range(first, first + DRAWS):
        check(Drawn(seed).function(), f"seed {seed}, ")


def check(fn: Callable[[Ledger], object], about: str = "") -> tuple[set[int], int]:
    """Raises at each instruction, one after the other.

    Returns:
        After which steps there are safe points, and how many steps the function has.
    """
    leaks = 0
    worked = set()
    for n in range(100_000):
        attempt = apart(Try, fn, n)
        if attempt.raised_in is None:
            break
        if attempt.is_safe:
            worked.add(attempt.ledger.worked)
            assert attempt.ledger.taken == 0, f"{about}instruction {n}, in {attempt.raised_in}"
            assert attempt.handled is None, f"{about}instruction {n}, in {attempt.raised_in}"
        leaks += attempt.ledger.taken != 0
    assert attempt.ledger.taken == 0
    assert n > 20
    assert leaks, f"{about}no instruction of this function is unsafe: it shows nothing"
    return worked, attempt.ledger.worked


def test_what_is_unsafe_is_not_wider_than_needed() -> None:
    def fn(ledger: Ledger) -> None:
        ledger.work()
        with ledger.taking():
            ledger.work()
        try:
            ledger.work()
        except KeyError:
            ledger.work()
        ledger.work()

    unsafe = unsafe_offsets(fn.__code__)
    calls = [each.offset for each in dis.get_instructions(fn) if each.opname == "CALL"]
    # The calls that make and leave the context manager, and no other.
    assert sum(offset in unsafe for offset in calls) == 2
    assert unsafe_offsets((lambda: Ledger().work()).__code__) == frozenset()


def test_inline_caches_count() -> None:
    """A frame that called in Python stands at the last cache of the call."""
    unsafe = unsafe_offsets(comprehensions.__code__)
    for each in dis.get_instructions(comprehensions):
        following = each.offset + 2
        if comprehensions.__code__.co_code[following : following + 1] == b"\0":  # CACHE
            assert (following in unsafe) == (each.offset in unsafe)


def all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from all_codes(constant)


@pytest.mark.parametrize("module", ["contextlib", "asyncio.base_events"])
def test_real_code_has_unsafe_points(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    unsafe = 0
    for code in all_codes(compile(Path(spec.origin).read_text(), spec.origin, "exec")):
        found = unsafe_offsets(code)
        assert found <= set(range(0, len(code.co_code), 2))
        unsafe += len(found)
    assert unsafe


# ---- the stack


def stack(*frames: tuple[str, str]) -> Any:
    """Frames by name and file, the outermost first; returns the innermost."""
    innermost = None
    for name, file in frames:
        namespace: dict[str, Any] = {}
        exec(compile(f"def {name}(): pass", file, "exec"), namespace)
        innermost = SimpleNamespace(f_code=namespace[name].__code__, f_lasti=0, f_back=innermost)
    return innermost


OUTSIDE = stack.__code__


@pytest.mark.parametrize(
    ("name", "file", "for_good"),
    [
        ("__enter__", "train.py", False),
        ("__aexit__", "train.py", False),
        ("__del__", "train.py", False),
        ("close", "train.py", False),
        ("emit", logging.__file__, False),
        ("_find_and_load", "<frozen importlib._bootstrap>", True),
        ("__torch_dispatch__", "train.py", True),
        ("__torch_function__", "train.py", True),
    ],
)
def test_frames_that_are_unsafe_at_any_depth(name: str, file: str, for_good: bool) -> None:
    found = obstacle(stack(("main", "train.py"), (name, file), ("step", "train.py")), OUTSIDE)
    assert ([each.f_code.co_name for each in found.frames], found.for_good) == ([name], for_good)
    assert (found.finalizer is not None) == (name == "__del__")
    assert obstacle(stack(("main", "train.py"), ("step", "train.py")), OUTSIDE).frames == ()


def test_each_obstacle_is_named_and_the_outermost_finalizer() -> None:
    frames = [("__exit__", "a.py"), ("step", "s.py"), ("__del__", "b.py"), ("__del__", "c.py")]
    found = obstacle(stack(*frames), OUTSIDE)
    assert found.finalizer is not None
    assert [each.f_code.co_filename for each in found.frames] == ["c.py", "b.py", "a.py"]
    assert found.finalizer.f_code.co_filename == "b.py"


def test_frames_outside_do_not_count() -> None:
    inside = stack(("__enter__", "a.py"), ("call", "b.py"), ("main", "c.py"))
    assert obstacle(inside, inside.f_back.f_code).frames == ()
    assert obstacle(None, OUTSIDE).frames == ()


def test_what_was_prepared_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    safe_points._cache.clear()
    frame = stack(("main", "train.py"), ("__enter__", "a.py"), ("step", "s.py"))
    safe_points.prepare(frame, OUTSIDE)
    assert not safe_points._cache  # these are not inside: it is not among them
    safe_points.prepare(frame, frame.f_back.f_back.f_code)
    monkeypatch.setattr(safe_points, "_look_at", None)
    found = obstacle(frame, frame.f_back.f_back.f_code)
    assert [each.f_code.co_name for each in found.frames] == ["__enter__"]
    safe_points._cache.clear()


TORCH = "/site/torch/"


@pytest.mark.parametrize(
    ("files", "inside"),
    [
        (["train.py", TORCH + "_dynamo/convert_frame.py"], True),
        (["train.py", TORCH + "_ops.py", TORCH + "utils/_pytree.py"], True),
        (["train.py", TORCH + "_subclasses/fake_tensor.py", TORCH + "_prims/__init__.py"], True),
        (["train.py", TORCH + "_compile.py"], True),
        (["train.py", TORCH + "nn/module.py"], False),
        (["train.py", TORCH + "_dynamo/eval_frame.py", "train.py"], False),
        (["train.py", "/site/torchvision/_ops.py"], False),
    ],
)
def test_torchs_doors(monkeypatch: pytest.MonkeyPatch, files: list[str], inside: bool) -> None:
    """Inside as long as only torch's own frames are below."""
    frame = stack(*[("run", file) for file in files])
    for torch in (SimpleNamespace(__file__=TORCH + "__init__.py"), None):
        safe_points._cache.clear()
        if torch is None:
            monkeypatch.delitem(sys.modules, "torch")
        else:
            monkeypatch.setitem(sys.modules, "torch", torch)
        found = obstacle(frame, OUTSIDE)
        assert found.for_good == (inside and torch is not None)
    safe_points._cache.clear()
