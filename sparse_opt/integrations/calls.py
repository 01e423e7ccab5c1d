"""The arguments of a call by name, whatever a user's subclass makes of them."""

from __future__ import annotations

from inspect import BoundArguments, Parameter
from typing import Any


def named(bound: BoundArguments) -> dict[str, Any]:
    """The arguments that have a name: those in `**kwargs` too, those in `*args` not."""
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is Parameter.VAR_KEYWORD:
            found |= value
        elif kind is not Parameter.VAR_POSITIONAL:
            found[name] = value
    return found


def set_named(bound: BoundArguments, name: str, value: Any) -> None:
    """Give the call an argument, as a parameter where there is one of that name, else in `**kwargs`."""
    parameters = bound.signature.parameters
    if name in parameters:
        bound.arguments[name] = value
    else:
        rest = next(p.name for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD)
        bound.arguments[rest] = {**bound.arguments.get(rest, {}), name: value}
