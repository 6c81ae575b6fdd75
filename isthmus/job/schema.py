"""The JSON schema of a job file, for editors."""

from typing import cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from isthmus.job.fields import Frozen
from isthmus.job.spec import Job


def job_schema() -> dict[str, object]:
    """Return the JSON schema of a job file, by the keys that TOML uses."""
    return {"$schema": _TomlSchema.schema_dialect, **Job.model_json_schema(schema_generator=_TomlSchema)}


class _TomlSchema(GenerateJsonSchema):
    """JSON schema in TOML's words: units as text, no null, no titles that repeat the key."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        # Only a model, not a field by itself, writes its defaults with their units.
        model = cast("type[Frozen]", schema["cls"]).model_construct()
        for key, default in model.model_dump(mode="json", exclude_none=True).items():
            json_schema["properties"][key]["default"] = default
        return json_schema

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002 pydantic's signature
        return False
