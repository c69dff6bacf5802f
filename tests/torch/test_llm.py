"""`LLM`: prompts of every form, outputs in order, choices, stops, streaming, and what bad input gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama, tiny_tokenizer

from octavo import LLM, CapacityError, EngineDeadError, RequestError, SamplingParams
from octavo.kernels.cpu import instruction_sets
from octavo.memory.check import is_empty
from octavo.scheduling.plan import StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.5)
    tiny_tokenizer(vocab_size=32).save_pretrained(directory)
    return directory


@pytest.fixture
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), num_gpu_blocks_override=12, block_size=4, max_num_seqs=8, audit=True)


def assert_unharmed(llm: LLM) -> None:
    """No block is lost and the next request is served."""
    assert is_empty(llm.engine.core.scheduler.cache)
    assert len(llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids) == 8
    assert is_empty(llm.engine.core.scheduler.cache)


def test_every_form_of_one_prompt_gives_the_same_tokens(llm: LLM) -> None:
    ids = llm.get_tokenizer()("hello world").input_ids
    forms = ["hello world", {"prompt": "hello world"}, {"prompt_token_ids": ids}, ids]
    tokens = {llm.generate(form, GREEDY)[0].outputs[0].token_ids for form in forms}
    assert len(tokens) == 1
    assert llm.generate("hello world", GREEDY)[0].prompt_token_ids == tuple(ids)


@pytest.mark.parametrize("bar", [True, False])
def test_a_bar_may_be_asked_for_and_none_is_shown(llm: LLM, capfd: pytest.CaptureFixture[str], bar: bool) -> None:
    asked = llm.generate([5, 6], GREEDY, use_tqdm=bar, lora_request=None)
    assert asked[0].outputs[0].token_ids == llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids
    said = llm.chat(HELLO, GREEDY, use_tqdm=bar, lora_request=None)
    assert len(said[0].outputs[0].token_ids) == 8
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "value"), [("lora_request", "an adapter"), ("use_tqdm", 1), ("use_tqdm", None)])
def test_an_adapter_is_refused_by_name_before_anything_runs(llm: LLM, name: str, value: object) -> None:
    for ask in (lambda **more: llm.generate([5, 6], GREEDY, **more), lambda **more: llm.chat(HELLO, GREEDY, **more)):
        with pytest.raises(RequestError) as refused:
            ask(**{name: value})
        assert refused.value.field == name
    assert not llm.engine.core.has_work


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11, 12], [3, 4]]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [o.prompt_token_ids for o in together] == [tuple(p) for p in prompts]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate([[5], [5], [5]], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 3]
    with pytest.raises(RequestError, match="3 prompts"):
        llm.generate([[5], [5], [5]], params[:2])


def test_choices_are_independent_and_repeatable(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=4, ignore_eos=True)
    first, second = llm.generate([5, 6], params)[0], llm.generate([5, 6], params)[0]
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({c.token_ids for c in first.outputs}) == 3
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]


def test_requests_without_a_seed_differ_from_each_other(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    one, two = llm.generate([[5, 6], [5, 6]], params)
    assert one.outputs[0].token_ids != two.outputs[0].token_ids


@pytest.mark.parametrize("neighbour", [None, SamplingParams(max_tokens=20, seed=1), SamplingParams(max_tokens=20)])
def test_a_seeded_request_is_the_same_whatever_runs_beside_it(llm: LLM, neighbour: SamplingParams | None) -> None:
    seeded = SamplingParams(max_tokens=12, seed=11, temperature=1.5, ignore_eos=True)
    alone = llm.generate([7, 8], seeded)[0].outputs[0].token_ids
    prompts, params = [[7, 8]], [seeded]
    if neighbour is not None:
        prompts, params = [[4], [7, 8], [9, 3, 2]], [neighbour, seeded, neighbour]
    beside = llm.generate(prompts, params)
    assert beside[len(prompts) // 2].outputs[0].token_ids == alone


def test_a_seeded_request_survives_preemption_unchanged(checkpoint: Path) -> None:
    seeded = [SamplingParams(max_tokens=24, seed=s, temperature=1.2, ignore_eos=True) for s in range(6)]
    prompts = [[5 + s, 6, 7] for s in range(6)]
    roomy = LLM(str(checkpoint), num_gpu_blocks_override=64, block_size=4)
    tight = LLM(str(checkpoint), num_gpu_blocks_override=12, block_size=4, audit=True)
    calm, paused = roomy.generate(prompts, seeded), tight.generate(prompts, seeded)
    assert sum(o.outputs[0].record.preemptions for o in paused) > 0
    assert [o.outputs[0].token_ids for o in paused] == [o.outputs[0].token_ids for o in calm]


def test_an_end_of_sequence_token_ends_it_and_is_not_text(llm: LLM) -> None:
    free = llm.generate([5, 6, 7], GREEDY)[0].outputs[0]
    eos = free.token_ids[3]
    llm.engine.intake.eos_token_ids = (eos, 31)
    cut = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    first = free.token_ids.index(eos)
    assert cut.token_ids == free.token_ids[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", None)
    later = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, min_tokens=first + 2))[0].outputs[0]
    assert len(later.token_ids) >= first + 2


def test_a_stop_token_id_is_named_as_the_reason(llm: LLM) -> None:
    free = llm.generate([5, 6, 7], GREEDY)[0].outputs[0]
    stop = free.token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    cut = llm.generate([5, 6, 7], params)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason, cut.token_ids[-1]) == ("stop", stop, stop)


def test_a_stop_string_cuts_the_text_and_frees_the_blocks(llm: LLM) -> None:
    words = llm.get_tokenizer().decode(llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids).split()
    assert len(words) > 2, "the tiny model must say something"
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=words[1])
    cut = llm.generate([5, 6, 7], params)[0].outputs[0]
    assert words[1] not in cut.text
    assert (cut.finish_reason, cut.stop_reason) == ("stop", words[1])
    assert cut.record.request_id
    assert_unharmed(llm)


def test_logprobs_are_given_for_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    choice = llm.generate([5, 6], params)[0].outputs[0]
    assert [item.token_id for item in choice.logprobs] == list(choice.token_ids)
    assert all(len(item.top) == 2 and item.rank == 1 for item in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(sum(item.logprob for item in choice.logprobs))


def test_streaming_adds_up_to_the_whole(llm: LLM) -> None:
    whole = llm.generate([[5, 6, 7], [9, 8]], GREEDY)
    text, tokens, ends = {"0": "", "1": ""}, {"0": (), "1": ()}, {}
    for delta in llm.stream([[5, 6, 7], [9, 8]], GREEDY):
        text[delta.request_id] += delta.text
        tokens[delta.request_id] += delta.token_ids
        if delta.finish_reason:
            ends[delta.request_id] = delta.finish_reason
    assert [text["0"], text["1"]] == [o.outputs[0].text for o in whole]
    assert [tokens["0"], tokens["1"]] == [o.outputs[0].token_ids for o in whole]
    assert ends == {"0": "length", "1": "length"}


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream([[5, 6, 7], [9, 8]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    next(stream)
    assert not is_empty(llm.engine.core.scheduler.cache)
    stream.close()
    assert_unharmed(llm)


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hello world"}], GREEDY)[0]
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(output.prompt_token_ids) == "<s> <|user|> hello world <|assistant|>"
    assert len(llm.chat([[{"role": "user", "content": "hello"}], [{"role": "user", "content": "world"}]], GREEDY)) == 2
    with pytest.raises(RequestError, match="template"):
        llm.chat([{"role": "wizard", "content": "hello"}], GREEDY)


def test_the_record_says_what_the_request_cost(llm: LLM) -> None:
    record = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].record
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (3, 8, {})
    assert record.allocated_blocks == {"full": 3}  # 3 + 8 - 1 positions in blocks of 4
    assert record.attention_mode == ("gqa/cpu" if instruction_sets() else "gqa/reference")
    assert record.cache_dtype == "fp32"
    assert min(record.queue_time, record.prefill_time, record.decode_time) >= 0


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], None, "prompt"),
        ("", None, "prompt"),
        ({"prompt_token_ids": []}, None, "prompt"),
        ({"text": "hello"}, None, "prompt"),
        ([5, -1], None, "prompt_token_ids"),
        ([5, 32], None, "prompt_token_ids"),
        ([5, 2**40], None, "prompt_token_ids"),
        ([5, 2**70], None, "prompt_token_ids"),
        ({"prompt_token_ids": [5, "x"]}, None, "prompt_token_ids"),
        ({"prompt_token_ids": [5, 1.5]}, None, "prompt_token_ids"),
        ({"prompt_token_ids": "hello"}, None, "prompt_token_ids"),
        ({"prompt_token_ids": None}, None, "prompt_token_ids"),
        ("\ud800", None, "prompt"),
        ([5] * 64, None, "prompt"),
        ([5] * 5000, None, "prompt"),
        ([5, 6], {"max_tokens": 63}, "max_tokens"),
        ([5, 6], {"max_tokens": 2**31 - 1}, "max_tokens"),
        ([5, 6], {"max_tokens": 4, "logit_bias": {32: 1.0}}, "logit_bias"),
        ([5, 6], {"max_tokens": 4, "stop_token_ids": [99]}, "stop_token_ids"),
    ],
)
def test_bad_requests_name_the_field_and_harm_nothing(llm: LLM, prompt: object, params: dict, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate([[5, 6], prompt], None if params is None else SamplingParams(**params))
    assert refused.value.field == field
    assert_unharmed(llm)


def test_no_tokens_asked_is_the_empty_answer(llm: LLM) -> None:
    output = llm.generate([5, 6], SamplingParams(max_tokens=0))[0].outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
    assert_unharmed(llm)


def test_without_max_tokens_a_request_may_fill_the_context(llm: LLM) -> None:
    output = llm.generate([5, 6], SamplingParams(temperature=0, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == llm.deployment.max_model_len - 2
    assert output.finish_reason == "length"


def test_what_the_pool_never_holds_is_refused_with_the_arithmetic(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), num_gpu_blocks_override=4, block_size=4)
    assert any("larger than the pool" in warning for warning in llm.deployment.warnings)
    with pytest.raises(RequestError) as refused:
        llm.generate([5] * 10, SamplingParams(max_tokens=12))
    assert refused.value.field == "max_tokens"
    with pytest.raises(CapacityError, match=r"needs 11 blocks of 4 tokens, the whole pool has 4 .* larger KV cache"):
        llm.generate([5] * 40, SamplingParams(max_tokens=1))
    assert_unharmed(llm)


def test_without_a_tokenizer_ids_go_in_and_come_out(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), skip_tokenizer_init=True, num_gpu_blocks_override=12)
    output = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (8, "")
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate("hello", GREEDY)
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate([5], SamplingParams(stop="x"))


def test_logits_that_are_not_finite_end_one_sequence_alone(llm: LLM) -> None:
    healthy = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    weight = llm.engine.core.executor._bridge.model.get_input_embeddings().weight
    with torch.no_grad():
        weight[9] = float("nan")
    sick, well = llm.generate([[9, 8], [5, 6, 7]], GREEDY)
    assert (sick.outputs[0].finish_reason, len(sick.outputs[0].token_ids)) == ("error", 0)
    assert "finite" in sick.outputs[0].error
    if 9 not in healthy:
        assert well.outputs[0].token_ids == healthy
    assert is_empty(llm.engine.core.scheduler.cache)


def test_an_executor_that_breaks_ends_every_request_and_the_engine_says_so(llm: LLM) -> None:
    class Broken:
        def submit(self, plan: object) -> None: ...

        def collect(self) -> StepResult:
            raise RuntimeError("the device is gone")

        def close(self) -> None: ...

    llm.engine.core.executor = Broken()
    with pytest.raises(EngineDeadError, match="the device is gone"):
        llm.generate([[5, 6], [7]], GREEDY)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        llm.generate([5], GREEDY)


def test_two_engines_in_one_process_do_not_disturb_each_other(checkpoint: Path) -> None:
    one = LLM(str(checkpoint), num_gpu_blocks_override=12, block_size=4)
    two = LLM(str(checkpoint), num_gpu_blocks_override=30, block_size=2, pipeline_depth=1)
    expected = one.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    for first, second in zip(one.stream([5, 6, 7], GREEDY), two.stream([5, 6, 7], GREEDY), strict=False):
        assert first.token_ids == second.token_ids
    assert two.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == expected
