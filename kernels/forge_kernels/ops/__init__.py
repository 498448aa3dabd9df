"""One op per file. Every op has a plain torch reference, which is its definition and runs on any device."""
