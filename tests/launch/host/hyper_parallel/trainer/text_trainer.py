from .base import BaseTrainer


class TextTrainer:
    def __init__(self, config):
        self.base = BaseTrainer(config)

    def train(self):
        return self.base.train()


class VLMTrainer(TextTrainer):
    pass
