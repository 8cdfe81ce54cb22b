from tests.hosts.hyperparallel.moe import MoEMonitorCallback, sync_and_update_expert_bias

__all__ = ["MoEMonitorCallback", "sync_and_update_expert_bias"]
