"""objects: stores of objects beyond puts: parts, assembly in one step, puts and removals in a known state.

`wherry.objects.uploads` has the nouns and the protocol `ObjectStore`, `wherry.objects.stores` finds the one of a
location, and a module for each kind of store implements it. Reading has views that pin the state of what they read
(`object_view`), list many folders at once (`listing_view`) and request the next bytes while others are used
(`read_ahead`).
"""
