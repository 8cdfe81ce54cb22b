from tests.hosts.hyperparallel.runtime_g3 import (
    all_reduce,
    get_global_rank_safe,
    get_local_rank_safe,
    get_world_size_safe,
)

__all__ = ["all_reduce", "get_global_rank_safe", "get_local_rank_safe", "get_world_size_safe"]
