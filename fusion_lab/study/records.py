"""Records that are kept as JSON: one reader that checks every type on the way in, one writer out."""
import dataclasses
import types
import typing

LARGEST = 1e30  # no figure of a study comes near it, and products of a few stay finite


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def checked(value, kind):
    """value, of a JSON file, as this kind: None, bool, int, float, str, list, dict, tuple[kind, ...], a
    Record or a union of them. Raises ValueError."""
    if isinstance(kind, types.UnionType):
        for one in typing.get_args(kind):
            try:
                return checked(value, one)
            except ValueError:
                continue
    elif typing.get_origin(kind) is tuple:
        if isinstance(value, list):
            return tuple(checked(part, typing.get_args(kind)[0]) for part in value)
    elif dataclasses.is_dataclass(kind):
        return kind.read(value)
    elif kind is float and is_number(value) or kind is int and is_number(value) and isinstance(value, int):
        return value
    elif kind not in (int, float) and isinstance(value, kind):
        return value
    raise ValueError(f"{value!r:.40}: must be {getattr(kind, '__name__', kind)}")


def as_json(value):
    """A record, or a tuple or dict of them, as what json can write. Fields with the metadata `spread` put
    their own keys into the object that they belong to."""
    if hasattr(value, "as_json"):
        return value.as_json()
    if dataclasses.is_dataclass(value):
        content = {}
        for field in dataclasses.fields(value):
            part = as_json(getattr(value, field.name))
            content.update(part if field.metadata.get("spread") else {field.name: part})
        return content
    if isinstance(value, (tuple, list)):
        return [as_json(part) for part in value]
    return {key: as_json(part) for key, part in value.items()} if isinstance(value, dict) else value


def spread(**options):
    """A field whose keys stand among those of its record, as a shape's sizes do."""
    return dataclasses.field(metadata=dict(spread=True), **options)


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of the records. A field's annotation is the type it must have in a file."""

    @classmethod
    def read(cls, content, **given):
        """The record in a JSON object; `given` has fields that are known already. Fields without a default
        must be there, unknown keys are ignored. Raises ValueError."""
        if not isinstance(content, dict):
            raise ValueError(f"{content!r:.40}: must be an object")
        for field in dataclasses.fields(cls):
            if field.name in given:
                continue
            if field.name in content:
                try:
                    given[field.name] = checked(content[field.name], field.type)
                except ValueError as error:
                    raise ValueError(f"{field.name}: {error}") from None
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"{field.name} is missing")
        return cls(**given)
