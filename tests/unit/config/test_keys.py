"""Keys of a tree: values by path and back, text of every kind, the schema."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from k3.config.keys import Key, assemble, flatten, json_schema, keys_of, nested
from k3.config.tree import EngineConfig, RouterConfig

ENGINE_KEYS = keys_of(EngineConfig)


@given(st.sampled_from([EngineConfig, RouterConfig]), st.data())
def test_flatten_and_assemble_are_inverse(tree, data):
    values = dict(flatten(tree()))
    changed = data.draw(st.sampled_from(sorted(values)))
    if keys_of(tree)[changed].kind == "int":
        values[changed] = data.draw(st.integers(0, 99))
    assert flatten(assemble(tree, values)) == values


@given(st.text(), st.sampled_from(sorted(ENGINE_KEYS)))
def test_text_is_a_value_of_the_right_kind_or_a_value_error(text, path):
    kinds = {"bool": bool, "int": int, "float": float, "str": str, "list": tuple}
    with suppress(ValueError):
        assert isinstance(ENGINE_KEYS[path].parse(text), kinds[ENGINE_KEYS[path].kind])


def test_the_schema_is_closed_and_covers_every_key():
    schema = json_schema(EngineConfig, "k3-decode")
    assert schema["additionalProperties"] is False
    found = {
        f"{section}.{name}" if "properties" in node else section
        for section, node in schema["properties"].items()
        for name in node.get("properties", {"": None})
    }
    assert found == set(ENGINE_KEYS)
    assert schema["properties"]["schedule"]["properties"]["depth"]["maximum"] == 2


def test_flags_and_variables_are_derived_from_the_path():
    key: Key = ENGINE_KEYS["cache.page_tokens"]
    assert (key.flag, key.variable) == ("--cache-page-tokens", "K3_CACHE__PAGE_TOKENS")
    assert nested({"cache.pages": 3, "role": "x", "a.b": ("c",)}) == {
        "cache": {"pages": 3},
        "role": "x",
        "a": {"b": ["c"]},
    }
