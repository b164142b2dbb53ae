"""A process group that was there before the wrapped call: what has made it, and what to do about it."""

import ast
import linecache
import sys
import types
from collections.abc import Iterator

_Makers = dict[str, tuple[str, ...]]  # classes, by their package

_HUGGING_FACE: _Makers = {
    "accelerate": ("Accelerator", "PartialState", "AcceleratorState"),
    "transformers": ("TrainingArguments", "Trainer"),
}
_LIGHTNING: _Makers = dict.fromkeys(
    ("lightning", "lightning_fabric", "pytorch_lightning"), ("Fabric", "Trainer")
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def already_initialized(caller: types.FrameType | None) -> str:
    """The error's text.

    Hugging Face makes a group in ``TrainingArguments()`` and ``Accelerator()``, which many scripts call at
    their top; Lightning in ``Fabric.launch()`` and ``Trainer.validate()``. Of such objects the text names the
    one that was made first, if a variable holds it.

    Args:
        caller: the frame that calls the wrapped function.
    """
    states = sys.modules.get("accelerate.state")
    is_accelerate = bool(getattr(getattr(states, "PartialState", None), "_shared_state", None))
    made = next(_made(caller, _HUGGING_FACE if is_accelerate else _LIGHTNING), None)
    if made is not None:
        return f"a process group is already initialized, by {made}: move this line into the wrapped function"
    if is_accelerate:
        return (
            "a process group is already initialized, by an Accelerator or TrainingArguments of Hugging Face: "
            "make that inside the wrapped function"
        )
    return (
        "a process group is already initialized; call torch.distributed.destroy_process_group() before "
        "the wrapped function, and init_process_group() inside it"
    )


def _made(frame: types.FrameType | None, makers: _Makers) -> Iterator[str]:
    """The lines that have made such objects: of the nearest frame first, and of that in order."""
    while frame is not None:
        for variables, code in ((frame.f_locals, frame.f_code), (frame.f_globals, None)):
            held = {name: kind for name, value in list(variables.items()) if (kind := _kind(value, makers))}
            if held:
                yield from _lines(held, frame.f_code.co_filename, code)
        frame = frame.f_back


def _kind(value: object, makers: _Makers) -> str | None:
    for base in type(value).__mro__:
        if base.__name__ in makers.get(base.__module__.partition(".")[0], ()):
            return base.__name__
    return None


def _lines(held: dict[str, str], file: str, code: types.CodeType | None) -> Iterator[str]:
    """Where variables are set, in order.

    Args:
        held: which, and what they hold.
        file: the source.
        code: of the function that they are local to; None, or a module's: they are global.
    """
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # no Python, such as a notebook's magic
        return
    if code is not None and code.co_name != "<module>":
        functions = (node for node in ast.walk(tree) if isinstance(node, _SCOPES[:2]))
        found = [node for node in functions if _begin(node) == code.co_firstlineno]
        if not found:
            return
        tree = found[0]
    for line, name in sorted(_set(tree)):
        if name in held:
            yield f"{name} ({held[name]}) in {file}, line {line}"


def _begin(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min(node.lineno for node in (function, *function.decorator_list))


def _set(scope: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that are set in a function or a module, not in those inside it, each with its line."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        if not isinstance(node, _SCOPES):
            todo += ast.iter_child_nodes(node)
