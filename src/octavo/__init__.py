"""octavo: an LLM serving engine whose subject is attention state."""

__version__ = "0.1.0"
