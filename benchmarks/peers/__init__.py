"""Other ways to save and load the same state, each behind the same few methods."""
