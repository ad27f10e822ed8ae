"""What every format must do, as functions: the contract suites and the faults that the crash suite injects.

They are shipped so that a format of somebody else's package is held to the same promises as ours. They need no
test framework: a broken promise is an `AssertionError` that says which.

    from wherry.testing import readers, samples, writers

    sample = samples.sample(row, options)          # what the format says that it holds, all of it
    writers.check_writer(sample, folder)           # any order, threads, repeats, twice finished
    writers.check_kill_between(sample, folder)     # abandoned, then taken up
    readers.check_reader(opened)                   # regions, extents, errors, threads

`durability` models what a loss of power would leave of a folder at each step of a run, and checks that it is enough.
`faults` makes calls of the operating system fail, fall short or kill the process; `children` runs conversions in
processes that may be killed.
"""
