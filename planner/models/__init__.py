"""Models as lists of layers by kind: the specification, the reader of config.json files and the catalogue."""

from planner.models.catalogue import catalogue_entry, catalogue_ids, catalogue_table
from planner.models.count import describe_model
from planner.models.read import read_model
from planner.models.spec import ModelSpec

__all__ = ["ModelSpec", "catalogue_entry", "catalogue_ids", "catalogue_table", "describe_model", "read_model"]
