"""What-if plans against hand arithmetic, and what a file may say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.what_if.__main__ import main, profile_of, read_what_if
from experiments.what_if.file import Search, WhatIf, what_if_from
from experiments.what_if.planning import WhatIfPlan, plan_what_if
from tests.plan_pieces import EIGHT
from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.base.units import human_bytes, human_duration
from xcloud.comm.precision import BlockInt
from xcloud.net.link_profile import line_bytes
from xcloud.simulator import formulas
from xcloud.simulator.costs import write_profile

EXAMPLE = project_root() / "docs" / "plans" / "eight_clouds.yaml"
LAYER_S, TOKENS = 0.01, 16
LINE = {"bandwidth_bits_per_s": 1e6}
SMALL: dict[str, Any] = {
    "clouds": {"*": {"ranks": 1}, "a": {}, "b": {"ranks": 1}},
    "links": {"*": {"bandwidth_bits_per_s": 1e9, "latency_s": 0.02}},
    "model": {"layers": 4, "hidden": 32, "vocabulary": 100, "sequence_length": TOKENS,
              "seconds_per_layer": LAYER_S},
    "batch_size": 8,
    "prices": {"rank_hour": {"*": 3.6, "b": 7.2}, "egress_per_gb": {"*": 1.0, "a": 2.0}},
    "search": {"compressors": ["none"], "strategies": ["data_parallel"]},
}  # fmt: skip
LAYER = 12 * 32 * 32
HEAD_S = LAYER_S * 32 * 100 * 2 / (2 * LAYER + 4 * TOKENS * 32)


def what_if(**changed: Any) -> WhatIf:
    return what_if_from(SMALL | changed)


def rows(given: WhatIf) -> list[WhatIfPlan]:
    return plan_what_if(given, profile_of(given, Path())).rows


def test_data_parallel_is_compute_and_an_exchange_over_the_line() -> None:
    (row,) = rows(what_if())

    num_bytes = 4 * (4 * LAYER + 2 * 100 * 32)
    compute_s = 4 * 3 * (4 * LAYER_S + HEAD_S)  # four samples each
    step_s = compute_s + 8 * line_bytes(num_bytes) / 1e9 + 0.02
    assert row.priced.step_s == pytest.approx(step_s)
    assert row.tokens_per_s == pytest.approx(8 * TOKENS / step_s)
    assert row.busy == pytest.approx(compute_s / step_s)
    per_million = 1e6 / (8 * TOKENS)
    assert row.egress_bytes == pytest.approx(2 * num_bytes * per_million)
    assert row.compute_cost == pytest.approx((3.6 + 7.2) / 3600 * step_s * per_million)
    assert row.egress_cost == pytest.approx((2.0 + 1.0) * num_bytes / 1e9 * per_million)
    # Weights, gradients, two moments, what crosses; a sample in each of a rank's micro-batches.
    kept = 4 * 34 * TOKENS * 32
    assert row.priced.memory["a"] - 5 * num_bytes in {n * kept for n in (1, 2, 4)}


def test_a_pipeline_without_bytes_is_formula_2_with_overlap() -> None:
    """Two equal stages: the head is made as heavy as nothing."""
    model = SMALL["model"] | {"vocabulary": 1}
    far = {"*": {"bandwidth_bits_per_s": 1e15, "latency_s": 0.02}}
    search = {"compressors": ["none"], "strategies": ["pipeline"], "micro_batches": [8]}

    (row,) = rows(what_if(model=model, links=far, search=search))

    tf, tb = 2 * LAYER_S, 4 * LAYER_S
    whole_s = formulas.step_of_overlapped_transfers(2, 8, tf, tb, 0.0, 0.02)
    assert row.split == "2 x 2" and row.plan.micro_batches == 8
    # Stage 1 has the answer on the gradient norm a latency later.
    assert row.priced.step_s == pytest.approx(whole_s + 0.02, rel=2e-3)


def test_stages_and_lanes_inside_a_cloud_pay_for_the_lines_inside() -> None:
    inside = {"*": {"bandwidth_bits_per_s": 1e6, "latency_s": 0.0}}
    search = {"compressors": ["none"], "strategies": ["data_parallel"], "stages_inside": [1, 2]}
    clouds = {"*": {"ranks": 2}, "a": {}, "b": {}}
    lanes, stages = (
        {row.name: row for row in rows(what_if(clouds=clouds, search=search, **more))}
        for more in ({}, {"inside": inside})
    )
    num_bytes = 4 * (4 * LAYER + 2 * 100 * 32)
    ring_s = 2 * 8 * line_bytes(num_bytes // 2) / 1e6

    gain_s = stages["data_parallel"].priced.step_s - lanes["data_parallel"].priced.step_s
    assert gain_s == pytest.approx(ring_s)
    name = "data_parallel, 2 inside"
    assert stages[name].priced.step_s > lanes[name].priced.step_s
    assert stages[name].priced.memory["a"] < stages["data_parallel"].priced.memory["a"]


def test_weights_that_are_not_trained_take_no_moments_and_cross_in_no_average() -> None:
    search = {"compressors": ["none"], "strategies": ["data_parallel"]}
    whole, lora = (
        rows(what_if(model=SMALL["model"] | {"trained_share": share}, search=search))[0].priced
        for share in (1.0, 0.25)
    )
    assert lora.bytes_per_step == pytest.approx(whole.bytes_per_step / 4, rel=0.01)
    assert lora.compute_s == pytest.approx(whole.compute_s * (1 + 1.25) / 3)
    weights = 4 * (4 * LAYER + 2 * 100 * 32)
    assert whole.memory["a"] - lora.memory["a"] >= 3 * 0.75 * weights


def test_by_default_stages_are_tried_up_to_the_number_of_ranks() -> None:
    search = {"compressors": ["none"], "strategies": ["data_parallel"]}
    found = rows(what_if(clouds={"*": {"ranks": 4}, "a": {}, "b": {}}, search=search))
    inside = {"data_parallel", "data_parallel, 2 inside"}
    assert {row.name for row in found} == inside, "four layers over two clouds"


def test_a_part_comes_back_after_its_slowest_contribution_and_its_slowest_answer() -> None:
    """Three clouds, every way of its own length: the longest way to a merging cloud and on."""
    latency_s = {"a-b": 1.0, "b-a": 2.0, "a-c": 4.0, "c-a": 8.0, "b-c": 16.0, "c-b": 32.0}
    links = {pair: {"bandwidth_bits_per_s": 1e9, "latency_s": s} for pair, s in latency_s.items()}

    (row,) = rows(what_if(clouds={"a": {}, "b": {}, "c": {}}, links=links, batch_size=3))

    # Via a: 8 + 4; via b: c-b and on to c; via c: b-c and on to b.
    part = 8 * line_bytes(round(4 * (4 * LAYER + 2 * 100 * 32) / 3)) / 1e9
    assert row.priced.step_s == pytest.approx(3 * (4 * LAYER_S + HEAD_S) + 32 + 16 + 2 * part)
    each = row.priced.bytes_between
    assert len(each) == 6 and len(set(each.values())) == 1


def test_bytes_of_a_compressor_are_those_of_its_codec() -> None:
    given = what_if(search={"compressors": ["int4"], "strategies": ["pipeline"]})
    (boundary,) = profile_of(given, Path()).compressors["int4"].boundaries

    sent = BlockInt(4).compress(torch.randn(3 * TOKENS, 32))

    payload = sum(part.numel() * part.element_size() for part in sent)
    places = 2 * 3 + 2 * 3 * TOKENS  # rows of each sample, and where they stand
    header = boundary.forward.num_bytes.at(3) - payload - places
    assert 0 < header < 100


def test_a_rank_without_the_memory_is_not_planned_and_told() -> None:
    small = {"*": {"ranks": 1, "memory_gb": 1e-6}, "a": {}, "b": {}}

    with pytest.raises(ConfigError, match=r"data_parallel: its fullest rank needs 0\.00"):
        rows(what_if(clouds=small))


def test_the_slower_cloud_gets_fewer_layers() -> None:
    clouds = {"a": {"slowdown": 3.0}, "b": {}}
    search = {"compressors": ["none"], "strategies": ["pipeline"]}
    model = SMALL["model"] | {"vocabulary": 1}

    (row,) = rows(what_if(clouds=clouds, search=search, model=model))

    assert row.split == "1 | 3"


@pytest.mark.slow
@pytest.mark.nightly
def test_the_example_is_planned_within_what_its_ranks_have() -> None:
    given = read_what_if(EXAMPLE)
    few = Search(("data_parallel", "hybrid"), ("none", "int4"), (8,), [4], micro_batches=[128])
    found = plan_what_if(replace(given, search=few), profile_of(given, EXAMPLE.parent))

    by_name = {(row.name, row.plan.compression): row for row in found.rows}
    assert len(by_name) == 4 and found.left_out == {}
    for row in by_name.values():
        assert 0 < row.busy < 1 and row.mfu is not None and row.mfu < 0.45
        assert max(row.priced.memory.values()) < 80e9
    none, int4 = (by_name["data_parallel, 8 inside", name] for name in ("none", "int4"))
    assert none.bound[0] == "averaging" and int4.cost < none.cost
    # Four bits of 32, and a scale of 16 for 64 values.
    assert none.egress_bytes / int4.egress_bytes == pytest.approx(32 / 4.25, rel=0.01)


def test_the_command_prints_a_table_and_leaves_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(tmp_path / "mine.json", replace(EIGHT, tokens_per_sample=10.0))
    file = tmp_path / "plan.yaml"
    file.write_text(
        "clouds: {a: {}, b: {}}\n"
        "links: {a-b: {bandwidth_bits_per_s: 1.0e+7}}\n"
        "model: {profile: mine.json}\n"
        "batch_size: 8\n"
        "tokens: 2.0e+7\n"
        "prices: {egress_per_gb: {'*': 0.1}}\n"
    )

    assert main([str(file), "--by", "cost", "--out", str(tmp_path / "out.json")]) == 0

    said = capsys.readouterr().out
    assert "cost/Mtok" in said and "local_updates every 50" in said
    plans = json.loads((tmp_path / "out.json").read_text())["plans"]
    costs = [sum(plan["cost_per_million_tokens"].values()) for plan in plans]
    assert costs == sorted(costs) and len(plans) == 6
    assert plans[0]["model_flop_utilisation"] is None
    hours_s = 2e7 / plans[0]["tokens_per_s"]
    sent = human_bytes(20 * plans[0]["egress_bytes_per_million_tokens"])
    assert f"20 Mtok with plan 1: {human_duration(hours_s)}, {sent} leave clouds, cost " in said
    assert "FP32" not in said, "a profile was measured as it was"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cloud": {}}, r"unknown setting 'cloud'; did you mean 'clouds'"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"links": {"a-c": LINE}}, r"unknown setting 'links.a-c'; did you mean 'a-b'"),
        ({"links": {"a-b": {"latency_s": 1}}}, "links.a-b.bandwidth_bits_per_s is missing"),
        ({"links": {}}, "links is missing"),
        ({"inside": {"c": LINE}}, "'inside.c'"),
        ({"clouds": {"a": {"rank": 1}}}, "'clouds.a.rank'"),
        ({"model": {"layers": 4}}, "model.hidden is missing"),
        ({"model": SMALL["model"] | {"flop_per_s": 1e9}}, "either flop_per_s or seconds"),
        (
            {"model": SMALL["model"] | {"active_per_layer": 10**12}},
            "model.active_per_layer=1000000000000 must be at most the",
        ),
        ({"model": {"profile": "a.json", "layers": 2}}, "leave layers out"),
        ({"prices": {"rank_hour": {"*": -1}}}, r"prices.rank_hour.\* must be greater"),
        ({"prices": {"egress_per_gb": {"b-d": 1}}}, "'prices.egress_per_gb.b-d'"),
        ({"search": {"strategies": ["ddp"]}}, "search.strategies.0 must be 'pipeline'"),
        ({"search": {"every": 5}}, "search.every must be a list"),
        ({"codecs": {"int4": {"speed": 1}}}, "'codecs.int4.speed'"),
    ],
)
def test_what_a_file_says_wrongly_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        what_if(**changed)


def test_a_model_is_sized_by_its_config_without_weights(tmp_path: Path) -> None:
    """Of Qwen2.5-7B, published with 7,615,616,512 weights, 3,584 of them in the last norm."""
    big = {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "big").mkdir()
    (tmp_path / "big/config.json").write_text(json.dumps(big))
    others = {"sequence_length": 1024, "flop_per_s": 1e14}
    file = tmp_path / "plan.yaml"
    for name in ("big", "big/config.json"):
        file.write_text(json.dumps(SMALL | {"model": {"checkpoint": name, **others}}))
        model = read_what_if(file).model
        assert model is not None and model.parameters == 7_615_616_512 - 3584
        assert (model.layers, model.hidden, model.vocabulary) == (28, 3584, 152064)
    for given, said in (
        ({"checkpoint": "big", "layers": 4, "hidden": 8}, "says hidden, layers too; leave one"),
        ({"checkpoint": "small"}, "no file .*small/config.json"),
        ({"checkpoint": "big"}, "model.sequence_length is missing"),
    ):
        file.write_text(json.dumps(SMALL | {"model": given}))
        with pytest.raises(ConfigError, match=said):
            read_what_if(file)
    (tmp_path / "big/config.json").write_text(json.dumps(big | {"model_type": "bert"}))
    file.write_text(json.dumps(SMALL | {"model": {"checkpoint": "big", **others}}))
    with pytest.raises(ConfigError, match="is of type 'bert'"):
        read_what_if(file)


def test_a_token_passes_through_a_few_experts_and_memory_holds_all(tmp_path: Path) -> None:
    """Of Qwen3-30B-A3B, published with 30,532,122,624 weights, 2,048 of them in the last norm."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "plan.yaml"
    given = {"checkpoint": "config.json", "sequence_length": 1024, "flop_per_s": 1e14}
    file.write_text(json.dumps(SMALL | {"model": given}))
    model = read_what_if(file).model
    assert model is not None and model.parameters == 30_532_122_624 - 2048
    one = 3 * 2048 * 768
    assert model.active_per_layer == model.layer_parameters - 120 * one
    assert model.layer_flop == 1024 * (2 * model.active_per_layer + 4 * 1024 * 2048)


def test_frozen_weights_in_fewer_bits_take_less_of_each_rank() -> None:
    """Of Qwen2.5-7B: 28 layers of 233,057,792 weights, and two ends of 152,064 x 3,584."""
    path = EXAMPLE.parent / "qwen_7b_two_clouds.yaml"
    given = read_what_if(path)
    assert given.model is not None and given.model.weights == "nf4"
    held = {}
    for weights in ("float32", "bfloat16", "int8", "nf4"):
        pieces = profile_of(
            replace(given, model=replace(given.model, weights=weights)), path.parent
        ).pieces
        held[weights] = sum(p.parameter_bytes - p.trained_bytes for p in pieces)
    blocks, ends = 28 * 233_057_792, 2 * 152_064 * 3_584
    assert held["bfloat16"] == 2 * (blocks + ends)
    assert held["int8"] == blocks + 2 * ends
    assert held["nf4"] == 0.5625 * blocks + 2 * ends
    assert held["float32"] < 4 * (blocks + ends)  # there adapters count as weights
    with pytest.raises(ConfigError, match=r"weights=nf4 is for frozen weights.*trained_share"):
        replace(given.model, trained_share=1.0)


def test_an_unknown_compressor_and_a_missing_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no compression 'int5'; did you mean 'int"):
        profile_of(what_if(search={"compressors": ["int5"]}), Path())
