"""Hugging Face folders in and out: config.json, safetensors and tokenizer files, without transformers."""
