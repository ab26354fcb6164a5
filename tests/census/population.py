"""The population: the causal-LM classes of the installed Transformers, and whether they declare support."""

from dataclasses import dataclass

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One class, and one config class that leads to it."""

    model_type: str
    class_name: str
    config_class: type[PreTrainedConfig]
    # Whether other attention implementations are supported: `_supports_attention_backend`.
    declares: bool


def population(*names: str) -> list[Member]:
    """Every pair of config and class once, by name of the model type.

    With names, of these types alone; then no other class is imported, which takes seconds.
    """
    members: dict[tuple[str, str], Member] = {}
    for config_class in map(CONFIG_MAPPING.__getitem__, names) if names else MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        for model_class in found if isinstance(found, (tuple, list)) else (found,):
            member = Member(
                model_type=config_class.model_type,
                class_name=model_class.__name__,
                config_class=config_class,
                declares=bool(getattr(model_class, "_supports_attention_backend", False)),
            )
            members.setdefault((member.model_type, member.class_name), member)
    return sorted(members.values(), key=lambda member: member.model_type)
