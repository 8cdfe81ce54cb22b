"""A launcher as users of G3 write it: train.py CONFIG.yaml --a.b=c ..."""

import sys

from hyper_parallel.trainer.config import parse_args
from hyper_parallel.trainer.text_trainer import TextTrainer

if __name__ == "__main__":
    TextTrainer(parse_args(sys.argv[1:])).train()
