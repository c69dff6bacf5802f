"""What a start found is believed at the next one for the same model, code and machine, and for nothing else."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from checkpoints import tiny_llama
from safetensors.torch import load_file, save_file

from octavo.config import Config
from octavo.engine.build import build_engine
from octavo.engine.llm import LLM
from octavo.kernels.cpu import load_native
from octavo.kernels.layer import Rope
from octavo.models import checked
from octavo.models.verdicts import MOST_KEPT, Verdict, Verdicts
from octavo.scheduling.request import SamplingParams

needs_kernels = pytest.mark.skipif(load_native() is None, reason="the native kernels were not built")
VERDICT = Verdict(("native", "as asked"), "llama: equal", True, ("a.*",), (("pre", 1, 64, 1.0),), "2026-01-02")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_VERDICTS", "on")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "verdicts"


class Starts:
    """Starts of one tiny model, and how often it was tried."""

    def __init__(self, directory, monkeypatch):
        self.directory, self.tried = directory, 0
        require = checked.require_served

        def counted(*args):
            self.tried += 1
            return require(*args)

        monkeypatch.setattr(checked, "require_served", counted)

    def __call__(self, **options):
        """(tokens, notes) of an engine, and whether it was tried."""
        before = self.tried
        config = Config.from_kwargs(model=str(self.directory), max_kv_tokens=64, **options)
        engine = build_engine(config, keeps_verdicts=True)
        answers = LLM.from_engine(engine).generate([[1, 5, 6]], SamplingParams(temperature=0.0, max_tokens=6))
        return answers[0].outputs[0].token_ids, engine.notes, self.tried > before


@pytest.fixture
def starts(tmp_path, monkeypatch):
    return Starts(tiny_llama(tmp_path / "model"), monkeypatch)


def test_the_second_start_tries_nothing_again_and_says_so(cache, starts):
    tokens, notes, tried = starts()
    assert tried
    again, told, tried = starts()
    assert not tried
    assert again == tokens
    assert any("kept, OCTAVO_VERDICTS=off finds it again" in note for note in told)
    assert not any("kept" in note for note in notes)
    assert len(list(cache.iterdir())) == 1


def test_other_weights_options_code_or_processor_are_tried(cache, starts, monkeypatch):
    starts()
    assert starts(dtype="bfloat16")[2]
    file = starts.directory / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"].clone()
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, file, {"format": "pt"})
    assert starts()[2]
    assert not starts()[2]
    monkeypatch.setattr(checked, "code_digest", lambda: "newer")
    assert starts()[2]
    monkeypatch.setattr(checked, "processor", lambda: "another")
    assert starts()[2]


def test_with_the_switch_off_nothing_is_kept_or_believed(cache, starts, monkeypatch):
    starts()
    monkeypatch.setenv("OCTAVO_VERDICTS", "off")
    assert starts()[2]


@needs_kernels
def test_a_kept_wiring_that_is_wrong_is_noticed_and_the_model_is_loaded_and_tried_again(cache, starts):
    tokens, _, _ = starts(linear_backend="native")
    (path,) = cache.iterdir()
    verdicts = Verdicts(json.loads(path.read_text())["key"])
    found = verdicts.read()
    name, rope, rotary, scale = found.wirings[0]
    assert Rope(rope) is Rope.HALVES
    verdicts.keep(replace(found, wirings=((name, int(Rope.PAIRS), rotary, scale), *found.wirings[1:])))
    again, _, tried = starts(linear_backend="native")
    assert tried
    assert again == tokens
    assert not path.exists()
    verdicts.keep(replace(found, wirings=found.wirings[:1]))
    assert starts(linear_backend="native")[2]


def test_a_verdict_comes_back_as_it_was_kept_for_its_own_key_alone(cache):
    Verdicts({"weights": "a"}).keep(VERDICT)
    assert Verdicts({"weights": "a"}).read() == VERDICT
    assert Verdicts({"weights": "b"}).read() is None


def _flipped(text):
    return text.replace("as asked", "as Asked")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "[" * 100000,
        _flipped,
        lambda text: text.replace('"weights": "a"', '"weights": "b"'),
        lambda text: text.replace('"sha256"', '"sha"'),
    ],
)
def test_a_damaged_verdict_is_none(cache, damage):
    verdicts = Verdicts({"weights": "a"})
    verdicts.keep(VERDICT)
    text = verdicts.path.read_text()
    assert damage(text) != text
    verdicts.path.write_text(damage(text))
    assert verdicts.read() is None
    verdicts.keep(VERDICT)
    assert verdicts.read() == VERDICT


def test_a_verdict_of_another_key_under_this_name_is_none(cache):
    one, other = Verdicts({"weights": "a"}), Verdicts({"weights": "b"})
    other.keep(VERDICT)
    other.path.rename(one.path)
    assert one.read() is None


@pytest.mark.parametrize("wrong", [{"linear": ["native"]}, {"tried": 1}, {"wirings": [["pre"]]}, {"leave": [1]}])
def test_what_is_no_verdict_is_none_though_its_checksum_is_right(cache, wrong):
    from octavo.models import verdicts as module

    verdicts = Verdicts({"weights": "a"})
    verdicts.keep(VERDICT)
    told = json.loads(verdicts.path.read_text())
    told["verdict"] |= wrong
    told["sha256"] = module._checksum(told["key"], told["verdict"])
    verdicts.path.write_text(json.dumps(told))
    assert verdicts.read() is None


def test_where_nothing_can_be_written_nothing_is_kept_and_nothing_raised(cache):
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the directory should be")
    verdicts = Verdicts({"weights": "a"})
    verdicts.keep(VERDICT)
    verdicts.forget()
    assert verdicts.read() is None


def test_a_write_that_fails_leaves_no_trace(cache, monkeypatch):
    verdicts = Verdicts({"weights": "a"})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(verdicts.path), "replace", full)
    verdicts.keep(VERDICT)
    assert list(cache.iterdir()) == []


def test_the_oldest_verdicts_are_let_go(cache):
    for number in range(MOST_KEPT + 3):
        verdicts = Verdicts({"weights": number})
        verdicts.keep(VERDICT)
        os.utime(verdicts.path, ns=(number, number))
    Verdicts({"weights": "newest"}).keep(VERDICT)
    assert len(list(cache.iterdir())) == MOST_KEPT
    assert Verdicts({"weights": 0}).read() is None
    assert Verdicts({"weights": MOST_KEPT + 2}).read() == VERDICT
