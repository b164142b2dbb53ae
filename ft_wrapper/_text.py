"""Text for people: numbers with their unit; without passwords."""

import re

_HIDDEN = "…"
# Up to the last @: what is taken for a part of the secret by mistake does no harm.
_IN_URL = re.compile(r"""(?<=://)[^\s'"/]+@""")
_BEFORE_HOST = re.compile(r"""(?<![^\s'"=,(])[^\s'"=,(/:@]+:[^\s'"/]+@(?=[^\s'"])""")
_NAMED = re.compile(r"(?i)((?:password|passwd|secret|token|api_?key)=)[^\s&,;'\"]+")


def without_secrets(text: str) -> str:
    """A text without what looks like a secret: ``user:password@`` before a host, ``password=…``, ``token=…``.

    Args:
        text: any text: a URL, a line of a log, a command line.
    """
    if "@" in text:
        text = _IN_URL.sub(f"{_HIDDEN}@", text)
        text = _BEFORE_HOST.sub(f"{_HIDDEN}@", text)
    return _NAMED.sub(rf"\1{_HIDDEN}", text) if "=" in text else text


def duration(seconds: float) -> str:
    """Says how long something took, in the unit that a person would choose.

    Args:
        seconds: how long.
    """
    if seconds < 0.9995:
        return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plural(count: int, noun: str) -> str:
    """A noun, in the plural unless there is one."""
    return noun if count == 1 else noun + "s"
