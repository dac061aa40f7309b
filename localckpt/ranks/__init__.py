"""How the ranks of a job decide together, over the job's key-value store."""
