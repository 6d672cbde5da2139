"""Generation and scoring of files of any size, on one machine or many, with Ray Data.

rows.py       turns the rows of a batch into requests, and their results into a table
stages.py     the workers: `Generate` and `Score`, for ``map_batches``
folder.py     a folder on a file system that all nodes share, and the files of results in it
source.py     the input: its files, the types of its columns, its order
cluster.py    the connection to Ray; turns Ray's errors into llamabranch's
job.py        whole jobs, `generate` and `score`: read, sort, run, write, resume

Importing this package does not import Ray or pyarrow. ``pip install 'llamabranch[scale]'`` installs
both.
"""

from .job import JobOptions, JobReport, generate, score
from .stages import Generate, Score, WorkerOptions

__all__ = [
    "Generate",
    "JobOptions",
    "JobReport",
    "Score",
    "WorkerOptions",
    "generate",
    "score",
]
