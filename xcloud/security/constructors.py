"""xcloud's constructors: what an experiment file may name as a `_target_` without this cloud's
policy allowing it. Data only; nothing is imported to decide.

They are those of conf/: tests/test_policy.py compares, and prints the line that is missing here.
"""

from __future__ import annotations

_BY_MODULE = {
    "cluster.layout": "Cloud ClusterLayout",
    "cluster.link_profile": "LinkProfile",
    "cluster.liveness": "Liveness",
    "cluster.one_way_layout": "OneWayCloud OneWayLayout",
    "comm.cast": "Cast",
    "comm.chain": "Chain",
    "comm.low_rank": "Svd",
    "comm.memory": "DeltaCache ErrorFeedback",
    "comm.per_border": "PerBorder",
    "comm.per_tensor": "PerTensor",
    "comm.phases": "Compression Phase Phased",
    "comm.power_sgd": "PowerSgd",
    "comm.quantize": "BlockInt",
    "comm.sparsify": "RandomK RandomTopK TopK TopRows",
    "electra.config": "DiscriminatorSettings Generator",
    "electra.model": "MultilingualElectra",
    "job.experiment": "Experiment",
    "job.job": "Launch",
    "job.one_way": "OneWayExperiment OneWayTraining",
    "models.abnet": "AbNet",
    "models.backbone": "OwnBackbone PretrainedBackbone SeededBackbone",
    "models.causal": "CausalLM",
    "models.causal_base": "NextTokenPretraining OwnCausal",
    "models.decoding": "Beam Greedy",
    "models.lora": "Lora",
    "models.low_rank_split": "LowRankSplit",
    "models.pretraining": "MaskedLanguageModelling",
    "models.public_backbone": "PublicBackbone",
    "models.split_point": "Split",
    "models.transformer": "Transformer",
    "parallel.local_updates": "LocalUpdates",
    "parallel.merging": "Median NormBound TrimmedMean",
    "parallel.one_way.feed": "Feed",
    "parallel.outer_optimizer": "OuterOptimizer",
    "parallel.schedule": "GPipe OneForwardOneBackward ZeroBubble",
    "parallel.strategy": "GradientAveraging Strategy",
    "plan.autopilot": "Autopilot no_autopilot",
    "plan.settings": "Planning no_plan",
    "record.tracking": "MlflowTracker NullTracker",
    "security.defences": "Defences GaussianNoise Marvell MaxNorm no_defence",
    "security.observer": "LeakMeter no_meter",
    "security.privacy": "CloudPrivacy SamplePrivacy no_privacy",
    "security.visibility": "Visibility",
    "tasks.classification": (
        "classification_from_demo classification_from_files classification_from_hub"
    ),
    "tasks.corpus.monolingual": "DemoText HubText",
    "tasks.corpus.text_folder": "FolderText",
    "tasks.cross_lingual": (
        "cross_lingual_from_demo cross_lingual_from_files cross_lingual_from_hub"
    ),
    "tasks.glue": "glue_from_demo glue_from_files glue_from_hub",
    "tasks.language_modelling": (
        "language_modelling_from_demo language_modelling_from_files language_modelling_from_hub"
    ),
    "tasks.multilingual_text": "MultilingualText",
    "tasks.public_text": "PublicText",
    "tasks.question_answering": "squad_from_demo squad_from_files squad_from_hub",
    "tasks.tokenizer": "FileTokenizer PretrainedTokenizer TrainedTokenizer",
    "tasks.translation": (
        "translation_from_demo translation_from_files translation_from_hub translation_from_paper"
    ),
    "training.optimizer": "Optimizer",
    "training.settings": "Checkpoints Training",
}
CONSTRUCTORS = frozenset(
    f"xcloud.{module}.{name}" for module, names in _BY_MODULE.items() for name in names.split()
)
