"""DeepSpeed's checkpoints: the partitions of ZeRO, and universal checkpoints, which are whole.

A run that has both is that of its partitions, from which DeepSpeed resumes; the universal folder is read by its own
name.
"""

from __future__ import annotations

from wherry.formats.format import Format, Holds, Signs
from wherry.integrations.formats.deepspeed import universal, zero

FORMATS = (
    Format(
        name="deepspeed",
        title="DeepSpeed ZeRO",
        detect=zero.detect,
        signs=Signs(entries=frozenset({zero.LATEST}), ends=(".pt",)),
        open=zero.open_deepspeed,
        holds=Holds(dtypes=frozenset()),
        refines=("deepspeed-universal",),
    ),
    Format(
        name="deepspeed-universal",
        title="DeepSpeed universal checkpoint",
        detect=universal.detect,
        signs=Signs(entries=frozenset({universal.LATEST, universal.ZERO})),
        open=universal.open_universal,
        holds=Holds(dtypes=frozenset()),
    ),
)
