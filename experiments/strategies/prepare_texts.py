"""Other text for study.py: chats made from SQuAD, and TED talks.

    python -m experiments.strategies.prepare_texts DATA OUT [--language fr-CA]

DATA: a folder with squad_v1/{train,dev}.jsonl.gz (a paragraph a line: context, qas of question
and answers) and ted_mono/{train,dev}.LANGUAGE.txt.gz (a subtitle a line). OUT gets chats/ and
ted/, each with train, dev and test; dev and test are the halves of the source's dev part.
A chat: the part of a paragraph around an answer and the question, then the answer; nearly all fit
64 tokens of base_model.py. Talks: SUBTITLES subtitles a document.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

SUBTITLES = 12
LETTERS = 170  # of a chat


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--language", default="fr-CA")
    given = parser.parse_args()
    found = {}
    for part in ("train", "dev"):
        paragraphs = map(json.loads, lines_of(given.data / "squad_v1" / f"{part}.jsonl.gz"))
        found["chats", part] = [json.dumps(chat) for p in paragraphs for chat in chats(p)]
        talks = lines_of(given.data / "ted_mono" / f"{part}.{given.language}.txt.gz")
        found["ted", part] = [
            " ".join(talks[start : start + SUBTITLES]) for start in range(0, len(talks), SUBTITLES)
        ]
    for kind, ending in (("chats", "jsonl"), ("ted", "txt")):
        dev = found[kind, "dev"]
        half = len(dev) // 2
        splits = {"train": found[kind, "train"], "dev": dev[:half], "test": dev[half:]}
        (given.out / kind).mkdir(parents=True, exist_ok=True)
        for split, documents in splits.items():
            text = "".join(f"{document}\n" for document in documents)
            (given.out / kind / f"{split}.{ending}").write_text(text, encoding="utf-8")
            print(f"{kind}, {split}: {len(documents):,} documents, {len(text):,} letters")


def lines_of(file: Path) -> Sequence[str]:
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return [line.strip() for line in opened if line.strip()]


def chats(paragraph: dict) -> Iterator[dict]:
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", paragraph["context"])
    for asked in paragraph["qas"]:
        question, answer = asked["question"].strip(), min(asked["answers"], key=len)
        sentence = next((s for s in sentences if answer in s), None)
        room = LETTERS - len(question) - len(answer)
        if sentence is not None and room > len(answer):
            told = f"{around(sentence, answer, room)} {question}"
            yield {"messages": [{"role": "user", "content": told},
                                {"role": "assistant", "content": answer}]}  # fmt: skip


def around(sentence: str, answer: str, room: int) -> str:
    """Whole words of the sentence, at most `room` letters, the answer about in the middle."""
    start = sentence.index(answer)
    first = max(0, min(start - (room - len(answer)) // 2, len(sentence) - room))
    last = first + room
    if first and (space := sentence.find(" ", first, start)) >= 0:
        first = space + 1
    if last < len(sentence) and (space := sentence.rfind(" ", start + len(answer), last)) >= 0:
        last = space
    return sentence[first:last]


if __name__ == "__main__":
    main()
