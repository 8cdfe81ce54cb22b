class BaseTrainer:
    def __init__(self, config, setup=True):
        if set(config) - {"model", "train", "steps", "callbacks"}:
            raise ValueError(f"unknown keys: {sorted(config)}")
        self.config = config
        if setup:
            self.setup()

    def setup(self):
        self.callbacks = []

    def train(self):
        for step in range(1, self.config.get("steps", 2) + 1):
            for callback in self.callbacks:
                callback.on_step(step)
