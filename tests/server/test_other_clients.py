"""Libraries on top of the API: litellm and langchain-openai. Skipped where they are not installed.

They are no development dependencies: together they bring some forty packages and 400 MB.
To run these: `pip install litellm langchain-openai`.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.serving import Running

WHY = "{} is not among the development dependencies: it brings dozens of packages; pip install it to run this"
HI: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
SAID = "system\nbe brief"


@pytest.mark.filterwarnings("ignore")  # its own models warn as they are made
def test_litellm_asks_and_streams(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    litellm = pytest.importorskip("litellm", reason=WHY.format("litellm"), exc_type=ImportError)
    options = {"model": "openai/echo", "api_base": f"{server.url}/v1", "api_key": "none", "messages": HI}
    answer = litellm.completion(**options, temperature=0, max_tokens=50)
    assert answer.choices[0].message.content == SAID
    assert answer.usage.completion_tokens > 0
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)]
    assert "".join(parts) == SAID


@pytest.mark.filterwarnings("ignore")
def test_langchain_asks_and_streams(server: Running) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=WHY.format("langchain-openai"), exc_type=ImportError)
    chat = langchain.ChatOpenAI(model="echo", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [("system", "be brief"), ("human", "hi")]
    answer = chat.invoke(messages)
    assert answer.content == SAID
    assert answer.usage_metadata["input_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(messages)) == SAID
    plain = langchain.OpenAI(model="echo", base_url=f"{server.url}/v1", api_key="none", max_retries=0, max_tokens=4)
    assert plain.invoke("abc") == "abca"
