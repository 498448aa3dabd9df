"""The embedded proposer: a fixed catalogue of edits with rival explanations."""

from forge.proposers.catalogue.entry import catalogue_hash
from forge.proposers.catalogue.proposer import CatalogueProposer

__all__ = ["CatalogueProposer", "catalogue_hash"]
