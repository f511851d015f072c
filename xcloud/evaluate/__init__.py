"""A finished causal language model under the tasks of lm-evaluation-harness (docs/
causal-language-models.md, Scores that people quote). Only harness.py imports that package, which
is optional."""
