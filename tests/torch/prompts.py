"""Short prompts for the real models: languages, code, repetitions, text that no tokenizer likes."""

from __future__ import annotations

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Water boils at",
    "삼겹살과 김치를",
    "The three laws of thermodynamics state that",
    "In 1969, the first humans",
    "SELECT name, age FROM",
    "Roses are red,\nviolets are blue,\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Deutschland ist",
    "To make a good cup of tea, first",
    "x" * 40,
    "The quick brown fox jumps over the lazy dog. " * 12,
]
MORE_PROMPTS = ["A haiku about memory:", "E = mc", "Il était une fois"]
