"""Dataclasses as lines of JSON in the store: never pickles.

Text that cannot be read raises a `StoreError` that names the key.
"""

import dataclasses
import enum
import functools
import json
import typing
from typing import Any, Self

from .._text import IN_LINE, IN_STORE, cut
from ..exception import StoreError


class Record:
    """A dataclass that is written as one line of JSON, without fields that have their default value.

    A field's class with a `parse` method is written as text, an enum as its name, a nested dataclass as a
    list. Long text is cut, since a store takes at most 8 MiB at a time.
    """

    def to_json(self) -> str:
        """One line of JSON."""
        given = {name: value for name, value in vars(self).items() if value != _defaults(type(self))[name]}
        texts = [name for name, value in given.items() if isinstance(value, str) and len(value) > IN_LINE]
        return _to_json(given | {name: cut(given[name], IN_STORE) for name in texts})

    @classmethod
    def from_json(cls, text: str, key: str) -> Self:
        """Reads `to_json`; an error names the key."""
        try:
            values = typed(dict, json.loads(text), key)
            known = {name: kind for name, kind in _types(cls).items() if name in values}
            return cls(**{name: typed(kind, values[name], key) for name, kind in known.items()})
        except (KeyError, TypeError, ValueError) as error:
            what = cls.__name__.lower()
            raise StoreError(f"store key {key!r} holds {text!r}, which is no {what}: {error!r}") from None


_types: Any = functools.cache(typing.get_type_hints)
_defaults: Any = functools.cache(lambda of: {field.name: field.default for field in dataclasses.fields(of)})


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    return str(value) if hasattr(value, "parse") else [*vars(value).values()]


_to_json = json.JSONEncoder(default=_plain).encode


def typed(kind: Any, value: Any, key: str) -> Any:
    """Converts a JSON value to the type that an annotation names; an error names the key."""
    if type(value) is kind:
        return value
    if hasattr(kind, "parse"):
        return kind.parse(value, key)
    if typing.get_origin(kind) is tuple:
        return tuple(typed(typing.get_args(kind)[0], one, key) for one in value)
    if isinstance(kind, enum.EnumMeta):
        return kind[value]
    if hasattr(kind, "__dataclass_fields__"):
        parts = zip(_types(kind).values(), value, strict=True)
        return kind(*(typed(of, one, key) for of, one in parts))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is no {kind}")
    return value
