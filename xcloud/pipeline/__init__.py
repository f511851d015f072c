"""The training of a model cut into stages: schedule, pipeline, exchange, trainer, wiring."""
