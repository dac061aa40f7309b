"""Tests with the real classes of Megatron-Core and NVRx.

They run without a GPU: ``site/sitecustomize.py`` replaces a few calls of torch in the ranks of
these tests and in the workers that upstream spawns.
"""
