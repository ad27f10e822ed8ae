"""The process that wherry runs in: settings of the interpreter, threads, child processes.

- Crew: a few threads that carry out tasks until the first one fails (`threads`).
- Child: a process that wherry starts with a minimal environment, an empty working folder and limits (`child`).
"""
