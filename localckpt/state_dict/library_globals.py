"""Classes of other libraries whose states can be saved and loaded without naming them.

A library's classes are allowed while the running program has the library imported. Loading imports
the module of a class where only saving did so before.
"""

from __future__ import annotations

import sys

__all__ = ["is_library_value"]

_MEGATRON = {
    "megatron.core.dist_checkpointing.tensor_aware_state_dict": ("MCoreTensorAwareStateDict",),
    "megatron.core.dist_checkpointing.mapping": (
        *("ShardedTensor", "ShardedObject", "ShardedTensorFactory", "LocalNonpersistentObject"),
    ),
    # What the arguments of a run, which Megatron-LM saves with its state, hold beside plain values.
    "megatron.core.enums": ("ModelType", "Fp4Recipe", "Fp8Recipe"),
    "megatron.core.transformer.enums": (
        *("AttnBackend", "AttnMaskType", "AttnType", "CudaGraphModule", "CudaGraphScope"),
        *("InferenceCudaGraphScope", "LayerType", "ModelType"),
    ),
    "megatron.core.optimizer.optimizer_config": (
        *("AdamOptimizerConfig", "OptimizerConfig", "ParamKey", "SGDOptimizerConfig"),
    ),
    "megatron.core.rerun_state_machine": (
        *("Call", "Caller", "QuickStats", "RerunDiagnostic", "RerunMode", "RerunState"),
        "RerunValidationStatus",
    ),
    "signal": ("Signals",),
    # Transformer Engine's extra state.
    "_io": ("BytesIO",),
}

_LIBRARIES = {"megatron.core": _MEGATRON}


def is_library_value(module: str, name: str) -> bool:
    """Whether ``module.name`` is listed for a library that is imported."""
    return any(
        name in listed.get(module, ())
        for library, listed in _LIBRARIES.items()
        if library in sys.modules
    )
