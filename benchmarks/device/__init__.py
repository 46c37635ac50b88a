"""The benchmark on a GPU: ours and its peers in one process, as run.py --device cuda starts it."""
