"""``pagestride bench``: both engines beside named peers, in one process, as ratios.

:mod:`.harness` times, :mod:`.record` says on what machine, :mod:`.suites` lists what there is to
time, :mod:`.plots` draws. Peers that need a framework stand in a file for each framework.
"""
