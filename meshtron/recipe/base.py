"""What all sections of a recipe share."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshtron.recipe.problems import recipe_error

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of every section: unknown keys refused, no conversion between types, no change after it is built."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            name = type(self).__name__
            raise recipe_error(error, type(self), lambda key: "" if name == "Recipe" else f"{name}: ") from None

    # Without this flag pydantic would also call __init__ for a section inside a recipe, and the first mistake
    # would hide those in other sections.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
