"""The Orbax item: a folder of arrays with the tree in `_METADATA`, as Orbax, T5X, PaxML, MaxText and Penzai save it."""
