"""The same scheduler in virtual time: executors without a model, recording and replay. Pure."""
