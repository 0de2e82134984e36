"""Map, combine, reduce over a dataset: sorted shuffles on disk, tasks claimed by file locks.

api.py        arguments, and the directories of tasks and results
tasks.py      map and reduce tasks, and reading of their input
claims.py     file locks that die with their process
processes.py  worker processes of one call
spill.py      sorted runs of (key, value) in files; the buffer that spills them
keys.py       keys as bytes that sort as the keys do
identity.py   identity of data and functions, for reuse of results
aggregate.py  the result, read as a mapping
"""
