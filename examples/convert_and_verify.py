"""Convert a checkpoint, prove that nothing was lost, and print where the result came from.

python examples/convert_and_verify.py SOURCE TARGET [FORMAT]
"""

from __future__ import annotations

import sys

import wherry


def main(source: str, target: str, to: str = "orbax") -> None:
    """Convert, then compare every tensor of the result with the source."""
    receipt = wherry.convert(source, target, to=to, memory="256MiB")
    print(f"{receipt.target.uri}: {receipt.target.tensors} tensors, {receipt.target.checkpoint_digest}")

    verification = wherry.verify(target, level="roundtrip", against=source)
    print(f"{verification.verdict}: {verification.checked} tensors are equal to those of {source}")

    for step in wherry.why(target).steps:
        print(f"converted from {step.edge.source}, lossless: {step.edge.lossless}")


if __name__ == "__main__":
    main(*sys.argv[1:])
