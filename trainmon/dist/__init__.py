"""The ranks that report together: fixed-size collectives only, each bounded in time."""

from trainmon.dist.base import Group, Lost, Merging, Single

__all__ = ["Group", "Lost", "Merging", "Single"]
