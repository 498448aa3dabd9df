"""The two shipped subjects, and the scripts that made them."""
