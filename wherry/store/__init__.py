"""Store: the one interface of stores, and the stores that other machines have.

- Store, Capabilities, Entry: what a store does, what it can do, and what it holds (`store`).
- Protocols: what is known of each, as data (`protocols`).
- Remote store: opened from a protocol (`remote_store`), with deadlines, retries and errors that name the cure
  (`fsspec_store`), reads that fill buffers (`ranged_store`), and the rules of parts, puts and removals
  (`object_store`); a module for each provider.

`wherry.storage` has files of this machine, and views that pin the state of what they read.
"""
