"""A model as lm-evaluation-harness asks it, and a stand-in for what xcloud uses of that package,
which is an extra: its names, and of its own code what decides what the model is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.causal_models import build, saved, where
from tests.small_tokenizer import write_chat_tokenizer
from xcloud.models.causal import CausalLM
from xcloud.tasks.chat_template import DATE
from xcloud.tasks.language_modelling import CausalTokenizer
from xcloud.use import TextGenerator


def asked(*given: object, task: str = "", sample: int = 0) -> SimpleNamespace:
    """A request of the harness."""
    return SimpleNamespace(args=given, task_name=task, doc_id=sample)


def opened(
    kind: str, folder: Path, positions: int, begins: bool = False, learns_chats: bool = False
) -> tuple[Any, Any]:
    """A random checkpoint as a finished run of one stage, and as transformers' model.

    begins: the tokenizer writes a begin token itself.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    write_chat_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<user>"  # named, but not written, as in GPT-2
    if begins:
        number = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<user> $A", special_tokens=[("<user>", number)]
        )
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": 259, "max_position_embeddings": positions, "eos_token_id": 0}
    network = saved(kind, folder, **sizes)
    generator = TextGenerator.__new__(TextGenerator)
    generator.folder = folder
    generator.text = CausalTokenizer.load(folder)
    generator.text.learns_chats = learns_chats
    stages = build(CausalLM(str(folder)), 1, where(folder, max_length=positions))
    generator.stages = [stage.eval() for stage in stages]
    generator._crossings = {}  # nothing crosses clouds
    generator.autocast = nullcontext
    task = SimpleNamespace(max_length=positions, cache_dir=str(folder), date=DATE, data=None)
    generator.experiment = SimpleNamespace(
        task=task, training=SimpleNamespace(eval_batch_size=2), tracker=SimpleNamespace(store=None)
    )
    return generator, network


class TemplateLM:
    """The harness's base class of models: what it makes of a question and an answer."""

    def loglikelihood(self: Any, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        pairs = []
        for context, answer in (request.args for request in requests):
            if context == "":
                ids = self.tok_encode(answer, add_special_tokens=False)
                pairs.append(((context, answer), [self.prefix_token_id], ids))
                continue
            asks = context.rstrip()
            num = len(self.tok_encode(asks))
            whole = self.tok_encode(context + answer)
            pairs.append(((context, answer), whole[:num], whole[num:]))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)


def _normalized(given: Mapping[str, Any]) -> dict[str, Any]:
    how = dict(given)
    until = how.get("until", [])
    how["until"] = until if isinstance(until, list) else [until]
    most = [how.pop(name, None) for name in ("max_gen_toks", "max_new_tokens")]
    how["max_gen_toks"] = next((num for num in most if num is not None), 256)
    how.setdefault("do_sample", how.get("temperature", 0.0) > 0)
    if not how["do_sample"]:
        how["temperature"] = 0.0
    return how


def _before_stops(text: str, stops: Sequence[str], _think_end: None) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text


def _windows(
    token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[tuple[list[int], list[int]]]:
    """What each window is given, and what is scored there."""
    assert context_len == 1
    ids = [prefix_token, *token_list]
    for start in range(0, len(token_list), max_seq_len):
        end = min(start + max_seq_len, len(token_list))
        yield ids[max(0, end - max_seq_len) : end], token_list[start:end]


def _disjoint(window: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    given, scored = window
    return given[: len(given) - len(scored) + 1], scored


def stand_in() -> dict[str, ModuleType]:
    """The modules of lm-eval that xcloud imports, by name. A test adds what it asks of tasks."""
    names = ("api", "api.model", "models", "models.utils", "utils", "tasks", "loggers")
    found = {name: ModuleType(name) for name in ("lm_eval", *(f"lm_eval.{n}" for n in names))}
    found["lm_eval"].__spec__ = ModuleSpec("lm_eval", loader=None)
    vars(found["lm_eval.api.model"]).update(TemplateLM=TemplateLM)
    vars(found["lm_eval.models.utils"]).update(
        normalize_gen_kwargs=_normalized, postprocess_generated_text=_before_stops
    )
    vars(found["lm_eval.utils"]).update(
        get_rolling_token_windows=_windows, make_disjoint_window=_disjoint
    )
    return found
