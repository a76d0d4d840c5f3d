"""TOML and ``section.key=value`` overrides <-> Recipe, and its JSON schema."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from meshtron.errors import RecipeError
from meshtron.recipe.problems import nearest, recipe_error, section_class
from meshtron.recipe.sections import Recipe


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, apply overrides and check it.

    Args:
        path: the file.
        overrides: ``section.key=value`` strings, as ``parse_overrides`` takes them; the last of a key counts.

    Raises:
        RecipeError: the file cannot be read or is not TOML, or keys or values in it or in the overrides are wrong;
            one line for each mistake.
    """
    values = _read_toml(Path(path))
    changes = parse_overrides(overrides)
    for key, value in changes.items():
        _assign(values, key, value)

    def where(key: str) -> str:
        from_override = any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in changes)
        return "" if from_override else f"{path}: "

    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise recipe_error(error, Recipe, where) from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Turn ``["optimizer.lr=1e-3", "run.name=try"]`` into ``{"optimizer.lr": 0.001, "run.name": "try"}``.

    A value is read as a TOML value, and as plain text where it is none or where the key holds text anyway.

    Raises:
        RecipeError: an override has no ``=`` or its key is not ``section.key``.
    """
    parsed = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key, text = key.strip(), text.strip()
        parts = key.split(".")
        if not equals or len(parts) < 2 or not all(parts):
            raise RecipeError(f"override {override!r}: expected section.key=value, as in optimizer.lr=1e-3")
        parsed[key] = _parse_value(text, is_text=_holds_text(parts))
    return parsed


def dump_recipe(recipe: Recipe) -> str:
    """The recipe, defaults included, as TOML that loads back equal."""
    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Recipe.model_json_schema()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        # utf-8-sig: some editors put a byte-order mark in front, which TOML knows nothing of
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        folder = path.parent
        names = [item.name for item in folder.glob("*.toml")] if folder.is_dir() else []
        raise RecipeError(f"recipe {path}: no such file{nearest(path.name, names)}") from None
    except OSError as error:
        raise RecipeError(f"recipe {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {path}: not valid TOML: {error}") from None


def _parse_value(text: str, *, is_text: bool) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed.get("value")
    # more than one key: a line break in the text would otherwise smuggle in another assignment
    return text if len(parsed) != 1 or (is_text and not isinstance(value, str)) else value


def _holds_text(parts: list[str]) -> bool:
    """Whether the key can hold nothing but text, so that ``run.name=2026`` needs no quotes."""
    section: Any = Recipe
    for part in parts[:-1]:
        field = section.model_fields.get(part) if section else None
        section = section_class(field.annotation) if field else None
    field = section.model_fields.get(parts[-1]) if section else None
    return field is not None and field.annotation is str


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for depth, name in enumerate(tables):
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            held = ".".join(tables[: depth + 1])
            raise RecipeError(f"override {key}: {held} is not a table; give {held} as a whole")
        values = inner
    values[last] = value
