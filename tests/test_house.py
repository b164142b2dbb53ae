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
MOST_CODE_LINES = 26_995
MOST_LINES_OF_A_FILE = 450

# Files that are still too long, with their lines.
TALL: dict[str, int] = {}

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


if __name__ == "__main__":
    for file in sources():
        text = file.read_text()
        print(f"{code_lines(text):6} {len(text.splitlines()):6} {file.relative_to(PACKAGE)}")
    print(
        sum(code_lines(file.read_text()) for file in sources()), "lines of code in", len(sources()), "files"
    )
