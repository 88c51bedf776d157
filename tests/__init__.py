"""Tests of pagestride. A package, so that `tests.oracle` is this one and no other."""
