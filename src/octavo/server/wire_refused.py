"""Fields that clients know and octavo does not serve: each is refused by name, with the reason.

A value that changes nothing (null, or what `HARMLESS` lists) is accepted, for clients that send every
field they have. Nothing else is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import shorten
from octavo.server.errors import ApiError

WITHOUT_EFFECT = ("user", "safety_identifier", "prompt_cache_key")
"""Say who asks, not what: accepted, and without effect on the answer by their own definition."""

_TOOLS = "tool calls are not served yet; leave it out and describe the tools in a message"
_GUIDED = "use response_format, or structured_outputs"
_LATER = "is not served yet; leave it out"
_OFF = "is not served; leave it out"

UNSERVED: Mapping[str, str] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "parallel_tool_calls": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "audio": "only text is served; leave it out",
    "modalities": 'only text is served; leave it out, or send ["text"]',
    "prediction": _LATER,
    "reasoning_effort": "no part of the answer is set apart as reasoning; use chat_template_kwargs where a template "
    "knows such an option",
    "verbosity": _OFF,
    "store": "nothing is stored; leave it out",
    "metadata": "nothing is stored; leave it out",
    "service_tier": "there is one tier; leave it out",
    "web_search_options": _OFF,
    "moderation": _OFF,
    "prompt_cache_retention": _LATER,
    "suffix": "the model completes text, it does not fill gaps; leave it out",
    "prompt_logprobs": "log-probabilities of the prompt are not served yet; leave it out",
    "use_beam_search": "beams are not served; use n and temperature",
    "length_penalty": "beams are not served; leave it out",
    "early_stopping": "beams are not served; leave it out",
    "bad_words": "is not served yet; use logit_bias",
    "allowed_token_ids": "is not served yet; use logit_bias",
    "truncate_prompt_tokens": "a prompt is never cut; send a shorter one",
    "truncation_side": "a prompt is never cut; send a shorter one",
    "spaces_between_special_tokens": "text is decoded as the tokenizer does; leave it out",
    "return_tokens_as_token_ids": "use return_token_ids",
    "prompt_embeds": "prompts are text or token ids",
    "documents": "use chat_template_kwargs where the template knows documents",
    "chat_template": "a request cannot bring its own; start the server with --chat-template",
    "continue_final_message": "the answer is always a new message; leave it out",
    "add_generation_prompt": "the answer is always a new message; leave it out",
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": "use structured_outputs with choice",
    "guided_grammar": _GUIDED,
    "logits_processors": "no code from requests is run; use logit_bias",
    "mm_processor_kwargs": "only text is served; leave it out",
    "kv_transfer_params": _OFF,
    "request_id": "the server names requests; read the X-Request-Id header",
    "echo": "a chat has no text to repeat; use /v1/completions",
    "best_of": "use n",
    "continuous_usage_stats": "usage comes once, at the end; use include_usage",
    "include_obfuscation": "nothing is added to chunks; leave it out",
    "max_completion_tokens": "is a field of chats; use max_tokens",
    "top_logprobs": "is a field of chats; use logprobs",
    "messages": "is a field of chats; use prompt, or /v1/chat/completions",
    "prompt": "is a field of completions; use messages, or /v1/completions",
    "add_special_tokens": "a chat's special tokens come from its template; leave it out",
    "chat_template_kwargs": "is a field of chats",
}

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "best_of": (1,),
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
    "add_special_tokens": (False,),
}


def refuse_unserved(path: str, name: str, value: Any) -> None:
    """Raises `ApiError` unless the value is one that changes nothing."""
    if not any(type(value) is type(harmless) and value == harmless for harmless in HARMLESS.get(name, ())):
        raise ApiError(400, f"{path}={shorten(value)}: {UNSERVED[name]}", param=path, code="unsupported_field")
