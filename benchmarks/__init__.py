"""Measure linattn beside its peers: `python -m benchmarks PROGRAM`, from the checkout's top.

A program (`cpu`, `cuda`, `gradients`, `models`, `kernel`) is a module with a function
`run(given) -> exit status`. They share `base` (`Case`, `Peer`, `Result`), `inputs`, `check`,
`timing` and `report`. Every call is checked before it is timed, and takes turns with its peers.
"""
