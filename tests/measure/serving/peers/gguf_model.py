"""The benchmark's model as a GGUF file in float32, for llama.cpp. Needs the packages gguf and safetensors; no torch.

Owns the file's contents: the weights as they are, the sizes from config.json, and no tokenizer (token ids only).
"""

import json
from pathlib import Path

import gguf
from safetensors.numpy import load_file


def gguf_file(model: Path) -> Path:
    """Returns the GGUF file beside the model's weights; the first call writes it. Raises ValueError."""
    file = model / "model-f32.gguf"
    if not file.exists():
        config = json.loads((model / "config.json").read_text())
        if config["model_type"] != "qwen3":
            raise ValueError(f"model_type of {model} is {config['model_type']}; only qwen3 is written as GGUF")
        part = file.with_suffix(".part")
        _write(part, model, config)
        part.rename(file)
    return file


def _write(file: Path, model: Path, config: dict[str, object]) -> None:
    def size(name: str) -> int:
        value = config[name]
        assert isinstance(value, int), name
        return value

    writer = gguf.GGUFWriter(file, "qwen3")
    num_layers = size("num_hidden_layers")
    writer.add_name("benchmark")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(num_layers)
    writer.add_context_length(size("max_position_embeddings"))
    writer.add_embedding_length(size("hidden_size"))
    writer.add_feed_forward_length(size("intermediate_size"))
    writer.add_head_count(size("num_attention_heads"))
    writer.add_head_count_kv(size("num_key_value_heads"))
    writer.add_key_length(size("head_dim"))
    writer.add_value_length(size("head_dim"))
    writer.add_layer_norm_rms_eps(float(str(config["rms_norm_eps"])))
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_vocab_size(size("vocab_size"))
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    for name, tensor in load_file(model / "model.safetensors").items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None:
            raise ValueError(f"{name} has no name in GGUF")
        writer.add_tensor(found, tensor.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_base(config: dict[str, object]) -> float:
    parameters = config.get("rope_parameters")
    base = parameters["rope_theta"] if isinstance(parameters, dict) else config["rope_theta"]
    return float(str(base))
