"""Models to plan by name: GPT-2-like and BERT-like models by size, and Hugging Face configurations."""

from chunkc.scenarios.models.catalogue import FAMILIES, NAMES, built_in, family
from chunkc.scenarios.models.parallel import parallelise
from chunkc.scenarios.models.stages import Stage, divided_module
from chunkc.scenarios.models.transformer import CONFIG_MAX_NBYTES, Transformer, checkpoint_layers, from_config_file

__all__ = [
    "CONFIG_MAX_NBYTES",
    "FAMILIES",
    "NAMES",
    "Stage",
    "Transformer",
    "built_in",
    "checkpoint_layers",
    "divided_module",
    "family",
    "from_config_file",
    "parallelise",
]
