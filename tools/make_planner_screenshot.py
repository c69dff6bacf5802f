"""Write `docs/planner.png`: the HTML page of `octavo plan --html`, as a browser shows it.

Run it after a change of the page: `python tools/make_planner_screenshot.py`. It needs chromium; the model
is gpt-oss-120b, whose state-fixing fields stand below, on one H100.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from octavo.planner.build import plan
from octavo.planner.page import page

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "planner.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CONFIG = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
LENGTHS = "800,1500,2200,3000,4100,6000,9000,16000"


def main() -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser found; install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "openai__gpt-oss-120b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG), "utf-8")
        made = plan(model, device="h100-sxm", context=16384, lengths=LENGTHS, price=2.5)
        written = Path(folder) / "plan.html"
        written.write_text(page(made), "utf-8")
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,1500")
        command = [browser, *flags, f"--screenshot={PICTURE}", written.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
