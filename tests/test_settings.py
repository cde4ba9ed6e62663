"""Every mistake in a settings mapping gives one sentence that names the key, the value and what was
expected."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import model_validator

from slime_verlog import ConfigError, Field, Settings, read_settings

HINT = " (YAML reads numbers as 0.99 and 1.0e-6: with a dot, and a sign in the exponent)"


class Inner(Settings):
    period: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _not_thirteen(self) -> Self:
        if self.period == 13:
            raise ConfigError("a period of 13 brings bad luck")
        return self


class Outer(Settings):
    rate: float = Field(default=1.0, gt=0, le=1)
    tasks: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    inner: Inner = Inner()
    kind: Literal["window", "full"] = "window"
    weights: Mapping[str, float] = {}
    limit: int | None = None
    vlm: bool | Literal["only"] = False
    several: tuple[Inner, ...] = ()
    given_schema: Mapping[str, Any] | None = Field(None, alias="schema")
    source: str | tuple[Any, ...] | None = None
    choices: Mapping[str, str] | tuple[str, ...] = ()
    sweep: Mapping[str, tuple[Any, ...]] = {}
    nested: Annotated[Inner | str, Field(union_mode="left_to_right")] = Inner()


def test_lists_become_tuples_and_integers_floats() -> None:
    found = read_settings(
        Outer, {"rate": 1, "tasks": ["a", {"task": "b"}], "several": [{"period": 2}]}
    )
    assert (found.rate, found.tasks, found.several) == (
        1.0,
        ("a", {"task": "b"}),
        (Inner(period=2),),
    )


def test_one_of_several_types_may_be_a_list_a_section_or_text() -> None:
    found = read_settings(Outer, {"source": ["a"], "nested": {"period": 3}})
    assert (found.source, found.nested) == (("a",), Inner(period=3))
    assert read_settings(Outer, {"source": "a", "nested": "b"}).nested == "b"
    assert read_settings(Outer, {"sweep": {"rooms": [1, 2]}}).sweep == {"rooms": (1, 2)}


def test_a_key_may_differ_from_the_name_of_its_field() -> None:
    assert read_settings(Outer, {"schema": {"a": 1}}).given_schema == {"a": 1}


def test_a_section_without_keys_keeps_its_defaults() -> None:
    assert read_settings(Outer, {"inner": None}).inner == Inner()
    assert read_settings(Outer, None) == Outer()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer().rate = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        (
            {"inner": {"perod": 1}},
            "unknown key 'env.inner.perod'; did you mean 'env.inner.period'?",
        ),
        ({"several": [{"x": 1}]}, "unknown key 'env.several[0].x'; known keys: period"),
        ({"inner": {"period": 0}}, "env.inner.period must be at least 1, got 0"),
        ({"rate": 2}, "env.rate must be at most 1, got 2"),
        ({"rate": float("nan")}, "env.rate must be a finite number, got nan"),
        ({"rate": "1e-6"}, "env.rate must be a number, got '1e-6'" + HINT),
        ({"kind": "windw"}, "env.kind must be one of 'window', 'full', got 'windw'"),
        ({"vlm": "yes"}, "env.vlm must be true or false or 'only', got 'yes'"),
        ({"weights": [1]}, "env.weights must be a mapping, got [1]"),
        ({"names": ["goto", 3]}, "env.names[1] must be text, got 3"),
        ({"choices": [3]}, "env.choices[0] must be text, got 3"),
        (
            {"names": [True]},
            "env.names[0] must be text, got True (YAML reads yes, no, on and off as true and false; "
            "put the word in quotes)",
        ),
        ({True: 3}, "key True is not text; put it in quotes"),
        ({"weights": {5: 1.0}}, "key 5 is not text; put it in quotes"),
        ({"source": 3}, "env.source must be text or a list, got 3"),
        ({"nested": {"period": 13}}, "a period of 13 brings bad luck"),
        ({"nested": 3}, "env.nested must be a mapping or text, got 3"),
    ],
)
def test_a_mistake_is_one_sentence(mapping: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(Outer, mapping, "env.")
    assert str(caught.value) == sentence


def test_a_missing_value_is_named_and_a_misspelt_one_is_called_unknown() -> None:
    class Needy(Settings):
        path: str

    with pytest.raises(ConfigError, match="^unknown key 'pth'; did you mean 'path'\\?$"):
        read_settings(Needy, {"pth": "a"})
    with pytest.raises(ConfigError, match="^path is missing; it has no default$"):
        read_settings(Needy, {})


def test_the_configuration_itself_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"^env must be a mapping, got \[1\]$"):
        read_settings(Outer, [1], "env.")  # type: ignore[arg-type]
