"""The ranks that report together: fixed-size collectives only, each bounded in time."""

from trainmon.dist.base import Gathering, Group, Lost, Merging, Single

__all__ = ["Gathering", "Group", "Lost", "Merging", "Single"]
