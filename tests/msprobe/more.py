"""Cases beside the recorded ones, for the same driver: other models, dtypes, states and moments."""

from __future__ import annotations

from typing import Any

FOUR = {name: {"enabled": True} for name in ("module", "weight_grad", "optimizer", "param")}
MODULE = {"module": {}}


def case(name: str, **facts: Any) -> dict[str, Any]:
    facts.setdefault("model", "mlp")
    facts.setdefault("steps", 2)
    facts["config"] = {"monitors": facts.pop("monitors", FOUR), **facts.pop("config", {})}
    return {"name": name, **facts}


CASES = {
    one["name"]: one
    for one in (
        case("keywords", model="kw"),
        case("several_outputs", model="multi_out"),
        case("late_state", model="late", steps=4, script={"2": ["use_extra"], "3": ["use_extra"]}),
        case("amsgrad", optimizer="amsgrad", steps=3),
        case("momentum", optimizer="sgdm"),
        case("input_needs_gradient", input_grad=True, monitors=MODULE),
        case("input_needs_gradient_twice", model="twice", input_grad=True, monitors=MODULE),
        case("started_late", start_late=True, steps=3, script={"1": ["start"]}),
        case("negative_infinity", script={"1": ["neginf_input"]}),
        case("infinite_gradient", script={"1": ["poison_grad_inf"]}),
        case("rescaled", steps=3, script={"1": ["rescale_weight"]}),
        case("no_update", steps=3, script={"1": ["skip_optimizer"]}),
        case(
            "no_update_by_hand",
            steps=3,
            manual_step=True,
            script={"1": ["skip_optimizer"]},
            config={"patch_optimizer_step": False},
        ),
        case("both_infinities", steps=1, script={"0": ["inf_input", "neginf_input"]}, monitors=MODULE),
        case("tied_bf16", model="tied", dtype="bf16", steps=1),
        case("gpt_bf16", model="gpt", dtype="bf16", steps=1),
        case("chunks_accumulated", model="chunks", micro=2, context={"grad_acc_steps": 2}),
        case(
            "window",
            model="twice",
            steps=9,
            micro=2,
            context={"micro_batch_number": 2},
            config={"start_step": 1, "step_interval": 2, "step_count_per_record": 3, "collect_times": 3},
        ),
        case(
            "counted_wrong",
            micro=3,
            steps=4,
            context={"grad_acc_steps": 2},
            config={"start_step": 1, "step_interval": 2},
        ),
        case("empty_batch_all", rows=0, model="kw", steps=1, monitors=MODULE),
        case("checkpointed_all", model="ckpt"),
        case("in_place_all", model="mlp_inplace"),
        case("in_place_on_output_all", model="adds_inplace"),
        case("sparse_all", model="sparse", optimizer="sgd", micro=2, context={"grad_acc_steps": 2}),
        case("convolution", model="conv", steps=2, micro=2),
        case("wide", model="wide", steps=1),
        case("types", model="types", steps=1),
        case("scalar", model="scalar", steps=3),
        case("dictionary", model="dict"),
        case("stopped_and_started", steps=6, script={"1": ["stop"], "3": ["start"]}),
        case("scaled", scaler=True, steps=4, script={"2": ["inf_loss"]}, config={"step_interval": 2}),
        case(
            "closure_window",
            steps=4,
            script={"every": ["closure"]},
            config={"start_step": 1, "step_interval": 2},
        ),
    )
}
