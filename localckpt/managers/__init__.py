"""The protocol that all ranks follow: save, finalize, find_latest, load."""
