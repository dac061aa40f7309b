"""Parity in place of whole replicas: what is lost is computed from what several nodes keep."""
