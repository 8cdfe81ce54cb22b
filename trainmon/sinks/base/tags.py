"""Names of series as other tools spell them: ``tag_style`` slash, megatron or mindformers.

Rank and unit are metadata and never part of a tag. A series without a name of its own in a style keeps its
own.
"""

from __future__ import annotations

__all__ = ["TAG_STYLES", "tag"]

_MEGATRON = {
    "loss/global": "lm loss",
    "optim/lr": "learning-rate",
    "optim/loss_scale": "loss-scale",
    "grad/norm": "grad-norm",
    "weight/norm": "params-norm",
    "time/step": "iteration-time",
    "perf/tflops_device": "throughput",
}
#: Contract of both modes; ``throughput`` is left out, because its unit differs between them.
_MINDFORMERS = {
    "loss/global": "loss",
    "loss/device": "device_loss",
    "loss/micro": "local_loss",
    "loss/part/lm": "lm-loss",
    "loss/part/mtp": "mtp-loss",
    "loss/part/aux": "load-balancing-loss",
    "loss/part/indexer": "indexer-loss",
    "optim/lr": "learning-rate",
    "optim/loss_scale": "loss-scale",
    "grad/norm": "grad-norm",
    "grad/norm_device": "device_local_norm",
    "weight/norm": "weight_norm",
    "attention/max_logit": "max_attention_logit/max",
    "attention/max_logit_mean": "max_attention_logit/mean",
    "time/step": "iteration-time",
    "perf/tflops_device": "model-flops-throughput-per-npu",
    "perf/throughput_ratio": "throughput_linearity",
}
_MINDFORMERS_PREFIXES = {
    "grad/norm_local/": "local_norm/",
    "moment/norm/exp_avg/": "adam_m_norm/",
    "moment/norm/exp_avg_sq/": "adam_v_norm/",
    "spectral/stable_rank/": "weight_stable_rank/",
    "spectral/eigenvalue/": "weight_eigenvalue/",
    "attention/max_logit/": "max_attention_logit/",
    "moe/load/": "expert_load/",
}
TAG_STYLES = ("slash", "megatron", "mindformers")


def tag(name: str, style: str) -> str:
    """The tag of the series ``name`` in ``style``.

    Raises:
        ValueError: an unknown style.
    """
    if style == "slash":
        return name
    if style == "megatron":
        return _MEGATRON.get(name, name)
    if style == "mindformers":
        for prefix, theirs in _MINDFORMERS_PREFIXES.items():
            if name.startswith(prefix):
                return theirs + name[len(prefix) :]
        return _MINDFORMERS.get(name, name)
    raise ValueError(f"tag_style must be one of {', '.join(TAG_STYLES)}, not {style!r}")
