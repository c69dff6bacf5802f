"""The engines by name: which environment, which form of the checkpoint, which player, which options.

A choice is written `name:option=value:...`; an option without a value is on. `only=W1+W4` limits the
workloads that it plays. octavo takes every option of its own configuration; a peer takes those listed.
A name in capitals is a variable of the process's environment: `octavo:OMP_WAIT_POLICY=passive`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPES = ("fp32", "bf16", "int8")
"""Of weights; with int8 of weights alone."""


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    about: str
    environment: str
    """A recipe, or "" for the environment that runs the comparison."""
    form: str
    """Of the checkpoint: safetensors, openvino or gguf."""
    player: str
    options: tuple[str, ...] = ()
    """Names that may be written; for octavo any."""
    always: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32", "bf16")


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("octavo", "this engine", "", "safetensors", "play_octavo", dtypes=DTYPES),
        Engine(
            "vllm", "vLLM's CPU build", "vllm", "safetensors", "play_vllm", ("reuse", "eager", "batched")
        ),
        Engine(
            "openvino", "OpenVINO GenAI's continuous batching", "openvino", "openvino", "play_openvino",
            ("reuse", "batched"), dtypes=DTYPES,
        ),
        Engine(
            "llamacpp", "llama.cpp's server", "llamacpp", "gguf", "play_llamacpp", ("reuse", "batch", "ubatch"),
            dtypes=DTYPES,
        ),
        Engine(
            "hf-continuous", "Transformers' generate_batch", "transformers", "safetensors", "play_transformers",
            ("reuse", "page"), {"batching": "continuous"},
        ),
        Engine(
            "hf-padded", "Transformers' generate on padded batches", "transformers", "safetensors",
            "play_transformers", ("batch",), {"batching": "padded"},
        ),
    )
}  # fmt: skip

DEFAULT = (
    "octavo,vllm,openvino,llamacpp,octavo:reuse:only=W4,vllm:reuse:only=W4,openvino:reuse:only=W4,"
    "hf-continuous:only=W1+W2,hf-padded:only=W1+W2"
)
"""Every engine; reuse where there is something to reuse; the slow ones where they say something."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One engine with its options, as one line of the table."""

    engine: Engine
    options: dict[str, str]
    only: tuple[str, ...]
    """Workloads that it plays; all when empty."""

    @property
    def label(self) -> str:
        written = [name if value == "on" else f"{name}={value}" for name, value in self.options.items()]
        return ":".join([self.engine.name, *written])

    @property
    def asked(self) -> dict[str, str]:
        """The options that the engine's player is given."""
        return self.engine.always | {name: value for name, value in self.options.items() if not name.isupper()}

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment of the engine's process."""
        return {name: value for name, value in self.options.items() if name.isupper()}

    def plays(self, workload: str) -> bool:
        return not self.only or workload in self.only


def chosen(text: str) -> list[Choice]:
    """Raises `ValueError` in words for what is not an engine or not an option of it."""
    choices = [_choice(word.strip()) for word in text.split(",") if word.strip()]
    labels = [choice.label for choice in choices]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if not choices or twice:
        raise ValueError(f"{text!r}: " + (f"{', '.join(twice)} twice" if twice else "name at least one engine"))
    return choices


def _choice(word: str) -> Choice:
    name, *written = word.split(":")
    if name not in ENGINES:
        raise ValueError(f"{name!r}: no such engine; there are {', '.join(ENGINES)}")
    engine = ENGINES[name]
    options: dict[str, str] = {}
    only: tuple[str, ...] = ()
    for one in written:
        option, _, value = one.partition("=")
        if option == "only":
            only = tuple(value.split("+"))
        elif engine.options and option not in engine.options and not option.isupper():
            raise ValueError(f"{word!r}: {name} has no option {option!r}; it has {', '.join(engine.options)}, only")
        else:
            options[option] = value or "on"
    return Choice(engine, options, only)
