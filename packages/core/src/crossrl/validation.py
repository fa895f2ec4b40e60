"""Turns pydantic's findings into one error that names every key, with a suggestion for each unknown one."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from crossrl.errors import ConfigError


def _suggest(key: str, model: type[BaseModel] | None) -> str:
    known = list(model.model_fields) if model else []
    near = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else f" (known: {', '.join(known)})" if known else ""


def _section_at(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    """The pydantic model that holds the last key of `loc`."""
    model: Any = root
    for part in loc[:-1]:
        if isinstance(part, int) or model is None:
            continue
        field = model.model_fields.get(part)
        args = [field.annotation] if field else []
        while args and not (isinstance(args[0], type) and issubclass(args[0], BaseModel)):
            head = args.pop(0)
            args = [*getattr(head, "__args__", ()), *args]
        model = args[0] if args else None
    return model


def validated(model: type[BaseModel], values: Any, *, source: str, prefix: str = "") -> Any:
    """`model` built from `values`, or one `ConfigError` that lists every problem with its key and a suggestion."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            loc = tuple(p for p in problem["loc"] if not str(p).startswith("function-"))
            key = prefix + ".".join(str(p) for p in loc)
            if problem["type"] == "extra_forbidden":
                text = f"unknown key {key!r}" + _suggest(str(loc[-1]), _section_at(model, loc))
            else:
                got = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
                text = f"{key or 'config'}: {problem['msg'].removeprefix('Value error, ')}"
                text += got if loc and len(got) < 80 else ""
            lines.append(text)
        raise ConfigError("; ".join(lines), where=source, fix="`crossrl check demo` shows every key of a job") from None
