"""Helpers that test files share: problems, comparisons, the grid, devices, child processes."""
