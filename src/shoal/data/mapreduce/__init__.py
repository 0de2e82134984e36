"""Map, combine, reduce over a dataset: sorted shuffles on disk, tasks claimed by file locks.

api.py        arguments, the directories of tasks and results, and the result, read as a mapping
tasks.py      map and reduce tasks, their claims (file locks that die with their process), their worker processes
shuffle.py    outputs of tasks between hosts
spill.py      sorted runs of (key, value) in files; the buffer that spills them; keys as bytes that sort as the keys do
identity.py   identity of data and functions, for reuse of results
"""
