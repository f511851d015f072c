"""The embedded texts, made by seeded grammars: no download, no files. What is imported from here
is all that the rest of the package may use; the grammars and their words are nobody else's.

words.toml   the words, commonest first
dice.py      seeded choices; words.py, verbs.py, times.py: the words as nouns, verbs, times
spanish.py, english.py   word forms;  phrases.py, clauses.py   noun phrases, a verb and its objects
sentences.py, states.py, feelings.py, joined.py, nested.py   sentences in both languages
events.py    stories, questions, inferences;  reviews.py   film reviews
corpora.py   the functions below
"""

from xcloud.demo_corpus.corpora import (
    MAX_PAIRS,
    answers,
    inferences,
    pairs,
    public_sentences,
    reviews,
    stories,
)
from xcloud.demo_corpus.events import Story

__all__ = [
    "MAX_PAIRS",
    "Story",
    "answers",
    "inferences",
    "pairs",
    "public_sentences",
    "reviews",
    "stories",
]
