"""What a handler is called with. The annotations of its arguments decide.

==============================  =========================================================
annotation                      argument
==============================  =========================================================
none, ``Event``                 the event
``Event[Order]``                the event, with an ``Order`` as its payload
``Delivery``, ``Delivery[Order]``  the delivery; as a second argument too
any other type, ``Order``       the payload as an ``Order``
==============================  =========================================================

A type is what msgspec can convert to: a struct, a dataclass, a ``TypedDict``, a list of these; or a
pydantic model. A payload that does not fit is rejected, and the reason names the field.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from trunkline.bus import Delivery, Handler
from trunkline.errors import InvalidOption, Reject
from trunkline.event import Event
from trunkline.explain import reason

Arguments = Callable[[Delivery], tuple[Any, ...]]
_Read = Callable[[Any], Any]
_ANYTHING = (inspect.Parameter.empty, Any, object)
_OURS = {"Event": Event, "Delivery": Delivery}
_SHOWN = 3  # of the errors of one payload


def check_handler(handler: Callable[..., Any]) -> bool:
    """Whether a handler takes two arguments, or (False) one. ``InvalidOption`` for a function that
    takes neither: it would fail for every event.
    """
    return len(_parameters(handler)) > 1


def _parameters(handler: Callable[..., Any]) -> list[inspect.Parameter]:
    """The one or two parameters that a handler is called with."""
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        # Calling it does nothing yet, and so it would never fail either.
        raise InvalidOption(f"a handler does not yield: {handler!r}", name="handler")
    try:
        signature = inspect.signature(handler)
    except ValueError:  # a builtin that does not say what it takes
        return []
    except TypeError as error:
        raise _no_handler(handler, error) from None
    listed = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    count = 2 if sum(p.default is p.empty for p in listed) > 1 else 1
    try:
        signature.bind(*(None,) * count)
    except TypeError as error:
        raise _no_handler(handler, error) from None
    return listed[:count]


def _no_handler(handler: object, error: object) -> InvalidOption:
    return InvalidOption(
        f"not a handler: {handler!r}: {error}",
        name="handler",
        hint="a handler takes the event, the payload or the delivery; or one of the first two and "
        "the delivery",
    )


def arguments_of(handler: Handler) -> Arguments:
    """The arguments for a delivery, from the handler's annotations."""
    parameters = _parameters(handler)
    kinds = [_annotation(handler, p) for p in parameters] or [Any]
    names = [p.name for p in parameters]
    first, second = kinds[0], kinds[1] if len(kinds) > 1 else Any
    swapped = len(kinds) > 1 and (_is(first, Delivery) or names == ["delivery", "event"])
    if swapped or not (second in _ANYTHING or _is(second, Delivery)):
        raise _no_handler(handler, "its second argument is the delivery")
    asked = {kind for kind in map(_payload_of, kinds) if kind not in _ANYTHING}
    if len(asked) > 1:
        raise _no_handler(handler, "its arguments ask for two types of one payload")
    read = reader(asked.pop(), handler) if asked else None
    take: Callable[[Delivery], Any] = (
        _event if first in _ANYTHING or _is(first, Event) else _payload
    )
    if _is(first, Delivery):
        take = _delivery
    both = len(kinds) > 1

    def arguments(delivery: Delivery) -> tuple[Any, ...]:
        if read is not None:
            event = delivery.event
            typed = msgspec.structs.replace(event, payload=read(event.payload))
            delivery = delivery.with_event(typed)
        return (take(delivery), delivery) if both else (take(delivery),)

    return arguments


_event = attrgetter("record.event")
_payload = attrgetter("record.event.payload")


def _delivery(delivery: Delivery) -> Delivery:
    return delivery


def _is(kind: Any, of: type) -> bool:
    return kind is of or get_origin(kind) is of


def _payload_of(kind: Any) -> Any:
    """The type of the payload that an annotation asks for; ``Any`` if it asks for none."""
    if _is(kind, Event) or _is(kind, Delivery):
        (kind,) = get_args(kind) or (Any,)
    return Any if isinstance(kind, TypeVar) else kind


# -- annotations -----------------------------------------------------------------------------------


def _annotation(handler: Any, parameter: inspect.Parameter) -> Any:
    """The type behind an annotation, also if it is text. Its names are those of the module, and of
    the function in which the handler was defined if that runs now.
    """
    found = parameter.annotation
    if not isinstance(found, str):
        return found
    function = inspect.unwrap(handler)
    function = getattr(function, "func", function)  # of a partial
    if not isinstance(function, types.FunctionType | types.MethodType):
        function = getattr(type(function), "__call__", function)  # noqa: B004
    names: dict[str, Any] = {}
    scope = getattr(function, "__qualname__", "").rpartition(".<locals>.")[0]
    frame = sys._getframe(1) if scope else None
    while frame is not None:
        if frame.f_code.co_qualname == scope:
            names = frame.f_locals
            break
        frame = frame.f_back
    try:
        # Our own names may be imported for the type checker alone.
        return eval(found, {**_OURS, **getattr(function, "__globals__", {})}, names)
    except Exception as error:  # noqa: BLE001 -- an annotation is any expression
        plain = found.rpartition(".")[2]
        if plain in _OURS:
            return _OURS[plain]
        raise InvalidOption(
            f"the annotation {found!r} of {handler!r} cannot be read: {error}",
            name="handler",
            hint="the handler's annotation says what its payload is: import its names where the "
            "program runs, not for the type checker alone",
        ) from None


# -- types -----------------------------------------------------------------------------------------


def reader(kind: Any, handler: object = None) -> _Read:
    """A function that makes a ``kind`` of a payload, or raises ``Reject`` with the field's path."""
    name = getattr(kind, "__name__", None) or str(kind)
    if get_args(kind):
        name = str(kind)
    try:
        known = msgspec.inspect.type_info(kind)
        msgspec.json.Decoder(kind, dec_hook=_of_pydantic)  # refuses what can never be decoded
    except (TypeError, RecursionError) as error:
        raise _no_payload(name, handler, str(error)) from None
    is_model = hasattr(kind, "__pydantic_validator__")
    if isinstance(known, msgspec.inspect.CustomType) and not is_model:
        raise _no_payload(name, handler, "it is no type of data")

    def read(payload: Any) -> Any:
        try:
            if is_model:
                return _of_pydantic(kind, payload)
            return msgspec.convert(payload, kind, dec_hook=_of_pydantic, str_keys=True)
        except msgspec.ValidationError as error:
            why = reason(error, payload)
        except ValueError as error:
            why = str(error)
        raise Reject(f"the payload is not {name}: {why}")

    return read


def readers_of(function: Callable[..., Any]) -> dict[str, _Read]:
    """For each argument of any function that is annotated with a type: how to read its value."""
    found: dict[str, _Read] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = _annotation(function, parameter)
        if kind not in _ANYTHING and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            found[parameter.name] = reader(kind, function)
    return found


def _no_payload(name: str, handler: object, why: str) -> InvalidOption:
    return InvalidOption(
        f"a payload cannot be read as {name}: {why}",
        name="handler",
        handler=handler,
        hint="annotate a msgspec struct, a dataclass, a pydantic model or another type of JSON",
    )


def _of_pydantic(kind: Any, value: Any) -> Any:
    validator = getattr(kind, "__pydantic_validator__", None)
    if validator is None:
        raise NotImplementedError
    try:
        return validator.validate_json(msgspec.json.encode(value))
    except ValueError as error:
        listed = getattr(error, "errors", None)
        if listed is None:
            raise
        found = listed(include_url=False, include_context=False, include_input=False)
        told = [f"{_path(one['loc'])}: {one['msg']}" for one in found[:_SHOWN]]
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ValueError("; ".join(told) + more) from None


def _path(steps: tuple[str | int, ...]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".") or "it"
