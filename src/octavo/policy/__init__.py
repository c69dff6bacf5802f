"""Preferences, each behind a protocol with a dull baseline. Policies see numbers and answer; they change nothing."""
