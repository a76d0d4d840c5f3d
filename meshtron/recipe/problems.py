"""pydantic's errors -> one line a mistake: where, which key, what was found, what is allowed, nearest name."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from meshtron.errors import RecipeError

# pydantic's error types in a user's words; {placeholders} are filled from the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "extra_forbidden": "",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a table",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "some text",
    "string_type": "text in quotes",
    "too_long": "{max_length} values",
    "too_short": "at least {min_length} value(s)",
    "tuple_type": "a list",
}


# Where a key may hold one of two sections, pydantic puts these into the location of a mistake.
UNION_TAGS = ("shipped family", "custom family")


class Problems(ValueError):
    """Several mistakes found by one validator: pairs of (key inside the section, sentence)."""

    def __init__(self, found: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {sentence}" for key, sentence in found))
        self.found = tuple(found)

    @classmethod
    def raise_if(cls, found: Sequence[tuple[str, str]]) -> None:
        """Raise the mistakes in ``found``, if there are any."""
        if found:
            raise cls(found)


def nearest(name: str, valid: Sequence[str]) -> str:
    """``; did you mean "x"?`` for the most similar of ``valid``, or nothing."""
    close = difflib.get_close_matches(name.lower(), [option.lower() for option in valid], n=1, cutoff=0.5)
    original = {option.lower(): option for option in valid}
    return f'; did you mean "{original[close[0]]}"?' if close else ""


def show(value: Any) -> str:
    """A value as a user would write it in TOML, shortened."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    try:
        text = json.dumps(value, ensure_ascii=False).replace("NaN", "nan").replace("Infinity", "inf")
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def recipe_error(
    error: ValidationError, root: type[BaseModel], where: Callable[[str], str] = lambda key: ""
) -> RecipeError:
    """Turn ``error``, raised while building ``root``, into one RecipeError with a line for each mistake.

    Args:
        error: what pydantic found.
        root: the class that was being built; keys are looked up in it.
        where: gives the text in front of a key, for instance the file it was read from.
    """
    sentences: dict[tuple[str, str], str] = {}  # a union reports one key once for each of its types
    expectations: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        kind, context = detail["type"], detail.get("ctx", {})
        location, section = _locate(root, detail["loc"])
        key = key_text(location)
        if kind == "default_factory_not_called":  # another field, reported by itself, is what is wrong
            continue
        if kind == "extra_forbidden":
            sentences[key, kind] = f"unknown key{_suggest_key(root, section, str(location[-1]))}"
        elif kind == "missing":
            sentences[key, kind] = "missing"
        elif isinstance(cause := context.get("error"), Problems):
            for inner, sentence in cause.found:
                sentences[f"{key}.{inner}" if key else inner, sentence] = sentence
        else:
            expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else detail["msg"]
            expected = expected.replace("'", '"')
            hint = _suggest_value(detail["input"], expected) if kind == "literal_error" else ""
            if kind == "tuple_type":
                hint = _suggest_list(section, str(location[-1]), detail["input"])
            allowed = expectations.setdefault(key, [])
            allowed.append(expected)
            options = " or ".join(dict.fromkeys(allowed))
            sentences[key, "value"] = f"expected {options}, found {show(detail['input'])}{hint}"
    return RecipeError("\n".join(f"{where(key)}{key}: {text}" for (key, _), text in sentences.items()))


def key_text(location: Sequence[int | str]) -> str:
    """``("data", "train", 0, "path")`` -> ``data.train[0].path``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation such as ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_class(part))), None)


def _locate(root: type[BaseModel], location: Sequence[int | str]) -> tuple[list[int | str], type[BaseModel] | None]:
    """Drop what pydantic appends for members of a union; also give the section that holds the last name."""
    section: type[BaseModel] | None = root
    holder, kept = section, list[int | str]()
    for part in location:
        if isinstance(part, str):
            if part in UNION_TAGS:
                continue
            if section is None:
                break
            holder = section
            field = section.model_fields.get(part)
            section = section_class(field.annotation) if field else None
        kept.append(part)
    return kept, holder


def _suggest_key(root: type[BaseModel], section: type[BaseModel] | None, name: str) -> str:
    names = list(section.model_fields) if section else []
    sections: Mapping[str, Any] = root.model_fields
    elsewhere = [
        f"{other}.{name}"
        for other, field in sections.items()
        if (inside := section_class(field.annotation)) and inside is not section and name in inside.model_fields
    ]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return nearest(name, names) or f"; known here: {', '.join(names)}"


def _suggest_list(section: type[BaseModel] | None, name: str, found: Any) -> str:
    """A path where a list of tables with paths is meant: that list."""
    field = section.model_fields.get(name) if section else None
    inside = section_class(field.annotation) if field else None
    if inside is None or "path" not in inside.model_fields or not isinstance(found, str):
        return ""
    return f"; did you mean [{{path = {json.dumps(found)}}}]?"


def _suggest_value(found: Any, expected: str) -> str:
    options = [part.strip('" ') for part in expected.replace(" or ", ",").split(",")]
    return nearest(found, options) if isinstance(found, str) else ""
