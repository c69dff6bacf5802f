"""`octavo serve --executor sim` as a process: the same API, nothing computed, the cost model's pace."""

from __future__ import annotations

import re
import time
from pathlib import Path
from random import Random

import httpx2 as httpx
import openai
import pytest
from tests.server.test_serve_command import refused, started
from tests.torch.checkpoints import tiny_llama

from octavo.cli.serve_simulated import start_simulated
from octavo.engine.paced import PacedMover
from octavo.observe.names import ROUTES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=2048, hidden_size=64)


def test_it_answers_like_the_real_server_at_the_pace_of_another_machine(model: Path) -> None:
    with started(str(model), "--executor", "sim", "--sim-device", "h100-sxm", "--max-num-seqs", "8") as server:
        assert "nothing is computed" in server.text
        asked = {"prompt": "hello world", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        begun = time.monotonic()
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        took = time.monotonic() - begun
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 60
        assert answer["choices"][0]["text"].split()[:2] == ["hello", "world"]
        assert took > 60 * 1e-3  # the host's millisecond a step, beside which a tiny model is nothing
        again = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        assert again["choices"] == answer["choices"]
        assert "octavo_" in httpx.get(f"{server.url}/metrics").text


def test_what_it_cannot_fake_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "executor='x'" in refused(capsys, str(model), "--executor", "x", "--port", "0")
    assert "dtype='bfloat16'" in refused(capsys, str(model), "--executor", "sim", "--dtype", "bfloat16", "--port", "0")
    assert "device=None" in refused(capsys, str(model), "--executor", "sim", "--port", "0")


def test_bounds_of_both_links_are_those_of_the_fake(model: Path) -> None:
    given = {"model": str(model), "reuse": "prefix", "kv_cache_memory_bytes": "64KiB", "host_bytes": "1MiB",
             "disk_path": "/nowhere", "disk_bytes": "1MiB", "transfer_bytes_per_second": 3e6,
             "disk_bytes_per_second": 2e6}  # fmt: skip
    engine = start_simulated(given, {"device": "h100-sxm", "tp": 1, "cost": "roofline", "answer": None})
    assert isinstance(engine.core.mover, PacedMover)
    links = engine.core.mover.inner.links
    per_block = {route: links.times_ns(route, 6000)[1] for route in ROUTES}
    assert per_block == {"demote": 2e6, "promote": 2e6, "store": 3e6, "load": 3e6}


def test_tiers_below_the_device_are_faked_as_well_and_counted(model: Path) -> None:
    flags = ["--sim-device", "h100-sxm", "--kv-cache-memory-bytes", "64KiB", "--max-num-seqs", "4", "--reuse", "prefix",
             "--host-bytes", "96KiB", "--disk-path", "/nowhere", "--disk-bytes", "1MiB", "--placement", "write_through",
             "--preemption", "offload"]  # fmt: skip
    with (
        started(str(model), "--executor", "sim", *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        assert "nothing is written to /nowhere" in server.text
        name = client.models.list().data[0].id

        def cached(seed: int) -> int:
            draw = Random(seed)
            prompt = [draw.randrange(3, 8) for _ in range(100)]
            answer = client.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert max(cached(seed) for seed in range(12)) < 16, "texts that share a few tokens at most"
        assert cached(11) >= 80, "still on the device"
        assert [cached(seed) >= 80 for seed in reversed(range(12))] == [True] * 12, "what went down comes up again"
        told = httpx.get(f"{server.url}/metrics").text
    counted = {
        found[1]: float(found[2]) for found in re.finditer(r"^(octavo_\w+(?:\{.*\})?) (\S+)$", told, re.MULTILINE)
    }
    hits = {tier: sum(value for key, value in counted.items() if key.startswith("octavo_prefix_cache_hits_total")
                      and f'tier="{tier}"' in key) for tier in ("device", "host", "disk")}  # fmt: skip
    assert all(hits.values()), hits
    moved = [value for key, value in counted.items() if key.startswith("octavo_host_offload_bytes_total")]
    assert moved
    assert moved[0] > 0
    assert not Path("/nowhere").exists()
