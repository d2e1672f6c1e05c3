"""Models in Hugging Face layout, Llama and GPT-2: a folder with `config.json` and safetensors files.

Read and written here without `transformers`, and without running code from the folder: JSON and safetensors only.
"""

from zeropp_ray.models.hf.export import export_model
from zeropp_ray.models.hf.sizes import adopted, read_sizes
from zeropp_ray.models.hf.weights import foreign_tokenizer, initial_weights, weights_of

__all__ = ["adopted", "export_model", "foreign_tokenizer", "initial_weights", "read_sizes", "weights_of"]
