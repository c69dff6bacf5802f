"""`SamplingParams`: every field against every wrong kind of value, and how defaults fill what was not asked."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.scheduling.request import SamplingParams, validate_token_fields

OPTIONAL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed", "logprobs")
INTEGERS = ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
LISTS = ("stop", "stop_token_ids")


def refused(name: str, value: Any, **others: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value}, **others)
    error = caught.value
    assert error.field == name
    assert len(str(error)) < 400
    assert str(error).startswith(f"{name}=")
    return error


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["1", 1.0, 1.5, True, False, math.nan, [1], {}, b"1", 1j, np.float64(1), object()])
def test_integers_must_be_integers(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", ["0.5", True, False, math.nan, math.inf, -math.inf, [0.5], {}, 1j, b"1", Decimal("0.5"), np.nan, object()]
)
def test_numbers_must_be_finite_numbers(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, [], np.bool_(True)])
def test_flags_must_be_true_or_false(name: str, value: Any) -> None:
    assert refused(name, value).remedy == "must be true or false"


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("value", [1, 1.5, {"a": 1}, {1}, object(), b"bytes"])
def test_lists_must_be_lists(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", 10**30),
        ("temperature", -1),
        ("temperature", -1e-9),
        ("temperature", 10_001),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.0000001),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e5),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", None),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", None),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("min_tokens", 2**40),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 10**100),
        ("seed", 10**5000),
        ("temperature", 10**5000),
        ("logit_bias", {10**5000: 1.0}),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop", ["a", None]),
        ("stop", ["x" * 4097]),
        ("stop", ["x"] * 65),
        ("stop", ["x"] * 1_000_000),
        ("stop", "x" * 1_000_000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [0] * 65),
        ("stop_token_ids", list(range(1_000_000))),
        ("logit_bias", [1]),
        ("logit_bias", "1"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"1.0": 1.0}),
        ("logit_bias", {"²": 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {None: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: -101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: "1"}),
        ("logit_bias", {1: True}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 30 else type(v).__name__,
)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 128),
        ("temperature", 0),
        ("temperature", 0.0),
        ("temperature", 1e-5),
        ("temperature", Fraction(1, 2)),
        ("temperature", np.float32(0.5)),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 2**31 - 1),
        ("top_k", np.int64(5)),
        ("top_p", 1),
        ("top_p", 1e-300),
        ("min_p", 0),
        ("min_p", 1),
        ("repetition_penalty", 1e-9),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("max_tokens", 0),
        ("max_tokens", 2**31 - 1),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("seed", np.uint32(7)),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
    ids=str,
)
def test_the_ends_of_every_range_are_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name", OPTIONAL)
def test_none_means_not_asked(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) is None


def test_none_and_absent_lists_are_empty() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})


def test_lists_and_single_strings_become_tuples_that_the_caller_cannot_change() -> None:
    stop, ids, bias = ["a", "b"], [np.int64(3), 4], {"7": 1, 8: np.float32(-2)}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("c")
    ids.append(5)
    bias[9] = 3
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3, 4)
    assert all(type(i) is int for i in params.stop_token_ids)
    assert params.logit_bias == {7: 1.0, 8: -2.0}
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop_token_ids=np.array([1, 2]).tolist()).stop_token_ids == (1, 2)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    refused("min_tokens", 6, max_tokens=5)
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5).max_tokens is None


def test_stop_strings_need_text() -> None:
    refused("stop", "a", detokenize=False)
    assert SamplingParams(detokenize=False, stop_token_ids=[1]).stop_token_ids == (1,)


def test_a_field_takes_no_place_but_its_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2
    assert dataclasses.replace(SamplingParams(top_k=3), n=2).top_k == 3
    with pytest.raises(RequestError):
        dataclasses.replace(SamplingParams(), n=0)


def test_defaults_fill_only_what_was_not_asked() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "do_sample": True}
    params = SamplingParams(temperature=0, top_p=1.0, stop="x").with_defaults(defaults)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 20, 1.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert params.stop == ("x",)
    assert params.greedy


def test_without_defaults_the_constants_decide() -> None:
    params = SamplingParams().with_defaults({})
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.with_defaults({"temperature": 0.1, "top_k": 3}) is params
    assert not params.greedy


def test_an_asked_zero_is_not_filled() -> None:
    asked = SamplingParams(temperature=0, top_k=0, min_p=0.0)
    filled = asked.with_defaults({"temperature": 0.9, "top_k": 7, "min_p": 0.5})
    assert (filled.temperature, filled.top_k, filled.min_p) == (0, 0, 0.0)


def test_bad_defaults_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams().with_defaults({"top_p": 3})


@given(st.dictionaries(st.sampled_from(SamplingParams.names()), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3),
    st.lists(st.text(max_size=3), max_size=3), st.dictionaries(st.integers(), st.floats(), max_size=2),
)))  # fmt: skip
def test_any_values_are_accepted_or_refused_by_name(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**fields).with_defaults({})
    except RequestError as error:
        named = error.field
    else:
        named = None
        assert params == SamplingParams(**{f.name: getattr(params, f.name) for f in dataclasses.fields(params)})
    assert named is None or named in fields


def test_token_ids_beyond_the_vocabulary_are_refused_by_field_and_value() -> None:
    validate_token_fields(SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]), 10)
    with pytest.raises(RequestError, match="0 to 9") as caught:
        validate_token_fields(SamplingParams(logit_bias={3: 1, 10: 1}), 10)
    assert (caught.value.field, caught.value.value) == ("logit_bias", 10)
    with pytest.raises(RequestError) as caught:
        validate_token_fields(SamplingParams(stop_token_ids=[0, 11]), 10)
    assert (caught.value.field, caught.value.value) == ("stop_token_ids", 11)


def test_errors_cross_processes() -> None:
    error = refused("temperature", -1)
    again = copy.copy(error)  # by the same `__reduce__` that crossing uses
    assert (again.field, again.value, str(again)) == (error.field, error.value, str(error))


# -- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temprature", 0.5, "did you mean temperature"),
        ("max_new_tokens", 8, "max_tokens"),
        ("zzqqzz", 1, "there are n, temperature"),
        ("zzqqzz", ..., "there are n, temperature"),
        ("best_of", 2, "use n"),
        ("use_beam_search", True, "use n and temperature"),
        ("prompt_logprobs", 0, "use logprobs"),
        ("bad_words", ["no"], "logit_bias"),
        ("guided_decoding", {"json": {}}, "structured_outputs"),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_use(name: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature=0, **{name: value})
    assert caught.value.field == name
    assert says in caught.value.remedy


def test_names_of_vllm_with_the_value_that_asks_for_nothing_change_nothing() -> None:
    brought = {"best_of": None, "prompt_logprobs": None, "bad_words": None, "guided_decoding": None}
    assert SamplingParams(n=2, use_beam_search=False, **brought) == SamplingParams(n=2)  # type: ignore[call-arg]


def test_a_constructor_that_checks_names_is_still_that_of_a_dataclass() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: 1.0})
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=2).n == 2
    assert tuple(inspect.signature(SamplingParams).parameters) == SamplingParams.names()
    with pytest.raises(RequestError, match="did you mean seed"):
        dataclasses.replace(params, seeds=1)
