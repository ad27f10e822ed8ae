"""A checkpoint seen through another system's layout, and the inverse of that view.

- View: a checkpoint whose tensors have the key paths, axes and values of another system (`view`).
- Group: the sources and targets of a view that must be in memory together (`groups`).
"""
