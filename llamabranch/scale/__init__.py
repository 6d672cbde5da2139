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
job.py        whole jobs: plan, resume, progress
planning.py   what a job will take, on paper and simulated

Importing this imports neither Ray nor pyarrow; both come with ``pip install 'llamabranch[scale]'``.
"""

from .job import JobOptions, JobReport, Progress, check_plan, generate, make_ledger, score
from .planning import JobNumbers, JobPlan, WorkerProfile, measure, plan, simulate
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
    "WorkerProfile",
    "check_plan",
    "generate",
    "make_ledger",
    "measure",
    "plan",
    "score",
    "simulate",
]
