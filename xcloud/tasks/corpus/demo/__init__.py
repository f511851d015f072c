"""The parts of the embedded Spanish-English corpus: words, forms, phrases, sentences."""
