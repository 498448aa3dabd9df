"""Programs that only look as if their mechanism acted, and what screening and probes say of each: ``quantforge bench probes``."""
