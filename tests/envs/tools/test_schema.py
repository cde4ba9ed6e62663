"""Schemas from elsewhere: what cannot be checked is refused when the tool is listed, and every
check ends."""

import json
from typing import Any

import pytest

from envs.errors import ToolError
from envs.tools import schema
from envs.tools.schema import ArgumentCheck, check_schema


def listed(properties: dict[str, Any], **more: Any) -> ArgumentCheck:
    parameters = {"type": "object", "properties": properties, **more}
    return ArgumentCheck(
        check_schema({"name": "f", "description": "F.", "parameters": parameters}, "the server")
    )


def deep(levels: int) -> Any:
    return json.loads('{"properties": {"a": ' * levels + "{}" + "}}" * levels)


LONG_LOOP = {
    "$defs": {
        "x": {"allOf": [{"$ref": "#/$defs/y"}]},
        "y": {"anyOf": [{"not": {"$ref": "#/$defs/x"}}]},
    }
}
DOUBLING = {f"x{i}": {"allOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(60)} | {
    "x60": {"type": "string"}
}
TREE = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/tree"}}}


@pytest.mark.parametrize(
    ("properties", "more", "words"),
    [
        (
            {"a": {"$ref": "http://127.0.0.1:9/schema.json"}},
            {},
            "only references such as #/$defs/NAME are supported",
        ),
        (
            {"a": {"$ref": "other.json"}},
            {"$id": "http://127.0.0.1:9/"},
            "refer to 'other.json', which is not in them",
        ),
        ({"a": {"$ref": "#/$defs/x"}}, LONG_LOOP, "refer to themselves without end"),
        ({"a": {"$dynamicRef": "#x"}}, {}, "use $dynamicRef"),
        ({"a": {"pattern": "("}}, {}, "'(' is not a 'regex'"),
        ({"a": deep(400)}, {}, "nested too deep"),
        ({}, {"$id": 5}, "$id must be text, got 5"),
        ({}, {"$schema": []}, "$schema must be text, got []"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_when_it_is_listed(
    properties: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ToolError) as caught:
        listed(properties, **more)
    assert (
        words in str(caught.value)
        and "the parameters of f" in str(caught.value)
        and len(str(caught.value)) < 300
    )


@pytest.mark.parametrize(
    ("properties", "more", "arguments"),
    [
        ({"a": {"type": "string", "pattern": "^(a|a)*$"}}, {}, {"a": "a" * 50 + "!"}),
        (
            {"a": {"type": "object", "patternProperties": {"^(a|a)*$": {}}}},
            {},
            {"a": {"a" * 50 + "!": 1}},
        ),
        ({"a": {"$ref": "#/$defs/x0"}}, {"$defs": DOUBLING}, {"a": "x"}),
    ],
)
def test_a_check_that_would_never_end_is_an_error_in_the_arguments(
    properties: dict[str, Any],
    more: dict[str, Any],
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schema, "CHECK_S", 0.2)
    assert listed(properties, **more)(arguments) == "f: checking these arguments takes too long"


def test_patterns_references_and_names_that_look_like_keywords_work() -> None:
    check = listed(
        {
            "pattern": {"type": "string", "pattern": "^[a-z]+$"},
            "properties": {
                "type": "object",
                "patternProperties": {"^x-": {"type": "integer"}},
                "required": ["x-a"],
            },
            "enum": {"enum": [{"$ref": "http://elsewhere"}, 1]},
            "tree": {"$ref": "#/$defs/tree"},
        },
        **{"$defs": {"tree": TREE}},
    )
    tree: Any = {"inner": {"inner": {}}}
    assert check({"pattern": "abc", "properties": {"x-a": 1}, "enum": 1, "tree": tree}) is None
    assert check({"pattern": "ABC"}) == "f: pattern: 'ABC' does not match '^[a-z]+$'"
    assert "is not of type 'integer'" in str(check({"properties": {"x-a": "1"}}))
    for _ in range(2000):
        tree = {"inner": tree}
    assert check({"tree": tree}) == "f: these arguments are nested too deep"


def test_null_passes_where_openapi_allows_it_also_through_references() -> None:
    inner = {"nullable": True, "type": "object", "properties": {"b": {"type": "string"}}}
    check = listed(
        {
            "a": inner,
            "c": {"$ref": "#/properties/a/properties/b"},
            "d": {"enum": ["x"], "nullable": True},
        }
    )
    assert check({"a": None, "c": "x", "d": None}) is None
    assert check({"c": None}) == "f: c: None is not of type 'string'"


TEXT: Any = {"type": "string"}
NUMBER: Any = {"type": "integer"}
BIG: Any = {"properties": {"mode": {"const": "big"}}, "required": ["mode"]}
SIZES: Any = {
    "if": BIG,
    "then": {"properties": {"size": {"maximum": 100}}},
    "else": {"properties": {"size": {"maximum": 5}}},
}
ONE_OF: Any = [
    {"properties": {k: TEXT}, "required": [k], "additionalProperties": False} for k in "ab"
]
PREFIXED: Any = {"type": "object", "patternProperties": {"^x-": {}}, "additionalProperties": False}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
PAIR: Any = {"type": "array", "items": [NUMBER, TEXT], "additionalItems": False}


@pytest.mark.parametrize(
    ("more", "right", "wrong"),
    [
        ({"oneOf": ONE_OF}, {"b": "x"}, {"a": "x", "b": "y"}),
        ({"properties": {"mode": TEXT, "size": NUMBER}, **SIZES}, {"mode": "big", "size": 50}, {"size": 50}),
        ({"$ref": "#/$defs/base", "properties": {"x": TEXT}, "$defs": {"base": {"properties": {"id": TEXT}}}},
         {"id": "1", "x": "y"}, {"id": "1", "y": "y"}),
        ({**DRAFT_7, "properties": {"pair": PAIR}}, {"pair": [1, "x"]}, {"pair": ["x", 1]}),
        ({"properties": {"a": PREFIXED}}, {"a": {"x-1": 1}}, {"a": {"x-1": 1, "y": 2}}),
        ({"properties": {"a": {"$ref": "word.json"}}, "$id": "http://x/", "$defs": {"w": {"$id": "word.json", **TEXT}}},
         {"a": "x"}, {"a": 1}),
    ],
)  # fmt: skip
def test_calls_are_checked_by_json_schemas_rules_and_other_names_are_refused(
    more: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    described = {"name": "f", "description": "F.", "parameters": {"type": "object", **more}}
    check = ArgumentCheck(check_schema(described, "the server"))
    assert check(right) is None and check(wrong)


def test_text_from_markup_stays_text_if_it_could_not_be_sent_and_any_legal_schema_converts_it() -> (
    None
):
    check = listed({"a": {"type": "array"}, "b": True, "c": {"anyOf": [True, {"type": "null"}]}})
    assert check.convert({"a": "[1]", "b": "[2]", "c": "3"}) == {"a": [1], "b": [2], "c": 3}
    half = check.convert({"a": r'["\ud83d"]'})
    assert half == {"a": r'["\ud83d"]'} and "is not of type 'array'" in str(check(half))
    assert check.convert({"a": r'["\ud83d\ude00"]'}) == {"a": ["\U0001f600"]}
