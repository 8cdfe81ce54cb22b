"""A launcher as users of G2 write it: train.py CONFIG.yaml --a.b=c ..."""

import sys

from hyper_parallel.trainer.config import parse_args
from hyper_parallel.trainer.llm_trainer import LLMTrainer

if __name__ == "__main__":
    LLMTrainer(parse_args(sys.argv[1:])).train()
