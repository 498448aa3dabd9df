"""QuantForge's orchestrator: recipes, the campaign loop, proposers, programs, reports and the command line."""

from importlib import metadata

__all__ = ["__version__"]

try:
    __version__ = metadata.version("quantforge")
except metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"
