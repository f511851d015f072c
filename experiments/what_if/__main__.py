"""What if: what a job would take and cost on clouds that FILE describes, which need not
exist. Nothing is measured and nothing runs.

FILE is YAML; docs/plans/eight_clouds.yaml is one, with every key explained. The least of one:

    clouds: {"*": {ranks: 8}, north: {}, south: {}}
    links: {"*": {bandwidth_bits_per_s: 1.0e9, latency_s: 0.02}}
    model: {layers: 24, hidden: 2048, vocabulary: 50000, sequence_length: 1024, flop_per_s: 1.0e14}
    batch_size: 256

tokens: of the whole run, such as 1.0e9: then a line says what all of it takes and costs.
clouds: ranks, slowdown, memory_gb. links, inside: bandwidth_bits_per_s, latency_s.
prices: rank_hour, egress_per_gb; by cloud, pair of clouds (a-b) or "*".
model: as above, and utilisation, seconds_per_layer (in place of flop_per_s),
    parameters_per_layer, active_per_layer (of mixtures of experts), trained_share, weights
    (float32, bfloat16, int8, nf4), checkpointing. In place of layers, hidden, vocabulary and what
    a layer has: checkpoint, the config.json of a causal language model, or its folder; it needs
    no weights. Or profile alone: a JSON file, as plan.profile of run.py.
codecs: compress_bytes_per_s, decompress_bytes_per_s; by compressor or "*"; else they take no time.
search: strategies, compressors (files of conf/compression), stages_inside, replicas, every,
    micro_batches: lists of what is tried.

The table has the best plan of each strategy and compressor, by the time of a step, by the cost of
a million tokens or by the bytes of them that leave clouds (--by).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.what_if.file import KEPT_BYTES, WhatIf, what_if_from, with_lines
from experiments.what_if.planning import plan_what_if
from experiments.what_if.tables import ORDERS, as_table, print_planned, ranked, total_of
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import project_root
from xcloud.base.wording import meant
from xcloud.job.config import build, read_plain
from xcloud.models.causal_network import KINDS, Part, laid_out, read_config
from xcloud.models.experts import Experts
from xcloud.simulator.costs import Profile, read_profile


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.what_if", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("file", type=Path, help="clouds, lines, prices and a model")
    parser.add_argument("--by", choices=list(ORDERS), default="step", help="what comes first")
    parser.add_argument("--rows", type=int, default=20, help="rows of the table (20)")
    parser.add_argument("--out", type=Path, help="write all of it here, as JSON")
    given = parser.parse_args(arguments)
    started_s = time.perf_counter()
    try:
        what_if = read_what_if(given.file)
        planned = plan_what_if(what_if, profile_of(what_if, given.file.parent))
    except ConfigError as error:
        print(f"xcloud: {given.file}: {error}", file=sys.stderr)
        return 2
    rows = ranked(planned, given.by)
    if what_if.model is not None:
        frozen = {"float32": 4, **KEPT_BYTES}[what_if.model.weights]
        print(
            "weights: 16 bytes a trained one in FP32 (with its gradient and two moments), "
            f"{frozen:g} a frozen one ({what_if.model.weights}); activations in 16 bits; a rank's "
            "program and buffers come on top"
        )
        if what_if.model.trained_share == 1:
            print("all weights are trained; with LoRA or frozen parts give model.trained_share")
    has_prices = bool(what_if.prices.rank_hour or what_if.prices.egress_per_gb)
    print_planned(rows[: given.rows], planned, has_prices, time.perf_counter() - started_s)
    if what_if.tokens is not None:
        print(total_of(rows[0], what_if.tokens, has_prices))
    if given.out:
        given.out.write_text(json.dumps(as_table(rows, planned), indent=1) + "\n")
    return 0


def read_what_if(path: Path) -> WhatIf:
    """Read a file, and the config.json that its model.checkpoint names. Raises ConfigError."""
    given = read_plain(path)
    model = given.get("model") if isinstance(given, dict) else None
    if isinstance(model, dict) and "checkpoint" in model:
        sizes = sizes_of(path.parent / Path(str(model.pop("checkpoint"))).expanduser())
        if both := sizes.keys() & model.keys():
            said = ", ".join(sorted(both))
            raise ConfigError(f"model.checkpoint says {said} too; leave one of both out")
        model |= sizes
    return what_if_from(given)


def sizes_of(checkpoint: Path) -> dict[str, int]:
    """Return settings of Decoder from the config.json of a causal language model; its weights need
    not be there. checkpoint: the file or its folder. Raises ConfigError."""
    folder = checkpoint.parent if checkpoint.name == "config.json" else checkpoint
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.checkpoint: there is no file {folder / 'config.json'}")
    try:
        config = read_config(str(folder))
    except DataError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error
    first = Part(range(1), is_first=True, is_last=True)
    network = laid_out(config, first).base_model  # without memory
    layer = getattr(network, KINDS[config.model_type].blocks)[0]
    num_parameters = sum(parameter.numel() for parameter in layer.parameters())
    sizes = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "parameters_per_layer": num_parameters,
    }
    for experts in (module for module in layer.modules() if isinstance(module, Experts)):
        of_one = sum(parameter.numel() for parameter in experts.get_submodule("0").parameters())
        num_idle = experts.num_experts - config.num_experts_per_tok
        sizes["active_per_layer"] = num_parameters - num_idle * of_one
    return sizes


def profile_of(what_if: WhatIf, folder: Path) -> Profile:
    """folder: in which the names of files begin."""
    if what_if.model is None:
        assert what_if.profile is not None
        return with_lines(what_if, read_profile(folder / what_if.profile))
    found = compressions(what_if.search.compressors, project_root() / "conf")
    return what_if.model.profile(found, what_if.codecs, what_if.lines)


def compressions(names: Sequence[str], conf_dir: Path) -> dict[str, Any]:
    """Options of conf/compression, by name. Raises ConfigError, naming those that there are."""
    there = {path.stem: path for path in sorted((conf_dir / "compression").glob("*.yaml"))}
    for name in names:
        if name not in there:
            hint = meant(name, [*there])
            raise ConfigError(
                f"there is no compression {name!r}{hint} There are {', '.join(there)}"
            )
    return {name: build(OmegaConf.to_container(OmegaConf.load(there[name]))) for name in names}


if __name__ == "__main__":
    sys.exit(main())
