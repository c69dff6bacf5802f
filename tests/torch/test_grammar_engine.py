"""Structured outputs through the whole engine: preempted, in mixed batches, on a random model and on SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from checkpoints import tiny_llama
from test_grammar import SCHEMAS, byte_tokenizer

from octavo import LLM, SamplingParams
from octavo.errors import ModelError, RequestError
from octavo.memory.check import is_empty
from octavo.models.embedded import embedded_checkpoint
from octavo.scheduling.events import Preempted
from octavo.scheduling.request import StructuredOutputs

OBJECT = StructuredOutputs("json_object")
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "kind": {"enum": ["capital", "port", None]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "people", "kind", "rivers"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_llama(
        tmp_path_factory.mktemp("bytes"), tokenizer=False, vocab_size=270, eos_token_id=256, bos_token_id=257,
        initializer_range=0.5, max_position_embeddings=256,
    )  # fmt: skip
    byte_tokenizer().save_pretrained(made)
    return made


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled, with a grammar of each kind and without one."""
    person = StructuredOutputs("json_schema", json.dumps(SCHEMAS["person"]))
    languages = [OBJECT, None, person, None,
                 StructuredOutputs("regex", "(ab|c){20,}d"),
                 StructuredOutputs("ebnf", 'root ::= [a-f]+ "."')]  # fmt: skip
    params = [
        SamplingParams(structured_outputs=languages[i % 6], temperature=(0.0, 1.5)[i % 4 > 1], seed=i, max_tokens=40)
        for i in range(24)
    ]
    return [[(7 * i + j) % 256 for j in range(3 + i % 11)] for i in range(24)], params


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_do_not_depend_on_neighbours_preemption_or_pipelining(checkpoint: Path, depth: int) -> None:
    prompts, params = mixed()
    roomy = LLM(str(checkpoint), num_gpu_blocks_override=64, block_size=4, max_num_seqs=1)
    alone = [output.outputs[0].token_ids for output in roomy.generate(prompts, params)]
    tight = LLM(str(checkpoint), num_gpu_blocks_override=40, block_size=4, max_num_seqs=16, pipeline_depth=depth,
                audit=True)  # fmt: skip
    preempted = []
    tight.engine.observers.append(lambda events: preempted.extend(e for e in events if isinstance(e, Preempted)))
    outputs = tight.generate(prompts, params)
    assert len(preempted) > 3
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert {output.outputs[0].finish_reason for output in outputs} <= {"stop", "length"}
    assert is_empty(tight.engine.core.scheduler.cache)


def test_an_ended_grammar_stops_and_a_cut_one_is_a_matter_of_length(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), num_gpu_blocks_override=64, block_size=4)
    asked = StructuredOutputs("regex", "abc")
    (whole,) = llm.generate([[1]], SamplingParams(structured_outputs=asked, seed=1))
    (cut,) = llm.generate([[1]], SamplingParams(structured_outputs=asked, seed=1, max_tokens=2))
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == ("abc", "stop")
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("ab", "length")


def test_a_refused_grammar_queues_nothing(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), num_gpu_blocks_override=64, block_size=4)
    good, bad = SamplingParams(structured_outputs=OBJECT), SamplingParams(
        structured_outputs=StructuredOutputs("json_schema", '{"type": "colour"}'))  # fmt: skip
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        llm.generate([[1], [1]], [good, bad])
    assert caught.value.field == "structured_outputs"
    assert not llm.engine.has_work


def test_without_a_tokenizer_structured_outputs_are_refused(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), num_gpu_blocks_override=64, block_size=4, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate([[1]], SamplingParams(structured_outputs=OBJECT, detokenize=False))


@pytest.mark.slow
def test_smollm2_answers_in_the_schema_at_any_temperature() -> None:
    try:
        embedded_checkpoint()
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    llm = LLM(dtype="float32", num_gpu_blocks_override=48, max_num_seqs=16, audit=True)
    preempted: list[Any] = []
    llm.engine.observers.append(lambda events: preempted.extend(e for e in events if isinstance(e, Preempted)))
    city = StructuredOutputs("json_schema", json.dumps(CITY))
    chat = [{"role": "user", "content": "Describe Paris as JSON."}]
    params = [SamplingParams(structured_outputs=city, temperature=t, seed=i, max_tokens=80)
              for i, t in enumerate([0.0, 0.7, *([1.5] * 14)])]  # fmt: skip
    outputs = llm.chat([chat] * len(params), params)
    ended = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(ended) >= 8
    assert preempted
    for answer in ended:
        jsonschema.validate(json.loads(answer.text), CITY)
    assert len({answer.text for answer in ended}) == len(ended)
