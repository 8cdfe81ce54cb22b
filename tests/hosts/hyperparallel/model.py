"""The tiny training that the HyperParallel traces were recorded from.

Nothing here is random: weights, token ids and label masks come from integer formulas, so any trainer, real or fake, can
rebuild the same run.  `settings(**changes)` gives the settings of a case (each trace carries its own, complete),
`Loader` the data, `build` the model with optimizer and scheduler, `plain_run` the numbers that an ordinary loop gets.

    from model import settings, plain_run
    for step in plain_run(settings(), "token"):
        print(step["loss"], step["grad_norm"], step["lr"])
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100
VOCAB, WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 8, 12, 4, 2

SETTINGS = {
    "world": 1,  # processes (gloo), pure data parallel
    "micro_batches": 2,  # per optimizer step and rank
    "rows": 2,
    "length": 6,  # shape of one micro-batch
    "loader_len": 4,  # micro-batches per epoch and rank
    "loader_says": "len",  # what len(loader) tells: "len" = the truth, None = it has no len, or a wrong number
    "epochs": 2,
    "max_steps": 3,  # G3 is given max_steps and works out the epochs
    "data_seed": 0,
    "lr": 0.0078125,
    "warmup": 4,
    "betas": [0.875, 0.96875],
    "eps": 1e-8,
    "weight_decay": 0.125,
    "max_grad_norm": 0.25,  # <= 0: off
    "loss_aggregation": "token_weighted",
    "two_optimizers": False,  # G3: one AdamW for "embed", one for the rest
    "fp32_main_params": False,  # G3: bfloat16 parameters, the optimizer works on float32 copies
    "moe_monitor": True,
    "moe_lr": 0.0009765625,  # G1, G2; nothing in G3 resets counters or moves the bias
    "check_nan_inf": False,
    "log_steps": 1,
    "save_steps": 0,
    "save_async": False,
    "resume": None,  # checkpoint directory to start from; "LATEST" in G3
    "nan_loss": None,  # [epoch, micro-batch index in the epoch]: that micro-batch's loss is multiplied by NaN
    "nan_grad": None,  # {"step", "param", "index"}: NaN put there after the step's last backward
    "sections": "both",  # G1: where the sections are: "both" = args.train.x and args.x, "nested" = only args.train.x
}


def settings(**changes):
    unknown = set(changes) - set(SETTINGS)
    if unknown:
        raise KeyError(f"unknown settings: {sorted(unknown)}")
    return {**SETTINGS, **changes}


def setup():
    """One thread and no oneDNN: the fewest sources of difference between machines."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False


def pattern(shape, seed, scale=1.0):
    """float32 values scale*k/512 with integer k in [-510, 510]; exact when scale is a power of two."""
    n = 1
    for s in shape:
        n *= s
    i = torch.arange(n, dtype=torch.int64)
    k = (i * 7919 + seed * 104729 + (i * i % 991) * 31) % 1021 - 510
    return (k.to(torch.float64) * scale / 512.0).reshape(tuple(shape)).to(torch.float32)


class MoeLayer(nn.Module):
    """Sigmoid router, top 2 of 4, dropless; experts are one stacked weight, so that every parameter gets a gradient."""

    enable_expert_bias = True

    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k, self.load_balance_coeff = EXPERTS, TOP_K, 0.015625
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))
        self.last_aux_loss = None
        self.spread = None  # of a rank that has some of the experts: sends tokens to the others

    def forward(self, x):
        score = torch.sigmoid(F.linear(x.float(), self.router.weight.float()))  # [B, L, E]
        chosen = (score + self.expert_bias).topk(self.top_k, dim=-1).indices
        picked = F.one_hot(chosen, self.num_experts).sum(-2).float()  # 0/1, [B, L, E]
        with torch.no_grad():
            count = picked.sum((0, 1))
            self.tokens_per_expert += count  # (token, k) slots, rank-local
            share = (score / score.sum(-1, keepdim=True)).mean((0, 1))
            self.last_aux_loss = (
                self.load_balance_coeff * self.num_experts * (count / count.sum() * share).sum()
            )
        weights = (score * picked).to(x.dtype)
        if self.spread is not None:
            return x + self.spread(weights, x, self.experts)
        return x + torch.einsum("ble,bld,edo->blo", weights, x, self.experts)

    @torch.no_grad()
    def update_expert_bias(self, lr, num_recomputations=1):
        count = self.tokens_per_expert / num_recomputations
        move = lr * torch.sign(count.mean() - count)
        self.expert_bias += move - move.mean()
        self.tokens_per_expert.zero_()


class TinyMoeLM(nn.Module):
    """embed -> residual MLP -> MoE -> head; the loss is the mean over the valid next-token labels of the micro-batch."""

    config = SimpleNamespace(vocab_size=VOCAB, hidden_size=WIDTH, num_experts=EXPERTS)

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.moe = MoeLayer()
        self.head = nn.Linear(WIDTH, VOCAB)
        with torch.no_grad():
            for j, p in enumerate(self.parameters()):
                p.copy_(pattern(p.shape, 3 + j, 0.5))
            self.moe.router.weight.copy_(
                pattern(self.moe.router.weight.shape, 34)
            )  # no near ties between experts
            for p in self.parameters():
                p.data = p.data.to(dtype)  # the buffers stay float32

    def forward(self, input_ids, labels=None, use_cache=None, loss_factor=None, **_):
        x = self.embed(input_ids)
        x = self.moe(x + self.down(torch.tanh(self.up(x))))
        logits = self.head(x).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=IGNORE
            )
            if loss_factor is not None:
                loss = loss * loss_factor
        return SimpleNamespace(loss=loss, logits=logits)


def micro_batch(s, epoch, index, rank=0):
    """Micro-batch `index` (0-based in its epoch) of a rank; the epoch matters for `nan_loss` only."""
    row = torch.arange(s["rows"]).reshape(-1, 1)
    pos = torch.arange(s["length"]).reshape(1, -1)
    ids = (
        37 * index + 101 * rank + 53 * s["data_seed"] + 11 * row + 5 * pos + 3 * pos * pos + 7 * index * pos
    ) % VOCAB
    keep = 2 + (2 * index + rank + row) % (s["length"] - 1)  # labels end after 2..length positions ...
    valid = (pos < keep) & (
        (pos > 0) | (row % 2 == index % 2)
    )  # ... and one row's first label is ignored too
    batch = {"input_ids": ids, "labels": torch.where(valid, ids, torch.full_like(ids, IGNORE))}
    if s["nan_loss"] is not None:
        hit = list(s["nan_loss"]) == [epoch, index]
        batch["loss_factor"] = torch.tensor(float("nan") if hit else 1.0)
    return batch


def valid_labels(batch):
    """(all, shifted): labels that are not ignored, with and without the first position, which nothing predicts."""
    v = batch["labels"] != IGNORE
    return int(v.sum()), int(v[:, 1:].sum())


class Loader:
    """Yields a micro-batch at a time (G3 BaseTrainer: a list of `micro_batches` of them); resumes where it was saved."""

    def __init__(self, s, rank=0, grouped=False):
        self.s, self.rank, self.grouped = s, rank, grouped
        self.epoch, self.position, self.start = -1, 0, 0

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        self.epoch += 1
        start, self.start = self.start, 0
        step = self.s["micro_batches"] if self.grouped else 1
        for i in range(start, self.s["loader_len"] - step + 1, step):
            self.position = i + step
            got = [micro_batch(self.s, self.epoch, i + j, self.rank) for j in range(step)]
            yield got if self.grouped else got[0]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


class SizedLoader(Loader):
    def __len__(self):
        n = self.s["loader_len"] if self.s["loader_says"] == "len" else self.s["loader_says"]
        return n // self.s["micro_batches"] if self.grouped else n


def loader(s, rank=0, grouped=False):
    return (Loader if s["loader_says"] is None else SizedLoader)(s, rank, grouped)


def adamw(s, parameters):
    return torch.optim.AdamW(
        parameters,
        lr=s["lr"],
        betas=tuple(s["betas"]),
        eps=s["eps"],
        weight_decay=s["weight_decay"],
        foreach=False,
    )


def warm_up(s, optimizer):
    """Step N (1-based) uses lr * min(1, N / warmup); after the scheduler's step the next one's is set."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / s["warmup"]))


def build(s):
    model = TinyMoeLM(torch.bfloat16 if s["fp32_main_params"] else torch.float32)
    optimizer = adamw(s, model.parameters())
    return model, optimizer, warm_up(s, optimizer)


def norm(tensors):
    """L2 norm over all elements, in float64."""
    return float(sum(float((t.detach().double() ** 2).sum()) for t in tensors) ** 0.5)


def plain_run(s, weighting, short_group=True):
    """Train in one ordinary loop (ranks one after the other, gradients summed) and return one dict a step.

    weighting: how the step's loss, and its gradient, add up the mean losses l[r, i] of rank r's micro-batch i:
      "token"         n*l / sum of n, n = valid labels, unshifted       (G1, G2)
      "shifted"       the same with shifted labels                      (G3 BaseTrainer)
      "micro"         for each i: n*l over ranks / sum of n over ranks, shifted; then the mean over i   (G3 Text, VLM)
      "rank"          plain mean over ranks and micro-batches           (G1, G2 with "rank_average")
    short_group: a last group of fewer micro-batches is a step too (G1, G2) or is left out (G3).
    """
    model, optimizer, scheduler = build(s)
    steps = []
    for epoch in range(s["epochs"]):
        for first in range(0, s["loader_len"], s["micro_batches"]):
            group = range(first, min(first + s["micro_batches"], s["loader_len"]))
            if len(steps) == s["max_steps"] or (len(group) < s["micro_batches"] and not short_group):
                break
            cells = [[micro_batch(s, epoch, i, r) for i in group] for r in range(s["world"])]
            counts = [[valid_labels(b)[weighting in ("shifted", "micro")] for b in row] for row in cells]
            local, total = [[0.0] * len(group) for _ in cells], 0.0
            for r, row in enumerate(cells):
                for i, batch in enumerate(row):
                    loss = model(**batch).loss
                    local[r][i] = loss.item()
                    if weighting == "rank":
                        weight = 1.0 / (len(group) * s["world"])
                    elif weighting == "micro":
                        weight = counts[r][i] / sum(c[i] for c in counts) / len(group)
                    else:
                        weight = counts[r][i] / sum(map(sum, counts))
                    (loss * weight).backward()
                    total += local[r][i] * weight
            gradients = [p.grad for p in model.parameters()]
            before = norm(gradients)
            if s["max_grad_norm"] > 0:
                for g in gradients:
                    g.mul_(min(1.0, s["max_grad_norm"] / (before + 1e-6)))
            step = {
                "loss": total,
                "grad_norm": before if s["max_grad_norm"] > 0 else None,
                "live_norm": norm(gradients),
                "lr": scheduler.get_last_lr()[0],
                "local": local,
                "tokens": counts,
                "tokens_per_expert": model.moe.tokens_per_expert.tolist(),
            }
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if s["moe_monitor"]:
                model.moe.update_expert_bias(s["moe_lr"])
            step["expert_bias"] = model.moe.expert_bias.tolist()
            step["weights_norm"] = norm(model.parameters())
            steps.append(step)
    return steps
