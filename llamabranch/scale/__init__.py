"""Generation and scoring of files of any size, on one machine or many, with Ray Data.

ledger.py     the attempts of a job's rows: which of them end the processes that run them
rows.py       from a batch's rows to requests, and from their results to a table
stages.py     the workers: `Generate` and `Score`, for ``map_batches``
folder.py     a folder on a file system that all nodes share, and the files of results in it
cluster.py    Ray: connection, settings, errors
staging.py    the input: unique ids, sorted by prompt, one block a file
job.py        whole jobs: `generate` and `score`: stage, map, commit, resume

Importing this imports neither Ray nor pyarrow; both come with ``pip install 'llamabranch[scale]'``.
"""

from .cluster import make_ledger
from .job import JobOptions, JobReport, generate, score
from .stages import Generate, Score, WorkerOptions

__all__ = [
    "Generate",
    "JobOptions",
    "JobReport",
    "Score",
    "WorkerOptions",
    "generate",
    "make_ledger",
    "score",
]
