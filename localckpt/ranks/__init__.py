"""Decisions of the ranks of a job, over the job's key-value store."""
