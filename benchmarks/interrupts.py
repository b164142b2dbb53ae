"""What interrupts at random moments leave behind.

    python benchmarks/interrupts.py                        # 10,000 interrupts over all contexts, minutes
    python benchmarks/interrupts.py --interrupts 100       # a quick look
    python benchmarks/interrupts.py --only inductor --interrupts 50
    PYTHONPATH=../older python benchmarks/interrupts.py    # the same for another ft_wrapper

A function that runs in a context again and again is interrupted at a random moment, as a restart does it.
Then the context's state is looked at: is it what it was before the function began? Each context has a process
of its own, whose sudden end is counted, too. Without torch, only contexts that do not need it are tried.

The compiled models are never the same twice, and no cache on disk is read. "inside" counts the interrupts
that came while torch was compiling; "failed" those after which an error came out of the function, or the
next model was not compiled, or not right.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ft_wrapper.exception import RankShouldRestart
from ft_wrapper.monitor.frames import current_frames
from ft_wrapper.monitor.interrupt import Interrupter

LIMIT = 120.0  # seconds for one interrupt: then it counts as not left, and its process ends
STUCK = 3  # the exit code then


@dataclasses.dataclass
class Context:
    """What is interrupted.

    Args:
        step: what the function does for ever.
        state: what must be the same after the interrupt as before the function began.
        restore: puts that back after it was broken.
        longest: seconds after the beginning of the function within which the interrupt comes.
        check: what must work after an interrupt, and raises if it does not.
        files: ends of file names; an interrupt that comes while one is on the stack counts as inside.
    """

    step: Callable[[], object]
    state: Callable[[], object]
    restore: Callable[[], object]
    longest: float = 0.003
    check: Callable[[], object] = lambda: None
    files: tuple[str, ...] = ()


CONTEXTS: dict[str, Callable[[], Context]] = {}
COMPILERS = ("aot_eager", "inductor")


def context(make: Callable[[], Context]) -> Callable[[], Context]:
    CONTEXTS[make.__name__] = make
    return make


def work() -> int:
    return sum(i for i in range(20))


def grad_context(step: Callable[[], object]) -> Context:
    import torch

    return Context(step, torch.is_grad_enabled, lambda: torch.set_grad_enabled(True))


@context
def no_grad() -> Context:
    import torch

    def step() -> None:
        with torch.no_grad():
            work()

    return grad_context(step)


@context
def set_grad_enabled() -> Context:
    import torch

    def step() -> None:
        with torch.set_grad_enabled(False):
            work()

    return grad_context(step)


@context
def decorated_with_no_grad() -> Context:
    import torch

    return grad_context(torch.no_grad()(work))


@context
def evaluation() -> Context:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    data = torch.ones(2, 4)

    def step() -> None:
        model(data).sum().backward()
        with torch.no_grad():
            model(data)

    return grad_context(step)


@context
def cudnn_flags() -> Context:
    import torch
    from torch.backends import cudnn

    before = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)

    def state() -> tuple[bool, ...]:
        return (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)

    def step() -> None:
        with cudnn.flags(enabled=not before[0], benchmark=not before[1], deterministic=True):
            work()

    def restore() -> None:
        torch._C._set_cudnn_enabled(before[0])
        torch._C._set_cudnn_benchmark(before[1])
        torch._C._set_cudnn_deterministic(before[2])
        torch._C._set_cudnn_allow_tf32(before[3])

    return Context(step, state, restore)


@context
def patch_dict() -> Context:
    def step() -> None:
        with mock.patch.dict(os.environ, {"FT_WRAPPER_INTERRUPTED": "1"}):
            work()

    def restore() -> None:
        os.environ.pop("FT_WRAPPER_INTERRUPTED", None)

    return Context(step, lambda: "FT_WRAPPER_INTERRUPTED" in os.environ, restore)


@context
def sdpa_kernel() -> Context:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = torch.backends.cuda

    def state() -> tuple[bool, ...]:
        return (
            backends.flash_sdp_enabled(),
            backends.mem_efficient_sdp_enabled(),
            backends.math_sdp_enabled(),
        )

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            work()

    def restore() -> None:
        backends.enable_flash_sdp(True)
        backends.enable_mem_efficient_sdp(True)
        backends.enable_math_sdp(True)

    return Context(step, state, restore)


def semaphore_context(step: Callable[[threading.Semaphore], Callable[[], object]]) -> Context:
    semaphore = threading.Semaphore(1)

    def restore() -> None:
        semaphore._value = 1  # type: ignore[attr-defined]
        semaphore._cond = threading.Condition()  # type: ignore[attr-defined]

    return Context(step(semaphore), lambda: semaphore._value, restore)  # type: ignore[attr-defined]


@context
def semaphore() -> Context:
    def steps(semaphore: threading.Semaphore) -> Callable[[], object]:
        def step() -> None:
            with semaphore:
                work()

        return step

    return semaphore_context(steps)


@context
def semaphore_and_finally() -> Context:
    def steps(semaphore: threading.Semaphore) -> Callable[[], object]:
        def step() -> None:
            semaphore.acquire()
            try:
                work()
            finally:
                semaphore.release()

        return step

    return semaphore_context(steps)


@context
def semaphore_in_a_generator_manager() -> Context:
    def steps(semaphore: threading.Semaphore) -> Callable[[], object]:
        @contextlib.contextmanager
        def held() -> Iterator[None]:
            semaphore.acquire()
            try:
                yield
            finally:
                semaphore.release()

        def step() -> None:
            with held():
                work()

        return step

    return semaphore_context(steps)


@context
def default_dtype() -> Context:
    import torch

    def step() -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            work()
        finally:
            torch.set_default_dtype(before)

    return Context(step, torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float32))


def modes() -> int:
    import torch

    return int(torch._C._len_torch_dispatch_stack())


def pop_modes() -> None:
    import torch

    while modes():
        torch._C._pop_torch_dispatch_stack()


@context
def flop_counter_mode() -> Context:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = torch.nn.Linear(4, 4)
    data = torch.ones(2, 4)

    def step() -> None:
        with FlopCounterMode(display=False):
            model(data)

    return Context(step, modes, pop_modes)


@context
def inference_mode() -> Context:
    import torch

    guards = []  # at its end one would bring back what was wrong

    def step() -> None:
        with torch.inference_mode():
            work()

    def restore() -> None:
        guards.append(torch._C._InferenceMode(False))
        guards[-1].__enter__()

    return Context(step, torch.is_inference_mode_enabled, restore)


@context
def default_device() -> Context:
    import torch
    from torch.utils import _device

    def step() -> None:
        with torch.device("meta"):
            work()

    def state() -> tuple[object, ...]:
        return torch._C._len_torch_function_stack(), _device.CURRENT_DEVICE, torch.get_default_device()

    def restore() -> None:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        _device.CURRENT_DEVICE = None

    return Context(step, state, restore)


def saved_hooks() -> tuple[object, ...]:
    import torch

    autograd = torch._C._autograd
    return (
        autograd._top_saved_tensors_default_hooks(True),
        autograd._saved_tensors_hooks_get_disabled_error_message(),
    )


@context
def saved_tensor_hooks() -> Context:
    import torch

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            work()

    def restore() -> None:
        while saved_hooks()[0] is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    return Context(step, saved_hooks, restore)


@context
def parametrize_cached() -> Context:
    from torch.nn.utils import parametrize

    def step() -> None:
        with parametrize.cached():
            work()

    def restore() -> None:
        parametrize._cache_enabled = 0
        parametrize._cache = {}

    return Context(step, lambda: (parametrize._cache_enabled, len(parametrize._cache)), restore)


def functorch_context(step: Callable[[], object]) -> Context:
    import torch
    from torch._functorch import eager_transforms

    def depth() -> int:
        return int(torch._C._functorch.get_dynamic_layer_stack_depth())

    def state() -> tuple[object, ...]:
        levels = depth(), eager_transforms.JVP_NESTING, torch.autograd.forward_ad._current_level
        return (*levels, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled(), *saved_hooks())

    def restore() -> None:
        while depth():
            torch._C._functorch.pop_dynamic_layer_stack()
        while torch.autograd.forward_ad._current_level >= 0:
            torch.autograd.forward_ad.exit_dual_level()
        eager_transforms.JVP_NESTING = 0
        torch.set_grad_enabled(True)
        torch._C._set_fwd_grad_enabled(True)
        torch._C._autograd._saved_tensors_hooks_enable()

    return Context(step, state, restore)


@context
def vmap() -> Context:
    import torch

    def row(x: torch.Tensor) -> torch.Tensor:
        return x * work()

    data = torch.ones(4, 4)
    return functorch_context(lambda: torch.func.vmap(row)(data))


@context
def func_grad() -> Context:
    import torch

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * work()).sum()

    data = torch.ones(4)
    return functorch_context(lambda: torch.func.grad(loss)(data))


@context
def func_jvp() -> Context:
    import torch

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * work()

    data = torch.ones(4)
    return functorch_context(lambda: torch.func.jvp(double, (data,), (data,)))


@context
def amp() -> Context:
    """A training loop in mixed precision."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    data = torch.ones(2, 4)

    def nesting() -> int:
        torch.autocast_increment_nesting()
        return int(torch.autocast_decrement_nesting())

    def state() -> tuple[object, ...]:
        on = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return (*on, torch.is_autocast_cache_enabled(), nesting(), torch.is_grad_enabled())

    before = state()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(data).sum() * work()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def restore() -> None:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])
        torch.set_autocast_cache_enabled(before[2])
        while nesting():
            torch.autocast_decrement_nesting()
        torch.set_grad_enabled(True)

    return Context(step, state, restore)


@context
def detect_anomaly() -> Context:
    import torch

    def step() -> None:
        with torch.autograd.set_detect_anomaly(True):
            work()

    def state() -> tuple[bool, ...]:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    return Context(step, state, lambda: torch.set_anomaly_enabled(False, True))


@context
def multithreaded_backward() -> Context:
    import torch

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            work()

    put = torch._C._set_multithreading_enabled
    return Context(step, torch._C._is_multithreading_enabled, lambda: put(True))


@context
def mkldnn_flags() -> Context:
    import torch
    from torch.backends import mkldnn

    def state() -> tuple[object, ...]:
        return torch._C._get_mkldnn_enabled(), torch._C._get_mkldnn_deterministic()

    before = state()

    def step() -> None:
        with mkldnn.flags(enabled=not before[0], deterministic=not before[1]):
            work()

    def restore() -> None:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_mkldnn_deterministic(before[1])

    return Context(step, state, restore)


@context
def fake_tensors() -> Context:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step() -> None:
        with FakeTensorMode():
            a = torch.ones(4, 4)
            for _ in range(5):
                a = torch.nn.functional.relu(a @ a + 1).view(-1).reshape(4, 4)
            assert a.shape == (4, 4)

    return Context(step, modes, pop_modes, longest=0.02)


def compiled(backend: str) -> Context:
    """A small model that is compiled in each entry, as after a restart."""
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor import config

    torch.set_num_threads(1)
    config.force_disable_caches = True
    config.cpp.simdlen = 1  # no vectors: the C++ compiler is done in half the time
    sizes = itertools.count(4)

    def compile_and_run(dynamic: bool = False) -> None:
        size = next(sizes)  # a new one, or the C++ compiler's output would be found on disk
        model = torch.nn.Sequential(torch.nn.Linear(4, size), torch.nn.GELU(), torch.nn.Linear(size, 4))
        data = torch.rand(3, 4)
        graphs = counters["stats"]["unique_graphs"]
        found = torch.compile(model, backend=backend, dynamic=dynamic)(data)
        assert counters["stats"]["unique_graphs"] > graphs, "not compiled"
        torch.testing.assert_close(found, model(data))
        found.sum().backward()

    def step() -> None:
        torch._dynamo.reset()
        compile_and_run(dynamic=chance.random() < 0.5)

    chance = random.Random(0)
    step()
    began = time.monotonic()
    step()
    return Context(
        step,
        lambda: (modes(), torch.is_grad_enabled()),
        pop_modes,
        longest=time.monotonic() - began,
        check=compile_and_run,  # without a reset, which would clear what the interrupt has left
        files=("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py"),
    )


@context
def aot_eager() -> Context:
    return compiled("aot_eager")


@context
def inductor() -> Context:
    return compiled("inductor")


class Interrupting:
    """Interrupts a function once, from a thread, at a random moment."""

    def __init__(self, interrupter: Interrupter, after: float, files: tuple[str, ...]) -> None:
        self.began = threading.Event()
        self.took = 0.0
        self.inside = False
        self._files = files
        self._interrupter = interrupter
        self._after = after
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.began.wait(LIMIT)
        time.sleep(self._after)
        frame = current_frames()[threading.main_thread().ident or 0] if self._files else None
        while frame is not None:
            self.inside |= frame.f_code.co_filename.endswith(self._files)
            frame = frame.f_back
        began = time.monotonic()
        self._interrupter.request()
        if not self._interrupter.interrupt_until_left(LIMIT):
            print(json.dumps({"stuck": True}), flush=True)
            os._exit(STUCK)
        self.took = time.monotonic() - began

    def join(self) -> None:
        self._thread.join()


def worker(name: str, interrupts: int, seed: int) -> None:
    """Interrupts one context, and prints a line after each interrupt."""
    chance = random.Random(seed)
    here = CONTEXTS[name]()
    before = here.state()
    here.step()  # with its imports, which are never interrupted
    gc.freeze()
    with contextlib.closing(Interrupter()) as interrupter:
        for _ in range(interrupts):
            interrupter.reset()
            thread = Interrupting(interrupter, chance.uniform(0, here.longest), here.files)

            def fn(began: Callable[[], None] = thread.began.set) -> None:
                began()
                while True:
                    here.step()

            error = ""
            try:
                interrupter.call(fn)
            except RankShouldRestart as raised:
                error = "" if raised.__cause__ is None else repr(raised.__cause__)
            thread.join()
            broken = here.state() != before
            if broken:
                here.restore()
            fails = ""
            try:
                here.check()
            except Exception as failed:
                fails = repr(failed)
            gc.collect()
            result = {"took": thread.took, "inside": thread.inside, "broken": broken}
            print(json.dumps({**result, "error": error, "fails": fails}), flush=True)


@dataclasses.dataclass
class Count:
    """What became of one context's interrupts."""

    interrupts: int = 0
    inside: int = 0
    broken: int = 0
    aborted: int = 0
    stuck: int = 0
    failed: int = 0
    took: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)


def count(name: str, interrupts: int, seed: int) -> Count:
    """Interrupts a context as often as wanted, in another process after each that aborts."""
    total = Count()
    while total.interrupts < interrupts:
        before = total.interrupts
        command = [sys.executable, __file__, "--worker", name]
        command += ["--interrupts", str(interrupts - before), "--seed", str(seed + before)]
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                result: dict[str, Any] = json.loads(line)
                total.interrupts += 1
                if "stuck" in result:
                    total.stuck += 1
                    continue
                total.took.append(result["took"])
                total.inside += result["inside"]
                total.broken += result["broken"]
                total.failed += bool(result["error"] or result["fails"])
                total.errors += [text for text in (result["error"], result["fails"]) if text]
            process.wait()
            said.seek(0)
            errors = said.readlines()
        if process.returncode not in (0, STUCK):
            if process.returncode > 0 and not total.interrupts:
                sys.exit("".join(errors))
            total.interrupts += 1
            total.aborted += 1
            total.errors += errors[-1:]
    return total


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--interrupts", type=int, help="per context; default 10,000 in all, 150 and 50 to compile"
    )
    parser.add_argument("--only", nargs="+", choices=CONTEXTS, metavar="CONTEXT", help=", ".join(CONTEXTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="a line of JSON per context")
    parser.add_argument("--worker", choices=CONTEXTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.interrupts, options.seed)
        return
    defaults = dict.fromkeys(CONTEXTS, -(-10_000 // (len(CONTEXTS) - len(COMPILERS))))
    defaults.update(aot_eager=150, inductor=50)
    has_torch = importlib.util.find_spec("torch") is not None
    if not options.json:
        print(f"{'context':34}{'interrupts':>11}{'inside':>8}{'broken':>8}{'aborted':>9}{'stuck':>7}", end="")
        print(f"{'failed':>8}{'median':>10}{'slowest':>10}")
    for name in options.only or CONTEXTS:
        if not has_torch and "semaphore" not in name and name != "patch_dict":
            continue
        found = count(name, options.interrupts or defaults[name], options.seed)
        took = sorted(found.took) or [float("nan")]
        if options.json:
            print(json.dumps({"context": name, **dataclasses.asdict(found)}), flush=True)
            continue
        inside = found.inside if name in COMPILERS else "-"
        numbers = f"{found.interrupts:11}{inside:>8}{found.broken:8}{found.aborted:9}{found.stuck:7}"
        times = f"{took[len(took) // 2] * 1e3:7.2f} ms{took[-1] * 1e3:7.1f} ms"
        print(f"{name:34}{numbers}{found.failed:8}{times}", flush=True)
        for error in dict.fromkeys(found.errors):
            print(f"    {error.strip()}", flush=True)


if __name__ == "__main__":
    main()
