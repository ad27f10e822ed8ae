"""What Penzai needs besides Orbax: the axis names and labels of its NamedArrays, and how they are put back."""
