"""Canonical JSON: one text for one content, nothing that is no number."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypotheses.ledger import LedgerValueError
from hypotheses.ledger.canonical import canonical_json, make_id, text_hash

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_it_reads_back_as_the_same_value(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_order_of_keys_does_not_matter(value: dict[str, Any]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_two_floats_have_one_text_only_when_they_are_the_same_bits(a: float, b: float) -> None:
    same_bits = a == b and math.copysign(1, a) == math.copysign(1, b)
    assert (canonical_json(a) == canonical_json(b)) == same_bits


def test_tuples_are_lists_and_keys_are_sorted() -> None:
    assert (
        canonical_json({"b": (1, 2.5), "a": {"y": None, "x": "\u00e9"}}) == '{"a":{"x":"\\u00e9","y":null},"b":[1,2.5]}'
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0.0, {"b": math.nan}]}, r"thing\.a\[1\]\.b is nan"),
        ([math.inf], r"thing\[0\] is inf"),
        ({1: 2}, "has the key 1; JSON keys are strings"),
        ({"a": {1, 2}}, r"thing\.a is a set"),
        (b"bytes", "thing is a bytes"),
    ],
)
def test_what_json_does_not_have_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(LedgerValueError, match=message):
        canonical_json(value, name="thing")


def test_ids_name_their_kind_and_depend_on_the_whole_key() -> None:
    ids = {make_id("prog", "x", None), make_id("eval", "x", None), make_id("prog", "x"), make_id("prog", None, "x")}
    assert len(ids) == 4
    assert make_id("prog", "x", None) == make_id("prog", "x", None)
    assert text_hash("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
