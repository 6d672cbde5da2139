"""Generation and scoring of files of any size, on one machine or many, with Ray Data.

ledger.py     the attempts of a job's rows: which of them end the processes that run them
rows.py       from a row to a request, and from its results to a row
tables.py     batches as rows, rows as tables of a fixed schema
resident.py   one engine for all batches of a worker
placement.py  which cores a worker uses
stages.py     the workers: `Generate` and `Score`, for ``map_batches``
folder.py     a folder on a file system that all nodes share
staging.py    the input: checked, sorted by prompt, one block a file
sink.py       the output: one file for each block
job.py        whole jobs: `generate` and `score`
settings.py   how a job runs, its progress, its report
run.py        one run of a job: stage, map, commit, resume
cluster.py    Ray: connection, settings, errors
planning.py   what a job will take, and what a worker can do

Importing this imports neither Ray nor pyarrow; both come with ``pip install 'llamabranch[scale]'``.
"""

from .cluster import check_plan, make_ledger
from .job import generate, score
from .planning import JobNumbers, JobPlan, measure
from .settings import JobOptions, JobReport, Progress
from .stages import Generate, Score, WorkerOptions

__all__ = [
    "Generate",
    "JobNumbers",
    "JobOptions",
    "JobPlan",
    "JobReport",
    "Progress",
    "Score",
    "WorkerOptions",
    "check_plan",
    "generate",
    "make_ledger",
    "measure",
    "score",
]
