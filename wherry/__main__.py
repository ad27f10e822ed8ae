"""`python -m wherry`: the `wherry` command where its script is not on PATH."""

from __future__ import annotations

from wherry.cli import main

if __name__ == "__main__":
    main()
