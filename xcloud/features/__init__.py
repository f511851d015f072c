"""What a job may use beyond a plain pipeline: a folder for each feature."""

COMMANDS = """\
features.weight_patches.command.follow | follow outputs/DATE/TIME --as served \
    | keep a folder of transformers current with a run that is training elsewhere
features.leak_meter.meter.main | leak-meter outputs/DATE/TIME \
    | measure what other clouds could recover, from the notes of a run
"""
"""The commands of features, as rows of __main__.TABLE."""
