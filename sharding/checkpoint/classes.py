"""Sequence classifiers of every family: what a value model or reward model is in files.

Owns the classifier of a family that has none in transformers. Must not know files.
"""

from typing import Any


def classifier_class(config: Any) -> Any:
    """What builds and loads a sequence classifier of this configuration.

    Where transformers has none it is made as its others are: the family's backbone under the names
    of the causal LM, and a linear head `score`.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS,
    )

    if type(config) in CLASSIFIERS or type(config) not in CAUSAL:
        return AutoModelForSequenceClassification
    causal: Any = CAUSAL[type(config)]
    base = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "") + "ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, base), {"__module__": causal.__module__})


def empty_model(kind: Any, config: Any, **options: Any) -> Any:
    """A model of such a class, where torch's device is; options as of transformers' from_config."""
    build = getattr(kind, "from_config", None) or kind._from_config
    return build(config, **options)
