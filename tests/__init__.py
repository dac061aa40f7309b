"""Tests of localckpt, by behaviour."""
