"""From router ids to the balance of each layer: an expert that dies, drops before they happen, tokens that move.

python examples/ops/moe.py
"""

import numpy as np

import trainmon

LAYERS, EXPERTS, TOKENS, K = 4, 16, 2048, 2
STEPS = 30
rng = np.random.default_rng(0)


def route(step, noise):
    """Ids [layers, tokens, k] of a router that drifts: layer 1 comes to prefer expert 0, layer 2 loses expert 7."""
    liking = np.zeros((LAYERS, 1, EXPERTS))
    liking[1, :, 0] = 2 * step / STEPS
    liking[2, :, 7] = 0 if step <= 5 else -np.inf
    return np.argsort(-(liking + noise), axis=2)[:, :, :K]


state = None
for step in range(1, STEPS + 1):
    ids = route(step, rng.gumbel(size=(LAYERS, TOKENS, EXPERTS)))
    counts, invalid = trainmon.expert_load(list(ids), EXPERTS, per_tensor=True)  # [layers, experts]
    assert not invalid.any()
    metrics, state = trainmon.expert_metrics(
        counts, capacity_factor=1.25, ep_size=4, state=state, window=20, hold=10
    )

print(f"{'layer':>5} {'max_vio':>8} {'window':>8} {'effective':>9} {'gini':>6} {'drops':>6} {'dead':>4}")
for layer in range(LAYERS):
    print(
        f"{layer:>5} {metrics.max_vio[layer]:>8.3f} {metrics.max_vio_window[layer]:>8.3f}"
        f" {metrics.experts_effective[layer]:>9.2f} {metrics.load_gini[layer]:>6.3f}"
        f" {metrics.drop_forecast[layer]:>6.3f} {metrics.dead[layer]:>4.0f}"
    )
(worst, value), *_ = metrics.worst(names=[f"layer {layer}" for layer in range(LAYERS)])
print(f"least balanced: {worst}, max_vio {value:.3f}; median of the layers {metrics.over_layers().p50:.3f}")

tokens = rng.gumbel(size=(LAYERS, 500, EXPERTS))  # the same tokens, routed at the start and at the end
churn = [
    trainmon.assign_churn(a, b, EXPERTS) for a, b in zip(route(1, tokens), route(STEPS, tokens), strict=True)
]
print("assignments that changed, by layer:", " ".join(f"{share:.1%}" for share in churn))

assert worst == "layer 1"
assert metrics.dead.tolist() == [0, 0, 1, 0]
assert metrics.dead_age[2, 7] == STEPS - 5
assert metrics.drop_forecast[1] > 0.1 > metrics.drop_forecast[0]
assert churn[0] == churn[3] == 0 < churn[2] < churn[1]
