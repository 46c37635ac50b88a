"""What the test files share: problems, comparisons, the grid, the devices, child processes."""
