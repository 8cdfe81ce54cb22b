"""Spikes of a loss and of gradient norms, found while they happen; state saved in the middle; what became of one.

python examples/ops/detectors.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
steps, layers = 600, 4
names = ["loss", *(f"grad/norm/layer{i}" for i in range(layers))]
history = np.empty((steps, 1 + layers))
history[:, 0] = 2.0 + 4.0 * np.exp(-np.arange(steps) / 150) + rng.normal(0, 0.02, steps)
history[:, 1:] = rng.lognormal(0, 0.1, (steps, layers))
history[400:410, 0] += 3.0 * 0.7 ** np.arange(10)  # a spike that recovers
history[398, 3] = 40.0  # and the norm that announced it
history[500, 1] = np.nan

bank = trainmon.DetectorBank(
    [
        trainmon.Detector("mad", series=["loss"]),
        trainmon.Detector("mad", {"log": True}, series=names[1:]),
        trainmon.Detector("kill_loss_spike", series=["loss"]),
    ],
    names,
)
found = []
for step, values in enumerate(history):
    if step == 300:  # a checkpoint: the restored bank goes on with the same bits
        bank = trainmon.DetectorBank.from_state(bank.state, names)
    for detection in bank.describe(bank.update(values)):
        found.append((step, detection.rule))
        print(f"step {step}: {detection}")

assert found[0] == (398, "mad") and (400, "mad") in found and (500, "nonfinite") in found

spike = trainmon.classify_spike(history[300:400, 0], history[400:, 0])
print(f"the spike at step 400 is {spike.kind}, after {spike.time_to_recover} steps")
assert spike.kind == "recovering"

# The same spec on a history that is there already: one call.
replayed = trainmon.DetectorBank(["mad"], names).update(history)
print(f"{len(replayed)} events in the replay of {steps} steps")
