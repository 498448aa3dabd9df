"""Time every op against its floor and against what one would call instead, in one run: ``quantforge bench kernels``."""
