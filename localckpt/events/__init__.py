"""The record of what happened: one stream of events, and the sinks that it is written to."""
