"""Contract tests for formats, and the fault injection of the crash tests.

They are part of the package so that the formats of plug-ins can be tested against the same contract as those of wherry.
They need no test framework: a violation is an `AssertionError` that names it.

    from wherry.testing import readers, samples, writers

    sample = samples.sample(row, options)          # everything that the format declares to hold
    writers.check_writer(sample, folder)           # any order, threads, repeated writes, repeated finish
    writers.check_kill_between(sample, folder)     # abandoned, then resumed
    readers.check_reader(opened)                   # regions, extents, errors, threads

`durability` models what a power loss would leave of a folder at each step of a run, and checks that it is sufficient.
`faults` makes system calls fail, write less than requested or kill the process; `children` runs conversions in
processes that may be killed.
"""
