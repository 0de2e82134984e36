"""Map, combine, reduce over a dataset: sorted shuffles on disk, tasks that claim themselves.

keys.py        keys as bytes that sort as the keys do
values.py      values as bytes, and back exactly
records.py     sorted runs of (key, value) in files
combining.py   what a map task gives: combined in memory, spilled, merged
claims.py      who works on which task, by locks that die with their process
tasks.py       the tasks of one aggregate, and what to do about each
forking.py     several processes of one's own
reading.py     samples and batches of a stretch of a dataset
identity.py    what an aggregate is made of, as a key; or that nobody can tell
places.py      where tasks and results lie, and when they go
aggregate.py   the result, read as a mapping
calling.py     the front door
"""
