"""Passwords and tokens, left out of what people and log files see."""

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
