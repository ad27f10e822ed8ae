"""Store: the one interface of stores, and the stores that other machines have.

- Store, Capabilities, Entry: what a store does, what it can do, and what it holds; and what is known of each protocol,
  as data (`store`).
- Remote store: opened from a protocol, with deadlines, retries and errors that name the cure, reads that fill buffers,
  and the rules of parts, puts and removals (`remote_store`); a module for each provider.
- Content: checksums of parts and objects, and bodies of requests (`content`).

`wherry.storage` has files of this machine, and views that pin the state of what they read.
"""
