"""The package stays small enough to be reasoned about: files and lines.

The limits only ever go down. ``python tests/test_house.py`` prints what is counted, file by file.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "ft_wrapper"
MOST_FILES = 191  # 14 of them for live state
MOST_CODE_LINES = 26_974
MOST_LINES_OF_A_FILE = 450

# Files that are still too long, with their lines.
TALL: dict[str, int] = {}

MOST_ATTRIBUTES = 15
"""That a class gives itself. Data, declared as fields, does not count."""
MOST_METHODS_OF_A_STORE = 25

_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def code_lines(source: str) -> int:
    """Lines with a token other than a comment and the line's end, without docstrings."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def test_what_counts_as_code() -> None:
    source = '"""Module."""\n\nX = 1  # one\n# none\n\n\ndef f():\n    """Doc.\n\n    More.\n    """\n'
    source += '    return """a\nb"""\n'
    assert code_lines(source) == 4


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in sources()}
    tall = {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FILE}
    assert tall.keys() <= TALL.keys(), f"over {MOST_LINES_OF_A_FILE} lines: {tall.keys() - TALL.keys()}"
    grown = {name: length for name, length in tall.items() if length > TALL[name]}
    assert not grown, "these are too long already"
    assert tall.keys() == TALL.keys(), "shorter now, strike them off the list"


def test_the_package_does_not_grow() -> None:
    assert len(sources()) <= MOST_FILES
    assert sum(code_lines(path.read_text()) for path in sources()) <= MOST_CODE_LINES


def classes(folder: str = "") -> list[ast.ClassDef]:
    paths = [path for path in sources() if str(path.relative_to(PACKAGE)).startswith(folder)]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def own_attributes(node: ast.ClassDef) -> set[str]:
    """What its methods assign to ``self``."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }


def test_no_class_has_too_many_attributes() -> None:
    wide = {node.name: len(own_attributes(node)) for node in classes()}
    assert {name: number for name, number in wide.items() if number > MOST_ATTRIBUTES} == {}


def test_no_store_has_too_many_methods_of_its_own() -> None:
    methods = {
        node.name: [one.name for one in node.body if isinstance(one, ast.FunctionDef) and one.name[0] != "_"]
        for node in [*classes("store/"), *classes("protocol/"), *classes("testing/fake_store")]
    }
    assert "EtcdStore" in methods and "FakeStore" in methods
    assert not {name for name, own in methods.items() if len(own) > MOST_METHODS_OF_A_STORE}


if __name__ == "__main__":
    for file in sources():
        text = file.read_text()
        print(f"{code_lines(text):6} {len(text.splitlines()):6} {file.relative_to(PACKAGE)}")
    print(
        sum(code_lines(file.read_text()) for file in sources()), "lines of code in", len(sources()), "files"
    )
