"""A small Llama that has read some English, as a folder of transformers: what the strategies of
this study fine-tune.

    python -m experiments.strategies.base_model TEXT.txt[.gz] FOLDER [--steps 1500]

TEXT: a paragraph a line. 1.9 million parameters (4 blocks of 128, 4,000 words). Minutes on a core.
"""

import argparse
import gzip
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LENGTH, BATCH = 4000, 64, 32
CHAT = (  # a question as plain text, a space, the answer and an end
    "<s>{% for m in messages %}"
    "{{ m['content'] if m['role'] == 'user' else ' ' + m['content'] + '</s>' }}{% endfor %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    opened = gzip.open if given.text.suffix == ".gz" else open
    with opened(given.text, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip()]

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))  # fmt: skip
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>",
        chat_template=CHAT,
    )  # fmt: skip
    ids = [0, *(token for e in tokenizer.encode_batch(lines) for token in (*e.ids, 1))]
    stream = torch.tensor(ids)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=1, pad_token_id=1, tie_word_embeddings=False,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    began, last = time.time(), given.steps
    for step in range(last):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((step + 1) / 100, (last - step) / (last - 100))
        starts = torch.randint(len(stream) - LENGTH, (BATCH,))
        batch = torch.stack([stream[s : s + LENGTH] for s in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 250 == 0:
            print(
                f"step {step + 1}, loss {loss.item():.3f}, {time.time() - began:.0f} s", flush=True
            )
    model.save_pretrained(given.folder)
    fast.save_pretrained(given.folder)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} tokens read"
    )


if __name__ == "__main__":
    main()
