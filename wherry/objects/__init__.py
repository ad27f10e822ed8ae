"""objects: stores of objects beyond puts: parts, assembly in one step, puts and removals in a known state.

`wherry.objects.uploads` has the nouns and the protocol `ObjectStore`, `wherry.objects.stores` finds the one of a
location, and each further module implements it for one kind of store.
"""
