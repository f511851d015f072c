"""The grammars that made the demo texts of `xcloud/demo`, with their words.

words.toml   the words, most common first
dice.py      seeded choices; words.py, verbs.py, times.py: the words as nouns, verbs, times
spanish.py, english.py   word forms;  phrases.py, clauses.py   noun phrases, a verb and its objects
sentences.py, states.py, feelings.py, joined.py, nested.py   sentences in both languages
events.py    stories, questions, inferences;  reviews.py   film reviews
corpora.py   any number of texts of a kind, from a seed
__main__.py  write the files of `xcloud/demo/texts`
"""
