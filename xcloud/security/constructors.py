"""xcloud's constructors: what an experiment file may name as a `_target_` although this cloud's
policy does not allow it. They are those of conf/ (tests/test_policy.py compares).
"""

CONSTRUCTORS = frozenset(
    f"xcloud.{name}"
    for name in """
cluster.layout.Cloud cluster.layout.ClusterLayout cluster.link_profile.LinkProfile
cluster.liveness.Liveness cluster.one_way_layout.OneWayCloud cluster.one_way_layout.OneWayLayout
comm.compression.Compression comm.compression.PerBoundary comm.compression.PerTensor
comm.compression.Phase comm.compression.Phased comm.compressor.Chain comm.low_rank.PowerSgd
comm.low_rank.Svd comm.memory.DeltaCache comm.memory.ErrorFeedback comm.precision.BlockInt
comm.precision.Cast comm.sparsify.RandomK comm.sparsify.RandomTopK comm.sparsify.TopK
comm.sparsify.TopRows electra.model.MultilingualElectra electra.parts.DiscriminatorSettings
electra.parts.Generator job.experiment.Experiment job.job.Launch job.one_way.OneWayExperiment
job.one_way.OneWayTraining models.abnet.AbNet models.backbone.OwnBackbone
models.backbone.PretrainedBackbone models.backbone.PublicBackbone models.backbone.SeededBackbone
models.causal.CausalLM models.causal_base.NextTokenPretraining models.causal_base.OwnCausal
models.decoding.Beam models.decoding.Greedy models.lora.Lora models.low_rank_split.LowRankSplit
models.pretraining.MaskedLanguageModelling models.split_point.Split models.transformer.Transformer
parallel.gradient_averaging.GradientAveraging parallel.local_updates.LocalUpdates
parallel.merging.Median parallel.merging.NormBound parallel.merging.TrimmedMean
parallel.one_way.feed.Feed parallel.outer_parameters.OuterOptimizer parallel.schedule.GPipe
parallel.schedule.OneForwardOneBackward parallel.schedule.ZeroBubble parallel.strategy.Strategy
plan.settings.Autopilot plan.settings.no_autopilot plan.settings.Planning plan.settings.no_plan
record.mlflow_tracker.MlflowTracker record.tracking.NullTracker security.defences.Defences
security.defences.GaussianNoise security.defences.Marvell security.defences.MaxNorm
security.defences.no_defence security.observer.LeakMeter security.observer.no_meter
security.privacy.CloudPrivacy security.privacy.SamplePrivacy security.privacy.no_privacy
security.visibility.Visibility tasks.classification.DemoClassification
tasks.classification.DemoCrossLingual tasks.classification.FolderClassification
tasks.classification.FolderCrossLingual tasks.classification.HubClassification
tasks.classification.HubCrossLingual tasks.corpus.multilingual.DemoText
tasks.corpus.multilingual.FolderText tasks.corpus.multilingual.HubText
tasks.language_modelling.DemoLanguageModelling tasks.language_modelling.FolderLanguageModelling
tasks.language_modelling.HubLanguageModelling tasks.multilingual_text.MultilingualText
tasks.public_text.PublicText tasks.question_answering.DemoQuestionAnswering
tasks.question_answering.FolderQuestionAnswering tasks.question_answering.HubQuestionAnswering
tasks.tokenizer.FileTokenizer tasks.tokenizer.PretrainedTokenizer tasks.tokenizer.TrainedTokenizer
tasks.translation.DemoTranslation tasks.translation.FolderTranslation
tasks.translation.HubTranslation tasks.translation.Wit3Translation training.settings.Checkpoints
training.settings.Optimizer training.settings.Training
""".split()
)
