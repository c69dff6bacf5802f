"""Structured outputs on tokens of one byte each: what the sampler may choose, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import octavo.runtime.grammar as grammar_module
from octavo.engine.intake import Intake
from octavo.errors import RequestError
from octavo.runtime.grammar import Grammars
from octavo.runtime.sampler import Sampler
from octavo.scheduling.plan import NO_TOKEN, Admission
from octavo.scheduling.request import Request, SamplingParams, StructuredOutputs
from octavo.server.formats import format_of
from octavo.server.wire import CompletionBody

END, CONTROL, WIDTH = 256, 257, 270
"""The end token, a control token, and logits wider than the tokenizer."""
OBJECT = StructuredOutputs("json_object")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|control|>"]})
    assert (fast.eos_token_id, fast.convert_tokens_to_ids("<|control|>")) == (END, CONTROL)
    return fast


TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, WIDTH)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def schema(**fields: Any) -> StructuredOutputs:
    return StructuredOutputs("json_schema", json.dumps(fields))


def admission(row: int, outputs: list[int], asked: StructuredOutputs | None, **params: Any) -> Admission:
    params.setdefault("seed", row)
    request = Request(
        request_id=f"r{row}",
        prompt_token_ids=np.array([1], np.int32),
        params=SamplingParams(structured_outputs=asked, **params).with_defaults({}),
        eos_token_ids=(END,),
    )
    return Admission(row, row, request, np.array(outputs, np.int32))


class World:
    """A sampler over logits that are a function of a row's identity and position: no model at all."""

    def __init__(self, rows: int) -> None:
        self.sampler = Sampler(rows, WIDTH, "cpu", GRAMMARS)
        self.asked: dict[int, tuple[int, dict[str, Any]]] = {}
        self.outputs: dict[int, list[int]] = {}

    def admit(self, row: int, identity: int, outputs: list[int] = [], **params: Any) -> None:  # noqa: B006
        self.sampler.admit(admission(row, outputs, params.pop("asked"), **{"seed": identity, **params}))
        self.asked[row] = identity, params
        self.outputs[row] = list(outputs)

    def logits(self, row: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(7919 * self.asked[row][0] + len(self.outputs[row]))
        made = torch.randn(WIDTH, generator=random) * 2
        made[ids('"}],:0123ab{[')] += 3
        made[END] += 4
        return made

    def step(self, rows: list[int]) -> list[int]:
        at = np.array([1 + len(self.outputs[row]) for row in rows], np.int64)
        table = torch.stack([self.logits(row) for row in rows])
        tokens, _ = self.sampler.sample(table, np.array(rows, np.int32), at)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self.outputs[row].append(token)
        return tokens.tolist()

    def run(self, rows: list[int], limit: int = 600) -> None:
        for _ in range(limit):
            rows = [row for row in rows if not self.outputs[row] or self.outputs[row][-1] not in (END, NO_TOKEN)]
            if not rows:
                return
            self.step(rows)

    def text(self, row: int) -> str:
        assert self.outputs[row][-1] == END, "it did not end"
        return str(TOKENIZER.decode(self.outputs[row][:-1]))


SCHEMAS = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0},
                       "tags": {"type": "array", "items": {"enum": ["a", "b\n", 3]}, "maxItems": 3}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": ["number", "null"]},
                                                            "next": {"anyOf": [{"$ref": "#/$defs/node"},
                                                                               {"type": "null"}]}},
                           "required": ["v", "next"]}},
        "$ref": "#/$defs/node",
    },
    "pattern": {"type": "string", "pattern": r'^[^a-y]{1,4}"\\\d+(z|\.)\s?$'},
    "one of": {"oneOf": [{"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]},
                         {"type": "object", "properties": {"k": {"const": "y"}, "n": {}}, "required": ["k", "n"]}]},
    "date": {"type": "array", "prefixItems": [{"type": "string", "format": "date"}, {"type": "boolean"}]},
    "map": {"type": "object", "additionalProperties": {"type": "integer", "exclusiveMaximum": 12, "minimum": -3.5},
            "minProperties": 1, "maxProperties": 3},
    "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20},
    "loose": {"properties": {"a": {"title": "A", "default": 1}}, "required": ["a"], "description": "x"},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_are_json_of_the_schema_for_every_seed(name: str) -> None:
    world = World(40)
    for row in range(40):
        world.admit(row, row, asked=schema(**SCHEMAS[name]), temperature=1.5)
    world.run(list(range(40)))
    ended = [row for row in range(40) if world.outputs[row][-1] == END]
    assert len(ended) > 30  # the others are long, not wrong
    check = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    for row in ended:
        check.validate(json.loads(world.text(row)))
    assert len({world.text(row) for row in ended}) > 1


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    world = World(60)
    for row in range(60):
        world.admit(row, row, asked=OBJECT, temperature=1.5)
    world.run(list(range(60)))
    ended = [row for row in range(60) if world.outputs[row][-1] == END]
    assert len(ended) > 40
    made = [json.loads(world.text(row)) for row in ended]
    assert all(type(one) is dict for one in made)
    assert max(len(str(one)) for one in made) > 40


@pytest.mark.parametrize(("kind", "spec", "wanted"), [
    ("regex", "(ab|c)+d", set("abcd")), ("ebnf", 'root ::= "x" root | "yz"', set("xyz")),
])  # fmt: skip
def test_regular_expressions_and_grammars_are_followed(kind: Any, spec: str, wanted: set[str]) -> None:
    world = World(8)
    for row in range(8):
        world.admit(row, row, asked=StructuredOutputs(kind, spec))
    world.run(list(range(8)))
    assert all(set(world.text(row)) <= wanted and len(world.text(row)) > 1 for row in range(8))


def test_a_row_is_the_same_alone_among_others_and_after_preemption() -> None:
    """Greedy and seeded, with and without a grammar, each in its own row of one batch."""
    kinds: list[dict[str, Any]] = [
        {"asked": schema(**SCHEMAS["person"]), "temperature": 1.5},
        {"asked": None, "temperature": 1.0},
        {"asked": OBJECT, "temperature": 0.0},
        {"asked": None, "temperature": 0.0},
        {"asked": schema(**SCHEMAS["tree"]), "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
        {"asked": None, "temperature": 0.9, "top_k": 5},
    ]
    alone = []
    for identity, params in enumerate(kinds):
        world = World(1)
        world.admit(0, identity, **params)
        for _ in range(30):
            world.step([0])
        alone.append(world.outputs[0])
    together = World(6)
    for identity, params in enumerate(kinds):
        together.admit(identity, identity, **params)
    for step in range(30):
        if step in (7, 19):  # every sequence takes another's seat, and its outputs are all there is to go by
            kept = [together.outputs[row] for row in range(6)]
            for identity, params in enumerate(kinds):
                together.admit(identity, identity, kept[identity], **params)
        together.step([(row + step) % 6 for row in range(6)])
    assert [together.outputs[row] for row in range(6)] == alone


def test_a_row_without_a_grammar_never_meets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    world.admit(0, 0, asked=OBJECT)
    world.admit(0, 1, asked=None)
    monkeypatch.setattr(world.sampler, "_languages", None)
    assert world.sampler._followers == {}
    world.step([0])


def test_control_tokens_are_never_content_however_likely() -> None:
    world = World(1)
    world.admit(0, 0, asked=OBJECT, logit_bias={CONTROL: 100, WIDTH - 1: 100, END: 100}, temperature=0.0)
    world.run([0])
    json.loads(world.text(0))


def test_log_probabilities_are_those_before_the_mask() -> None:
    sampler = Sampler(1, WIDTH, "cpu", GRAMMARS)
    sampler.admit(admission(0, [], OBJECT, temperature=0.0, logprobs=1))
    logits = torch.zeros(1, WIDTH)
    logits[0, 5] = 20.0
    tokens, logprobs = sampler.sample(logits, np.zeros(1, np.int32), np.ones(1, np.int64))
    assert tokens.tolist() == ids("{")
    assert logprobs[0].top[0][0] == 5
    assert logprobs[0].rank > 1


def test_an_end_is_possible_only_where_the_grammar_ends() -> None:
    follower = GRAMMARS.follow(StructuredOutputs("regex", "ab?"), (END,), np.zeros(0, np.int32))
    seen = []
    for char in "ab":
        seen.append(allowed(follower))
        follower.accept(ids(char)[0])
    seen.append(allowed(follower))
    assert seen == [set(ids("a")), {*ids("b"), END}, {END}]
    follower.accept(END)  # a step that was in flight when the sequence ended
    assert allowed(follower) == {END}


def allowed(follower: Any) -> set[int]:
    bits = np.unpackbits(follower.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: WIDTH + 32]).tolist())


def test_stop_token_ids_end_a_complete_output_and_may_be_content_before() -> None:
    stop = ids("b")[0]
    asked = StructuredOutputs("regex", "abc?")
    follower = GRAMMARS.follow(asked, (stop, CONTROL), np.array(ids("a"), np.int32))
    assert allowed(follower) == {stop}
    follower.accept(stop)
    assert allowed(follower) == {*ids("c"), stop, CONTROL}
    assert not follower.must_end


def test_min_tokens_gives_way_when_a_grammar_has_ended() -> None:
    world = World(2)
    world.admit(0, 3, asked=StructuredOutputs("regex", "ab"), min_tokens=50)
    world.admit(1, 3, asked=StructuredOutputs("regex", "[ab]*"), min_tokens=50)
    world.run([0, 1])
    assert world.text(0) == "ab"
    assert len(world.text(1)) >= 50


def test_a_token_outside_the_language_ends_that_sequence_alone() -> None:
    world = World(2)
    world.admit(0, 0, ids("not json"), asked=OBJECT)
    world.admit(1, 1, asked=OBJECT)
    first, second = world.step([0, 1])
    assert (first, second) == (NO_TOKEN, ids("{")[0])


def test_a_grammar_that_takes_ever_longer_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "RESERVE_S", 0.1)
    world = World(2)
    ambiguous = StructuredOutputs("regex", "(a*)*(a*)*(a*)*(a*)*b")
    world.admit(0, 0, asked=ambiguous, logit_bias={ids("b")[0]: -100})
    world.admit(1, 1, asked=StructuredOutputs("regex", "a*b"), logit_bias={ids("b")[0]: -100})
    for _ in range(300):
        if world.step([0, 1])[0] == NO_TOKEN:
            break
    assert world.outputs[0][-1] == NO_TOKEN
    assert world.outputs[1][-1] == ids("a")[0]


# -- what is refused, before anything is queued --------------------------------------------------


def refuse(asked: Any, **params: Any) -> RequestError:
    intake = Intake(params.pop("tokenizer", TOKENIZER), defaults={}, eos_token_ids=params.pop("eos", (END,)),
                    vocab_size=WIDTH, grammars=params.pop("grammars", GRAMMARS))  # fmt: skip
    with pytest.raises(RequestError) as caught:
        intake.prepare("r", [1], SamplingParams(structured_outputs=asked, **params))
    assert caught.value.field == "structured_outputs"
    return caught.value


def test_no_tokenizer_no_structured_outputs() -> None:
    assert "skip_tokenizer_init" in str(refuse(OBJECT, grammars=None, tokenizer=None))
    assert "nothing computes here" in str(refuse(OBJECT, grammars=None))


def test_an_output_that_nothing_could_end_is_refused() -> None:
    assert "ignore_eos" in str(refuse(OBJECT, ignore_eos=True))
    assert "no end token" in str(refuse(OBJECT, eos=()))


@pytest.mark.parametrize(("kind", "spec", "said"), [
    ("xml", "", "json_schema"),
    ("json_object", "{}", "takes no spec"),
    ("json_schema", "  ", "needs a spec"),
    ("json_schema", 5, "must be a text"),
    ("json_schema", "x" * 70_000, "longer than"),
    ("json_schema", "\ud800", "not valid Unicode"),
    ("json_schema", "{", "is not JSON"),
    ("json_schema", '{"a": NaN}', "NaN"),
    ("json_schema", "[]", "must be a JSON object"),
    ("json_schema", "[" * 30_000, "not JSON"),
    ("regex", "(", "never closed|parenthesis"),
    ("regex", "(?=a)b", "Lookahead"),
    ("ebnf", "root ::= nothing", "not defined"),
    ("ebnf", 'root ::= "a"{2,1}', "cannot be compiled|no output"),
])  # fmt: skip
def test_specifications_that_cannot_be_compiled_are_refused(kind: Any, spec: Any, said: str) -> None:
    import re

    error = refuse(StructuredOutputs(kind, spec))
    assert re.search(said, str(error)), error
    assert len(str(error)) < 700


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(("fields", "said"), [
    ({"not": {}}, "#: not is not served"),
    ({"type": "object", "properties": {"a": {"if": {}}}}, "#/properties/a: if is not served"),
    ({"allOf": [{}, {}]}, "allOf of several"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    ({"type": "foo"}, "none of string"),
    ({"$ref": "http://example.org/x"}, "is not served; refer"),
    ({"$ref": "#/$defs/none"}, "finds nothing"),
    ({"$ref": "#"}, "cannot be compiled"),
    ({"type": "object", "required": ["q"]}, "required names"),
    ({"type": "string", "minLength": 2, "maxLength": 1}, "below minLength"),
    ({"type": "string", "pattern": "(a"}, "never closed"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "together"),
    ({"type": "string", "format": "color"}, "format"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer"),
    ({"type": "string", "minimum": 3}, "belongs to type"),
    ({"minLength": 1, "minItems": 1}, "name a type"),
    ({"enum": []}, "at least one"),
    ({"type": "string", "enum": [1]}, "no value of enum"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is served where"),
    ({"properties": {"a": False}}, "allows nothing"),
    ({"type": "object", "properties": {"a": DEEP}}, "nested more than"),
    ({"enum": list(range(6000))}, "more than 5000"),
    ({"type": "string", "pattern": "((a{100}){100}){100}"}, "written out"),
    ({"type": "object", "properties": {f"k{i}": {} for i in range(3000)}}, "make it simpler"),
])  # fmt: skip
def test_schemas_that_cannot_be_kept_are_refused_by_keyword(fields: dict[str, Any], said: str) -> None:
    assert said in str(refuse(schema(**fields)))


def test_without_the_package_the_remedy_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def hidden(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "xgrammar":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", hidden)
    assert "pip install" in str(refuse(OBJECT, grammars=Grammars(TOKENIZER, WIDTH)))


def test_a_warm_compiler_has_compiled_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = Grammars(TOKENIZER, WIDTH)
    warm.warm()
    assert warm.cached == 1
    monkeypatch.setattr(warm, "_compile", None)
    warm.check(SamplingParams(structured_outputs=StructuredOutputs("json_object")).with_defaults({}), [0])
    # Nothing can be had for a vocabulary that nobody can spell; it is told when somebody asks.
    Grammars(object(), WIDTH).warm()


def test_grammars_are_compiled_once_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(TOKENIZER, WIDTH)
    first = made.compiled(OBJECT)
    assert made.compiled(OBJECT) is first
    monkeypatch.setattr(grammar_module, "MAX_CACHED_BYTES", 3 * first.memory_size_bytes)
    for index in range(60):
        made.compiled(StructuredOutputs("json_schema", json.dumps({"properties": {f"key {index}": {}}})))
    assert 1 <= made.cached < 10
    assert made.compiled(OBJECT) is not first  # forgotten, and made anew


@pytest.mark.parametrize(
    "text", ["yes", 'a "b" c', "a\\nb\\\\", "tab\tline\nend", "é 你好 👋🏽", "\x07 bell", "root ::= x | y"]
)
def test_a_choice_is_kept_to_letter_by_letter_whatever_is_in_it(text: str) -> None:
    body = CompletionBody.parse({"prompt": "p", "structured_outputs": {"choice": ["other", text]}})
    asked = format_of(body)
    assert asked is not None
    follower = GRAMMARS.follow(asked, (END,), np.array(ids(text), np.int32))
    follower.allowed()
    assert follower.must_end
