"""Models with packed linear layers: the same tokens, weights held once, and what must stay as it was."""

from __future__ import annotations

import pytest
import torch
from checkpoints import tiny_llama
from prompts import PROMPTS
from torch import nn

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kernels import choose_linear as choosing
from octavo.kernels.choose_linear import choose_linear
from octavo.kernels.linear import linear_instruction_sets
from octavo.models.linear import NativeEmbedding, NativeLinear, Packing, kind_of, packed_matrices, usual_shape
from octavo.models.load import held_bytes, load_checkpoint
from octavo.models.verify import require_served

pytestmark = pytest.mark.skipif(not linear_instruction_sets(), reason="the native kernels were not built")

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("llama")))


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def parameters(model):
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 3e-2), ("float16", 3e-3)])
def test_a_packed_model_gives_the_logits_it_gave_and_holds_its_weights_once(checkpoint, dtype, most):
    model = load_checkpoint(checkpoint, dtype=dtype).model
    before, held = logits(model, [3, 9, 4, 1, 5]), held_bytes(model)
    Packing().apply(model)
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
    after = logits(model, [3, 9, 4, 1, 5])
    assert float((after - before).abs().max()) <= most * float(before.abs().max())
    assert parameters(model) < held / 5
    assert held <= held_bytes(model) < held * 2  # whole panels of matrices this small


def test_a_tied_embedding_is_looked_up_in_the_packed_head(checkpoint):
    model = load_checkpoint(checkpoint, dtype="float32").model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    head.weight = embedding.weight
    table = embedding.weight.detach().clone()
    Packing().apply(model)
    found = model.get_input_embeddings()
    assert isinstance(found, NativeEmbedding)
    assert isinstance(model.get_output_embeddings(), NativeLinear)
    ids = torch.tensor([[0, 5, 5], [7, 1, len(table) - 1]])
    assert torch.equal(found(ids), table[ids])
    assert torch.equal(found.weight, table)
    assert torch.equal(model.get_output_embeddings().weight, table)


def test_a_weight_that_something_else_holds_too_stays(checkpoint):
    model = load_checkpoint(checkpoint, dtype="float32").model
    layers = [module for module in model.modules() if type(module) is nn.Linear and module.weight.shape[0] != 1]
    first = layers[0]
    twin = nn.Linear(first.in_features, first.out_features, bias=False)
    twin.weight = first.weight
    model.twin = twin
    Packing().apply(model)
    assert sum(type(module) is nn.Linear for module in model.modules()) == 2
    assert model.twin.weight is first.weight


def test_what_a_forward_reads_by_itself_is_found_by_the_trial_and_left_alone():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer["b"](x) @ layer["a"].weight.T
            return x

    packing = Packing()
    tiny, real = Reads(), Reads()
    packing.try_on(tiny)
    with torch.inference_mode():
        tiny(torch.ones(1, 4))
        before = real(torch.ones(1, 4))
    packing.learn(tiny)
    assert packing.leave == ("layers.*.a",)
    packing.apply(real)
    assert all(type(layer["a"]) is nn.Linear and isinstance(layer["b"], NativeLinear) for layer in real.layers)
    with torch.inference_mode():
        assert torch.allclose(real(torch.ones(1, 4)), before, rtol=1e-5)


def test_a_model_that_was_not_tried_stays_with_torch(checkpoint):
    model = load_checkpoint(checkpoint, dtype="float32").model
    name, why = Packing().serve(model, "as asked")
    assert (name, list(packed_matrices(model))) == ("torch", [])
    assert "could be tried" in why
    packing = Packing()
    require_served(model, packing=packing)
    assert packing.serve(model, "as asked") == (
        "native",
        f"as asked; {len(list(packed_matrices(model)))} matrices packed",
    )


def test_a_packed_form_that_is_wrong_is_refused_by_name(checkpoint, monkeypatch):
    from octavo.kernels.linear import PackedLinear
    from octavo.models import linear

    class Wrong(PackedLinear):
        def __call__(self, x):
            return super().__call__(x) * 1.01

    monkeypatch.setattr(linear, "PackedLinear", Wrong)
    model = load_checkpoint(checkpoint, dtype="float32").model
    with pytest.raises(Exception, match=r"linear_backend.*differs from torch's"):
        Packing().apply(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_start_table_says_what_multiplies_and_the_ledger_counts_what_is_packed(checkpoint, dtype):
    llm = LLM(checkpoint, dtype=dtype, linear_backend="native", max_kv_tokens=256)
    deployment = llm.engine.deployment
    rows = {row.name: row for row in deployment.rows()}
    assert rows["linear_backend"].value == "native"
    assert rows["linear_backend"].reason.startswith("as asked")
    packed = sum(matrix.nbytes for matrix in packed_matrices(llm.engine.core.executor.model))
    assert packed > 0
    assert deployment.ledger.weights.predicted_bytes == held_bytes(llm.engine.core.executor.model) > packed


def test_tokens_of_the_default_model_are_those_of_torch():
    outputs = {}
    for backend in ("torch", "native"):
        llm = LLM(dtype="float32", linear_backend=backend, max_kv_tokens=1024, max_num_seqs=4)
        outputs[backend] = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS[:4], GREEDY)]
    assert outputs["native"] == outputs["torch"]


@pytest.mark.parametrize("fuse", ["auto", "off"])
@pytest.mark.parametrize(("quantization", "least"), [("int8", 3.0), ("int4", 4.5)])
def test_rounded_weights_take_the_bytes_that_the_ledger_says(quantization, least, fuse):
    llm = LLM(dtype="float32", quantization=quantization, fuse=fuse, max_kv_tokens=512, max_num_seqs=2)
    weights = llm.engine.deployment.ledger.weights.predicted_bytes
    assert weights < 538_060_288 / least
    assert llm.engine.deployment.facts.linear_backend == f"native {quantization}"
    texts = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], GREEDY)]
    assert all(len(text) == GREEDY.max_tokens for text in texts)
    head = llm.engine.core.executor.model.get_output_embeddings()
    assert head.packed.storage is torch.int8


def test_quantization_without_packed_layers_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"quantization.*run on torch"):
        LLM(checkpoint, linear_backend="torch", quantization="int8")
    with pytest.raises(ConfigError, match="int8, int4"):
        LLM(checkpoint, quantization="awq")


def test_the_choice_follows_what_was_asked_what_was_built_and_what_was_measured(monkeypatch):
    shape = (64, 32)
    assert choose_linear("torch", shape, torch.float32, CPU) == ("torch", "as asked")
    assert choose_linear("native", shape, torch.float32, CPU)[0] == "native"
    with pytest.raises(ConfigError, match="do not run on meta"):
        choose_linear("native", shape, torch.float32, torch.device("meta"))
    assert choose_linear("auto", shape, torch.float32, torch.device("meta"))[0] == "torch"
    for times, chosen in (((1.0, 1.0), "native"), ((1.0, 0.6), "native"), ((1.0, 0.4), "torch")):
        monkeypatch.setattr(choosing, "measured", lambda *_, times=times: times)
        name, why = choose_linear("auto", shape, torch.float32, CPU)
        assert name == chosen
        assert "64 x 32" in why
    monkeypatch.setattr(choosing, "load_native", lambda: None)
    assert choose_linear("auto", shape, torch.float32, CPU)[0] == "torch"
    with pytest.raises(ConfigError, match="were not built"):
        choose_linear("native", shape, torch.float32, CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_where_torch_measures_far_better_as_with_matrix_units_it_serves_the_whole_model(checkpoint, dtype, monkeypatch):
    monkeypatch.setattr(choosing, "measured", lambda *_: (5e-6, 1e-6))
    made = {backend: LLM(checkpoint, dtype=dtype, linear_backend=backend, max_kv_tokens=256)
            for backend in ("auto", "torch")}  # fmt: skip
    facts = made["auto"].engine.deployment.facts
    assert facts.linear_backend == "torch"
    assert "5.0 us a token beside torch's 1.0" in facts.linear_reason
    assert not list(packed_matrices(made["auto"].engine.core.executor.model))
    tokens = [[o.outputs[0].token_ids for o in llm.generate([[5, 6, 7], [9]], GREEDY)] for llm in made.values()]
    assert tokens[0] == tokens[1]
    assert len(tokens[0][0]) == GREEDY.max_tokens


def test_weights_to_be_rounded_are_packed_however_fast_torch_is(checkpoint, monkeypatch):
    monkeypatch.setattr(choosing, "measured", lambda *_: (5e-6, 1e-6))
    llm = LLM(checkpoint, dtype="bfloat16", quantization="int8", max_kv_tokens=256)
    facts = llm.engine.deployment.facts
    assert facts.linear_backend == "native int8"
    assert "alone multiply weights in int8" in facts.linear_reason
    assert len(llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids) == GREEDY.max_tokens


def test_the_measurement_is_short_and_says_both_times():
    ours, theirs = choosing.measured((96, 64), torch.bfloat16)
    assert 0 < ours < 1
    assert 0 < theirs < 1


def test_kinds_and_the_usual_shape(checkpoint):
    assert kind_of("model.layers.12.mlp.experts.3.up") == "model.layers.*.mlp.experts.*.up"
    assert kind_of("layers.7") == "layers.*"
    model = load_checkpoint(checkpoint, dtype="float32").model
    config = model.config
    assert usual_shape(model) in {
        (config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    }
