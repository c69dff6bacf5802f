"""`python -m octavo` is the `octavo` command."""

from __future__ import annotations

from octavo.cli.main import main

if __name__ == "__main__":
    main()
