"""The command line, `quantforge`."""
