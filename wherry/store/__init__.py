"""Storage: one interface of stores, the disk of this machine and remote ones; how writes become durable.

- Store, Capabilities, Entry: what a store does, what it can do, and what it holds; and what is known of each protocol,
  as data (`store`).
- Local store: files of this machine, opened by the rules of `open_file`, and the parsing of URIs (`local_store`).
- Remote store: opened from a protocol, with deadlines, retries and errors that name the cure, reads that fill buffers,
  and the rules of parts, puts and removals (`remote_store`); a module for each provider.
- Location: one file or folder in one store (`location`).
- View: a remote store as one command sees it (`object_view`).
- Wait: calls of libraries (gcsfs, s3fs, adlfs, huggingface_hub) that always end (`waits`), and their failures as errors
  of wherry (`failures`).
- Content: checksums of parts and objects, and bodies of requests (`content`).
- Sidecar: the manifest stored next to a checkpoint that wherry wrote (`sidecar`).
- Device: what the device under a folder can do, measured in a moment (`device`).
- Home: the folder of the user's ledger, keys and settings (`home`).
"""
