"""`wherry` and `python -m wherry`: signals have their handlers before anything is imported that takes time."""

from __future__ import annotations

from wherry.core import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.end_at_once()
    from wherry.cli import main as run

    run()


if __name__ == "__main__":
    main()
