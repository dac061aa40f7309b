"""Analysis of a job's record: pure functions of events, and their form for people and programs."""
